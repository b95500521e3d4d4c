"""Selection agrees with brute force, whatever the rule, the norms, the tiles and the path the filter
takes."""

import numpy as np
import pytest
import torch

from ingest.rules import Absolute, All_, Any_, Everything, Rule, Top, Z
from tests.workers.brute_force import Pair, chosen, weights
from workers import operands as operands_module
from workers import scan as scan_module
from workers.operands import BFLOAT16, FLOAT32, Operand, Precision, RowBounds
from workers.pairs import Pairs
from workers.products import direct_pairs
from workers.scan import scan
from workers.search import Search
from workers.selection import Norms, keeps, local_choice, tops, within_top
from workers.sides import DictionaryEntry, Readers, Writers, lengths

D, TARGETS = 48, 40
RULES: list[Rule] = [
    Z(2.5),
    Absolute(1.2),
    Top(3, "target"),
    Top(2, "target×source_layer"),
    Top(4, "target×type"),
    Top(2, "target×head"),
    Top(3, "source"),
    Top(40, "block"),
    Any_((Z(3.2), Top(20, "block"), Top(1, "target"))),
    All_((Top(200, "block"), Z(2.0))),
    Any_((Z(3.0), Top(2, "target"))),
    All_((Z(1.5), Top(20, "target"), Absolute(0.5))),
    Any_((All_((Z(2.0), Absolute(1.0))), Top(1, "source"), Top(1, "target×source_layer"))),
    All_((Top(5, "source"), Top(30, "target"))),
    Everything(),
]


def vectors(rng: np.random.Generator, count: int, norms: str) -> np.ndarray:
    """Float32 rows with ties (equal rows), zeros, and a dead feature."""
    rows = rng.standard_normal((count, D))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    if norms == "heavy":
        rows *= np.exp(1.5 * rng.standard_normal((count, 1)))
    rows[7] = rows[3]
    rows[11] = -rows[3]
    rows[13] = 0
    return rows.astype(np.float32).astype(np.float64)


def writers(omega: np.ndarray, place: int, rescalable: bool) -> Writers:
    length = lengths(omega)
    scale = 1 / np.where(length > 0, length, 1) if rescalable else np.ones(len(length))
    return Writers(DictionaryEntry(f"source {place}", "test", place), omega, Norms(length, scale))


def readers(rho: np.ndarray, scale: np.ndarray, readings: int) -> Readers:
    size = len(rho) // readings
    names = np.array([0] if readings == 1 else [1, 2], np.int8)
    return Readers(
        DictionaryEntry("target", "test", 9),
        rho,
        Norms(lengths(rho), scale),
        np.tile(np.arange(size, dtype=np.int32), readings),
        np.repeat(names, size),
        cut=9,
    )


