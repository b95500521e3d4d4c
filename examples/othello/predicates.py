"""Ground truth for features of Othello-GPT (methods: Patch-free circuits): what the rules say of a position.

A position is a token of a game, seen after its move. Of it are true or false

    move d3      the move just made                                                       60
    flips d3     that move turned the disc there; corners are never turned                60
    mine d3      a disc of the player to move next is there                               64
    theirs d3    a disc of the other one                                                  64
    empty d3     none; the four in the middle never are                                   60
    legal d3     the player to move next may go there                                     60
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.othello.game import MOVES, PAD, SQUARE_OF, Games, square_name

__all__ = ["KINDS", "NAMES", "kind_of", "positions", "truth"]

KINDS = ("move", "flips", "mine", "theirs", "empty", "legal")
_PLAYABLE = tuple(int(square) for square in SQUARE_OF[1:])
_SQUARES = {
    "move": _PLAYABLE,
    "flips": tuple(square for square in range(64) if square not in (0, 7, 56, 63)),
    "mine": tuple(range(64)),
    "theirs": tuple(range(64)),
    "empty": _PLAYABLE,
    "legal": _PLAYABLE,
}
NAMES = tuple(f"{kind} {square_name(square)}" for kind in KINDS for square in _SQUARES[kind])


def kind_of(name: str) -> str:
    """The first word of a predicate's name."""
    return name.partition(" ")[0]


def positions(games: Games, length: int = MOVES) -> NDArray[np.bool_]:
    """(n, length): where there is a move, of the first `length` tokens."""
    return games.tokens[:, :length] != PAD


def truth(games: Games, length: int = MOVES) -> NDArray[np.bool_]:
    """(positions, len(NAMES)): the predicates of each position of the first `length` tokens, game by game."""
    there = positions(games, length)
    moves = np.zeros((int(there.sum()), 64), np.uint8)
    moves[np.arange(len(moves)), SQUARE_OF[games.tokens[:, :length][there]]] = 1
    mine, theirs = (_squares(board[:, :length][there]) for board in (games.mine, games.theirs))
    boards = {
        "move": moves,
        "flips": _squares(games.flipped[:, :length][there]),
        "mine": mine,
        "theirs": theirs,
        "empty": 1 - mine - theirs,
        "legal": _squares(games.legal[:, :length][there]),
    }
    return np.concatenate([boards[kind][:, list(_SQUARES[kind])] for kind in KINDS], -1).astype(bool)


def _squares(boards: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """(n, 64) of bitboards (n,)."""
    return np.unpackbits(boards.astype("<u8").view(np.uint8).reshape(-1, 8), axis=-1, bitorder="little")
