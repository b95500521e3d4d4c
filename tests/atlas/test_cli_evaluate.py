"""`atlas evaluate` through the program: tables, JSON, the picture, and mistakes told in a line."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers

from atlas.cli.program import program
from atlas.evaluating import evaluate
from ingest.errors import InputError
from ingest.spec import spec_for
from tests.atlas.tiny_source import write_model, write_transcoders

torch.set_num_threads(1)
WORDS = ["a", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "seven", "wizards"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny model with a tokenizer, transcoders, a corpus of text and one of token ids."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_model(folder / "model")
    write_transcoders(folder / "transcoders")
    vocabulary = {"<|endoftext|>": 0} | {word: at for at, word in enumerate(WORDS, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(WORDS, 40)) for _ in range(60)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    np.save(folder / "ids.npy", random.integers(0, 50, (40, 12)))
    return folder


def run(place, *options, text="corpus.jsonl", sets=("transcoders",), code=0):
    given = [
        word for name in sets for word in ("--dictionaries", name if name == "neurons" else str(place / name))
    ]
    arguments = ["evaluate", "--model", place / "model", "--text", place / text, *given, *options]
    done = CliRunner().invoke(program, list(map(str, arguments)))
    assert done.exit_code == code, done.output
    return done


def test_the_figures_are_told_and_the_json_has_all_of_them(place):
    shown = run(place, "--contexts", 8, "--length", 12, "--part", "all").stdout
    assert re.search(r"transcoders: transcoder in place of mlp", shown)
    assert re.search(r"CE of the model +\d\.\d+ ± \d", shown)
    assert len(re.findall(r"^ +[012] ", shown, re.MULTILINE)) == 3
    assert re.search(r"^ +all ", shown, re.MULTILINE)
    found = json.loads(run(place, "--contexts", 8, "--length", 12, "--part", "all", "--json").stdout)
    assert (found["contexts"], found["length"], found["tokens"], found["predicted"]) == (8, 12, 88, 80)
    (one,) = found["sets"]
    assert [layer["layer"] for layer in one["layers"]] == [0, 1, 2]
    assert one["layers"][0]["fvu"]["se"] > 0
    again = json.loads(run(place, "--contexts", 8, "--length", 12, "--part", "all", "--json").stdout)
    assert again == found
    other = run(place, "--contexts", 8, "--length", 12, "--part", "all", "--seed", 1, "--json").stdout
    assert json.loads(other)["ce"] != found["ce"]


def test_two_sets_are_compared_on_the_layers_of_both_and_drawn(place, tmp_path):
    options = ("--contexts", 6, "--length", 10, "--part", "all", "--layers", "0,2")
    done = run(place, *options, "--to", tmp_path / "p.svg", "--json", sets=("transcoders", "neurons"))
    found = json.loads(done.stdout)
    assert [[layer["layer"] for layer in one["layers"]] for one in found["sets"]] == [[0, 2], [0, 2]]
    assert {one["layer"] for one in found["differences"]} == {0, 2, None}
    fvu = next(one for one in found["differences"] if one["quantity"] == "fvu" and one["layer"] == 2)
    measured = found["sets"][0]["layers"][1]["fvu"]["value"]
    assert fvu["estimate"]["value"] == pytest.approx(-measured)  # neurons leave nothing out
    drawn = (tmp_path / "p.svg").read_text()
    marks = list(ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}circle"))
    assert len(marks) == 2 + 2 * 4  # a legend of two, four dictionaries in each panel
    assert "layer 2: L0" in drawn
    assert "paired by context" in run(place, *options, sets=("transcoders", "neurons")).stdout


def test_token_ids_need_no_tokenizer_and_padding_counts_nowhere(place):
    plain = json.loads(run(place, "--part", "all", "--json", text="ids.npy").stdout)
    assert (plain["contexts"], plain["length"], plain["tokens"]) == (40, 12, 480)
    ids = np.load(place / "ids.npy")
    padded = json.loads(run(place, "--part", "all", "--pad", 7, "--json", text="ids.npy").stdout)
    assert padded["tokens"] == int((ids != 7).sum())


def test_a_training_record_keeps_evaluation_on_what_was_held_out(place, tmp_path):
    record = place / "transcoders" / "training.json"
    record.write_text(json.dumps({"documents": {"held_out_share": 0.25, "seed": 0}}))
    try:
        found = json.loads(run(place, "--length", 12, "--json").stdout)
        assert (found["part"], found["share"]) == ("held-out", 0.25)
        spec = spec_for(str(place / "model"), [str(place / "transcoders")])
        assert evaluate(spec, place / "corpus.jsonl", length=12, share=0.1).share == 0.1
        with pytest.raises(InputError, match=r"was trained on all but 0\.25"):
            evaluate(spec, place / "corpus.jsonl", length=12, share=0.5)
        for text in ("{}", 100_000 * "["):
            record.write_text(text)
            with pytest.raises(InputError, match=r"training\.json: no training record"):
                evaluate(spec, place / "corpus.jsonl", length=12)
    finally:
        record.unlink()


def test_mistakes_are_told_before_anything_is_computed(place, tmp_path):
    (tmp_path / "short.txt").write_text("a quick fox")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    spec = spec_for(str(place / "model"), [str(place / "transcoders")])
    for text, said in [
        ("short.txt", "the longest of 1 documents has 3 tokens, a context needs 127"),
        ("binary.txt", "is not text"),
        ("absent.txt", "no such file"),
    ]:
        with pytest.raises(InputError, match=said):
            evaluate(spec, tmp_path / text, part="all")
    with pytest.raises(InputError, match="falls into the part 'held-out'"):
        evaluate(spec, place / "ids.npy", share=0.0)
    with pytest.raises(InputError, match="has 32 positions; give a shorter length"):
        evaluate(spec, place / "corpus.jsonl", length=40, part="all")
    assert "--layers 1-x" in run(place, "--layers", "1-x", code=2).output
