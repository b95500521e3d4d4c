"""The filter: which pairs of a block may pass, found at the speed of a low-precision matrix product.

For unit sources â_i and targets b̂_j of length reach_j ≤ 1 (both divided by the norms that `selection` names)
the score x_ij = â_i · b̂_j is computed in bfloat16 (float32 where the processor has no bfloat16 instructions),
one tile that stays in the cache at a time, and read once: every block of `BLOCK` sources is tested with one
integer addition for four scores, and only blocks that hold a candidate are looked at again.
A pair is a candidate unless rounding alone cannot explain its missing the threshold, so nothing that passes
exactly is lost:

    |fl(x_ij) - x_ij| ≤ slack_j + output |fl(x_ij)|

slack (`Operand.slack`) is made of what rounding the vectors really did to them, known when they were rounded:
for bfloat16 (8 bits, unit u = 2⁻⁸) about u times their lengths, where the worst case would be 2u + u². The
product is returned in bfloat16, another u of itself.

Running top-k bounds: each row may carry heaps of its k largest proven scores; the smallest of them is a lower
bound on what enters the row's top k, raised while the block is read.
"""

from __future__ import annotations

import numpy as np
import torch

from workers.compiled import compiled
from workers.heap import push
from workers.operands import Candidates, Operand, Precision, RowBounds

__all__ = ["scan"]

BLOCK = 128  # sources tested together
TILE_ROWS, TILE_COLUMNS = 512, 1024  # scores in one tile: 1 MB in bfloat16, half a level-2 cache or less
PRUNE_AT = 4_000_000  # candidates kept in memory before those the bounds have outgrown are dropped


@compiled(inline="always")
def _code_below(low, bits):
    """The largest code (a magnitude's bits) that is certainly below `low`; -1 lies below every score."""
    if not low > 0:
        return np.int64(-1)
    code = np.int64(np.float32(low).view(np.uint32)) - 1  # the cast may have rounded up
    return (code >> 16) - 1 if bits == 16 else code - 1


@compiled(inline="always")
def _least_bound(heaps, row):
    """The smallest bound of the row's heaps; infinite without heaps."""
    least = np.inf
    for leaf in range(heaps.shape[0]):
        least = min(least, np.float64(heaps[leaf, row, 0]))
    return least


@compiled(inline="always")
def _need(plain, weighted, every, proven, inverse):
    """The smallest |x| that may pass against a source whose weight is 1/inverse."""
    weighted *= inverse
    return min(max(plain, weighted) if every else min(plain, weighted), proven * inverse)


