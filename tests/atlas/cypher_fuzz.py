"""Random Cypher with its answer by numpy: hops, directions, filters, aggregates, ordering, subqueries,
unions.

The queries keep to what embedded stores and Neo4j both understand, and to meanings that both share: no
pattern relies on two relationships being different, no order on where nulls go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.atlas.bindings import Bindings
from tests.atlas.cypher_parts import EDGE_VARIABLES, VARIABLES, CypherParts, Row, listed


@dataclass
class Question:
    """A query and its answer. `ordered` says how many leading columns the order of the rows is by."""

    cypher: str
    columns: int
    rows: list[Row]
    ordered: int = 0

    def differs(self, found: list[Row]) -> str:
        """What is wrong with an answer, or "" if it is right."""
        expected = [tuple(map(_canonical, row)) for row in self.rows]
        given = [tuple(map(_canonical, row)) for row in found]
        if Counter(expected) != Counter(given):
            missing, extra = Counter(expected) - Counter(given), Counter(given) - Counter(expected)
            return f"missing {list(missing.items())[:3]}, extra {list(extra.items())[:3]}"
        if self.ordered and [row[: self.ordered] for row in expected] != [
            row[: self.ordered] for row in given
        ]:
            return "the rows are right but not their order"
        return ""


def _canonical(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list):
        return tuple(sorted(map(_canonical, value), key=repr))
    return float(f"{value:.9g}") if isinstance(value, float) else value


class Fuzz(CypherParts):
    """Questions about one graph, the same for the same seed."""

    def question(self) -> Question:
        kinds: list[Callable[[], Question]] = [
            self.counted, self.grouped, self.listed, self.top, self.distinct, self.filtered_groups,
            self.optional, self.exists, self.counted_within, self.union, self.top_then_aggregate,
            self.top_then_match, self.tokens, self.cases, self.two_matches, self.variable_length,
            self.undirected, self.collected, self.triangle,
        ]  # fmt: skip
        return self.random.choice(kinds)()

    def counted(self) -> Question:
        text, bound = self.matched()
        chosen = [(t, f) for t, f in self.aggregates(bound) if not t.startswith(("sum", "min", "max", "avg"))]
        chosen = chosen or [("count(*)", len)]
        everything = np.arange(len(bound))
        return Question(
            f"{text} RETURN {', '.join(t for t, _ in chosen)}",
            len(chosen),
            [tuple(f(everything) for _, f in chosen)],
        )

    def grouped(self) -> Question:
        text, bound = self.matched()
        names, keys = self._keys(bound, self.random.choice([1, 2]))
        chosen = self.aggregates(bound)
        rows = [(*key, *(f(rows) for _, f in chosen)) for key, rows in self._groups(keys).items()]
        return Question(
            f"{text} RETURN {', '.join([*names, *(t for t, _ in chosen)])}", len(names) + len(chosen), rows
        )

    def listed(self) -> Question:
        text, bound = self.matched(self.random.choice([1, 2]))
        names, rows = self._keys(bound, self.random.choice([2, 3]))
        aliases = [f"{name} AS x{i}" for i, name in enumerate(names)]
        down = [self.random.random() < 0.5 for _ in names]
        for place in reversed(range(len(names))):
            rows = sorted(rows, key=lambda row: row[place], reverse=down[place])
        order = ", ".join(f"x{i}{' DESC' if d else ''}" for i, d in enumerate(down))
        limit, rows = self._limit(rows)
        return Question(
            f"{text} RETURN {', '.join(aliases)} ORDER BY {order}{limit}", len(names), rows, len(names)
        )

    def top(self) -> Question:
        """The strongest edges; ties may come in any order, so only the values are returned."""
        text, bound = self.matched()
        edge = self.random.choice(sorted(bound.edges))
        weights = np.sort(np.abs(bound.value(edge, "weight")[0]))[::-1]
        limit, rows = self._limit([(value,) for value in weights.tolist()])
        return Question(f"{text} RETURN abs({edge}.weight) AS size ORDER BY size DESC{limit}", 1, rows, 1)

    def distinct(self) -> Question:
        text, bound = self.matched()
        names, rows = self._keys(bound, self.random.choice([1, 2, 3]))
        return Question(f"{text} RETURN DISTINCT {', '.join(names)}", len(names), list(dict.fromkeys(rows)))

    def filtered_groups(self) -> Question:
        text, bound = self.matched()
        node = self.random.choice(sorted(bound.nodes))
        least = self.random.choice([1, 2, 5])
        groups = self._groups([(key,) for key in bound.value(node, "key")[0].tolist()])
        sizes = [len(rows) for rows in groups.values() if len(rows) > least]
        query = f"{text} WITH {node}.key AS x, count(*) AS n WHERE n > {least} RETURN count(*), max(n)"
        return Question(query, 2, [(len(sizes), max(sizes, default=None))])

    def optional(self) -> Question:
        text, bound = self.node("a")
        types = self.types()
        wide = bound.expand("a", "r", "b", types, "->")
        condition = self.condition(wide, 1)
        kept = wide.take(condition.rows())
        rows = np.searchsorted(bound.nodes["a"], kept.nodes["a"])
        padded = bound.with_unmatched(kept, rows, ("b",), ("r",))
        weight, there = padded.value("r", "weight")
        keys = padded.value("a", "key")[0].tolist()
        b_keys, b_there = padded.value("b", "key")
        answer = []
        for (key,), own in self._groups([(key,) for key in keys]).items():
            known = there[own]
            most = weight[own][known].max() if known.any() else None
            answer.append((key, int(known.sum()), most, len(set(b_keys[own][b_there[own]].tolist()))))
        query = (
            f"MATCH {text} OPTIONAL MATCH (a)-[r:{'|'.join(types)}]->(b:Feature) WHERE {condition.text}"
            " RETURN a.key, count(r), max(r.weight), count(DISTINCT b.id)"
        )
        return Question(query, 4, answer)

    def _subquery(self, bound: Bindings, variable: str) -> tuple[str, np.ndarray]:
        """A pattern from a variable, and how often it matches in every row."""
        types, direction = self.types(), self.random.choice(["->", "<-"])
        numbered = Bindings(self.graph, {variable: bound.nodes[variable]})
        row = np.arange(len(bound))
        numbered.edges["row"] = row  # carried along to find the rows again
        wide = numbered.expand(variable, "q", "e", types, direction)
        own = Bindings(self.graph, {"e": wide.nodes["e"]}, {"q": wide.edges["q"]}, {"q": types})
        condition = self.comparison(own)
        count = np.bincount(wide.edges["row"][condition.rows()], minlength=len(bound))
        body = f"[q:{'|'.join(types)}]"
        arrow = f"-{body}->" if direction == "->" else f"<-{body}-"
        return f"MATCH ({variable}){arrow}(e:Feature) WHERE {condition.text}", count

    def exists(self) -> Question:
        text, bound = self.pattern(self.random.choice([1, 2]))
        variable = self.random.choice(sorted(bound.nodes))
        inner, count = self._subquery(bound, variable)
        negated = self.random.random() < 0.5
        joint = " AND " if " WHERE " in text else " WHERE "
        names, keys = self._keys(bound, 1)
        kept = np.flatnonzero((count == 0) if negated else (count > 0))
        groups = self._groups([keys[row] for row in kept])
        rows = [(*key, len(own)) for key, own in groups.items()]
        query = (
            f"MATCH {text}{joint}{'NOT ' if negated else ''}EXISTS {{ {inner} }} RETURN {names[0]}, count(*)"
        )
        return Question(query, 2, rows)

    def counted_within(self) -> Question:
        text, bound = self.node("a")
        inner, count = self._subquery(bound, "a")
        rows = list(zip(bound.value("a", "key")[0].tolist(), count.tolist(), strict=True))
        return Question(f"MATCH {text} RETURN a.key, COUNT {{ {inner} }} AS n", 2, rows)

    def union(self) -> Question:
        parts, rows = [], []
        for _ in range(self.random.choice([2, 3])):
            text, bound = self.matched(self.random.choice([1, 2]))
            parts.append(f"{text} RETURN a.key AS x, b.layer AS y")
            rows += list(
                zip(*(listed(*bound.value(v, n)) for v, n in (("a", "key"), ("b", "layer"))), strict=True)
            )
        if self.random.random() < 0.5:
            return Question(" UNION ALL ".join(parts), 2, rows)
        return Question(" UNION ".join(parts), 2, list(dict.fromkeys(rows)))

    def top_then_aggregate(self) -> Question:
        """An ORDER BY with LIMIT before an aggregate: versions of the engine have dropped it."""
        text, bound = self.matched()
        edge = self.random.choice(sorted(bound.edges))
        limit = self.random.choice([1, 3, 10, 50])
        kept = np.sort(bound.value(edge, "weight")[0])[::-1][:limit]
        first = f"{text} WITH {edge}.weight AS w ORDER BY w DESC LIMIT {limit}"
        query = f"{first} RETURN count(*), min(w), max(w), sum(w)"
        found = (kept.min(), kept.max(), kept.sum()) if len(kept) else (None, None, None)
        if not len(kept):  # the sum of nothing is null on one store and 0 on the other
            return Question(query.replace(", sum(w)", ""), 3, [(0, None, None)])
        return Question(query, 4, [(len(kept), *found)])

    def top_then_match(self) -> Question:
        text, bound = self.node("a")
        limit = self.random.choice([1, 3, 10])
        order = np.argsort(-bound.value("a", "write_norm")[0], kind="stable")[:limit]
        bound = bound.take(order)
        types, direction = self.types(), self.random.choice(["->", "<-"])
        wide = bound.expand("a", "r", "b", types, direction)
        condition = self.condition(wide, 1)
        wide = wide.take(condition.rows())
        groups = self._groups([(key,) for key in wide.value("a", "key")[0].tolist()])
        body = f"[r:{'|'.join(types)}]"
        arrow = f"-{body}->" if direction == "->" else f"<-{body}-"
        query = (
            f"MATCH {text} WITH a ORDER BY a.write_norm DESC LIMIT {limit}"
            f" MATCH (a){arrow}(b:Feature) WHERE {condition.text} RETURN a.key, count(*)"
        )
        return Question(query, 2, [(*key, len(rows)) for key, rows in groups.items()])

    def tokens(self) -> Question:
        """Token to feature to feature to token, as a path from embedding to logit."""
        types = self.types()
        bound = Bindings(self.graph, {"t": self.graph.all_nodes(token=True)})
        bound = bound.expand("t", "r", "a", ("EMBEDS",), "->").expand("a", "s", "b", types, "->")
        bound = bound.expand("b", "q", "u", ("PROMOTES",), "->")
        between = {name: bound.nodes[name] for name in "ab"}
        condition = self.condition(Bindings(self.graph, between, {"s": bound.edges["s"]}, {"s": types}))
        bound = bound.take(condition.rows())
        chosen = self.aggregates(Bindings(self.graph, bound.nodes, {"s": bound.edges["s"]}, {"s": types}))
        groups = self._groups([(number,) for number in bound.value("t", "number")[0].tolist()])
        rows = [(*key, *(f(own) for _, f in chosen)) for key, own in groups.items()]
        query = (
            f"MATCH (t:Token)-[r:EMBEDS]->(a:Feature)-[s:{'|'.join(types)}]->(b:Feature)"
            "-[q:PROMOTES]->(u:Token)"
            f" WHERE {condition.text} RETURN t.number, {', '.join(t for t, _ in chosen)}"
        )
        return Question(query, 1 + len(chosen), rows)

    def cases(self) -> Question:
        text, bound = self.matched()
        edge = self.random.choice(sorted(bound.edges))
        weight, _ = bound.value(edge, "weight")
        names = np.where(weight > 0.25, "high", np.where(weight < 0, "low", "middle")).tolist()
        rows = [(*key, len(own)) for key, own in self._groups([(name,) for name in names]).items()]
        case = (
            f"CASE WHEN {edge}.weight > 0.25 THEN 'high' WHEN {edge}.weight < 0 THEN 'low' ELSE 'middle' END"
        )
        return Question(f"{text} RETURN {case} AS size, count(*)", 2, rows)

    def two_matches(self) -> Question:
        """Two relationships from one node, in two clauses; the ends differ, so the stores agree."""
        text, bound = self.matched(1)
        types = self.types()
        wide = bound.expand("a", "s", "c", types, "->")
        wide = wide.take(np.flatnonzero(wide.nodes["b"] != wide.nodes["c"]))
        condition = self.condition(wide, 1)
        wide = wide.take(condition.rows())
        chosen = self.aggregates(wide)
        groups = self._groups([(layer,) for layer in wide.value("b", "layer")[0].tolist()])
        query = (
            f"{text} MATCH (a)-[s:{'|'.join(types)}]->(c:Feature) WHERE b.id <> c.id AND {condition.text}"
            f" RETURN b.layer, {', '.join(t for t, _ in chosen)}"
        )
        return Question(
            query, 1 + len(chosen), [(*k, *(f(own) for _, f in chosen)) for k, own in groups.items()]
        )

    def variable_length(self) -> Question:
        types = self.types()
        longest = self.random.choice([1, 2, 3])
        start = Bindings(self.graph, {"a": self.graph.all_nodes(token=False)})
        layer = self.random.randrange(3)
        start = start.take(np.flatnonzero(start.value("a", "layer")[0] == layer))
        ends: Counter[Row] = Counter()
        walk, here = start, "a"
        for hop in range(longest):
            walk = walk.expand(here, EDGE_VARIABLES[hop], VARIABLES[hop + 1], types, "->")
            here = VARIABLES[hop + 1]
            pairs = zip(walk.value("a", "key")[0].tolist(), walk.value(here, "key")[0].tolist(), strict=True)
            ends.update(pairs)
        query = (
            f"MATCH (a:Feature)-[:{'|'.join(types)}*1..{longest}]->(b:Feature) WHERE a.layer = {layer}"
            " RETURN a.key, b.key, count(*)"
        )
        return Question(query, 3, [(*pair, count) for pair, count in ends.items()])

    def undirected(self) -> Question:
        types = self.types()
        bound = Bindings(self.graph, {"a": self.graph.all_nodes(token=False)}).expand(
            "a", "r", "b", types, "-"
        )
        condition = self.condition(bound)
        bound = bound.take(condition.rows())
        chosen = self.aggregates(bound)
        groups = self._groups([(key,) for key in bound.value("a", "key")[0].tolist()])
        rows = [(*key, *(f(own) for _, f in chosen)) for key, own in groups.items()]
        query = (
            f"MATCH (a:Feature)-[r:{'|'.join(types)}]-(b:Feature) WHERE {condition.text}"
            f" RETURN a.key, {', '.join(t for t, _ in chosen)}"
        )
        return Question(query, 1 + len(chosen), rows)

    def collected(self) -> Question:
        text, bound = self.matched()
        node = self.random.choice(sorted(bound.nodes))
        keys, groups_by = bound.value(node, "key")[0].tolist(), bound.value("a", "layer")[0].tolist()
        distinct = self.random.random() < 0.5
        rows = []
        for (layer,), own in self._groups([(layer,) for layer in groups_by]).items():
            values = [keys[row] for row in own]
            rows.append((layer, len(own), sorted(set(values) if distinct else values)))
        word = "DISTINCT " if distinct else ""
        return Question(f"{text} RETURN a.layer, count(*), collect({word}{node}.key)", 3, rows)

    def triangle(self) -> Question:
        """A feed-forward loop. The WITH keeps the embedded engine from its cyclic join, which loses edges."""
        first, second, third = self.types(), self.types(), self.types()
        bound = Bindings(self.graph, {"a": self.graph.all_nodes(token=False)})
        bound = bound.expand("a", "r", "b", first, "->").expand("b", "s", "c", second, "->")
        bound = bound.expand("a", "t", "c", third, "->")
        condition = self.condition(bound)
        bound = bound.take(condition.rows())
        groups = self._groups([(layer,) for layer in bound.value("c", "layer")[0].tolist()])
        query = (
            f"MATCH (a:Feature)-[r:{'|'.join(first)}]->(b:Feature)-[s:{'|'.join(second)}]->(c:Feature)"
            f" WITH a, b, c, r, s MATCH (a)-[t:{'|'.join(third)}]->(c) WHERE {condition.text}"
            " RETURN c.layer, count(*)"
        )
        return Question(query, 2, [(*key, len(rows)) for key, rows in groups.items()])
