"""Tables as people read them: widths, numbers, what is cut and what never is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas.answers import Answer, Table, visible
from atlas.rendering import as_text, cell
from atlas.store.guard import tokens
from atlas.store.limit import limited


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("weight", 1.23456, "+1.235"),
        ("weight", -12345.678, "-12,346"),
        ("weight", 0.00012345, "+1.234e-04"),
        ("weight", 0.0, "0"),
        ("z", float("inf"), "inf"),
        ("r.weight", 1.0, "+1.000"),
        ("norm", 0.5, "0.5000"),
        ("share", 0.1234, "12.3 %"),
        ("kept_share", 0.000123, "0.0123 %"),
        ("edges", 1234567, "1,234,567"),
        ("number", 1234567, "1234567"),
        ("f.id", 1234567, "1234567"),
        ("bytes", 1_500_000, "1.5 MB"),
        ("seconds", 125.0, "2 min 05 s"),
        ("parallel", True, "yes"),
        ("label", None, "–"),
        ("token", " a\n", "' a\\n'"),
        ("name", "a\x1b[2Jb", "a\\x1b[2Jb"),
        ("n", {"_label": "Feature", "key": "m/s/L00.mlp/1"}, "m/s/L00.mlp/1"),
        ("names", ["a", "b"], "a, b"),
    ],
)
def test_a_cell(column, value, text):
    assert cell(column, value) == text


def test_numbers_of_a_column_have_one_number_of_decimals_and_keep_two_digits_of_the_least():
    text = as_text(Table.of("", ("weight",), [(12.5,), (-0.25,), (None,)]))
    assert [line.strip() for line in text.splitlines()[2:]] == ["+12.50", "-0.25", "–"]
    wild = as_text(Table.of("", ("weight",), [(1e9,), (1e-9,)]))
    assert [line.strip() for line in wild.splitlines()[2:]] == ["+1.000e+09", "+1.000e-09"]


def test_what_is_long_is_cut_and_keys_and_numbers_are_not():
    key = "model/transcoders/L08.mlp/12345"
    rows = [(key, "DIRECT", "gate", -123.456, 1, ["' " + "long" * 20 + "'"])]
    text = as_text(Table.of("", ("feature", "via", "reading", "weight", "rank_in", "promotes"), rows))
    assert key in text and "-123.5" in text and "…" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_does_not_fit_in_columns_goes_below_each_other():
    table = Table.of("", [f"a_rather_long_column_{n}" for n in range(8)], [tuple(float(n) for n in range(8))])
    text = as_text(table)
    assert text.splitlines()[0] == "row 1" and len(text.splitlines()) == 9


def test_wide_characters_keep_the_columns_straight():
    from rich.cells import cell_len

    text = as_text(Table.of("", ("token", "weight"), [("日本語", 1.0), ("a", 2.0)]))
    ends = {cell_len(line) for line in text.splitlines()[2:]}
    assert len(ends) == 1


@given(st.text(), st.text())
def test_no_text_reaches_the_terminal_as_control_or_markup(title, value):
    answer = Answer(visible(title), {"fact": value}, {"t": Table.of("", ("token", "name"), [(value, value)])})
    shown = as_text(answer)
    assert all(c.isprintable() or c == "\n" for c in shown)
    if len(value) < 20 and value.isprintable() and value.strip():
        assert visible(value) in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("cypher", "bounded"),
    [
        ("MATCH (n) RETURN n", True),
        ("MATCH (n) RETURN n;", True),
        ("MATCH (n) RETURN n // LIMIT 3", True),
        ("MATCH (n) WITH n LIMIT 5 RETURN n", True),
        ("MATCH (n) RETURN n.LIMIT AS limited", True),
        ("MATCH (n) RETURN 'LIMIT 3' AS t", True),
        ("MATCH (n) RETURN n limit 3", False),
        ("MATCH (n) RETURN n SKIP 2 LIMIT $k", False),
        ("MATCH (n) RETURN n UNION ALL MATCH (m) RETURN m", False),
        ("EXPLAIN MATCH (n) RETURN n", False),
    ],
)
def test_a_limit_is_added_only_where_there_is_none(cypher, bounded):
    result = limited(cypher, 7)
    assert (result != cypher) == bounded
    if bounded:
        assert [token.text for token in tokens(result)][-2:] == ["LIMIT", "7"]


def test_titles_and_notes_cannot_act_on_a_terminal():
    table = Table.of("t\x1b[31m", ("a",), [(1,)], notes=["n\x1b[31m\nforged"])
    shown = Answer("a\x9b31m", {}, {"t": table}, ("\u202enote",))
    for text in (as_text(shown), shown._repr_html_()):
        assert not {"\x1b", "\x9b", "\u202e"} & set(text)
    assert r"n\x1b[31m\nforged" in as_text(shown)
