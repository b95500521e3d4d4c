"""Othello as the rule book tells it, on a dictionary of squares: slow, and independent of the bitboards."""

from itertools import product

WAYS = [way for way in product((-1, 0, 1), repeat=2) if way != (0, 0)]


def name(square):
    column, row = square
    return "abcdefgh"[column] + str(row + 1)


def square(name):
    return "abcdefgh".index(name[0]), int(name[1]) - 1


class Board:
    def __init__(self):
        self.discs = {
            square("d4"): "white",
            square("e5"): "white",
            square("e4"): "black",
            square("d5"): "black",
        }
        self.player = "black"
        self.last, self.turned = None, set()

    def closed_in(self, at, player):
        """The discs that a move would turn."""
        if at in self.discs:
            return set()
        found = set()
        for dx, dy in WAYS:
            run, (x, y) = set(), (at[0] + dx, at[1] + dy)
            while self.discs.get((x, y), player) != player:
                run.add((x, y))
                x, y = x + dx, y + dy
            if self.discs.get((x, y)) == player:
                found |= run
        return found

    def moves(self, player):
        return {at for at in product(range(8), repeat=2) if self.closed_in(at, player)}

    def play(self, at):
        turned = self.closed_in(at, self.player)
        assert turned, f"{name(at)} is not legal"
        for one in {at} | turned:
            self.discs[one] = self.player
        self.last, self.turned = at, turned
        other = {"black": "white", "white": "black"}[self.player]
        # Whoever cannot move passes; when neither can, the game is over and the turn is the other's.
        if self.moves(other) or not self.moves(self.player):
            self.player = other

    def facts(self):
        """The predicates that hold, as `examples.othello.predicates` names them."""
        yield f"move {name(self.last)}"
        for at in self.turned:
            yield f"flips {name(at)}"
        for at in product(range(8), repeat=2):
            if at not in self.discs:
                yield f"empty {name(at)}"
            else:
                yield f"{'mine' if self.discs[at] == self.player else 'theirs'} {name(at)}"
        for at in self.moves(self.player):
            yield f"legal {name(at)}"
