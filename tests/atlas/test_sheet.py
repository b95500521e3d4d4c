"""The blind sheet: nothing on it tells whose a feature is; what is filled in is counted by the key."""

import csv
import json
import re

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.stats import fisher_exact

from atlas.cli.program import program
from atlas.errors import AtlasError
from atlas.sheet import score_sheet
from ingest.errors import InputError
from tests.atlas.tiny_source import write_model, write_transcoders
from workers.measures import exact_p

torch.set_num_threads(1)


def run(*arguments, code=0):
    done = CliRunner().invoke(program, ["sheet", *map(str, arguments)])
    assert done.exit_code == code, (done.output, done.exception)
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sheet")
    write_model(folder / "model")
    write_transcoders(folder / "transcoders")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, 50, (40, 12)))
    return folder


def make(place, out, *more, code=0):
    given = ["--dictionaries", place / "transcoders", "--dictionaries", "neurons"]
    return run("make", out, "--model", place / "model", *given, "--text", place / "ids.npy", "--part", "all",
               "--features", 9, *more, code=code)  # fmt: skip


@pytest.fixture(scope="module")
def sheet(place):
    make(place, place / "blind")
    return place / "blind"


def filled(sheet, to, verdict):
    """The sheet with verdict(set, number) in each row."""
    key = json.loads((sheet / "key.json").read_text())["features"]
    with (sheet / "sheet.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row, entry in zip(rows, key, strict=True):
        row["verdict"] = verdict(entry["set"], int(row["feature"]))
    with to.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return to


def test_the_sheet_tells_nothing_of_whose_a_feature_is(sheet):
    page, table = (sheet / "sheet.html").read_text(), (sheet / "sheet.csv").read_text()
    key = json.loads((sheet / "key.json").read_text())
    assert re.findall(r"<h2>(.*?)</h2>", page) == [f"Feature {at}" for at in range(1, 19)]
    for text in (page, table):
        assert not re.search("transcoders|neurons|layer", text)
    assert [row["feature"] for row in csv.DictReader(table.splitlines())] == [str(at) for at in range(1, 19)]
    owners = [entry["set"] for entry in key["features"]]
    assert sorted(owners) == ["neurons"] * 9 + ["transcoders"] * 9
    assert owners not in (sorted(owners), sorted(owners, reverse=True))
    assert len({(one["set"], one["layer"], one["feature"]) for one in key["features"]}) == 18
    assert page.count('class="peak"') >= 18
    shades = [float(one) for one in re.findall(r"rgba\(230,159,0,([\d.]+)\)", page)]
    assert max(shades) == 1.0


def test_the_same_seed_makes_the_same_sheet(place, sheet, tmp_path):
    make(place, tmp_path / "again")
    make(place, tmp_path / "other", "--seed", 1)
    for name in ("sheet.html", "sheet.csv", "key.json"):
        assert (tmp_path / "again" / name).read_text() == (sheet / name).read_text()
        assert (tmp_path / "other" / name).read_text() != (sheet / name).read_text()


def test_verdicts_are_counted_by_the_key(sheet, tmp_path):
    words = {"transcoders": ["interpretable", "INT", "y"], "neurons": ["no", "maybe", "n"]}
    words["transcoders"][2] = "i"
    table = filled(sheet, tmp_path / "filled.csv", lambda name, at: words[name][at % 3])
    found = json.loads(run("score", sheet, "--csv", table, "--json").stdout)
    rows = {row["dictionary"]: row for row in found["verdicts"]}
    assert rows["transcoders"] == {
        "dictionary": "transcoders",
        "interpretable": 9,
        "maybe": 0,
        "no": 0,
        "judged": 9,
    }
    assert rows["neurons"]["interpretable"] == 0
    assert rows["neurons"]["maybe"] + rows["neurons"]["no"] == 9
    assert found["p_interpretable"] == pytest.approx(fisher_exact([[9, 0], [0, 9]])[1])
    assert "transcoders" in run("score", sheet, "--csv", table).stdout


def test_an_open_verdict_is_said_and_not_counted(sheet, tmp_path):
    table = filled(sheet, tmp_path / "f.csv", lambda name, at: "" if at == 4 else "maybe")
    answer = score_sheet(sheet, table)
    assert sum(row[-1] for row in answer.tables["verdicts"].rows) == 17
    assert any("1 features have no verdict yet" in note for note in answer.notes)
    assert answer.facts["p_all_verdicts"] == 1.0


def test_what_is_no_filled_sheet(place, sheet, tmp_path):
    good = filled(sheet, tmp_path / "good.csv", lambda *_: "no").read_text()
    lines = good.splitlines()
    for text, said in [
        (
            good.replace(",no,", ",perhaps,", 1),
            "f.csv:2: verdict 'perhaps': expected interpretable, maybe, no",
        ),
        (good.replace(lines[2], lines[1]), "f.csv:3: feature '1' stands there twice"),
        ("\n".join(lines[:-1]), "feature 18 is missing"),
        (good.replace(",18,", ",19,"), "feature '19' is none of 1 to 18"),
        (good.replace("verdict", "judged", 1), "column verdict is missing"),
        (re.sub(r"\n[0-9a-f]{12},", "\n0123456789ab,", good), "of sheet '0123456789ab', the key is of"),
        (good.replace(",no,", ",,"), "no verdict for one of the dictionaries"),
    ]:
        (tmp_path / "f.csv").write_text(text)
        with pytest.raises(InputError, match=re.escape(said)):
            score_sheet(sheet, tmp_path / "f.csv")
    (tmp_path / "key.json").write_text("{}")
    with pytest.raises(InputError, match="is no key of a sheet"):
        score_sheet(sheet, tmp_path / "good.csv", tmp_path / "key.json")
    refused = make(place, sheet, code=1).exception
    assert isinstance(refused, AtlasError)
    assert "not written over without --force" in str(refused)
    refused = make(place, tmp_path / "new", "--features", 999, code=1).exception
    assert isinstance(refused, InputError)
    assert "features fire on these 40 contexts, 999 are wanted" in str(refused)


def hand_made(folder, rows, **key):
    """A sheet of two features, its CSV as given."""
    features = [{"set": "a"}, {"set": "b"}]
    stored = {"sheet": "abc", "sets": ["a", "b"], "features": features} | key
    (folder / "key.json").write_text(json.dumps(stored))
    (folder / "sheet.csv").write_text("sheet,feature,verdict,note\n" + rows, encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("note", ["a\u2028b", "a\x0bb", '"two\nlines, ""quoted"""', '"\u202eright to left"'])
def test_a_note_may_hold_anything(tmp_path, note):
    answer = score_sheet(hand_made(tmp_path, f"abc,1,no,{note}\r\nabc,2,interpretable,\r\n"))
    assert answer.tables["verdicts"].rows == (("a", 0, 0, 1, 1), ("b", 1, 0, 0, 1))


@pytest.mark.parametrize("rows, told", [
    ("abc," + 5000 * "9" + ",no,\n", r"sheet\.csv:2: feature '9{20}' is none of 1 to 2"),
    ("abc,1,no," + 200_000 * "x" + "\n", r"sheet\.csv:\d: is not CSV \(field larger"),
    ("abc\n", r"sheet\.csv:2: feature '' is none"),
])  # fmt: skip
def test_rows_that_are_none(tmp_path, rows, told):
    with pytest.raises(InputError, match=told):
        score_sheet(hand_made(tmp_path, rows))


def test_keys_that_are_none(tmp_path):
    with pytest.raises(InputError, match="is no key of a sheet"):
        score_sheet(hand_made(tmp_path, "", sets=["a", "a"], features=[{"set": "a"}]))
    (tmp_path / "key.json").write_text(100_000 * "[")
    with pytest.raises(InputError, match="is no key of a sheet"):
        score_sheet(tmp_path)


def test_the_exact_test_is_fishers_and_every_table_counts_once():
    random = np.random.default_rng(0)
    for _ in range(20):
        (a, b), (c, d) = random.integers(0, 12, (2, 2)).tolist()
        if a + b and c + d and a + c and b + d:
            assert exact_p([a, b], [c, d]) == pytest.approx(fisher_exact([[a, b], [c, d]])[1])
    # Three verdicts: against every way of dealing out nine verdicts, one by one.
    from itertools import combinations

    first, second = [3, 1, 0], [1, 2, 2]
    verdicts = [0] * 4 + [1] * 3 + [2] * 2
    dealt = [
        tuple(np.bincount([verdicts[at] for at in hand], minlength=3)) for hand in combinations(range(9), 4)
    ]
    ways = {one: dealt.count(one) for one in dealt}
    expected = sum(count for count in ways.values() if count <= ways[tuple(first)]) / len(dealt)
    assert exact_p(first, second) == pytest.approx(expected)
