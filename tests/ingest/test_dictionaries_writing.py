"""Dictionaries written in two public layouts and read back by our own readers: they compute the same.

What the layouts mean is in test_dictionaries_written_files.py, without our readers.
"""

import dataclasses
import itertools
import json

import pytest
import torch
import yaml

from ingest.dictionaries import (
    At,
    JumpReLU,
    LayerNormInput,
    Read,
    RescaledInput,
    Space,
    open_set,
)
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.hashing import dictionary_hash
from ingest.dictionaries.writing import write_circuit_tracer, write_saelens
from ingest.errors import InputError
from tests.ingest.small_dictionaries import RMS_NORM, Outline
from tests.ingest.written_dictionaries import (
    FACTS,
    GAIN,
    GATES,
    LAYER_NORM,
    NORMALISED,
    RAW,
    D,
    F,
    X,
    back,
    check_same,
    made,
    place,
    random,
    sae,
)


def check_again(again, write, folder):
    """Written once more, what was read back has the same hash."""
    once = write(folder, [again], facts=FACTS)
    (twice,) = back(once, "circuit-tracer" if write is write_circuit_tracer else "saelens").values()
    assert dictionary_hash(twice, "m") == dictionary_hash(again, "m")
    assert not [note for note in once.notes if "config.yaml" not in note and "circuit-tracer" not in note]


# --- circuit-tracer -----------------------------------------------------------------------------------------

MLP_GATES = [gate for gate in GATES if gate not in ("abstopk", "gated")]
UNCHANGED = {"relu", "jumprelu", "negative thresholds", "topk"}  # by circuit-tracer's own JumpReLU


@pytest.mark.parametrize("at", list(At))
@pytest.mark.parametrize("read", [GAIN, NORMALISED, RAW], ids=lambda read: str(read.space))
@pytest.mark.parametrize("gate", MLP_GATES)
def test_circuit_tracers_layout_computes_what_was_written(gate, read, at, tmp_path):
    for number, (skip, b_in) in enumerate(itertools.product((False, True), (None, "own"))):
        one = made(0, gate, read, ("mlp", at), skip=skip, b_in=b_in)
        written = write_circuit_tracer(tmp_path / str(number), [one], facts=FACTS)
        (again,) = back(written, "circuit-tracer").values()
        check_same(again, one)
        assert place(again) == place(one)
        assert again.b_in is None
        told = " ".join(written.notes)
        assert ("b_in is folded" in told) is (b_in is not None)
        assert ("`k: 4`" in told and "ReLU alone" in told) is (gate == "topk")
        assert ("20 equal ones" in told) is gate.startswith("one ")
        assert ("written as 0" in told) is (gate == "negative thresholds with relu")
        if gate in UNCHANGED and b_in is None:
            assert dictionary_hash(again, "m") == dictionary_hash(one, "m")
        check_again(again, write_circuit_tracer, tmp_path / f"{number}-again")


def test_several_layers_are_one_set_and_notes_name_the_layers(tmp_path):
    layers = [made(0), made(1, "jumprelu", b_in="own"), made(2, "one threshold", skip=True)]
    extra = {"model_name": "small", "scan": "a scan", "model_hash": Outline().hash}
    written = write_circuit_tracer(tmp_path / "deep" / "set", layers, extra=extra)
    assert sorted(path.name for path in written.folder.iterdir()) == [
        "config.yaml",
        *(f"layer_{layer}.safetensors" for layer in range(3)),
    ]
    assert [path.name for path in written.folder.parent.iterdir()] == ["set"]
    for again, one in zip(back(written, "circuit-tracer").values(), layers, strict=True):
        check_same(again, one)
    assert [note for note in written.notes if note.startswith("layer 1: b_in is folded")]
    assert [note for note in written.notes if note.startswith("layer 2: one threshold")]
    config = yaml.safe_load((written.folder / "config.yaml").read_text())
    assert {key: config[key] for key in extra} == extra
    assert config["model_kind"] == "transcoder_set"
    assert "activation" not in config


def test_a_gap_is_told_as_circuit_tracer_wants_every_layer(tmp_path):
    whole = write_circuit_tracer(tmp_path / "whole", [made(1), made(0)])
    gap = write_circuit_tracer(tmp_path / "gap", [made(0), made(2)])
    assert ["layers are missing" in " ".join(one.notes) for one in (whole, gap)] == [False, True]


