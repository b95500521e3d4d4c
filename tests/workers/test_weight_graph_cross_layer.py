"""Cross-layer transcoders in the weight graph: what a latent writes for a reader is the sum of its decoders
below it, against plain matrix products in float64 (`tests.workers.sites`)."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from atlas.cli import main
from atlas.estimate import estimate
from ingest.errors import InputError
from ingest.rules import rule_from_data
from ingest.spec import parse_spec
from tests.ingest.tiny_models import tiny_model
from tests.workers.building import build
from tests.workers.sites import (
    Random,
    Sited,
    check_edges,
    edges,
    kept,
    neurons,
    token_edges,
    write_cross_layer,
)
from tests.workers.streams import LAYERS, D, Stream, stream_of

MODELS = ["qwen3", "gpt_neox-parallel", "granite", "gemma2"]
SETS = "c: {model: m, path: clt, alias: c}, n: {model: m, format: neurons}"
BEST = "{any: [{top: 3, per: target}, {top: 1, per: target×head}, {top: 2, per: source}, {z: 3.2}]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and a cross-layer transcoder for each: the same files."""
    where = tmp_path_factory.mktemp("cross-layer")
    torch.set_num_threads(1)
    for name in MODELS:
        tiny_model(name).save_pretrained(where / name)
    random = Random(3)
    for layer in range(LAYERS):
        decoders = [random.rows(D, dead=4) for _ in range(layer, LAYERS)]
        write_cross_layer(where / "clt", layer, random.rows(D), decoders)
    return where


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Runs a command: (exit code, stdout, stderr)."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(list(map(str, arguments)))
        out = capsys.readouterr()
        return int(end.value.code or 0), out.out, out.err

    return command


def dictionaries(stream: Stream) -> list[Sited]:
    """The cross-layer transcoder, then the neurons."""
    random, found = Random(3), []
    for layer in range(LAYERS):
        decoders = [random.rows(D, dead=4) for _ in range(layer, LAYERS)]
        writes = [
            (2 + 2 * target, d @ stream.blocks[target].behind_mlp)
            for target, d in zip(range(layer, LAYERS), decoders, strict=True)
        ]
        found.append(Sited("c", layer, "mlp.in", {"in": random.rows(D)}, writes))
    return found + neurons(stream)


def spec(name: str, edges: str, sets: str = SETS) -> str:
    return f"atlas: 1\nmodels: {{m: {{path: {name}}}}}\ndictionaries: {{{sets}}}\nedges: {edges}\n"


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox-parallel", "granite"])
@pytest.mark.parametrize("keep", ["everything", BEST])
def test_every_weight_sums_the_decoders_below_its_reader(
    name: str, keep: str, folder: Path, tmp_path: Path
) -> None:
    stream = stream_of(name, folder / name)
    # The neurons are targets alone: their own edges are tested elsewhere, and are many.
    text = f"[{{types: [DIRECT, VIA_HEAD], from: [c], keep: {keep}}}]"
    built = build(spec(name, text), folder, tmp_path)
    every = dictionaries(stream)
    pairs = [pair for pair in edges(stream, every) if every[pair.source[0]].set == "c"]
    want = kept(rule_from_data(yaml.safe_load(keep)), every, pairs)
    assert len(want) > 100
    check_edges(built, every, want)


def test_promotes_sums_all_decoders_and_write_norm_is_of_all(folder: Path, tmp_path: Path) -> None:
    stream = stream_of("qwen3", folder / "qwen3")
    text = "[{types: [EMBEDS, PROMOTES], keep: {top: 61}}]"
    built = build(spec("qwen3", text, "c: {model: m, path: clt}"), folder, tmp_path)
    every = dictionaries(stream)[:LAYERS]
    promotes, embeds = (token_edges(built, every, table) for table in ("PROMOTES", "EMBEDS"))
    logits = stream.logits - stream.logits.mean(axis=0)
    for place, one in enumerate(every):
        np.testing.assert_allclose(promotes[place][0], one.omega @ stream.final_norm @ logits.T, atol=1e-5)
        rho = one.encoders["in"] @ stream.blocks[one.layer].mlp_norm.T
        np.testing.assert_allclose(embeds[place][0], rho @ stream.tokens.T, atol=1e-5)
    for row in built.table("features").to_pylist():
        place = [built.sets["c"].hash_of(layer) for layer in range(LAYERS)].index(row["dictionary"])
        length = np.linalg.norm(every[place].omega[row["number"]])
        assert row["write_norm"] == pytest.approx(length, rel=1e-12)


def test_behind_post_norms_it_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, run
) -> None:
    text = spec("gemma2", "[{types: [DIRECT], keep: everything}]", "c: {model: m, path: clt}")
    with pytest.raises(InputError) as caught:
        build(text, folder, tmp_path)
    assert "c: writes in 3 layers, and in Gemma2ForCausalLM a norm" in str(caught.value)
    assert not (tmp_path / "artifacts").exists()
    with pytest.raises(InputError, match="stands behind each MLP"):
        estimate(parse_spec(text, base=folder), rate=1e9)
    (tmp_path / "spec.yaml").write_text(text.replace("gemma2", str(folder / "gemma2")).replace(
        "path: clt", f"path: {folder / 'clt'}"))  # fmt: skip
    code, _, said = run("build", tmp_path / "spec.yaml", "--out", tmp_path / "g.atlas")
    assert code == 2
    assert "a norm with a scale of its own" in said
    assert not (tmp_path / "g.atlas").exists()


def test_a_build_and_its_estimate_from_the_command_line(folder: Path, tmp_path: Path, run) -> None:
    """The estimate counts pairs exactly; the atlas answers for a cross-layer latent."""
    keep = "[{types: [DIRECT, VIA_HEAD], keep: everything}, {types: [EMBEDS, PROMOTES], keep: {top: 2}}]"
    text = spec(str(folder / "qwen3"), keep, f"c: {{model: m, path: {folder / 'clt'}, alias: c}}")
    (tmp_path / "spec.yaml").write_text(text)
    stream = stream_of("qwen3", folder / "qwen3")
    pairs = list(edges(stream, dictionaries(stream)[:LAYERS]))
    figures = estimate(parse_spec(text), rate=1e9).tables["edges_by_type"].rows
    counted = {row[0]: row[1] for row in figures}
    assert counted["DIRECT"] == sum(pair.head < 0 for pair in pairs) == 3 * 36
    assert counted["VIA_HEAD"] == sum(pair.head >= 0 for pair in pairs) == 4 * 4 * 36
    code, _, said = run("build", tmp_path / "spec.yaml", "--out", tmp_path / "c.atlas")
    assert code == 0, said
    code, shown, said = run("edges", "c0[3]", "--atlas", tmp_path / "c.atlas", "--json")
    assert code == 0, said
    assert "m/c/L02.mlp/" in shown
