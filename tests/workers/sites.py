"""Dictionaries at any site of a residual stream as plain matrices, and every edge between them: a reference
that knows nothing of `ingest.models` (the streams are those of `tests.workers.streams`).

Written from the statement of the methods: events are the embedding 0, attention 1 + 2L, the MLP 2 + 2L; a
reader sees what is written before its cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from ingest.rules import Rule
from tests.workers.brute_force import Pair, chosen
from tests.workers.building import Built
from tests.workers.streams import HEADS, Stream

READINGS = ("in", "gate", "up")
SIZE = 6


@dataclass(frozen=True, eq=False)
class Sited:
    """One dictionary. encoders: e (F, d_in) of each reading, as the file has them; writes: event and what is
    added to the stream then, (F, d)."""

    set: str
    layer: int
    site: str
    encoders: dict[str, np.ndarray]
    writes: list[tuple[int, np.ndarray]]
    at_module: bool = False  # an attention output before what stands behind attention
    rescalable: bool = True

    @property
    def describes_stream(self) -> bool:
        return self.site.startswith("resid")

    @property
    def omega(self) -> np.ndarray:
        return sum(d for _, d in self.writes)

    def written_before(self, cut: int) -> np.ndarray | None:
        found = [d for event, d in self.writes if event < cut]
        return sum(found) if found else None


def cut(stream: Stream, site: str, layer: int) -> int:
    attention, mlp = 1 + 2 * layer, 2 + 2 * layer
    if site == "mlp.in":
        return attention if stream.parallel else mlp
    return {
        "resid_pre": attention, "attn.in": attention, "resid_mid": mlp, "resid_post": mlp + 1,
        "attn.out": attention, "attn.z": attention,
    }[site]  # fmt: skip


def feeds(stream: Stream, every: list[Sited], source: Sited, target: Sited) -> bool:
    """Whether the source may have edges into the target."""
    if target.site in ("mlp.out", "embed"):
        return False
    end = cut(stream, target.site, target.layer)

    def is_below(one: Sited) -> bool:
        if one.describes_stream:  # all that is written before its own cut, and no edge at one place of it
            begin = cut(stream, one.site, one.layer)
            return begin < end or (begin == end and not target.describes_stream)
        return any(event < end for event, _ in one.writes)

    if not is_below(source):
        return False
    if source.describes_stream:  # the last of its set before the target
        begins = [cut(stream, o.site, o.layer) for o in every if o.set == source.set and is_below(o)]
        return cut(stream, source.site, source.layer) == max(begins)
    return True


def edges(stream: Stream, every: list[Sited]) -> Iterator[Pair]:
    """Every pair, with its source's and target's place in the list."""
    for (t, target), (s, source) in (
        (one, other) for one in enumerate(every) for other in enumerate(every) if
        feeds(stream, every, other[1], one[1])
    ):  # fmt: skip
        end = cut(stream, target.site, target.layer)
        norm = {"mlp.in": stream.blocks[target.layer].mlp_norm}.get(target.site)
        scale = 1 / np.maximum(np.linalg.norm(source.omega, axis=1), 1e-300) if source.rescalable else 1.0
        own = np.linalg.norm(target.omega, axis=1)
        free = np.where(own > 0, own, 1) if target.rescalable else 1.0
        for reading, e in target.encoders.items():
            rho = e if norm is None else e @ norm.T
            for layer, head, passed in arriving(stream, source, target, end):
                weight = (passed @ rho.T).astype(np.float32)
                length = np.linalg.norm(passed, axis=1)[:, None] * np.linalg.norm(rho, axis=1)
                z = np.divide(
                    weight * np.sqrt(rho.shape[1]), length, out=np.zeros(length.shape), where=length > 0
                )
                size = np.abs(weight.astype(np.float64)) * np.reshape(scale, (-1, 1)) * free
                for i, j in np.ndindex(*weight.shape):
                    yield Pair(
                        (s, i), 1000 * t + j, READINGS.index(reading), layer, head, source.layer,
                        float(weight[i, j]), float(z[i, j]), float(size[i, j]),
                    )  # fmt: skip


def arriving(stream: Stream, source: Sited, target: Sited, end: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(layer, head, vectors) by which a source reaches the target's site; -1 directly."""
    behind_heads = target.site in ("attn.out", "attn.z")
    if not behind_heads:
        yield -1, -1, source.written_before(end)
    for layer, block in enumerate(stream.blocks):
        omega = source.written_before(1 + 2 * layer)
        if source.describes_stream and cut(stream, source.site, source.layer) > 1 + 2 * layer:
            omega = None
        reached = layer == target.layer if behind_heads else 1 + 2 * layer < end
        if omega is None or not reached:
            continue
        for head, W_O in enumerate(block.W_O):
            value = omega @ block.attention_norm @ block.W_V[head * len(block.W_V) // HEADS]
            if target.site == "attn.z":
                z = np.zeros((len(value), HEADS, value.shape[1]))
                z[:, head] = value
                yield layer, head, z.reshape(len(value), -1)
            else:
                output = value @ W_O
                yield layer, head, output if target.at_module else output @ block.behind_attention


def kept(rule: Rule, every: list[Sited], pairs: list[Pair]) -> dict[tuple, Pair]:
    """What a rule keeps: decided apart for each set that describes the stream again."""

    def apart(pair: Pair) -> str:
        source = every[pair.source[0]]
        return source.set if source.describes_stream else ""

    by_identity = {pair.identity: pair for pair in pairs}
    assert len(by_identity) == len(pairs)
    found: set[tuple] = set()
    for _, group in groupby(sorted(pairs, key=apart), key=apart):
        found |= chosen(rule, list(group))
    return {identity: by_identity[identity] for identity in found}


def stored(built: Built, every: list[Sited]) -> dict[tuple, dict]:
    """Identity to row, of both tables."""
    place = {built.sets[one.set].hash_of(one.layer): n for n, one in enumerate(every)}
    assert len(place) == len(every)
    found: dict[tuple, dict] = {}
    for table in ("DIRECT", "VIA_HEAD"):
        for row in built.table(table).to_pylist():
            source = (place[row["source_dictionary"]], row["source"])
            target = 1000 * place[row["target_dictionary"]] + row["target"]
            reading = READINGS.index(row["reading"])
            identity = (source, target, reading, row.get("layer", -1), row.get("head", -1))
            assert identity not in found
            found[identity] = row
    return found


def check_edges(built: Built, every: list[Sited], want: dict[tuple, Pair]) -> None:
    """The same pairs, the same numbers; a float64 sum taken in another order may end one float32 step off."""
    got = stored(built, every)
    assert set(got) == set(want)
    off = 0
    for identity, pair in want.items():
        row = got[identity]
        assert abs(row["weight"] - pair.weight) <= np.spacing(np.float32(abs(pair.weight)))
        off += row["weight"] != pair.weight
        assert abs(row["z"] - pair.z) <= 1e-5 * abs(pair.z)
    assert off <= 3


def token_edges(built: Built, every: list[Sited], table: str) -> dict[int, np.ndarray]:
    """Place to (readings · F, vocabulary) weights of EMBEDS or PROMOTES; zero where there is no edge."""
    place = {built.sets[one.set].hash_of(one.layer): n for n, one in enumerate(every)}
    side = "target" if table == "EMBEDS" else "source"
    vocabulary = 1 + max(row["token"] for row in built.table(table).to_pylist())
    found: dict[int, np.ndarray] = {}
    for row in built.table(table).to_pylist():
        one = every[at := place[row[f"{side}_dictionary"]]]
        shape = (len(one.encoders) if side == "target" else 1, len(one.omega), vocabulary)
        reading = list(one.encoders).index(row["reading"]) if side == "target" else 0
        found.setdefault(at, np.zeros(shape))[reading, row[side], row["token"]] = row["weight"]
    return found


# --- files --------------------------------------------------------------------------------------------------


@dataclass
class Random:
    """Encoders and decoders of uneven size, float32 numbers in float64, one dead latent in each decoder."""

    seed: int
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def rows(self, width: int, dead: int | None = None) -> np.ndarray:
        found = self._rng.standard_normal((SIZE, width)) * np.exp(self._rng.standard_normal((SIZE, 1)))
        if dead is not None:
            found[dead] = 0
        return found.astype(np.float32).astype(np.float64)


def write_sae(folder: Path, layer: int, W_enc: np.ndarray, W_dec: np.ndarray) -> None:
    """One dictionary of Gemma Scope's layout; what it reads and writes the spec must say."""
    where = folder / f"layer_{layer}"
    where.mkdir(parents=True)
    arrays = {
        "W_enc": W_enc.T, "W_dec": W_dec, "b_enc": W_enc[:, 0], "b_dec": W_dec[1],
        "threshold": np.abs(W_enc[:, 1]),
    }  # fmt: skip
    np.savez(where / "params.npz", **{key: value.astype(np.float32) for key, value in arrays.items()})


def write_cross_layer(folder: Path, layer: int, W_enc: np.ndarray, decoders: list[np.ndarray]) -> None:
    """One layer of circuit-tracer's cross-layer layout, reading the MLP's input and writing its output."""
    folder.mkdir(exist_ok=True)

    def save(name: str, **tensors: np.ndarray) -> None:
        named = {f"{key}_{layer}": torch.from_numpy(value.astype(np.float32).copy()) for key, value in
                 tensors.items()}  # fmt: skip
        save_file(named, str(folder / f"{name}_{layer}.safetensors"))

    save("W_enc", W_enc=W_enc, b_enc=W_enc[:, 0], b_dec=decoders[0][1])
    save("W_dec", W_dec=np.stack(decoders, axis=1))
    config = {
        "model_kind": "cross_layer_transcoder", "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "mlp.hook_out",
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def neurons(stream: Stream) -> list[Sited]:
    """The model's own neurons, as a set n."""
    return [
        Sited("n", layer, "mlp.in", dict(block.W_in), [(2 + 2 * layer, block.W_out @ block.behind_mlp)],
              rescalable=False)
        for layer, block in enumerate(stream.blocks)
    ]  # fmt: skip
