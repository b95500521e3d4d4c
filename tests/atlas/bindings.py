"""The reference of the differential test: patterns matched and conditions judged with numpy on the edge
lists.

A table of bindings has one row for each match; a node variable is an array of node numbers, a
relationship variable an array of edge numbers, -1 where an OPTIONAL MATCH found nothing. Conditions
follow three-valued logic: a value has a truth and whether it is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.atlas.synthetic import Synthetic

TYPES = ("DIRECT", "VIA_HEAD", "EMBEDS", "PROMOTES")
READINGS = np.array(["gate", "up"])


@dataclass
class Graph:
    """Nodes and edges with their properties; a property is an array and a mask of where it has a value."""

    nodes: dict[str, tuple[np.ndarray, np.ndarray]]
    edges: dict[str, tuple[np.ndarray, np.ndarray]]
    is_token: np.ndarray
    source: np.ndarray
    target: np.ndarray
    type: np.ndarray

    @classmethod
    def of(cls, model: Synthetic) -> Graph:
        n_features, n_tokens = model.n_layers * model.size, model.d_vocab
        number = np.arange(n_features)
        layer = number // model.size
        is_token = np.arange(n_features + n_tokens) >= n_features
        keys = [
            f"{model.name}/neurons/L{a:02d}.mlp/{b}" for a, b in zip(layer, number % model.size, strict=True)
        ]
        keys += [f"{model.name}/{token}" for token in range(n_tokens)]
        nothing = np.zeros(n_tokens)
        nodes = {
            "key": (np.array(keys), np.ones(len(keys), bool)),
            "number": (np.concatenate([number % model.size, np.arange(n_tokens)]), np.ones(len(keys), bool)),
            "layer": (np.concatenate([layer, nothing.astype(int)]), ~is_token),
            "write_norm": (np.concatenate([1.0 + number, nothing]), ~is_token),
        }
        parts: dict[str, list[np.ndarray]] = {}
        known: dict[str, list[np.ndarray]] = {}
        names = ("weight", "z", "rank_in", "rank_out", "rank", "layer", "head", "reading", "coactivation")
        ends: dict[str, list[np.ndarray]] = {"source": [], "target": [], "type": []}
        for code, type in enumerate(TYPES):
            own = model.edges[type]
            n = len(own["weight"])
            for name in names:
                values = own.get(name, np.zeros(n))
                if name == "reading":
                    values = READINGS[values.astype(int)]
                elif name in ("weight", "z"):
                    values = values.astype(np.float64)
                parts.setdefault(name, []).append(values)
                known.setdefault(name, []).append(np.full(n, name in own))
            ends["source"].append(own["source"] + (n_features if type == "EMBEDS" else 0))
            ends["target"].append(own["target"] + (n_features if type == "PROMOTES" else 0))
            ends["type"].append(np.full(n, code))
        edges = {name: (np.concatenate(parts[name]), np.concatenate(known[name])) for name in names}
        joined = {name: np.concatenate(values) for name, values in ends.items()}
        return cls(nodes, edges, is_token, joined["source"], joined["target"], joined["type"])

    def all_nodes(self, token: bool) -> np.ndarray:
        return np.flatnonzero(self.is_token == token)


@dataclass
class Bindings:
    """Rows of matches."""

    graph: Graph
    nodes: dict[str, np.ndarray] = field(default_factory=dict)
    edges: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The types that a relationship variable may have."""

    def __len__(self) -> int:
        return len(next(iter((*self.nodes.values(), *self.edges.values())), ()))

    def take(self, rows: np.ndarray) -> Bindings:
        return Bindings(
            self.graph,
            {name: values[rows] for name, values in self.nodes.items()},
            {name: values[rows] for name, values in self.edges.items()},
            dict(self.types),
        )

    def value(self, variable: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A property of a variable in every row, and whether it has a value there."""
        bound, properties = (
            (self.nodes[variable], self.graph.nodes)
            if variable in self.nodes
            else (self.edges[variable], self.graph.edges)
        )
        values, known = properties[name]
        there = bound >= 0
        place = np.where(there, bound, 0)
        return values[place], known[place] & there

    def expand(
        self,
        start: str,
        edge: str,
        end: str,
        types: tuple[str, ...],
        direction: str,
        *,
        optional: bool = False,
    ) -> Bindings:
        """The rows with one more relationship: `direction` is -> or <- as seen from `start`, or - for
        both.
        """
        graph = self.graph
        chosen = np.flatnonzero(np.isin(graph.type, [TYPES.index(type) for type in types]))
        pairs = []
        if direction in ("->", "-"):
            pairs.append((graph.source[chosen], graph.target[chosen], chosen))
        if direction in ("<-", "-"):
            pairs.append((graph.target[chosen], graph.source[chosen], chosen))
        near, far, number = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        order = np.argsort(near, kind="stable")
        near, far, number = near[order], far[order], number[order]
        begin = np.searchsorted(near, self.nodes[start], side="left")
        count = np.searchsorted(near, self.nodes[start], side="right") - begin
        rows = np.repeat(np.arange(len(self)), count)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        place = begin[rows] + within
        wide = self.take(rows)
        wide.types[edge] = types
        if end in self.nodes:  # the end is bound: keep the rows that meet it
            meets = wide.nodes[end] == far[place]
            wide = wide.take(np.flatnonzero(meets))
            wide.edges[edge] = number[place][meets]
        else:
            wide.nodes[end], wide.edges[edge] = far[place], number[place]
        if optional:
            return self.with_unmatched(wide, rows, (end,), (edge,))
        return wide

    def with_unmatched(
        self, wide: Bindings, rows: np.ndarray, nodes: tuple[str, ...], edges: tuple[str, ...]
    ) -> Bindings:
        """`wide`, whose rows came from `rows` of these, and a row with nulls for each of these that
        gave none.
        """
        lost = np.setdiff1d(np.arange(len(self)), rows)
        padded = self.take(lost)
        for name in nodes:
            padded.nodes[name] = np.full(len(lost), -1)
        for name in edges:
            padded.edges[name] = np.full(len(lost), -1)
        return Bindings(
            self.graph,
            {name: np.concatenate([wide.nodes[name], padded.nodes[name]]) for name in padded.nodes},
            {name: np.concatenate([wide.edges[name], padded.edges[name]]) for name in padded.edges},
            wide.types,
        )


@dataclass
class Condition:
    """A WHERE expression: its Cypher, and its truth in every row of some bindings."""

    text: str
    truth: np.ndarray
    known: np.ndarray

    def rows(self) -> np.ndarray:
        return np.flatnonzero(self.truth & self.known)

    def __and__(self, other: Condition) -> Condition:
        false = (self.known & ~self.truth) | (other.known & ~other.truth)
        both = self.known & other.known
        return Condition(f"({self.text} AND {other.text})", both & self.truth & other.truth, both | false)

    def __or__(self, other: Condition) -> Condition:
        true = (self.known & self.truth) | (other.known & other.truth)
        return Condition(f"({self.text} OR {other.text})", true, (self.known & other.known) | true)

    def __invert__(self) -> Condition:
        return Condition(f"NOT ({self.text})", ~self.truth & self.known, self.known)
