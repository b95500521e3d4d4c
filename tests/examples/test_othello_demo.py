"""`atlas demo --model othello` on an untrained model with random dictionaries, laid out as those shipped."""

import dataclasses

import pytest
import torch
from click.testing import CliRunner

from atlas import othello_demonstration
from atlas.cli.program import program
from atlas.errors import AtlasError
from examples.othello.game import random_games
from examples.othello.labels import labelled, write_labels
from examples.othello.make import write_beside
from examples.othello.measure import MODEL, SETS, open_sets
from examples.othello.train_model import LAYERS, WIDTH, OthelloGPT, write
from ingest.dictionaries import Dictionary, Encoder, Read, TopK, Write
from ingest.dictionaries.types import At, Space
from ingest.dictionaries.writing import write_circuit_tracer, write_saelens
from ingest.models import open_model

SIZE = 24
PLACES = {
    "transcoders": (Read("mlp.in", Space.NORMALISED_WITH_GAIN), "mlp", LAYERS, write_circuit_tracer),
    "mlp_out": (Read("mlp.out", Space.BRANCH_OUTPUT), "mlp", LAYERS, write_saelens),
    "attn_out": (Read("attn.out", Space.BRANCH_OUTPUT), "attn", LAYERS, write_saelens),
    "embed": (Read("embed", Space.RAW), "embed", 1, write_saelens),
}


def dictionary(name, layer, make):
    read, site, _, _ = PLACES[name]
    W_enc, W_dec = (torch.randn(SIZE, WIDTH, generator=make) for _ in range(2))
    return Dictionary(
        set=name,
        kind="transcoder" if name == "transcoders" else "sae",
        layer=layer,
        read=read,
        encoders=(Encoder("in", W_enc, torch.zeros(SIZE)),),
        writes=(Write(layer, site, At.MODULE, W_dec, torch.zeros(WIDTH)),),
        gate=TopK(6),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository") / "examples" / "othello" / "models" / "seed-1"
    make = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    write(OthelloGPT(), folder, {})
    write_beside(folder)
    for name, (_, _, layers, write_set) in PLACES.items():
        (folder / SETS[name][0]).parent.mkdir(exist_ok=True)
        write_set(folder / SETS[name][0], [dictionary(name, layer, make) for layer in range(layers)])
    model = open_model(folder, name=MODEL)
    for one in open_sets(folder, model):
        found = labelled(
            model, [one.load(layer) for layer in one.layers], random_games(30, 1), random_games(30, 2)
        )
        # Nothing here tells anything: every label is made a name, so that there is something to show.
        labels = {
            layer: [dataclasses.replace(label, f1=max(label.f1, 0.4), chance=0.0) for label in some]
            for layer, some in zip(one.layers, found, strict=True)
        }
        write_labels(
            folder / "labels" / f"{one.name}.csv", {layer: one.key(layer) for layer in one.layers}, labels
        )
    return folder


def test_the_demo_shows_features_by_their_names_and_squares(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(othello_demonstration, "othello_files", lambda: folder)
    monkeypatch.chdir(tmp_path)
    arguments = ["demo", "--model", "othello", "--workers", "1"]
    first = CliRunner().invoke(program, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    for name in ("embed", "attn_out", "transcoders"):
        assert f"{name}: the feature of each layer" in first.output
    shown = othello_demonstration.named(folder, "transcoders")
    assert f"{MODEL}/transcoders/L" in first.output and "(F1 0." in first.output
    assert any(f"'{square}'" in first.output for square in ("d3", "c4", "f5", "e6", "a1"))
    assert "what feeds it" in first.output and "strongest pairs through a head" in first.output
    assert (tmp_path / "othello.svg").read_text(encoding="utf-8").startswith("<svg")
    again = CliRunner().invoke(program, arguments, catch_exceptions=False)
    assert again.exit_code == 0
    assert "labels of" not in again.output  # neither built nor labelled a second time
    assert again.output.count("the feature of each layer") == 3
    assert shown == sorted(shown, key=lambda one: (-one.f1, one.key))


def test_without_the_repositorys_files_there_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(othello_demonstration, "__file__", str(tmp_path / "atlas" / "module.py"))
    with pytest.raises(AtlasError, match=r"seed-1: no Othello-GPT there; .*examples\.othello\.make"):
        othello_demonstration.othello_files()


def test_the_best_of_a_layer_tells_more_than_the_move_just_read(tmp_path):
    (tmp_path / "labels").mkdir()
    rows = [
        "key,predicate,kind,layer,f1,precision,recall,chance",
        "a,move d3,move,0,0.99,1,1,0.1",
        "b,mine d3,mine,0,0.7,1,1,0.1",
        "c,mine d4,mine,0,0.8,1,1,0.1",
        "d,move e3,move,1,0.9,1,1,0.1",
        "e,flips e3,flips,1,0.2,1,1,0.1",  # tells hardly anything
    ]
    (tmp_path / "labels" / "embed.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    best = othello_demonstration._best_of_layers(othello_demonstration.named(tmp_path, "embed"))
    assert [one.key for one in best] == ["c", "d"]
