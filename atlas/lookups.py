"""Questions about one feature, head or token of an atlas, and about the atlas: Cypher in, answers out.

Neighbours are ordered by |weight| (or |z|), ties by the neighbour's id, then reading, layer, head: the order
of the ranks that the edges carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from atlas.answers import Answer, Table, visible
from atlas.errors import AtlasError
from atlas.keys import TokenName, find_head, find_tokens
from atlas.store import Store

__all__ = ["FEATURE_TYPES", "embeds", "head_answer", "labelled_answer", "labels_of_features", "neighbours",
           "promoted_by_feature", "promotes", "search_answer"]  # fmt: skip

FEATURE_TYPES = ("DIRECT", "VIA_HEAD")
VIA = "via: the type of edge, or the head of a VIA_HEAD edge"
NEIGHBOUR_COLUMNS = ("feature", "via", "reading", "weight", "z", "rank_in", "rank_out", "promotes", "label")
UNDER = {"label": "feature"}


def neighbours(
    store: Store,
    feature: dict[str, Any],
    direction: str,
    *,
    types: Sequence[str] = FEATURE_TYPES,
    by: str = "weight",
    limit: int | None = 20,
    via: str | None = None,
    layer: int | None = None,
) -> Table:
    """The edges out of ("down") or into ("up") a feature, strongest first.

    types: DIRECT, VIA_HEAD; by: "weight" or "z"; via: one head (`L.H`), which leaves VIA_HEAD alone; layer:
    of the neighbour. Raises AtlasError for what is none of these.
    """
    for type in types:
        if type not in FEATURE_TYPES:
            raise AtlasError(
                f"{type}: no type of edge between features; expected {' or '.join(FEATURE_TYPES)}"
            )
    _check_order(by)
    if direction not in ("up", "down"):
        raise AtlasError(f"{direction}: expected up or down")
    head = find_head(f"{feature['model']}/{via}" if "/" not in via else via, store) if via else None
    if head is not None:
        types = ["VIA_HEAD"]
    rows: list[tuple[Any, ...]] = []
    total = 0
    for type in dict.fromkeys(types):
        pattern = (
            f"(f:Feature)-[r:{type}]->(o:Feature)"
            if direction == "down"
            else f"(o:Feature)-[r:{type}]->(f:Feature)"
        )
        place = "r.layer AS layer, r.head AS head" if type == "VIA_HEAD" else "-1 AS layer, -1 AS head"
        conditions, parameters = ["f.id = $id"], {"id": feature["id"]}
        if layer is not None:
            conditions.append("o.layer = $layer")
            parameters["layer"] = layer
        if head is not None:
            conditions.append("r.layer = $via_layer AND r.head = $via_head")
            parameters |= {"via_layer": head["layer"], "via_head": head["number"]}
        match = f"MATCH {pattern} WHERE {' AND '.join(conditions)}"
        total += store.query(f"{match} RETURN count(*) AS n", parameters).rows[0][0]
        rows += store.query(
            f"{match} RETURN o.id AS id, o.key AS key, '{type}' AS type, {place}, r.reading AS reading,"
            " r.weight AS weight, r.z AS z, r.rank_in AS rank_in, r.rank_out AS rank_out"
            f" ORDER BY abs(r.{by}) DESC, id, reading, layer, head"
            + (f" LIMIT {int(limit)}" if limit else ""),
            parameters,
        ).rows
    size = 6 if by == "weight" else 7
    rows.sort(key=lambda row: (-abs(row[size]), row[0], row[5], row[3], row[4], row[2]))
    rows = rows[:limit] if limit else rows
    said = promoted_by_feature(store, [row[0] for row in rows])
    labels = labels_of_features(store, [row[0] for row in rows])
    shown = [
        (key, f"L{l:02d}.H{h:02d}" if h >= 0 else type, *values, said.get(id, []), labels.get(id))
        for id, key, type, l, h, *values in rows
    ]
    where = f"{'downstream of' if direction == 'down' else 'upstream of'} {feature['key']}"
    notes = [VIA] if any(row[2] == "VIA_HEAD" for row in rows) else []
    notes += [f"{len(rows)} of {total:,} kept edges"] if total > len(rows) else []
    return Table.of(f"{where}, by |{by}|", NEIGHBOUR_COLUMNS, shown, notes=notes, below=UNDER)


def _check_order(by: str) -> None:
    if by not in ("weight", "z"):
        raise AtlasError(f"{by}: expected weight or z to order edges by")


def promoted_by_feature(store: Store, ids: Iterable[int], most: int = 3) -> dict[int, list[str]]:
    """For each feature the tokens that it promotes most: a hint of what it is about."""
    said: dict[int, list[str]] = {}
    if wanted := sorted(set(ids)):
        # IN finds the features by their primary key; UNWIND would read every PROMOTES edge (60 ms)
        rows = store.query(
            "MATCH (f:Feature)-[p:PROMOTES]->(t:Token) WHERE f.id IN $ids AND p.weight > 0"
            " AND p.rank <= $most RETURN f.id, t.text, p.rank AS rank ORDER BY rank",
            {"ids": wanted, "most": most},
        ).rows
        for id, text, _ in rows:
            said.setdefault(id, []).append(text)
    return said


def keys_of_features(store: Store, ids: Iterable[int]) -> dict[int, str]:
    """The keys of features by id."""
    wanted = sorted(set(ids))
    if not wanted:
        return {}
    return dict(store.query("MATCH (f:Feature) WHERE f.id IN $ids RETURN f.id, f.key", {"ids": wanted}).rows)


def labels_of_features(store: Store, ids: Iterable[int]) -> dict[int, str]:
    """The labels of those features that have one, by id."""
    wanted = sorted(set(ids))
    if not wanted:
        return {}
    found = store.query(
        "MATCH (f:Feature) WHERE f.id IN $ids AND f.label IS NOT NULL RETURN f.id, f.label", {"ids": wanted}
    )
    return dict(found.rows)


def embeds(store: Store, feature: dict[str, Any], limit: int = 10) -> dict[str, Table]:
    """De-embedding: the tokens whose embeddings the feature reads highest and lowest, by reading."""
    rows = store.query(
        "MATCH (t:Token)-[e:EMBEDS]->(f:Feature) WHERE f.id = $id AND e.rank <= $limit"
        " RETURN e.reading AS reading, e.rank AS rank, t.text, e.weight AS weight"
        " ORDER BY reading, rank, weight",
        {"id": feature["id"], "limit": limit},
    ).rows
    readings = sorted({row[0] for row in rows}, key=("in", "gate", "up").index)
    return {
        reading: _two_signs(
            f"tokens that {feature['key']} reads" + ("" if reading == "in" else f" through {reading}"),
            [row[1:] for row in rows if row[0] == reading],
        )
        for reading in readings
    }


def promotes(store: Store, feature: dict[str, Any], limit: int = 10) -> Table:
    """Logit effect: the tokens that the feature raises and lowers most."""
    rows = store.query(
        "MATCH (f:Feature)-[p:PROMOTES]->(t:Token) WHERE f.id = $id AND p.rank <= $limit"
        " RETURN p.rank AS rank, t.text, p.weight AS weight ORDER BY rank, weight",
        {"id": feature["id"], "limit": limit},
    ).rows
    return _two_signs(f"tokens whose logits {feature['key']} moves", rows)


def _two_signs(title: str, rows: Sequence[Sequence[Any]]) -> Table:
    """Highest and lowest beside each other, by rank."""
    sides: dict[int, list[Any]] = {}
    for rank, text, weight in rows:
        side = sides.setdefault(rank, [None, None, None, None])
        side[0 if weight > 0 else 2], side[1 if weight > 0 else 3] = text, weight
    columns = ("rank", "highest", "weight", "lowest", "weight_lowest")
    return Table.of(title, columns, [(rank, *side) for rank, side in sorted(sides.items())])


def head_answer(store: Store, text: str, limit: int = 20, by: str = "weight") -> Answer:
    """A head: the strongest pairs that it carries, and its share of them by the layers it joins."""
    _check_order(by)
    head = find_head(text, store)
    match = (
        "MATCH (a:Feature)-[r:VIA_HEAD]->(b:Feature)"
        " WHERE r.layer = $layer AND r.head = $head AND a.model = $model"
    )
    parameters = {"layer": head["layer"], "head": head["number"], "model": head["model"]}
    strongest = store.query(
        f"{match} RETURN a.key AS source, b.key AS target, r.reading AS reading, r.weight AS weight,"
        f" r.z AS z, a.id AS ai, b.id AS bi ORDER BY abs(r.{by}) DESC, ai, bi, reading LIMIT {int(limit)}",
        parameters,
    ).rows
    joined = store.query(
        f"{match} RETURN a.layer AS source_layer, b.layer AS target_layer, count(*) AS edges,"
        " sum(abs(r.weight)) AS total ORDER BY source_layer, target_layer",
        parameters,
    ).rows
    labels = labels_of_features(store, [id for row in strongest for id in row[5:7]])
    edges, total = sum(row[2] for row in joined), sum(row[3] for row in joined)
    shares = []
    for name, place in (("source layer", 0), ("target layer", 1)):
        by_layer: dict[int, list[float]] = {}
        for row in joined:
            sums = by_layer.setdefault(row[place], [0, 0.0])
            sums[0] += row[2]
            sums[1] += row[3]
        shares += [
            (name, layer, int(count), weight, weight / total if total else 0.0)
            for layer, (count, weight) in sorted(by_layer.items())
        ]
    every = head.get("total_weight")
    facts = {"key": head["key"], "edges": edges, "total_weight": total if every is None else every}
    return Answer(
        f"head {head['key']}",
        facts,
        {
            "strongest": Table.of(
                f"strongest pairs it carries, by |{by}|",
                ("source", "target", "reading", "weight", "z", "source_label", "target_label"),
                [(*row[:5], labels.get(row[5]), labels.get(row[6])) for row in strongest],
                below={"source_label": "source", "target_label": "target"},
            ),
            "shares": Table.of(
                "its edges by the layers they join (share of the sum of |weight|)",
                ("side", "layer", "edges", "total", "share"),
                shares,
            ),
        },
    )


def search_answer(store: Store, text: str, limit: int = 10) -> Answer:
    """A token: the features that its embedding feeds, the features that promote it."""
    tokens = find_tokens(text, store)
    feeds: list[tuple[Any, ...]] = []
    raised: list[tuple[Any, ...]] = []
    for token in tokens:
        feeds += _of_token(store, "(t:Token)-[r:EMBEDS]->(f:Feature)", "r.reading", token, limit)
        raised += [
            (*row[:2], *row[3:])
            for row in _of_token(store, "(f:Feature)-[r:PROMOTES]->(t:Token)", "''", token, limit)
        ]
    columns = ("token", "feature", "reading", "weight", "rank", "promotes", "label")
    said = promoted_by_feature(store, [row[-1] for row in (*feeds, *raised)])
    labels = labels_of_features(store, [row[-1] for row in (*feeds, *raised)])

    def shown(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [(*row[:-1], said.get(row[-1], []), labels.get(row[-1])) for row in rows]

    return Answer(
        f"token {visible(tokens[0].text)}"
        + (f" and {len(tokens) - 1} more of this text" if len(tokens) > 1 else ""),
        {},
        {
            "tokens": Table.of("tokens", ("key", "text"), [(t.key, t.text) for t in tokens]),
            "feeds": Table.of(
                "features that its embedding feeds (EMBEDS)", columns, shown(feeds), below=UNDER
            ),
            "promoted_by": Table.of(
                "features that promote it or, below zero, lower it (PROMOTES)",
                (*columns[:2], *columns[3:]),
                shown(raised),
                below=UNDER,
            ),
        },
        ("rank: the token's place in the feature's own list, within its sign",),
    )


def labelled_answer(store: Store, text: str, limit: int = 10) -> Answer:
    """The features whose label has a text in it, whatever its case: those of the best score first."""
    if not text.strip():
        raise AtlasError("expected a text to search labels for")
    match = "MATCH (f:Feature) WHERE lower(f.label) CONTAINS $text"
    parameters = {"text": text.lower()}
    total = store.query(f"{match} RETURN count(*)", parameters).rows[0][0]
    found = store.query(
        f"{match} RETURN f.key, f.label, f.label_source, f.label_score, f.id AS id,"
        f" coalesce(f.label_score, -1e308) AS best ORDER BY best DESC, id LIMIT {int(limit)}",
        parameters,
    ).rows
    notes = [f"{len(found)} of {total:,}"] if total > len(found) else []
    if (
        not found
        and not store.query("MATCH (f:Feature) WHERE f.label IS NOT NULL RETURN count(*)").rows[0][0]
    ):
        notes = ["this atlas has no labels; atlas label import brings some"]
    columns = ("feature", "label", "source", "score")
    table = Table.of("", columns, [row[:4] for row in found], notes=notes)
    return Answer(f"features labelled {visible(text)}", {}, {"features": table})


def _of_token(
    store: Store, pattern: str, reading: str, token: TokenName, limit: int
) -> list[tuple[Any, ...]]:
    return list(
        store.query(
            f"MATCH {pattern} WHERE t.id = $id RETURN t.text, f.key, {reading} AS reading,"
            f" r.weight AS weight, r.rank AS rank, f.id AS id"
            f" ORDER BY abs(r.weight) DESC, id, reading LIMIT {int(limit)}",
            {"id": token.id},
        ).rows
    )