@pytest.mark.parametrize("given", [torch.tensor(0.9), torch.tensor([0.9]), 0.5 + random(7, F).abs()])
@pytest.mark.parametrize("skip", [False, True])
def test_topk_becomes_jumprelu_with_the_thresholds_given(given, skip, tmp_path):
    one = made(0, "topk", skip=skip, b_in="own")
    meant = dataclasses.replace(one, gate=JumpReLU(given.expand(F).clone(), relu_too=True))
    ours = write_circuit_tracer(tmp_path / "ct", [one], topk="jumprelu", thresholds={0: given})
    lens = write_saelens(tmp_path / "lens", [one], thresholds={0: given})
    for written, format in ((ours, "circuit-tracer"), (lens, "saelens")):
        (again,) = back(written, format).values()
        check_same(again, meant)
        assert "TopK 4 is written as JumpReLU" in written.notes[0]


@pytest.mark.parametrize("centred", [False, True])
def test_the_place_before_the_gain_has_no_name_of_its_own_in_circuit_tracers_config(centred, tmp_path):
    facts = dataclasses.replace(FACTS, norm=LAYER_NORM if centred else RMS_NORM)
    told = write_circuit_tracer(tmp_path / "told", [made(0, read=NORMALISED)])
    assert "right for the first alone" in " ".join(told.notes)
    if centred:
        with pytest.raises(InputError, match=r"ln2\.hook_normalized is behind it .* write_saelens"):
            write_circuit_tracer(tmp_path / "refused", [made(0, read=NORMALISED)], facts=facts)
    else:
        assert write_circuit_tracer(tmp_path / "set", [made(0, read=NORMALISED)], facts=facts).notes == ()


def test_a_parallel_blocks_mlp_input_and_a_stream_that_an_mlp_reads(tmp_path):
    parallel = dataclasses.replace(FACTS, parallel=True)
    written = write_circuit_tracer(tmp_path / "parallel", [made(0, read=RAW)], facts=parallel)
    (again,) = back(written, "circuit-tracer", parallel).values()
    assert again.read == RAW
    assert "use_hook_mlp_in" in written.notes[0]
    stream = made(0, read=Read("resid_mid", Space.RAW))
    for write, format in ((write_circuit_tracer, "circuit-tracer"), (write_saelens, "saelens")):
        written = write(tmp_path / format, [stream])
        (again,) = back(written, format).values()
        check_same(again, stream)
        assert again.read == RAW
        assert "read back as the MLP's input" in written.notes[0]


# --- SAELens ------------------------------------------------------------------------------------------------

SAE_GATES = [gate for gate in GATES if gate not in ("negative thresholds", "one negative threshold")]
SAE_PLACES = [
    ("embed", At.STREAM), ("resid_pre", At.STREAM), ("resid_mid", At.STREAM), ("resid_post", At.STREAM),
    ("mlp", At.MODULE), ("mlp", At.STREAM), ("attn", At.MODULE), ("attn", At.STREAM),
    ("attn.z", At.MODULE),
]  # fmt: skip
# SAELens' JumpReLU applies ReLU as well.
UNCHANGED_SAES = {"relu", "jumprelu with relu", "negative thresholds with relu", "topk", "abstopk"}


@pytest.mark.parametrize(("site", "at"), SAE_PLACES)
@pytest.mark.parametrize("gate", SAE_GATES)
def test_saelens_layout_computes_what_was_written_of_saes(gate, site, at, tmp_path):
    layer = 0 if site == "embed" else 1
    for b_in in (None, "own", "b_out"):
        one = sae(layer, gate, site, at, b_in=b_in)
        written = write_saelens(tmp_path / str(b_in), [one], facts=FACTS)
        assert sorted(path.name for path in written.folder.iterdir()) == [
            "cfg.json",
            "sae_weights.safetensors",
        ]
        (again,) = back(written, "saelens").values()
        check_same(again, one)
        assert place(again) == place(one)
        assert again.kind == "sae"
        assert (again.b_in is not None) is (b_in == "b_out")
        assert ("b_in is folded" in " ".join(written.notes)) is (b_in == "own")
        if gate in UNCHANGED_SAES and b_in != "own":
            assert dictionary_hash(again, "m") == dictionary_hash(one, "m")
        if gate != "gated":  # whose logarithm rounds
            check_again(again, write_saelens, tmp_path / f"{b_in}-again")


TRANSCODER_PLACES = {
    "mlp": (GAIN, ("mlp", At.MODULE)),
    "mlp before the gain": (NORMALISED, ("mlp", At.STREAM)),
    "mlp before the norm": (RAW, ("mlp", At.STREAM)),
    "attention": (Read("attn.in", Space.NORMALISED_WITH_GAIN), ("attn", At.MODULE)),
    "attention before the gain": (Read("attn.in", Space.NORMALISED), ("attn", At.STREAM)),
    "a whole block": (Read("resid_pre", Space.RAW), ("resid_post", At.STREAM)),
    "attention's output to the MLP's": (Read("attn.out", Space.BRANCH_OUTPUT), ("mlp", At.MODULE)),
    "one stream, with a skip": (Read("resid_post", Space.RAW), ("resid_post", At.STREAM)),
}


