"""Rules read from data and written back; every mistake of a rule told, not only the first."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.rules import (
    PER,
    Absolute,
    All_,
    Any_,
    Everything,
    RuleMistakes,
    Top,
    Z,
    rule_from_data,
    rule_to_data,
)

numbers = st.floats(0, 1e6)
leaves = st.one_of(
    st.just(Everything()),
    numbers.map(Absolute),
    numbers.map(Z),
    st.builds(Top, st.integers(1, 10_000), st.sampled_from(PER)),
)
rules = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda found: Any_(tuple(found))),
        st.lists(inner, min_size=1, max_size=3).map(lambda found: All_(tuple(found))),
    ),
    max_leaves=6,
)


@given(rules)
def test_what_is_written_reads_back_equal(rule):
    assert rule_from_data(rule_to_data(rule)) == rule
    hash(rule)  # they name steps and join sets


@pytest.mark.parametrize("text", ["target×source_layer", "target*source_layer", "target.source_layer"])
def test_the_cross_may_be_written_in_ascii(text):
    assert rule_from_data({"top": 3, "per": text}) == Top(3, "target×source_layer")


def test_top_is_per_target_unless_said():
    assert rule_from_data({"top": 16}) == Top(16, "target")


@pytest.mark.parametrize(
    ("data", "path", "said"),
    [
        ("all", (), "expected 'everything'"),
        (None, (), "found None"),
        ([{"z": 1}], (), "found [{'z': 1}]"),
        ({}, (), "found none"),
        ({"z": 1, "absolute": 2}, (), "found 2: absolute, z (join rules by any or all)"),
        ({"z": "6"}, ("z",), "expected a number of 0 or more, found '6'"),
        ({"z": True}, ("z",), "found True"),
        ({"z": -1}, ("z",), "found -1"),
        ({"z": float("nan")}, ("z",), "found nan"),
        ({"absolute": float("inf")}, ("absolute",), "found inf"),
        ({"top": 0}, ("top",), "expected a whole number of 1 or more, found 0"),
        ({"top": 1.5}, ("top",), "found 1.5"),
        ({"top": 1, "per": "head"}, ("per",), "found 'head'"),
        ({"top": 1, "pre": "target"}, ("pre",), "did you mean 'per'?"),
        ({"z": 1, "per": "target"}, ("per",), "unknown key"),
        ({"abs": 1}, ("abs",), "unknown key"),
        ({"any": []}, ("any",), "expected a list of one or more rules"),
        ({"all": {"z": 1}}, ("all",), "expected a list of one or more rules"),
        ({"any": [{"z": 6}, {"all": [{"zz": 1}]}]}, ("any", 1, "all", 0, "zz"), "did you mean 'z'?"),
    ],
)
def test_mistakes_name_their_place(data, path, said):
    with pytest.raises(RuleMistakes) as caught:
        rule_from_data(data)
    assert any(place == path and said in text for place, text in caught.value.mistakes), caught.value.mistakes


def test_all_mistakes_are_told():
    with pytest.raises(RuleMistakes) as caught:
        rule_from_data({"any": [{"z": -1}, {"top": 0, "per": "x"}, "nothing"]})
    assert [place for place, _ in caught.value.mistakes] == [
        ("any", 0, "z"),
        ("any", 1, "per"),
        ("any", 1, "top"),
        ("any", 2),
    ]


def test_rules_need_no_pydantic():
    program = "import sys, ingest.rules; assert not {'pydantic', 'torch', 'yaml', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
