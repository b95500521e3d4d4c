"""Pieces of random Cypher with their meaning in numpy: patterns, conditions, aggregates, keys, limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.atlas.bindings import Bindings, Condition, Graph

Row = tuple[Any, ...]
VARIABLES = "abcd"
EDGE_VARIABLES = "rst"


def listed(values: np.ndarray, known: np.ndarray) -> list[Any]:
    """A column as plain values, with None where there is none."""
    return [value if there else None for value, there in zip(values.tolist(), known.tolist(), strict=True)]


class CypherParts:
    """Random pieces of queries about one graph, the same for the same seed."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self.graph = graph
        self.random = random.Random(seed)

    def types(self) -> tuple[str, ...]:
        return self.random.choice([("DIRECT",), ("VIA_HEAD",), ("DIRECT", "VIA_HEAD")])

    def pattern(self, hops: int | None = None) -> tuple[str, Bindings]:
        """A chain of features with its matches, some nodes filtered in place."""
        hops = hops or self.random.choice([1, 1, 2, 2, 3])
        text, bound = self.node(VARIABLES[0])
        flips, before = [], ""
        for hop in range(hops):
            types, direction = self.types(), self.random.choice(["->", "->", "<-"])
            near, far, edge = VARIABLES[hop], VARIABLES[hop + 1], EDGE_VARIABLES[hop]
            inside, kept = self.inline_edge(edge, types)
            bound = bound.expand(near, edge, far, types, direction)
            bound = bound.take(kept(bound))
            shown, fits = self.inline_node(far)
            bound = bound.take(fits(bound))
            body = f"[{edge}:{'|'.join(types)}{inside}]"
            text += f"-{body}->{shown}" if direction == "->" else f"<-{body}-{shown}"
            if before not in ("", direction):
                flips.append((VARIABLES[hop - 1], far))
            before = direction
        if flips:  # a relationship must not be walked back: the stores differ there
            text += " WHERE " + " AND ".join(f"{a}.id <> {b}.id" for a, b in flips)
            for a, b in flips:
                bound = bound.take(np.flatnonzero(bound.nodes[a] != bound.nodes[b]))
        return text, bound

    def matched(self, hops: int | None = None) -> tuple[str, Bindings]:
        """MATCH … WHERE …, with its matches."""
        text, bound = self.pattern(hops)
        if self.random.random() < 0.8:
            condition = self.condition(bound)
            text += (" AND " if " WHERE " in text else " WHERE ") + condition.text
            bound = bound.take(condition.rows())
        return f"MATCH {text}", bound

    def node(self, variable: str) -> tuple[str, Bindings]:
        bound = Bindings(self.graph, {variable: self.graph.all_nodes(token=False)})
        text, fits = self.inline_node(variable)
        return text, bound.take(fits(bound))

    def inline_node(self, variable: str) -> tuple[str, Callable[[Bindings], np.ndarray]]:
        if self.random.random() < 0.75:
            return f"({variable}:Feature)", lambda bound: np.arange(len(bound))
        layer = self.random.randrange(4)
        return (
            f"({variable}:Feature {{layer: {layer}}})",
            lambda bound: np.flatnonzero(bound.value(variable, "layer")[0] == layer),
        )

    def inline_edge(
        self, variable: str, types: tuple[str, ...]
    ) -> tuple[str, Callable[[Bindings], np.ndarray]]:
        if self.random.random() < 0.75:
            return "", lambda bound: np.arange(len(bound))
        name, value = self.random.choice([("reading", "up"), ("reading", "gate"), ("head", 1)])
        if name == "head" and types != ("VIA_HEAD",):
            name, value = "reading", "up"

        def fits(bound: Bindings) -> np.ndarray:
            values, known = bound.value(variable, name)
            return np.flatnonzero((values == value) & known)

        return f" {{{name}: {value!r}}}", fits

    # Conditions

    def condition(self, bound: Bindings, depth: int = 2) -> Condition:
        draw = self.random.random()
        if depth and draw < 0.25:
            return self.condition(bound, depth - 1) & self.condition(bound, depth - 1)
        if depth and draw < 0.45:
            return self.condition(bound, depth - 1) | self.condition(bound, depth - 1)
        if depth and draw < 0.55:
            return ~self.condition(bound, depth - 1)
        return self.comparison(bound)

    def comparison(self, bound: Bindings) -> Condition:
        variable = self.random.choice([*bound.nodes, *bound.edges])
        has_head = "VIA_HEAD" in bound.types.get(variable, ())
        if self.random.random() < 0.1:
            absent = ["head", "coactivation"] if has_head else ["coactivation"]
            name = "layer" if variable in bound.nodes else self.random.choice(absent)
            _, known = bound.value(variable, name)
            negated = self.random.random() < 0.5
            text = f"{variable}.{name} IS {'NOT ' if negated else ''}NULL"
            return Condition(text, known if negated else ~known, np.ones(len(bound), bool))
        if self.random.random() < 0.15 and len(bound.nodes) > 1:
            one, two = self.random.sample(sorted(bound.nodes), 2)
            (left, ok), (right, also) = bound.value(one, "number"), bound.value(two, "number")
            return Condition(f"{one}.number < {two}.number", left < right, ok & also)
        names = ["layer", "number", "write_norm", "key"]
        if variable in bound.edges:
            names = ["weight", "weight", "z", "rank_in", "rank_out", "reading"]
            names += ["head", "layer"] if has_head else []
        name = self.random.choice(names)
        values, known = bound.value(variable, name)
        return self._compared(f"{variable}.{name}", name, values, known)

    def _compared(self, text: str, name: str, values: np.ndarray, known: np.ndarray) -> Condition:
        if name == "key":
            end = str(self.random.randrange(12))
            return Condition(f"{text} ENDS WITH '/{end}'", np.char.endswith(values, f"/{end}"), known)
        if name == "reading":
            return Condition(f"{text} = 'up'", values == "up", known)
        if name in ("weight", "z", "write_norm"):
            limit: Any = self.random.choice([0.25, 0.75, -0.5, 0.0, round(self.random.gauss(0, 1), 3), 20.0])
        else:
            limit = self.random.randrange(2 if name == "head" else 4 if name == "layer" else 50)
        if isinstance(limit, int) and self.random.random() < 0.25:
            choices = sorted({limit, self.random.randrange(12), 3})
            return Condition(f"{text} IN {choices}", np.isin(values, choices), known)
        symbol, compare = self.random.choice(
            [("<", np.less), ("<=", np.less_equal), (">", np.greater), (">=", np.greater_equal),
             ("=", np.equal), ("<>", np.not_equal)]
        )  # fmt: skip
        return Condition(f"{text} {symbol} {limit}", compare(values, limit), known)

    # Aggregates

    def aggregates(self, bound: Bindings) -> list[tuple[str, Callable[[np.ndarray], Any]]]:
        """One to three aggregates with how they are computed from the rows of a group."""
        edge = self.random.choice(sorted(bound.edges))
        node = self.random.choice(sorted(bound.nodes))
        weight, there = bound.value(edge, "weight")
        rank, ranked = bound.value(edge, "rank_in")
        keys, keyed = bound.value(node, "key")
        head, headed = bound.value(edge, "head")

        def some(
            values: np.ndarray, known: np.ndarray, how: Callable[[np.ndarray], Any]
        ) -> Callable[[np.ndarray], Any]:
            return lambda rows: how(values[rows][known[rows]]) if known[rows].any() else None

        def total(values: np.ndarray, known: np.ndarray) -> Callable[[np.ndarray], Any]:
            return lambda rows: values[rows][known[rows]].sum() if known[rows].any() else None

        choices = [
            ("count(*)", len),
            (f"count(DISTINCT {node}.id)", lambda rows: len(set(keys[rows][keyed[rows]].tolist()))),
            (f"count(DISTINCT {node}.key)", lambda rows: len(set(keys[rows][keyed[rows]].tolist()))),
            (f"count({edge}.head)", lambda rows: int(headed[rows].sum())),
            (f"count(DISTINCT {edge}.head)", lambda rows: len(set(head[rows][headed[rows]].tolist()))),
            (f"min({edge}.weight)", some(weight, there, np.min)),
            (f"max({edge}.weight)", some(weight, there, np.max)),
            (f"avg({edge}.weight)", some(weight, there, np.mean)),
            (f"sum({edge}.rank_in)", total(rank, ranked)),
            (f"sum(abs({edge}.weight))", some(np.abs(weight), there, np.sum)),
            (f"max({node}.key)", some(keys, keyed, lambda values: max(values.tolist()))),
        ]
        if "VIA_HEAD" not in bound.types[edge]:
            choices = [(text, how) for text, how in choices if ".head" not in text]
        chosen = self.random.sample(choices, self.random.choice([1, 1, 2, 3]))
        return sorted(chosen, key=lambda one: "DISTINCT" in one[0])  # before others the embedded engine fails

    def _groups(self, keys: list[Row]) -> dict[Row, np.ndarray]:
        groups: dict[Row, list[int]] = {}
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        return {key: np.array(rows) for key, rows in groups.items()}

    def _keys(self, bound: Bindings, count: int) -> tuple[list[str], list[Row]]:
        """Some properties without nulls, and their values in every row."""
        choices = [f"{v}.{name}" for v in bound.nodes for name in ("key", "layer", "number")]
        choices += [f"{v}.{name}" for v in bound.edges for name in ("weight", "reading", "rank_in")]
        chosen = self.random.sample(choices, min(count, len(choices)))
        columns = [listed(*bound.value(*name.split("."))) for name in chosen]
        return chosen, list(zip(*columns, strict=True))

    def _limit(self, rows: list[Row]) -> tuple[str, list[Row]]:
        skip, limit = self.random.choice([0, 0, 3]), self.random.choice([1, 5, 20, 1000])
        text = f" SKIP {skip}" if skip else ""
        return f"{text} LIMIT {limit}", rows[skip : skip + limit]