def search(rule: Rule, sources: list[Writers], target: Readers) -> Pairs:
    """The steps' way: filter, exact weights, local choice, then the rule."""
    layers = np.array([source.entry.layer // 2 for source in sources])
    looking = Search(rule, target.norms, D)
    for source in sources:
        looking.read(target.operand, source.operand, layer=source.entry.layer // 2, block=source.entry.layer)
    parts = [direct_pairs(found, n, sources[n], target) for n, found in enumerate(looking.finish())]
    pairs = Pairs.joined(parts).sorted()
    pairs = pairs.where(local_choice(rule, pairs, layers))
    members = {top: within_top(top, pairs, layers) for top in tops(rule, "source")}
    return pairs.where(keeps(rule, pairs, layers, members)).sorted()


def expected(rule: Rule, sources: list[Writers], target: Readers) -> dict[tuple, float]:
    pairs = []
    for place, source in enumerate(sources):
        table = weights(source.omega, target.rho)
        for i, j in np.ndindex(*table.shape):
            length = source.norms.length[i] * target.norms.length[j]
            z = float(table[i, j]) * np.sqrt(D) / length if length else 0.0
            size = abs(float(table[i, j])) * source.norms.scale[i] * target.norms.scale[j]
            pair = Pair(
                (place, i), int(target.target[j]), int(target.reading[j]), -1, -1, source.entry.layer // 2,
                float(table[i, j]), z, size,
            )  # fmt: skip
            pairs.append(pair)
    keep = chosen(rule, pairs)
    return {pair.identity: pair.weight for pair in pairs if pair.identity in keep}


def as_dict(pairs: Pairs) -> dict[tuple, float]:
    rows = zip(
        pairs.source_dictionary, pairs.source, pairs.target, pairs.reading, pairs.layer, pairs.head,
        pairs.weight, strict=True,
    )  # fmt: skip
    return {((int(p), int(i)), int(j), int(r), int(L), int(h)): float(w) for p, i, j, r, L, h, w in rows}


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("norms", "rescalable", "readings"), [("equal", True, 1), ("heavy", True, 2), ("heavy", False, 1)]
)
def test_direct_pairs_equal_brute_force(rule: Rule, norms: str, rescalable: bool, readings: int) -> None:
    rng = np.random.default_rng([len(norms), rescalable, readings])
    sources = [writers(vectors(rng, size, norms), n, rescalable) for n, size in enumerate((150, 40, 30))]
    rho = vectors(rng, TARGETS * readings, norms)
    scale = np.exp(rng.standard_normal(len(rho))) if rescalable else np.ones(len(rho))
    target = readers(rho, scale, readings)
    assert as_dict(search(rule, sources, target)) == expected(rule, sources, target)


@pytest.mark.parametrize("tile", [(8, 128), (64, 256), (512, 1024)])
@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "rule", [Z(2.5), Top(3, "target"), Absolute(1.2), All_((Z(2.0), Absolute(1.0)))], ids=str
)
def test_tiles_precision_and_path_change_nothing(
    tile: tuple[int, int],
    kind: Precision,
    fused: bool,
    rule: Rule,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`fused` False is the path that other devices take."""
    monkeypatch.setattr(operands_module, "precision", lambda device="cpu": kind)
    monkeypatch.setattr(
        "workers.search.scan",
        lambda rows, columns, bounds: scan(rows, columns, bounds, fused=fused, tile=tile),
    )
    rng = np.random.default_rng(5)
    sources = [writers(vectors(rng, 300, "heavy"), n, rescalable=False) for n in range(2)]
    target = readers(vectors(rng, 100, "heavy"), np.ones(100), 1)
    assert as_dict(search(rule, sources, target)) == expected(rule, sources, target)


def rounding_alike(rng: np.random.Generator, count: int, width: int, side: float) -> np.ndarray:
    """Rows whose every component lies as far as it can from its bfloat16, on the same side: nothing
    averages out."""
    low = (
        torch.from_numpy(np.exp2(rng.integers(-1, 1, (count, width)).astype(np.float64)))
        .bfloat16()
        .double()
        .numpy()
    )
    return low * (1 + side * 2.0**-8 * (1 - 2.0**-10)) / np.sqrt(width)


@pytest.mark.parametrize("width", [64, 576])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_operands_that_round_the_same_way_lose_no_pair(width: int, side: float) -> None:
    """The filter's error is then near its bound, where random data reach a twelfth of it."""
    rng = np.random.default_rng(width)
    a, b = (rounding_alike(rng, 256, width, side) for _ in range(2))
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    exact = b @ a.T
    ones = np.ones(256)
    rows, columns = Operand(b, ones), Operand(a, ones)
    low = rows.low.double() @ columns.low.double().T
    error = np.abs(low.numpy() - exact)
    assert error.max() > 0.5 * BFLOAT16.unit  # the case is one: random data stay below a tenth
    assert (error <= rows.slack(columns)[:, None]).all()
    for threshold in np.quantile(np.abs(exact), [0.2, 0.5, 0.9]):
        bounds = RowBounds(np.full(256, threshold), np.zeros(256), True, np.empty((0, 256, 1), np.float32))
        found = scan(rows, columns, bounds)
        missed = np.abs(exact) > threshold
        missed[found.row, found.column] = False
        assert not missed.any()


def test_norm_bounds_skip_work_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heavy tails most tiles cannot hold a pair; the rows that are kept are still the right ones."""
    read = []
    original = scan_module._Space.read
    monkeypatch.setattr(
        scan_module._Space,
        "read",
        lambda self, rows, *rest: read.append(len(rows)) or original(self, rows, *rest),
    )
    rng = np.random.default_rng(1)
    source = writers(
        np.exp(2 * rng.standard_normal((4096, 1))) * rng.standard_normal((4096, 16)), 0, rescalable=False
    )
    rho = np.exp(2 * rng.standard_normal((2048, 1))) * rng.standard_normal((2048, 16))
    target = readers(rho, np.ones(2048), 1)
    size = np.abs(weights(source.omega, target.rho))
    tau = float(np.quantile(size, 1 - 1e-4))
    looking = Search(Absolute(tau), target.norms, 16)
    looking.read(target.operand, source.operand, layer=0)
    found = looking.finish()[0]
    pairs = direct_pairs(found, 0, source, target)
    assert set(zip(*np.nonzero(tau < size.T), strict=True)) == set(
        zip(pairs.target[pairs.size > tau], pairs.source[pairs.size > tau], strict=True)
    )
    assert len(read) < 12  # of 16 tiles
