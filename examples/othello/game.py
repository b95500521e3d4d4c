"""Othello on bitboards: uniformly random legal games, and the boards behind a list of moves.

Squares are numbered 0 to 63, row by row from a1 (bit 0) to h8 (bit 63). Tokens are what the model reads: 0 is
the pad, 1 to 60 are the playable squares in that order, the four in the middle left out. A player who cannot
move passes, which leaves no token; a game ends when neither can, mostly after 60 moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = ["MOVES", "PAD", "SQUARE_OF", "TOKEN_OF", "Games", "play", "random_games", "square_name"]

MOVES = 60  # the most a game can have
PAD = 0
_MIDDLE = (27, 28, 35, 36)
SQUARE_OF = np.array([-1] + [square for square in range(64) if square not in _MIDDLE], np.int64)
TOKEN_OF = np.zeros(64, np.int64)
TOKEN_OF[SQUARE_OF[1:]] = np.arange(1, 61)

_U = np.uint64
_NOT_A = _U(0xFEFEFEFEFEFEFEFE)  # every square but the first of each row
_NOT_H = _U(0x7F7F7F7F7F7F7F7F)
_BLACK = _U((1 << 28) | (1 << 35))  # black moves first
_WHITE = _U((1 << 27) | (1 << 36))


class Games(NamedTuple):
    """Games and, after each move, the board as the player to move next sees it (none: whoever moved last)."""

    tokens: NDArray[np.int64]  # (n, 60), PAD after the end
    mine: NDArray[np.uint64]  # (n, 60) the discs of the player to move next
    theirs: NDArray[np.uint64]  # (n, 60)
    flipped: NDArray[np.uint64]  # (n, 60) discs that the move turned, the new one not among them
    legal: NDArray[np.uint64]  # (n, 60) where that player may go; 0 once the game is over

    def part(self, lo: int, hi: int) -> Games:
        """Games lo … hi-1."""
        return Games(
            self.tokens[lo:hi], self.mine[lo:hi], self.theirs[lo:hi], self.flipped[lo:hi], self.legal[lo:hi]
        )

    def legal_tokens(self) -> NDArray[np.bool_]:
        """(n, 60, 61): which tokens may come next."""
        bits = (self.legal[..., None] >> SQUARE_OF[1:].astype(np.uint64)) & _U(1)
        return np.concatenate([np.zeros((*self.legal.shape, 1), bool), bits.astype(bool)], -1)


def square_name(square: int) -> str:
    """`a1` for 0, `h8` for 63.

    >>> square_name(19)
    'd3'
    """
    return f"{'abcdefgh'[square % 8]}{square // 8 + 1}"


def random_games(count: int, seed: int) -> Games:
    """`count` games, each move uniform over the legal ones; the same for the same seed, each prefix too."""
    games = _empty(count)
    _random(np.random.SeedSequence(seed).generate_state(2 * count, np.uint64), *games)
    return games


def play(tokens: NDArray[np.int64]) -> Games:
    """The boards behind games (n, ≤ 60) of tokens. Raises ValueError at a move the rules do not allow."""
    games = _empty(len(tokens))
    games.tokens[:, : tokens.shape[1]] = tokens
    bad = _replay(*games)
    if bad >= 0:
        raise ValueError(f"game {bad // MOVES}: move {bad % MOVES + 1} is not legal")
    return games


def _empty(count: int) -> Games:
    return Games(np.zeros((count, MOVES), np.int64), *(np.zeros((count, MOVES), _U) for _ in range(4)))


# --- the rules ----------------------------------------------------------------------------------------------


@numba.njit(cache=True, inline="always")
def _shift(bits, way):
    """All discs one step in one of eight directions, none around an edge."""
    if way == 0:
        return (bits << _U(1)) & _NOT_A
    if way == 1:
        return (bits >> _U(1)) & _NOT_H
    if way == 2:
        return bits << _U(8)
    if way == 3:
        return bits >> _U(8)
    if way == 4:
        return (bits << _U(9)) & _NOT_A
    if way == 5:
        return (bits >> _U(9)) & _NOT_H
    if way == 6:
        return (bits << _U(7)) & _NOT_H
    return (bits >> _U(7)) & _NOT_A


@numba.njit(cache=True)
def _legal(mine, theirs):
    """Empty squares from which a run of their discs ends at one of mine."""
    empty = ~(mine | theirs)
    found = _U(0)
    for way in range(8):
        run = _shift(mine, way) & theirs
        for _ in range(5):
            run |= _shift(run, way) & theirs
        found |= _shift(run, way) & empty
    return found


@numba.njit(cache=True)
def _turned(mine, theirs, disc):
    """Their discs that a new disc of mine closes in."""
    turned = _U(0)
    for way in range(8):
        run = _U(0)
        at = _shift(disc, way)
        while at & theirs:
            run |= at
            at = _shift(at, way)
        if at & mine:
            turned |= run
    return turned


@numba.njit(cache=True, inline="always")
def _step(mine, theirs, disc):
    """After a move: (mine, theirs, flipped, legal) as the next to move sees it; a pass turns them back."""
    flipped = _turned(mine, theirs, disc)
    mine, theirs = theirs & ~flipped, mine | disc | flipped
    legal = _legal(mine, theirs)
    if legal == _U(0):
        back = _legal(theirs, mine)
        if back != _U(0):
            return theirs, mine, flipped, back
    return mine, theirs, flipped, legal


@numba.njit(cache=True)
def _random(states, tokens, mine_at, theirs_at, flipped_at, legal_at):
    for game in range(len(tokens)):
        state, step = states[2 * game], states[2 * game + 1] | _U(1)
        mine, theirs = _BLACK, _WHITE
        legal = _legal(mine, theirs)
        for at in range(60):
            if legal == _U(0):
                mine_at[game, at], theirs_at[game, at] = mine, theirs
                continue
            count = 0
            rest = legal
            while rest:
                rest &= rest - _U(1)
                count += 1
            # PCG32: a 64-bit linear congruence, its high bits mixed; a multiple of `count` is never biased.
            while True:
                old = state
                state = old * _U(6364136223846793005) + step
                mixed = (((old >> _U(18)) ^ old) >> _U(27)) & _U(0xFFFFFFFF)
                turn = old >> _U(59)
                drawn = ((mixed >> turn) | (mixed << ((_U(32) - turn) & _U(31)))) & _U(0xFFFFFFFF)
                if drawn < _U(0x100000000) - _U(0x100000000) % _U(count):
                    break
            rest = legal
            for _ in range(int(drawn % _U(count))):
                rest &= rest - _U(1)
            disc = rest & (~rest + _U(1))
            square = 0
            while (disc >> _U(square)) != _U(1):
                square += 1
            tokens[game, at] = TOKEN_OF[square]
            mine, theirs, flipped, legal = _step(mine, theirs, disc)
            mine_at[game, at], theirs_at[game, at] = mine, theirs
            flipped_at[game, at], legal_at[game, at] = flipped, legal


@numba.njit(cache=True)
def _replay(tokens, mine_at, theirs_at, flipped_at, legal_at):
    for game in range(len(tokens)):
        mine, theirs = _BLACK, _WHITE
        legal = _legal(mine, theirs)
        for at in range(60):
            token = tokens[game, at]
            if token == 0:
                mine_at[game, at], theirs_at[game, at] = mine, theirs
                if legal != _U(0) and at + 1 < 60 and tokens[game, at + 1] != 0:
                    return game * 60 + at
                continue
            if token < 0 or token > 60:
                return game * 60 + at
            disc = _U(1) << _U(SQUARE_OF[token])
            if disc & legal == _U(0):
                return game * 60 + at
            mine, theirs, flipped, legal = _step(mine, theirs, disc)
            mine_at[game, at], theirs_at[game, at] = mine, theirs
            flipped_at[game, at], legal_at[game, at] = flipped, legal
    return -1
