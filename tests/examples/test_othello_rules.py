"""The bitboard rules, the generator and the predicates, against Othello written a second time."""

import numpy as np
import pytest

from examples.othello.game import MOVES, PAD, SQUARE_OF, TOKEN_OF, play, random_games, square_name
from examples.othello.predicates import KINDS, NAMES, kind_of, positions, truth
from tests.examples.slow_othello import Board, square

GAMES = 40


@pytest.fixture(scope="module")
def games():
    return random_games(GAMES, 5)


def test_every_predicate_of_every_position_is_the_rule_books(games):
    told = truth(games)
    at = 0
    for tokens in games.tokens:
        board = Board()
        for token in tokens[tokens != PAD]:
            board.play(square(square_name(SQUARE_OF[token])))
            assert {NAMES[number] for number in np.flatnonzero(told[at])} == set(board.facts())
            at += 1
        assert len(tokens[tokens != PAD]) == MOVES or not board.moves("black") | board.moves("white")
    assert at == len(told) == positions(games).sum()


def test_a_first_position_by_hand():
    told = truth(play(np.array([[TOKEN_OF[19]]])))  # d3, black's: d4 is turned, white is next
    true = {NAMES[number] for number in np.flatnonzero(told[0])}
    assert {name for name in true if kind_of(name) != "empty"} == {
        "move d3", "flips d4", "mine e5", "theirs d3", "theirs d4", "theirs d5", "theirs e4",
        "legal c3", "legal c5", "legal e3",
    }  # fmt: skip
    assert len([name for name in true if kind_of(name) == "empty"]) == 59


def test_names_say_each_predicate_once():
    assert len(set(NAMES)) == len(NAMES) == 60 + 60 + 64 + 64 + 60 + 60
    assert {kind_of(name) for name in NAMES} == set(KINDS)
    assert not {"flips a1", "empty d4", "move e5", "legal d5"} & set(NAMES)


def test_some_games_pass_and_end_early():
    many = random_games(400, 6)
    lengths = positions(many).sum(-1)
    assert lengths.min() < MOVES == lengths.max()
    discs = sum(np.bitwise_count(board) for board in (many.mine, many.theirs))
    assert (discs[:, -1] == lengths + 4).all()
    # A pass: the player who moves twice sees as its own what it has just put down.
    tokens = np.where(many.tokens == PAD, 1, many.tokens)
    own = (many.mine >> SQUARE_OF[tokens].astype(np.uint64)) & np.uint64(1)
    assert own[positions(many)].any()


def test_the_same_seed_gives_the_same_games_whatever_their_number(games):
    again = random_games(GAMES, 5)
    assert all((one == other).all() for one, other in zip(games, again, strict=True))
    assert (random_games(7, 5).tokens == games.tokens[:7]).all()
    assert (random_games(GAMES, 6).tokens != games.tokens).any()


def test_a_replayed_game_has_the_boards_it_was_drawn_with(games):
    again = play(games.tokens)
    assert all((one == other).all() for one, other in zip(games, again, strict=True))


@pytest.mark.parametrize("moves", [["a1"], ["d3", "d3"], ["d3", "e6"], ["d3", "c3", "h8"]])
def test_a_move_the_rules_do_not_allow_is_refused(moves):
    tokens = np.array([[TOKEN_OF["abcdefgh".index(one[0]) + 8 * (int(one[1]) - 1)] for one in moves]])
    with pytest.raises(ValueError, match=f"move {len(moves)} is not legal"):
        play(tokens)


def test_a_game_does_not_go_on_behind_the_pad():
    with pytest.raises(ValueError, match="move 1 is not legal"):
        play(np.array([[PAD, TOKEN_OF[19]]]))


def test_moves_are_uniform():
    """χ² of the first move, and of each of the next two over the positions before it."""
    games = random_games(16_000, 7)
    first = np.bincount(games.tokens[:, 0], minlength=61)
    legal = [TOKEN_OF[square_number] for square_number in (19, 26, 37, 44)]
    assert first.sum() == first[legal].sum() == 16_000
    assert ((first[legal] - 4_000) ** 2 / 4_000).sum() < 21.1  # p = 0.0001 at 3 degrees of freedom
    statistic, freedom = 0.0, 0
    for at in (1, 2):
        before, which = np.unique(games.tokens[:, :at], axis=0, return_inverse=True)
        allowed = games.legal_tokens()[:, at - 1]
        for number in range(len(before)):
            mine = which.ravel() == number
            choices = np.flatnonzero(allowed[mine][0])
            seen = np.bincount(games.tokens[mine, at], minlength=61)
            assert seen.sum() == seen[choices].sum()
            expected = mine.sum() / len(choices)
            statistic += float(((seen[choices] - expected) ** 2 / expected).sum())
            freedom += len(choices) - 1
    # χ² of many degrees of freedom is nearly normal: mean f, variance 2 f.
    assert abs(statistic - freedom) < 4.5 * np.sqrt(2 * freedom)