@pytest.mark.parametrize("norm", [RMS_NORM, LAYER_NORM], ids=["rms", "layer norm"])
@pytest.mark.parametrize("where", list(TRANSCODER_PLACES))
@pytest.mark.parametrize("gate", ["relu", "jumprelu", "negative thresholds with relu", "one threshold"])
def test_saelens_layout_computes_what_was_written_of_transcoders(gate, where, norm, tmp_path):
    facts = dataclasses.replace(FACTS, norm=norm)
    read, write = TRANSCODER_PLACES[where]
    for skip, b_in in itertools.product(
        (True,) if "skip" in where else (False, True), (None, "own", "b_out")
    ):
        one = made(2, gate, read, write, skip=skip, b_in=b_in)
        written = write_saelens(tmp_path / f"{skip}-{b_in}", [one], facts=facts)
        (again,) = back(written, "saelens", facts).values()
        check_same(again, one)
        assert place(again) == place(one)
        assert again.kind == "transcoder"
        assert again.b_in is None
        assert ("b_in is folded" in " ".join(written.notes)) is (b_in is not None)


@pytest.mark.parametrize("norm", [LayerNormInput, RescaledInput])
@pytest.mark.parametrize("as_sae", [True, False])
def test_saelens_own_norms_of_the_input_are_kept(norm, as_sae, tmp_path):
    kept = norm(restores=as_sae) if norm is LayerNormInput else norm(D**0.5, restores=as_sae)
    for b_in in (None, "own", "b_out"):
        one = sae(b_in=b_in, input_norm=kept) if as_sae else made(skip=True, b_in=b_in, input_norm=kept)
        (again,) = back(write_saelens(tmp_path / str(b_in), [one]), "saelens").values()
        check_same(again, one)
        assert again.input_norm == kept


def test_several_saes_have_a_folder_each_and_one_model(tmp_path):
    layers = [sae(layer, gate) for layer, gate in enumerate(["relu", "topk", "jumprelu"])]
    extra = {"model_name": "small", "model_hash": Outline().hash}
    written = write_saelens(tmp_path / "saes", layers, extra=extra)
    assert sorted(path.name for path in written.folder.iterdir()) == ["layer_0", "layer_1", "layer_2"]
    for again, one in zip(back(written, "saelens").values(), layers, strict=True):
        check_same(again, one)
    other = Outline(FACTS, hash="b" * 64)
    with pytest.raises(InputError, match="model_hash: made for the model aaaa"):
        open_set(written.folder, name="back", model=other)


@pytest.mark.parametrize(
    ("facts", "hook", "site", "told"),
    [
        (FACTS, "hook_embed", "embed", None),
        (
            dataclasses.replace(FACTS, positions="learned"),
            "blocks.0.hook_resid_pre",
            "resid_pre",
            "same vectors",
        ),
        (
            dataclasses.replace(FACTS, embedding_norm=True),
            "blocks.0.hook_resid_pre",
            "resid_pre",
            "same vectors",
        ),
        (None, "hook_embed", "embed", "of a model with learnt positions"),
    ],
)
def test_the_embedding_is_named_by_what_is_added_to_it(facts, hook, site, told, tmp_path):
    written = write_saelens(tmp_path / "sae", [sae(0, site="embed")], facts=facts)
    config = json.loads((written.folder / "cfg.json").read_text())
    assert config["metadata"]["hook_name"] == hook
    (again,) = back(written, "saelens").values()
    assert (again.read.site, again.writes[0].site, again.kind) == (site, site, "sae")
    assert (told is None) is (written.notes == ())
    assert told is None or told in written.notes[0]


def test_what_attention_reads_before_its_norm_is_the_stream(tmp_path):
    one = made(read=Read("attn.in", Space.RAW), write=("attn", At.STREAM))
    written = write_saelens(tmp_path / "tc", [one])
    (again,) = back(written, "saelens").values()
    check_same(again, one)
    assert again.read == Read("resid_pre", Space.RAW)
    assert "the same vectors" in written.notes[0]


def test_a_top_k_by_decoder_norm_is_scaled_and_its_output_stays(tmp_path):
    norm = 0.3 + random(8, F).abs()
    one = sae(gate="topk", b_in="own", decoder_norm_in_gate=norm)
    written = write_saelens(tmp_path / "sae", [one])
    (again,) = back(written, "saelens").values()
    wanted, found = encode(one, X), encode(again, X)
    assert (found - wanted * norm).abs().max() <= 1e-6 * found.abs().max()
    out = decode(one, wanted, X)[0]
    assert (decode(again, found, X)[0] - out).abs().max() <= 1e-6 * out.abs().max()
    assert "chosen by activation times decoder norm" in written.notes[0]
