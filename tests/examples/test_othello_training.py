"""Othello-GPT's training: it learns; one that goes on from a finished model begins with its weights; what it
was is recorded whole."""

import json

import pytest
import torch

from examples.othello.train_model import (
    OthelloGPT,
    arguments,
    batch_of,
    illegality,
    legal_rates,
    random_games,
    train,
)


def trained(to, *options):
    train(arguments(["--to", str(to), "--seed", "3", "--batch", "8", *map(str, options)]))
    model = OthelloGPT()
    model.begin_from(to)
    return model, json.loads((to / "training.json").read_text())


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return tmp_path_factory.mktemp("othello") / "first"


@pytest.fixture(scope="module")
def learned(first):
    return trained(first, "--steps", 30, "--fall", 0.5)


def loss(model):
    inputs, targets = batch_of(random_games(20, 5))
    with torch.no_grad():
        return float(-(targets * model(inputs).log_softmax(-1)).sum() / targets.sum())


def test_it_learns(learned):
    torch.manual_seed(0)
    assert loss(learned[0]) < loss(OthelloGPT()) - 0.3


def test_one_that_goes_on_begins_with_the_weights_and_records_both_parts(first, learned, tmp_path):
    model, _ = learned
    again, record = trained(
        tmp_path / "second", "--steps", 1, "--start", first, "--rate", 0, "--muon-rate", 0
    )
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    third, record = trained(tmp_path / "third", "--steps", 2, "--start", tmp_path / "second", "--seed", "4")
    assert (record["seed"], record["steps"], record["games"]) == (3, 33, 33 * 8)
    assert [part["steps"] for part in record["parts"]] == [30, 1, 2]
    assert [part["seed"] for part in record["parts"]] == [3, 3, 4]
    assert "--muon-rate 0 " in record["parts"][1]["schedule"]
    assert loss(third) < loss(model) + 0.2


def test_legal_rates_leave_out_what_comes_after_the_end():
    legal = torch.zeros(1, 3, 61, dtype=torch.bool)
    legal[0, 0, [4, 7]] = True
    legal[0, 1, 9] = True  # and in the third place the game is over
    logits = torch.full((1, 3, 61), -20.0)
    logits[0, 0, 7] = logits[0, 1, 30] = 0.0
    top, mass = legal_rates(logits, legal)
    assert top == 0.5 and mass == pytest.approx(0.5, abs=1e-5)


def test_illegality_is_the_mean_surprise_at_a_legal_move():
    """Also its gradient, where a game is over and no move is legal."""
    logits = torch.randn(1, 3, 61, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
    targets = torch.zeros(1, 3, 61)
    targets[0, 0, [4, 7]] = 0.5
    targets[0, 1, 9] = 1.0
    p = logits.softmax(-1)
    found = illegality(logits.log_softmax(-1), targets)
    expected = -((p[0, 0, 4] + p[0, 0, 7]).log() + p[0, 1, 9].log()) / 2
    assert torch.allclose(found, expected, rtol=1e-12)
    (one,) = torch.autograd.grad(found, logits, retain_graph=True)
    (other,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(one, other, atol=1e-12) and (one[0, 2] == 0).all()
