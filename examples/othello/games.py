"""Random games as a matrix of tokens, (n, 59) with 0 behind the end, for `atlas train` and `atlas evaluate`.

    python -m examples.othello.games --count 40000 --seed 4 --to examples/othello/games.npy

59 moves are what the model reads; `--length 60` has the last one too, which it only predicts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from examples.othello.game import MOVES, random_games

READ = MOVES - 1


def write_games(to: Path, count: int, seed: int, length: int = READ) -> None:
    """The first `length` moves of each game, int16."""
    to.parent.mkdir(parents=True, exist_ok=True)
    np.save(to, random_games(count, seed).tokens[:, :length].astype(np.int16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--length", type=int, default=READ, choices=(READ, MOVES))
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    write_games(options.to, options.count, options.seed, options.length)


if __name__ == "__main__":
    main()
