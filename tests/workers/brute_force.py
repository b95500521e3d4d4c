"""The selection rules once more, as plainly as they are written: every pair, float64, Python's sort."""

from dataclasses import dataclass

import numpy as np

from ingest.rules import Absolute, All_, Any_, Everything, Rule, Top, Z


@dataclass(frozen=True)
class Pair:
    """One pair with what a rule looks at. source and target order ties."""

    source: tuple[int, int]  # dictionary, number
    target: int  # thousands tell dictionaries apart
    reading: int
    layer: int  # of the head, -1 without
    head: int
    source_layer: int
    weight: float  # float32(float64 product)
    z: float
    size: float

    @property
    def identity(self) -> tuple:
        return (self.source, self.target, self.reading, self.layer, self.head)


def chosen(rule: Rule, pairs: list[Pair]) -> set[tuple]:
    """Identities of the pairs that the rule keeps."""
    match rule:
        case Any_(rules=rules):
            return set.union(*(chosen(inner, pairs) for inner in rules))
        case All_(rules=rules):
            return set.intersection(*(chosen(inner, pairs) for inner in rules))
        case Everything():
            return {pair.identity for pair in pairs}
        case Absolute(tau=tau):
            return {pair.identity for pair in pairs if pair.size > tau}
        case Z(z=z):
            return {pair.identity for pair in pairs if abs(pair.z) > z and pair.weight != 0}
        case Top(k=k, per=per):
            groups: dict[tuple, list[Pair]] = {}
            for pair in pairs:
                row = (pair.target, pair.reading)
                group = {
                    "target": row,
                    "target×type": (*row, pair.head >= 0),
                    "target×source_layer": (*row, pair.source_layer),
                    "target×head": (*row, pair.layer, pair.head),
                    "source": pair.source,
                    "block": (pair.layer, pair.head)
                    if pair.head >= 0
                    else ("direct", pair.source[0], pair.target // 1000),
                }[per]
                groups.setdefault(group, []).append(pair)
            best = (sorted(group, key=lambda p: (-p.size, p.identity))[:k] for group in groups.values())
            return {pair.identity for group in best for pair in group if pair.size > 0}
    raise TypeError(rule)


def weights(omega: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """(sources, targets) float32 of the float64 product."""
    return (omega.astype(np.float64) @ rho.astype(np.float64).T).astype(np.float32)
