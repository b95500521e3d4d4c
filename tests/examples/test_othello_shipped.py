"""The shipped models and dictionaries: what their cards say, measured again on a part of the same games."""

import csv
import json

import numpy as np
import pytest
from safetensors import safe_open

from examples.othello.card import card
from examples.othello.game import random_games
from examples.othello.labels import FRACTIONS, count, maxima
from examples.othello.make import HERE
from examples.othello.measure import (
    CHOOSE_SEED,
    MODEL,
    REPORT_SEED,
    SETS,
    held_out,
    legal_moves,
    measured,
    open_sets,
)
from examples.othello.predicates import NAMES
from ingest.models import open_model

SEEDS = (1, 2)
ERRORS = 5  # standard errors that a sample may be off
PLACES = [("transcoders", 1), ("transcoders", 4), ("attn_out", 3), ("mlp_out", 4), ("embed", 0)]


@pytest.fixture(scope="module", params=SEEDS)
def folder(request):
    return HERE / "models" / f"seed-{request.param}"


@pytest.fixture(scope="module")
def figures(folder):
    return json.loads((folder / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(folder):
    return open_model(folder, name=MODEL)


def test_the_card_says_what_was_measured(folder, figures):
    assert (folder / "README.md").read_text(encoding="utf-8") == card(folder)
    assert figures["model"]["games"] == 1000
    assert len([row for row in figures["dictionaries"] if row["layer"] is not None]) == 19


def test_files_are_the_ones_that_were_measured(folder, figures, model):
    assert model.hash == figures["model"]["hash"]
    for one in open_sets(folder, model):
        record = json.loads((folder / SETS[one.name][0] / "training.json").read_text(encoding="utf-8"))
        assert record["model"]["hash"] == model.hash
        assert [one.sizes[layer] for layer in one.layers] == [1024] * len(one.layers)
        assert {entry["layer"]: entry["hash"] for entry in record["held_out"]} == {
            layer: one.hash_of(layer) for layer in one.layers
        }


def test_files_are_float16_and_small(folder):
    total = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert total < 16e6
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, "np") as stored:
            for name in stored.keys():  # noqa: SIM118
                part = stored.get_slice(name)
                assert part.get_dtype() == "F16" or len(part.get_shape()) == 1, f"{file}: {name}"


def test_moves_are_legal_as_often_as_the_card_says(figures, model):
    assert figures["model"]["legal_top1"] >= 0.99
    found = legal_moves(model, held_out(200))
    assert found.top1.value >= 0.985
    for name, estimate in (("legal_top1", found.top1), ("legal_mass", found.mass)):
        assert abs(estimate.value - figures["model"][name]) < ERRORS * estimate.se, name


def test_dictionaries_do_in_place_what_the_card_says(folder, figures, model):
    sets = []
    for name in SETS:
        layers = [layer for set, layer in PLACES if set == name]
        sets.append(only(folder, model, name, layers))
    found = measured(model, sets, held_out(48))
    told = {(row["set"], row["layer"]): row for row in figures["dictionaries"]}
    for one in found.sets:
        for layer in one.layers:
            row = told[one.name, layer.layer]
            for quantity in ("fvu", "added", "recovered"):
                estimate = getattr(layer, quantity)
                off = abs(estimate.value - row[quantity])
                assert off < ERRORS * estimate.se + 1e-6, (one.name, layer.layer, quantity)
            assert layer.l0.value == pytest.approx(row["l0"], rel=0.02)
            assert layer.dead >= row["dead"]  # fewer games, fewer features that fire


def only(folder, model, name, layers):
    from ingest.dictionaries import open_set

    place, declared = SETS[name]
    return open_set(folder / place, name=name, model=model, layers=layers, declared=declared)


def test_labels_tell_what_they_say_they_tell(folder, model):
    """F1 of a sample of features, on a part of the games that the files' figures are of."""
    sets = {name: only(folder, model, name, [layer for set, layer in PLACES if set == name]) for name in SETS}
    places = [(name, layer, sets[name].load(layer)) for name, layer in PLACES]
    dictionaries = [dictionary for _, _, dictionary in places]
    tops = maxima(model, dictionaries, random_games(1000, CHOOSE_SEED).part(0, 100))
    found = count(model, dictionaries, random_games(120, REPORT_SEED), tops)
    compared = 0
    for (name, layer, _), counts in zip(places, found, strict=True):
        f1 = counts.f1()[0]
        with (folder / "labels" / f"{name}.csv").open(encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if int(row["layer"]) == layer]
        assert all(row["key"].startswith(f"{MODEL}/{name}/L{layer:02d}.") for row in rows)
        for row in rows:
            feature, predicate = int(row["feature"]), NAMES.index(row["predicate"])
            both, fires = counts.both[0, feature, predicate], counts.fires[0, feature]
            # Thresholds are shares of a maximum over more games: those labels are not compared.
            if row["above"] != f"{FRACTIONS[0]:g}" or min(fires, counts.holds[predicate]) < 50:
                continue
            compared += 1
            # F1 is about a share of `fires + holds` trials; games cluster, hence the factor.
            n = (fires + counts.holds[predicate]) / 2
            told = float(row["f1"])
            error = 3 * np.sqrt(max(told * (1 - told), 0.01) / n)
            assert abs(f1[feature, predicate] - told) < ERRORS * error, (row["key"], both)
    assert compared > 500
