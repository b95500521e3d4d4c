"""Which feature of an atlas a row of a file of labels means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from atlas.answers import visible
from atlas.errors import AtlasError
from atlas.keys import DictionaryName, UnknownFeature, resolve_feature
from atlas.label_files import LabelRow

__all__ = ["Places"]

_NUMBER = re.compile(r"(?s)(.*?\D)([0-9]{1,9})(\]?)")


class Places:
    """Finds features. Every dictionary is looked up once, so that a million rows take seconds."""

    def __init__(self, known: Sequence[DictionaryName], set: str | None, skip_unknown: bool = False) -> None:
        """set: where rows do not say one of their own. Raises AtlasError for a set that is not there, or
        several.
        """
        self._known = known
        self._set = set
        self._skip = skip_unknown
        self._of_set: dict[str | None, list[DictionaryName]] = {None: list(known)}
        self._of_stem: dict[tuple[str | None, str, str], DictionaryName | None] = {}
        self._of_layer: dict[tuple[str | None, int], DictionaryName | None] = {}
        self._origin: tuple[str, str] | None = None
        self.seen: dict[DictionaryName, None] = {}
        """The dictionaries of the rows found so far."""
        self.first_unknown = ""
        """Of the rows that named no feature, what was said of the first."""
        if set is not None:
            self._chosen(set)

    def of(self, row: LabelRow) -> tuple[DictionaryName, int] | None:
        """Dictionary and number; None for a feature that is not there, where those are skipped.

        Raises AtlasError naming the line.
        """
        try:
            self._check_origin(row)
            chosen = row.set or self._set
            if row.key is not None:
                found = self._of_key(row.key, chosen)
            else:
                found = self._of_place(row.layer or 0, row.number or 0, chosen)
        except UnknownFeature as error:
            if not self._skip:
                raise AtlasError(f"{row.where}: {error}") from error
            self.first_unknown = self.first_unknown or f"{row.where}: {error}"
            return None
        except AtlasError as error:
            raise AtlasError(f"{row.where}: {error}") from error
        self.seen[found[0]] = None
        return found

    def origin_notes(self, kinds: Mapping[str, str]) -> Iterator[str]:
        """What Neuronpedia's source was taken for, and where its name speaks against that.

        kinds: of the sets, by `model/set`.
        """
        if self._origin is None:
            return
        model, source = self._origin
        sets = sorted({f"{d.model}/{d.set}" for d in self.seen})
        yield f"taken for {', '.join(sets)}: {model or 'a model'}, sources N-{source}"
        widths = {d.size for d in self.seen}
        if match := re.search(r"(?:^|-)([0-9]+)k(?:-|$)", source):
            least, most = int(match[1]) * 1000, int(match[1]) * 1024
            if not any(least <= width <= most for width in widths):
                sizes = ", ".join(f"{width:,}" for width in sorted(widths))
                yield f"warning: {source} says {match[1]}k features, the dictionaries have {sizes}"
        coders = [name for name in sets if "transcoder" in kinds.get(name, "")]
        if ("transcoder" in source) != bool(coders) and (coders or "transcoder" in source):
            yield f"warning: {source} against {', '.join(f'{name} ({kinds.get(name)})' for name in sets)}"

    def _check_origin(self, row: LabelRow) -> None:
        """Explanations of two sources under one set would be put on the wrong features."""
        if row.origin is None:
            return
        if self._origin is None:
            self._origin = row.origin
        elif row.origin != self._origin:
            both = " and ".join(
                f"{model or 'a model'} N-{source}" for model, source in (self._origin, row.origin)
            )
            raise AtlasError(f"explanations of two sources, {both}; import each for its own --set")

    def _chosen(self, set: str | None) -> list[DictionaryName]:
        if set not in self._of_set:
            named = [d for d in self._known if set in (d.set, d.alias, f"{d.model}/{d.set}")]
            sets = dict.fromkeys(f"{d.model}/{d.set}" for d in named or self._known)
            if not named:
                raise AtlasError(
                    f"set {visible(set or '')}: no such set; there are {', '.join(sets) or 'none'}"
                )
            if len(sets) > 1:
                raise AtlasError(f"set {set}: several have this name: {', '.join(sets)}")
            self._of_set[set] = named
        return self._of_set[set]

    def _of_key(self, key: str, chosen: str | None) -> tuple[DictionaryName, int]:
        known = self._chosen(chosen)
        match = _NUMBER.fullmatch(key)
        if match is None:
            return resolve_feature(key, known)  # which says what is wrong with it
        stem = (chosen, match[1], match[3])
        if stem not in self._of_stem:
            try:  # every dictionary has a feature 0: what this finds is the only one of the name
                self._of_stem[stem] = resolve_feature(f"{match[1]}0{match[3]}", known)[0]
            except AtlasError:
                self._of_stem[stem] = None
        found = self._of_stem[stem]
        if found is not None and int(match[2]) < found.size:
            return found, int(match[2])
        return resolve_feature(key, known)

    def _of_place(self, layer: int, number: int, chosen: str | None) -> tuple[DictionaryName, int]:
        known = self._chosen(chosen)
        place = (chosen, layer)
        if place not in self._of_layer:
            here = [d for d in known if d.layer == layer]
            if len(here) > 1:
                sets = dict.fromkeys(f"{d.model}/{d.set}" for d in here)
                named = ", ".join(sets if len(sets) > 1 else (d.key for d in here))
                raise AtlasError(f"layer {layer} is in several sets: {named}; say which with --set")
            self._of_layer[place] = here[0] if here else None
        found = self._of_layer[place]
        if found is None:
            layers = sorted({d.layer for d in known})
            span = f"{layers[0]} to {layers[-1]}" if layers else "none"
            raise UnknownFeature(f"no dictionary of layer {layer}; there are those of layers {span}")
        if number >= found.size:
            raise UnknownFeature(
                f"feature {number}: no such feature; {found.key} has the features 0 to {found.size - 1}"
            )
        return found, number
