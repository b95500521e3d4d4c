"""Dictionaries at every site that files may be of, in the weight graph: which pairs have edges and what they
weigh, against plain matrix products in float64 (`tests.workers.sites`)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from atlas.cli import main
from atlas.estimate import estimate
from ingest.dictionaries import open_set
from ingest.errors import InputError
from ingest.models import open_model
from ingest.rules import rule_from_data
from ingest.spec import parse_spec
from tests.ingest.tiny_models import tiny_model
from tests.workers.building import build
from tests.workers.sites import Random, Sited, check_edges, edges, kept, neurons, token_edges, write_sae
from tests.workers.streams import HEADS, LAYERS, D, Stream, stream_of
from workers.build import plan
from workers.heads import Head

MODELS = ["qwen3", "gpt_neox-parallel", "gpt2", "gemma2"]
BEST = "{any: [{top: 2, per: target}, {top: 1, per: target×head}, {top: 1, per: source}, {z: 3.5}]}"
# set -> (hook read and written, site of ours, layers)
SETS = {
    "emb": ("hook_embed", "embed", (0,)),
    "pre": ("hook_resid_pre", "resid_pre", (1,)),
    "post": ("hook_resid_post", "resid_post", (0, 1, 2)),
    "att": ("hook_attn_out", "attn.out", (0, 1, 2)),
    "mod": ("attn.hook_out", "attn.out", (1, 2)),
    "z": ("attn.hook_z", "attn.z", (0, 1, 2)),
    "mlp": ("hook_mlp_out", "mlp.out", (0, 1, 2)),
    "tc": ("mlp.hook_in", "mlp.in", (1, 2)),
}


def d_head(name: str) -> int:
    return 12 if name in ("qwen3", "gemma2") else D // HEADS


def width(set_: str, name: str) -> int:
    return HEADS * d_head(name) if set_ == "z" else D


def matrices(set_: str, name: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """(layer, W_enc (F, d_in), W_dec (F, d_out)) as the files hold them."""
    random = Random(list(SETS).index(set_))
    wide = width(set_, name)
    return [(layer, random.rows(wide), random.rows(wide, dead=3)) for layer in SETS[set_][2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and for each all the sets."""
    where = tmp_path_factory.mktemp("sites")
    torch.set_num_threads(1)
    for name in MODELS:
        tiny_model(name).save_pretrained(where / name)
        for set_ in SETS:
            for layer, W_enc, W_dec in matrices(set_, name):
                write_sae(where / f"{name}-sets" / set_, layer, W_enc, W_dec)
    return where


def sited(set_: str, name: str, stream: Stream) -> list[Sited]:
    """What each dictionary of a set reads and adds to the stream."""
    site = SETS[set_][1]
    found = []
    for layer, e, d in matrices(set_, name):
        block = stream.blocks[layer]
        # The file is for embeddings before the model's factor.
        factor = float(np.float32(D**0.5)) if name == "gemma2" and site == "embed" else 1.0
        e, d = ((x * by).astype(np.float32).astype(np.float64) for x, by in ((e, 1 / factor), (d, factor)))
        after_attention, after_mlp = 1 + 2 * layer, 2 + 2 * layer
        event, joined = {
            "embed": (0, d),
            "resid_pre": (after_attention - 1, d),
            "resid_post": (after_mlp, d),
            "attn.out": (after_attention, d @ block.behind_attention if set_ == "mod" else d),
            "mlp.out": (after_mlp, d),
            "mlp.in": (after_mlp, d),
        }.get(site, (after_attention, None))
        if site == "attn.z":
            by_head = d.reshape(len(d), HEADS, -1)
            joined = sum(by_head[:, h] @ block.W_O[h] for h in range(HEADS)) @ block.behind_attention
        found.append(Sited(set_, layer, site, {"in": e}, [(event, joined)], at_module=set_ == "mod"))
    return found


def spec(name: str, sets: list[str], edges: str, own: bool = False) -> str:
    said = {set_: f"{set_}: {{model: m, path: {name}-sets/{set_}, reads: {SETS[set_][0]}}}" for set_ in sets}
    if own:
        said["n"] = "n: {model: m, format: neurons}"
    listed = ", ".join(said.values())
    return f"atlas: 1\nmodels: {{m: {{path: {name}}}}}\ndictionaries: {{{listed}}}\nedges: {edges}\n"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", ["everything", BEST])