@compiled(inline="always")
def _more_than(words, code, negative, signed, bits):
    """How many lanes exceed a code, of one sign where `signed`."""
    if bits == 16:
        magnitude, one = np.uint64(0x7FFF7FFF7FFF7FFF), np.uint64(0x0001000100010001)
    else:
        magnitude, one = np.uint64(0x7FFFFFFF7FFFFFFF), np.uint64(0x0000000100000001)
    add = np.uint64((1 << (bits - 1)) - 1 - code) * one
    shift = np.uint64(bits - 1)
    flip = np.uint64(0) if negative else ~np.uint64(0)
    any_sign = np.uint64(0) if signed else ~np.uint64(0)
    total = np.uint64(0)
    for w in range(words.shape[0]):
        total += ((((words[w] & magnitude) + add) & ((words[w] ^ flip) | any_sign)) >> shift) & one
    count = np.int64(0)
    for _ in range(64 // bits):
        count += np.int64(total & np.uint64((1 << (bits - 1)) - 1))
        total >>= np.uint64(bits)
    return count


@compiled()
def _seed(words, heaps, row, signed, reach, slack, output, lightest, bits):
    """A first bound on the row's top-k scores: what at least k lanes of this tile exceed.

    Found by counting lanes, before any is looked at. lightest: the smallest weight in the tile.
    """
    least = np.inf
    for leaf in range(heaps.shape[0]):
        if heaps[leaf, row, 0] > 0:
            least = min(least, np.float64(heaps[leaf, row, 0]))
            continue
        size = heaps.shape[2]
        while size > 0 and heaps[leaf, row, size - 1] < 0:
            size -= 1
        low, high = _code_below(reach / 128, bits), _code_below(reach * 1.02, bits)
        if bits == 32:
            low, high = low >> 16 << 16, high >> 16 << 16
        step = 1 if bits == 16 else 1 << 16
        if _more_than(words, low, leaf == 1, signed, bits) < size:
            return 0.0
        while high - low > step:
            middle = low + (high - low) // (2 * step) * step
            if _more_than(words, middle, leaf == 1, signed, bits) < size:
                high = middle
            else:
                low = middle
        score = np.uint32((low + 1) << 16 if bits == 16 else low + 1).view(np.float32)
        least = min(least, (score / (1 + output) - slack) * lightest * (1 - 2e-6))
    return max(least, 0.0)


@compiled()
def _read_tile(
    lanes, words, width, weight, inverse, most_inverse, reach, slacks, output,
    floor, weighted_floor, every, heaps, signed, first_row, out_row, out_column, out_score,
):  # fmt: skip
    """Reads a tile from `first_row` on; stops before a row that might not fit: (candidates, next row).

    lanes (R, C) and words (R, 8C/bits) uint64 are the same scores seen as integers: without its sign bit, a
    float's bits order it by magnitude, so `score > threshold` in every lane is one addition that carries into
    the sign bit. inverse (C,), most_inverse (blocks,): 1/weight of each source and of each block's heaviest.
    """
    bits = 8 * lanes.itemsize
    if bits == 16:
        magnitude, sign = np.uint64(0x7FFF7FFF7FFF7FFF), np.uint64(0x8000800080008000)
        one = np.uint64(0x0001000100010001)
    else:
        magnitude, sign = np.uint64(0x7FFFFFFF7FFFFFFF), np.uint64(0x8000000080000000)
        one = np.uint64(0x0000000100000001)
    top = (1 << (bits - 1)) - 1
    rows, columns = lanes.shape
    per_word = 64 // bits
    count = 0
    lightest = weight.min() if weight.min() > 0.5 * weight.max() else 0.0
    for r in range(first_row, rows):
        if count + columns > out_row.shape[0]:
            return count, r
        if reach[r] == 0:
            continue
        plain, weighted, proven = floor[r], weighted_floor[r], _least_bound(heaps, r)
        slack = slacks[r]
        if proven == 0 and lightest > 0:
            proven = _seed(words[r], heaps, r, signed, reach[r], slack, output, lightest, bits)
        for b in range(most_inverse.shape[0]):
            need = _need(plain, weighted, every, proven, most_inverse[b])
            if need > reach[r]:
                continue
            code = _code_below((need - slack) * (1 - output), bits)
            add = np.uint64(top - code) * one
            first, last = b * BLOCK // per_word, min((b + 1) * BLOCK, columns) // per_word
            hit = np.uint64(0)
            for w in range(first, last):
                hit |= (words[r, w] & magnitude) + add
            if not hit & sign:
                continue
            for w in range(first, last):
                if not ((words[r, w] & magnitude) + add) & sign:
                    continue
                for c in range(w * per_word, min((w + 1) * per_word, width)):
                    found = np.int64(lanes[r, c]) & top
                    if found <= code:
                        continue
                    score = np.uint32(found << 16 if bits == 16 else found).view(np.float32)
                    largest = score / (1 - output) + slack
                    if largest < _need(plain, weighted, every, proven, inverse[c]):
                        continue  # the block's largest weight let it through, not its own
                    negative = np.int64(lanes[r, c]) > top
                    out_row[count] = r
                    out_column[count] = c
                    out_score[count] = -score if negative else score
                    count += 1
                    if heaps.shape[0]:
                        value = np.float32((score / (1 + output) - slack) * weight[c] * (1 - 1e-6))
                        for leaf in range(heaps.shape[0]):
                            if not signed or (leaf == 1) == negative:
                                push(heaps[leaf, r], value)
                        raised = _least_bound(heaps, r)
                        if raised > proven:
                            proven = raised
                            need = _need(plain, weighted, every, proven, most_inverse[b])
                            code = _code_below((need - slack) * (1 - output), bits)
                            add = np.uint64(top - code) * one
    return count, rows


def _read_scores(
    scores: torch.Tensor,
    weight: np.ndarray,
    slack: np.ndarray,
    reach: np.ndarray,
    bounds: RowBounds,
    output: float,
) -> Candidates:
    """What `_read_tile` does, in torch operations: for devices whose memory numba does not see.

    scores (R, C) on any device. Top-k bounds are raised once for the whole tile.
    """
    size = scores.abs().double()
    w = torch.from_numpy(weight).to(scores.device)
    off = torch.from_numpy(slack).to(scores.device)[:, None]
    heaps = bounds.heaps
    for leaf in range(len(heaps)):
        proven = (size / (1 + output) - off) * w * (1 - 1e-6)
        if bounds.signed:
            proven = torch.where((scores < 0) == bool(leaf), proven, 0.0)
        k = int((heaps[leaf, 0] >= 0).sum())
        best = proven.topk(min(k, proven.shape[1]), dim=1).values.clamp(min=0).float().cpu().numpy()
        merged = np.sort(np.concatenate([heaps[leaf, :, :k], best], axis=1), axis=1)[:, -k:]
        heaps[leaf, :, :k] = merged  # ascending order is a min-heap
    most = size / (1 - output) + off
    floor = torch.from_numpy(bounds.floor).to(scores.device)[:, None]
    weighted = torch.from_numpy(bounds.weighted_floor).to(scores.device)[:, None]
    keep = (most > floor) & (most * w > weighted) if bounds.every else (most > floor) | (most * w > weighted)
    for leaf in range(len(heaps)):
        within = most * w * (1 + 1e-6) >= torch.from_numpy(heaps[leaf, :, :1].copy()).to(scores.device)
        keep |= within & ((scores < 0) == bool(leaf)) if bounds.signed else within
    keep &= torch.from_numpy(reach > 0).to(scores.device)[:, None]
    row, column = keep.nonzero(as_tuple=True)
    score = scores[row, column].float()
    return Candidates(row.int().cpu().numpy(), column.int().cpu().numpy(), score.cpu().numpy())


def scan(rows: Operand, columns: Operand, bounds: RowBounds, *, fused: bool | None = None,
         tile: tuple[int, int] = (TILE_ROWS, TILE_COLUMNS)) -> Candidates:  # fmt: skip
    """All pairs that may exceed the bounds, and, with top-k rules, heaps of `bounds` raised in place.

    Blocks are skipped exactly where |x_ij| ≤ reach_j says that nothing can pass: rows are taken in the order
    of how far they reach above their bound, columns by falling weight, so that what can be skipped stands
    together. `fused` None: the fused pass on the CPU, torch operations elsewhere.
    """
    device, output = rows.device, rows.precision.output
    if not len(rows) or not len(columns):
        return Candidates.joined([])
    column_order = np.argsort(-columns.weight, kind="stable")
    weight = columns.weight[column_order]
    with np.errstate(divide="ignore", invalid="ignore"):
        row_order = np.argsort(-(rows.reach / bounds.least(float(weight[0]))), kind="stable")
    ordered = bounds.rows(row_order)
    reach, slack = rows.reach[row_order], rows.slack(columns)[row_order]
    a = columns.low[torch.from_numpy(column_order)] if _moved(column_order) else columns.low
    b = rows.low[torch.from_numpy(row_order)] if _moved(row_order) else rows.low
    fused = device == "cpu" if fused is None else fused
    parts: list[Candidates] = []
    held = 0
    space = _Space(rows.precision, tile)
    for first in range(0, len(a), tile[1]):
        last = min(first + tile[1], len(a))
        for top in range(0, len(b), tile[0]):
            part = slice(top, min(top + tile[0], len(b)))
            piece = RowBounds(ordered.floor[part], ordered.weighted_floor[part], ordered.every,
                              ordered.heaps[:, part], ordered.signed)  # fmt: skip
            able = piece.least(float(weight[first])) <= reach[part]
            if not able.any():
                continue
            x, y = b[part], a[first:last]
            if fused:
                found = space.read(x, y, weight[first:last], slack[part], reach[part], piece, output)
            else:
                scores = x @ y.T if device != "cpu" else x.float() @ y.float().T
                found = [_read_scores(scores, weight[first:last], slack[part], reach[part], piece, output)]
            parts += [Candidates(p.row + top, p.column + first, p.score) for p in found]
            held += sum(map(len, found))
            if len(ordered.heaps) and held > PRUNE_AT:
                parts = [_kept(parts, ordered, weight, slack, output)]
                held = len(parts[0])
    left = _kept(parts, ordered, weight, slack, output)
    bounds.heaps[:, row_order] = ordered.heaps
    return Candidates(
        row_order[left.row].astype(np.int32), column_order[left.column].astype(np.int32), left.score
    )


def _moved(order: np.ndarray) -> bool:
    return bool((order[1:] < order[:-1]).any())


def _kept(
    parts: list[Candidates], bounds: RowBounds, weight: np.ndarray, slack: np.ndarray, output: float
) -> Candidates:
    found = Candidates.joined(parts)
    return found.where(~bounds.outgrown(found, weight, slack, output)) if len(bounds.heaps) else found


class _Space:
    """One tile of scores and the room for its candidates, used again for every tile."""

    def __init__(self, kind: Precision, tile: tuple[int, int]) -> None:
        padded = -(-tile[1] // BLOCK) * BLOCK
        self.tile = torch.zeros(tile[0], padded, dtype=kind.dtype)
        capacity = max(4 * padded, 1 << 18)
        self.row, self.column = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
        self.score = np.empty(capacity, np.float32)

    def read(
        self,
        rows: torch.Tensor,
        columns: torch.Tensor,
        weight: np.ndarray,
        slack: np.ndarray,
        reach: np.ndarray,
        bounds: RowBounds,
        output: float,
    ) -> list[Candidates]:
        """The candidates of one tile."""
        width = len(columns)
        padded = -(-width // BLOCK) * BLOCK
        scores = self.tile.view(-1)[: len(rows) * padded].view(len(rows), padded)
        if width == padded:
            torch.mm(rows, columns.T, out=scores)
        else:
            scores[:, :width] = rows @ columns.T
            scores[:, width:] = 0
        lanes = scores.view(torch.int16 if scores.itemsize == 2 else torch.int32).numpy()
        lanes = lanes.view(np.uint16 if scores.itemsize == 2 else np.uint32)
        with np.errstate(divide="ignore"):
            inverse = 1 / weight
        most_inverse = np.minimum.reduceat(inverse, np.arange(0, width, BLOCK))
        parts, row, count = [], 0, 0
        while row < len(rows):
            count, row = _read_tile(
                lanes, lanes.view(np.uint64), width, weight, inverse, most_inverse, reach, slack, output,
                bounds.floor, bounds.weighted_floor, bounds.every, bounds.heaps, bounds.signed,
                row, self.row, self.column, self.score,
            )  # fmt: skip
            parts.append(
                Candidates(self.row[:count].copy(), self.column[:count].copy(), self.score[:count].copy())
            )
        return parts
