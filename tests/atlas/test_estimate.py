"""What an estimate says of rules and sizes, by hand."""

from __future__ import annotations

import itertools

import pytest

from atlas.estimate import TAIL, _all_of, bf16_instructions, estimate, matrix_product_rate, tail
from ingest.rules import Absolute, All_, Any_, Everything, Rule, Top, Z
from ingest.spec import parse_spec

PAIRS = {"DIRECT": 8 * 8 * 3, "VIA_HEAD": 8 * 8 * 2 * (1 + 2 + 1)}  # 3 layers of 8 plain neurons, 2 heads


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GPT-2 by its configuration alone: nothing else is read."""
    from transformers import GPT2Config

    path = tmp_path_factory.mktemp("gpt2")
    GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_inner=8, n_positions=32).save_pretrained(path)
    return path


def edges(model, keep: str) -> dict[str, int]:
    text = f"""
atlas: 1
models: {{m: {{path: "{model}"}}}}
dictionaries: {{neurons: {{model: m, format: neurons}}}}
edges:
  - {{types: [DIRECT, VIA_HEAD], keep: {keep}}}
"""
    found = estimate(parse_spec(text), workers=1, rate=1e9).to_json()
    by_type = {row["type"]: row for row in found["edges_by_type"]}
    assert {type: by_type[type]["pairs"] for type in PAIRS} == PAIRS
    assert by_type["EMBEDS"]["edges"] == by_type["PROMOTES"]["edges"] == 3 * 8 * 32
    return {type: by_type[type]["edges"] for type in PAIRS}


@pytest.mark.parametrize(
    ("keep", "total"),
    [
        ("everything", sum(PAIRS.values())),
        ("{top: 1, per: target}", 8 * 2),  # the features of layers 1 and 2
        ("{top: 1, per: target*type}", 8 * 2 * 2),
        ("{top: 1, per: source}", 8 * (1 + 2)),  # for each target layer, the features below
        ("{top: 1, per: target*source_layer}", 8 * (1 + 2)),
        ("{top: 1, per: target*head}", 8 * ((1 + 2) + (1 + 4))),
        ("{top: 1000, per: target}", sum(PAIRS.values())),
        ("{any: [everything, {top: 1}]}", sum(PAIRS.values())),
        ("{all: [everything, everything]}", sum(PAIRS.values())),
    ],
)
def test_edges_by_rule(model, keep, total):
    assert sum(edges(model, keep).values()) == pytest.approx(total, abs=3)  # each type is rounded for itself


def test_a_stricter_rule_keeps_fewer(model):
    kept = [sum(edges(model, f"{{z: {z}}}").values()) for z in (0, 1, 2, 3)]
    assert kept[0] == sum(PAIRS.values()) and kept == sorted(kept, reverse=True) and kept[3] < kept[1]


@pytest.mark.parametrize("type", ["DIRECT", "VIA_HEAD"])
def test_the_tail_passes_through_what_was_measured_and_falls(type):
    for z, share in TAIL[type].items():
        assert tail(type, z) == pytest.approx(share)
    values = [tail(type, z / 2) for z in range(60)]
    assert values[0] == 1 and all(a > b > 0 for a, b in itertools.pairwise(values))


def test_rules_joined_by_all_lie_between_independent_ones_and_the_least():
    for kept in ([10.0, 10.0], [1.0, 100.0], [50.0, 3.0]):
        independent = kept[0] * kept[1] / 1000
        assert independent <= _all_of(kept, 1000) <= min(kept)
    assert _all_of([1000.0, 7.0], 1000) == pytest.approx(7.0)
    assert _all_of([0.0, 0.0], 0) == 0


def test_an_absolute_threshold_is_said_to_be_a_guess(model):
    spec = f"""
atlas: 1
models: {{m: {{path: "{model}"}}}}
dictionaries: {{neurons: {{model: m, format: neurons}}}}
edges: [{{types: DIRECT, keep: {{any: [{{z: 3}}, {{absolute: 1}}]}}}}]
"""
    assert "guess" in estimate(parse_spec(spec), workers=1, rate=1e9).notes[0]
    assert (
        "guess"
        not in estimate(parse_spec(spec.replace("absolute: 1", "top: 1")), workers=1, rate=1e9).notes[0]
    )


def test_time_goes_with_the_rate_and_the_threads(model):
    spec = parse_spec(
        f'{{atlas: 1, models: {{m: {{path: "{model}"}}}},'
        " dictionaries: {n: {model: m, format: neurons}}}"
    )
    times = [
        estimate(spec, workers=w, rate=r).to_json()["computing_seconds"]
        for w, r in ((1, 1e9), (2, 1e9), (1, 4e9))
    ]
    assert times[0] == pytest.approx(2 * times[1]) and times[0] == pytest.approx(4 * times[2])


def test_the_rate_is_measured_here():
    assert 1e7 < matrix_product_rate(seconds=0.02, size=128) < 1e14
    assert set(bf16_instructions()) <= {"amx_bf16", "avx512_bf16"}


def test_every_rule_is_judged():
    """A new rule must be taught to the estimate."""
    assert set(Rule.__args__) == {Everything, Absolute, Z, Top, Any_, All_}