def test_every_site_has_the_edges_of_its_place_and_no_others(
    name: str, keep: str, folder: Path, tmp_path: Path
) -> None:
    stream, sets = stream_of(name, folder / name), list(SETS)
    built = build(spec(name, sets, f"[{{types: [DIRECT, VIA_HEAD], keep: {keep}}}]"), folder, tmp_path)
    every = [one for set_ in sets for one in sited(set_, name, stream)]
    want = kept(rule_from_data(yaml.safe_load(keep)), every, list(edges(stream, every)))
    check_edges(built, every, want)
    into = {every[target // 1000].set for _, target, *_ in want}
    assert into == {"pre", "post", "att", "mod", "z", "tc"}
    assert {every[source[0]].set for source, *_ in want} == set(SETS)
    heads = {
        (every[t // 1000].set, every[t // 1000].layer, layer) for _, t, _, layer, head in want if head >= 0
    }
    assert all(layer == own for set_, own, layer in heads if set_ in ("att", "mod", "z"))


def test_neurons_and_a_residual_dictionary_are_decided_apart(folder: Path, tmp_path: Path) -> None:
    """A top k of a target's edges is that of the neurons below it, and that of the residual dictionary just
    below it: one more set does not take from the other's."""
    stream = stream_of("qwen3", folder / "qwen3")
    rule = "{top: 2, per: target}"
    text = f"[{{types: [DIRECT], to: [n], keep: {rule}}}]"
    built = build(spec("qwen3", ["post"], text, own=True), folder, tmp_path)
    every = sited("post", "qwen3", stream) + neurons(stream)
    pairs = [p for p in edges(stream, every) if p.head < 0 and every[p.target // 1000].set == "n"]
    want = kept(rule_from_data(yaml.safe_load(rule)), every, pairs)
    check_edges(built, every, want)
    rows = 40 * 2  # neurons of a layer times readings
    by_set = [sum(every[s[0]].set == set_ for s, *_ in want) for set_ in ("post", "n")]
    assert by_set == [2 * 2 * rows, 2 * 2 * rows]


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_tokens_feed_what_reads_the_stream_and_all_that_writes_promotes(
    name: str, folder: Path, tmp_path: Path
) -> None:
    stream, sets = stream_of(name, folder / name), ["emb", "post", "mod", "z", "mlp"]
    built = build(spec(name, sets, "[{types: [EMBEDS, PROMOTES], keep: {top: 61}}]"), folder, tmp_path)
    every = [one for set_ in sets for one in sited(set_, name, stream)]
    embeds, promotes = (token_edges(built, every, table) for table in ("EMBEDS", "PROMOTES"))
    assert {every[place].set for place in embeds} == {"emb", "post"}
    assert set(promotes) == set(range(len(every)))
    for place, found in embeds.items():
        np.testing.assert_allclose(
            found[0], every[place].encoders["in"] @ stream.tokens.T, rtol=1e-5, atol=1e-5
        )
    logits = stream.logits - stream.logits.mean(axis=0)
    for place, found in promotes.items():
        want = every[place].omega @ stream.final_norm @ logits.T
        np.testing.assert_allclose(found[0], want, rtol=1e-5, atol=1e-4)


def test_norms_and_sites_of_features_are_kept(folder: Path, tmp_path: Path) -> None:
    stream, sets = stream_of("qwen3", folder / "qwen3"), ["z", "mlp"]
    built = build(spec("qwen3", sets, "[{types: [DIRECT], keep: {z: 50}}]"), folder, tmp_path)
    every = [one for set_ in sets for one in sited(set_, "qwen3", stream)]
    place = {built.sets[one.set].hash_of(one.layer): one for one in every}
    for row in built.table("features").to_pylist():
        one = place[row["dictionary"]]
        assert row["write_norm"] == pytest.approx(np.linalg.norm(one.omega[row["number"]]), rel=1e-12)
        assert row["read_norm"] == pytest.approx(np.linalg.norm(one.encoders["in"][row["number"]]), rel=1e-12)
    sites = {(row["key"], row["site"]) for row in built.table("dictionaries").to_pylist()}
    assert ("m/z/L01.attn.z", "attn.z") in sites
    assert ("m/mlp/L02.mlp.out", "mlp.out") in sites


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox-parallel"])
def test_the_estimate_counts_the_same_pairs(name: str, folder: Path) -> None:
    stream, sets = stream_of(name, folder / name), list(SETS)
    every = [one for set_ in sets for one in sited(set_, name, stream)]
    pairs = list(edges(stream, every))
    text = spec(name, sets, "[{types: [DIRECT, VIA_HEAD], keep: everything}]")
    answer = estimate(parse_spec(text, base=folder), rate=1e9)
    counted = {row[0]: row[1] for row in answer.tables["edges_by_type"].rows}
    assert counted["DIRECT"] == sum(pair.head < 0 for pair in pairs)
    assert counted["VIA_HEAD"] == sum(pair.head >= 0 for pair in pairs)
    readers = [one for one in every if one.site in ("embed", "resid_pre", "resid_post", "mlp.in")]
    assert counted["EMBEDS"] == 61 * 6 * len(readers)
    told = " ".join(answer.notes)
    for said in ("post: describes the residual stream again", "mlp: reads the MLP's output",
                 "z: reads attn.z: only VIA_HEAD", "emb: reads the embedding: only EMBEDS"):  # fmt: skip
        assert said in told


def test_a_write_before_what_is_read_is_refused(folder: Path) -> None:
    text = spec("qwen3", ["post"], "[{types: [DIRECT]}]").replace(
        "reads: hook_resid_post", "reads: hook_resid_post, writes: mlp.hook_out"
    )
    with pytest.raises(InputError, match="which the model computed before"):
        estimate(parse_spec(text, base=folder), rate=1e9)


def test_an_attention_output_on_no_stated_side_is_refused_behind_a_norm(folder: Path) -> None:
    text = spec("gemma2", ["att"], "[{types: [DIRECT]}]").replace(
        "reads: hook_attn_out", "reads: hook_attn_out, writes: hook_mlp_out"
    )
    with pytest.raises(InputError, match="does not say on which side"):
        estimate(parse_spec(text, base=folder), rate=1e9)


def test_an_atlas_of_such_sets_answers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Built, loaded and asked from the command line; a key's site may hold a dot; figures count each set's
    pairs."""
    sets = ["post", "att", "z", "mlp"]
    text = spec("qwen3", sets, "[{types: [DIRECT, VIA_HEAD], keep: everything}]")
    for path in ["qwen3", *(f"qwen3-sets/{set_}" for set_ in sets)]:
        text = text.replace(f"path: {path}}}", f"path: {folder / path}}}").replace(
            f"path: {path},", f"path: {folder / path},"
        )
    (tmp_path / "spec.yaml").write_text(text)

    def run(*arguments: str | Path) -> str:
        with pytest.raises(SystemExit) as end:
            main([*map(str, arguments), *(() if arguments[0] == "build" else ("--atlas", str(atlas)))])
        out = capsys.readouterr()
        assert not end.value.code, out.err
        return out.out + out.err

    atlas = tmp_path / "s.atlas"
    told = run("build", tmp_path / "spec.yaml", "--out", atlas)
    assert "post: describes the residual stream again" in " ".join(told.split())
    stream = stream_of("qwen3", folder / "qwen3")
    every = [one for set_ in sets for one in sited(set_, "qwen3", stream)]
    pairs = list(edges(stream, every))
    place = next(n for n, one in enumerate(every) if (one.set, one.layer) == ("z", 1))
    into = sorted(abs(pair.weight) for pair in pairs if pair.target == 1000 * place + 2)
    for key in ("m/z/L01.attn.z/2", "L01.attn.z/2", "z1[2]"):
        rows = json.loads(run("edges", key, "--up", "--limit", "0", "--json"))
        assert sorted(abs(row["weight"]) for row in rows) == pytest.approx(into, rel=1e-6)
    content = json.loads(run("info", "--dropped", "--json"))
    assert sum(row["pairs"] for row in content["via_head"]) == sum(pair.head >= 0 for pair in pairs)
    assert sum(row["pairs"] for row in content["direct"]) == sum(pair.head < 0 for pair in pairs)


@pytest.mark.parametrize("output", ["stream", "module", "z"])
def test_the_factors_of_a_head_give_its_output_back(output: str, folder: Path) -> None:
    model = open_model(folder / "gemma2", name="m")
    stream = stream_of("gemma2", folder / "gemma2")
    for number in range(HEADS):
        head = Head.of(model, 1, number, output)
        want = {
            "stream": stream.blocks[1].W_O[number] @ stream.blocks[1].behind_attention,
            "module": stream.blocks[1].W_O[number],
            "z": np.eye(HEADS * 12)[12 * number : 12 * (number + 1)],
        }[output]
        np.testing.assert_allclose(head.w_o, want, atol=1e-12)
        np.testing.assert_allclose(head.r @ head.q.T, want, atol=1e-12)
        assert head.residue < 1e-12


def test_steps_of_a_layers_heads_pair_every_source_with_every_target(folder: Path) -> None:
    """Each heads step computes a full product: so every source must have edges into every target of it."""
    sets = list(SETS)
    parsed = parse_spec(spec("qwen3", sets, "[{types: [VIA_HEAD], keep: everything}]"), base=folder)
    model = open_model(folder / "qwen3", name="m")
    opened = {
        name: open_set(one.where, name=name, model=model, format=one.format, declared=one.declared)
        for name, one in parsed.dictionaries.items()
    }
    stream = stream_of("qwen3", folder / "qwen3")
    every = [one for set_ in sets for one in sited(set_, "qwen3", stream)]
    named = {opened[one.set].hash_of(one.layer): (one.set, one.layer) for one in every}
    pairs = {
        (*(f(every, p) for f in (_source, _target)), p.layer) for p in edges(stream, every) if p.head >= 0
    }
    steps = [step for step in plan(parsed, {"m": model}, opened).steps if step.kind == "heads"]
    found = [
        (named[s["hash"]], named[t["hash"]], step.params["layer"])
        for step in steps
        for s in step.params["sources"]
        for t in step.params["targets"]
    ]
    assert len(found) == len(set(found))
    assert set(found) == pairs
    assert {LAYERS - 1, 0} <= {layer for *_, layer in found}


def _source(every: list[Sited], pair) -> tuple[str, int]:
    one = every[pair.source[0]]
    return one.set, one.layer


def _target(every: list[Sited], pair) -> tuple[str, int]:
    one = every[pair.target // 1000]
    return one.set, one.layer
