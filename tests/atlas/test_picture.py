"""Pictures: what is chosen is drawn to scale, no text meets another or an edge, no token is markup."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import atlas
from atlas import svg
from atlas.cli import main
from atlas.errors import AtlasError
from atlas.fan import THINNEST, WIDEST
from atlas.picture import _shares
from tests.atlas.small_atlas import MODEL, TEXTS, build, dictionary_hash

ROOT = Path(__file__).resolve().parents[2]
NS = "{http://www.w3.org/2000/svg}"
KEYS = ["n0[0]", "n1[3]", "n1[7]", "n2[11]"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return build(tmp_path_factory.mktemp("picture") / "small.atlas")


@pytest.fixture(scope="module")
def opened(small):
    with atlas.open(small.path) as one:
        yield one


def parsed(picture: svg.Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg)


def curves(picture: svg.Picture) -> list[tuple[ElementTree.Element, str]]:
    """The drawn edges with what they say."""
    return [(path, path.findtext(f"{NS}title", "")) for path in parsed(picture).iter(f"{NS}path")]


def expected(small, number: int, layer: int, side: str) -> list[dict]:
    """The kept edges of a feature, from the tables that the atlas was made of."""
    end = "target" if side == "up" else "source"
    hash = dictionary_hash(layer)
    rows = [{"type": type, **row} for type in ("direct", "via_head") for row in getattr(small, type)]
    return [row for row in rows if row[end] == number and row[f"{end}_dictionary"] == hash]


def said(row: dict) -> str:
    """What tells an edge, as its tip has it."""
    layers = {dictionary_hash(layer): layer for layer in range(3)}
    ends = [f"smol/neurons/L{layers[row[f'{e}_dictionary']]:02d}.mlp/{row[e]}" for e in ("source", "target")]
    via = "DIRECT" if row["type"] == "direct" else f"L{row['layer']:02d}.H{row['head']:02d}"
    return f"{ends[0]} → {ends[1]}: {via}, {row['reading']},"


def test_every_edge_is_drawn_with_its_width_colour_and_dashes(small, opened):
    picture = opened.feature("n1[3]").picture(200, 200)
    rows = expected(small, 3, 1, "up") + expected(small, 3, 1, "down")
    drawn = {text.partition(" weight")[0]: path for path, text in curves(picture)}
    assert picture.edges == len(rows) == len(drawn) > 20
    largest = max(abs(row["weight"]) for row in rows)
    for row in rows:
        path = drawn[said(row)]
        width = max(THINNEST, WIDEST * abs(row["weight"]) / largest)
        assert float(path.get("stroke-width", "")) == pytest.approx(width, abs=0.006)
        assert path.get("stroke") == (svg.POSITIVE if row["weight"] > 0 else svg.NEGATIVE)
        assert ("stroke-dasharray" in path.attrib) == (row["type"] == "via_head")
    assert f"|weight| = {svg.number(largest).lstrip('+')}" in picture.svg


@pytest.mark.parametrize("by", ["weight", "z"])
def test_the_strongest_of_each_type_are_chosen(small, opened, by):
    picture = opened.feature("n2[4]").picture(6, 0, by=by)
    rows = sorted(expected(small, 4, 2, "up"), key=lambda row: -abs(row[by]))
    strongest = [said(row) for type in ("direct", "via_head") for row in
                 [row for row in rows if row["type"] == type][:3]]  # fmt: skip
    assert sorted(text.partition(f" {'weight'}")[0] for _, text in curves(picture)) == sorted(strongest)


def test_what_one_type_lacks_the_other_gets(opened):
    assert _shares({"DIRECT": 9, "VIA_HEAD": 2}, 10) == {"DIRECT": 8, "VIA_HEAD": 2}
    assert _shares({"DIRECT": 1, "VIA_HEAD": 1}, 10) == {"DIRECT": 1, "VIA_HEAD": 1}
    only = curves(opened.feature("n1[3]").picture(4, 4, types=["VIA_HEAD"]))
    assert len(only) == 8 and all("stroke-dasharray" in path.attrib for path, _ in only)


def text_boxes(picture: svg.Picture) -> list[tuple[str, float, float, float, float]]:
    """(text, left, top, right, bottom) of every upright text."""
    boxes = []
    for element in parsed(picture).iter(f"{NS}text"):
        text = "".join(element.itertext())
        size, x, y = (float(element.get(name, "")) for name in ("font-size", "x", "y"))
        wide = svg.width(text, size, element.get("font-family", ""))
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[element.get("text-anchor", "")]
        boxes.append((text, left, y - 0.75 * size, left + wide, y + 0.2 * size))
    return boxes


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("most", [1, 9, 60])
def test_texts_meet_neither_each_other_nor_an_edge_nor_the_rim(opened, key, most):
    picture = opened.feature(key).picture(most, most)
    boxes = text_boxes(picture)
    for n, (text, left, top, right, bottom) in enumerate(boxes):
        for other, left2, top2, right2, bottom2 in boxes[:n]:
            apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
            assert apart, (text, other)
    root = parsed(picture)
    wide, high = float(root.get("width", "")), float(root.get("height", ""))
    assert all(b[1] >= 0 and b[2] >= 0 and b[3] <= wide and b[4] <= high for b in boxes)
    for path, text in curves(picture):
        x0, y0, x1, y1, x2, y2, x3, y3 = map(float, re.findall(r"-?[\d.]+", path.get("d", "")))
        for t in (step / 200 for step in range(201)):
            weights = ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3)
            x = sum(w * v for w, v in zip(weights, (x0, x1, x2, x3), strict=True))
            y = sum(w * v for w, v in zip(weights, (y0, y1, y2, y3), strict=True))
            hit = [b[0] for b in boxes if b[1] < x < b[3] and b[2] < y < b[4]]
            assert hit == [], text


def test_neighbours_stand_at_their_layers(opened):
    root = parsed(opened.feature("n2[4]").picture(60, 0))
    ticks = {"".join(t.itertext()): float(t.get("x", "")) for t in root.iter(f"{NS}text")
             if t.get("text-anchor") == "middle"}  # fmt: skip
    points = [(c.findtext(f"{NS}title", ""), float(c.get("cx", ""))) for c in root.iter(f"{NS}circle")]
    assert {key.split("/")[2] for key, _ in points} == {"L00.mlp", "L01.mlp"}
    assert all(x == ticks[str(int(key.split("/")[2][1:3]))] for key, x in points)


def test_tokens_are_shown_and_none_is_markup(small, opened):
    every = {"svg", "title", "rect", "line", "path", "circle", "text", "tspan", "g"}
    shown = set()
    for number in range(12):
        picture = opened.feature(f"n1[{number}]").picture()
        root = parsed(picture)
        assert {element.tag.removeprefix(NS) for element in root.iter()} <= every
        assert all(c.isprintable() or c == "\n" for c in picture.svg)
        assert not re.search(r"href|url\(|@import|<!|<\?|javascript", picture.svg)
        shown |= {"".join(element.itertext()) for element in root.iter(f"{NS}text")}
    read = {TEXTS[row["token"]] for row in small.embeds if row["target_dictionary"] == dictionary_hash(1)}
    short = {repr(text) for text in read if len(repr(text)) < 14}
    assert short <= shown and {"'&<>'", "'\\n'", "''"} <= shown
    assert "'[bold]not mark…'" in shown  # cut, and still in its quotes


def test_the_tokens_of_each_reading_and_of_the_logits_have_their_weights(small, opened):
    root = parsed(opened.feature("n1[3]").picture(0, 0))
    texts = Counter("".join(element.itertext()) for element in root.iter(f"{NS}text"))
    hash = dictionary_hash(1)
    for reading in ("gate", "up"):
        own = [row for row in small.embeds if (row["target_dictionary"], row["target"]) == (hash, 3)
               and row["reading"] == reading]  # fmt: skip
        assert texts[f"reads through {reading}"] == 1 and own
        assert all(
            texts[svg.number(row["weight"])] for row in own if row["rank"] <= (5 if row["weight"] > 0 else 3)
        )
    assert "no edges" not in " ".join(texts) and texts["none drawn"] == 2


def test_the_map_counts_every_edge(small, opened):
    picture = opened.picture()
    layers = {dictionary_hash(layer): layer for layer in range(3)}
    counts = Counter(
        f"L{layers[row['source_dictionary']]:02d} → L{layers[row['target_dictionary']]:02d}"
        for row in small.direct
    ) + Counter(f"L{row['layer']:02d}.H{row['head']:02d}" for row in small.via_head)
    cells = [rect.findtext(f"{NS}title") for rect in parsed(picture).iter(f"{NS}rect")]
    assert sorted(filter(None, cells)) == sorted(f"{name}: {n:,} edges" for name, n in counts.items())
    assert picture.edges == len(small.direct) + len(small.via_head)
    fills = {rect.findtext(f"{NS}title"): rect.get("fill") for rect in parsed(picture).iter(f"{NS}rect")}
    darkest = max((n, name) for name, n in counts.items() if "H" in name)
    assert fills[f"{darkest[1]}: {darkest[0]:,} edges"] == "#082858"


@given(st.text(st.characters(), max_size=40), st.floats(20, 200))
def test_any_text_fits_and_is_well_formed(text, room):
    cut = svg.fit(text, room, 10)
    assert svg.width(cut, 10) <= room and cut.isprintable()
    again = ElementTree.fromstring(svg.label(1, 2, cut))
    assert again.text == (cut or None)
    whole = ElementTree.fromstring(svg.tip(text))
    assert whole.text == (svg.printable(text) or None)
    token = svg.quoted(repr(text), room, 10)
    assert token[-1] == repr(text)[-1] and svg.width(token, 10) <= room


def test_a_notebook_shows_it_and_two_do_not_touch(opened):
    picture = opened.feature("n1[3]").picture()
    assert picture._repr_html_().startswith("<svg") and "<style" not in picture.svg
    assert not re.search(r"\sid=", picture.svg)
    assert picture.svg == opened.feature("smol/neurons/L01.mlp/3").picture().svg


@pytest.fixture
def run(small, capsys, monkeypatch):
    monkeypatch.setenv("ATLAS", str(small.path))

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["picture", *arguments])
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return command


def test_the_command_writes_the_file_or_prints_the_same(run, opened, tmp_path):
    out = tmp_path / "near.svg"
    code, text, _ = run("n1[3]", "--up", "5", "--down", "3", "--by", "z", "--out", str(out))
    assert code == 0 and text == f"wrote {out}: the neighbourhood of smol/neurons/L01.mlp/3, 8 edges\n"
    assert out.read_text(encoding="utf-8") == opened.feature("n1[3]").picture(5, 3, by="z").svg
    assert run("--map")[1] == opened.picture().svg
    assert [path.name for path in tmp_path.iterdir()] == ["near.svg"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "KEY or --map"), (["n1[3]", "--map"], "not both"), (["n1[99]"], "features 0 to 11"),
     (["n1[3]", "--up", "-1"], "--up"), (["n1[3]", "--out", "."], "is a folder"),
     (["n1[3]", "--out", "nowhere/near.svg"], "there is no folder")],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_told_in_a_line(run, arguments, said):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and said in err.splitlines()[0]


def test_numbers_below_zero_are_refused(opened):
    with pytest.raises(AtlasError, match="-1: expected a number of edges"):
        opened.feature("n1[3]").picture(-1)


def test_drawing_loads_nothing_heavy(small):
    code = (
        "import sys\nfrom atlas.cli import main\ntry:\n    main(['picture', 'n1[3]'])\nexcept SystemExit:\n"
        "    heavy = {'torch', 'pandas', 'numba', 'transformers', 'networkx', 'scipy'} & set(sys.modules)\n"
        "    sys.stderr.write(str(sorted(heavy)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "ATLAS": str(small.path), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.stdout.startswith("<svg") and done.stderr == "[]"
    assert MODEL not in done.stdout
