"""What no layout can say is refused before anything is written, weights in a shorter type are rounded once,
and a folder is there whole or not at all."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from ingest.dictionaries import (
    At,
    Gated,
    GatedMLP,
    GroupMax,
    JumpReLU,
    LayerNormInput,
    Pointwise,
    Read,
    RescaledInput,
    Space,
    TopK,
    open_set,
)
from ingest.dictionaries.writing import write_circuit_tracer, write_saelens
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Outline
from tests.ingest.written_dictionaries import (
    FACTS,
    RAW,
    F,
    back,
    check_same,
    made,
    sae,
)


def half_rounded(dictionary, kind):
    """The original with its weights rounded."""
    rounded = lambda tensor: tensor.to(kind).float()  # noqa: E731
    encoder, write = dictionary.encoders[0], dictionary.writes[0]
    return dataclasses.replace(
        dictionary,
        encoders=(dataclasses.replace(encoder, W_enc=rounded(encoder.W_enc)),),
        writes=(dataclasses.replace(write, W_dec=rounded(write.W_dec)),),
        W_skip=None if dictionary.W_skip is None else rounded(dictionary.W_skip),
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("gate", ["relu", "jumprelu", "topk", "one threshold"])
@pytest.mark.parametrize("b_in", [None, "own"])
def test_rounded_weights_compute_what_the_rounded_dictionary_does(dtype, gate, b_in, tmp_path):
    kind = getattr(torch, dtype)
    one = made(0, gate, skip=True, b_in=b_in)
    written = [(write_circuit_tracer(tmp_path / "ct", [one], dtype=dtype), "circuit-tracer", one)]
    if gate != "topk":
        written.append((write_saelens(tmp_path / "lens", [one], dtype=dtype), "saelens", one))
    written.append(
        (write_saelens(tmp_path / "sae", [again := sae(gate=gate)], dtype=dtype), "saelens", again)
    )
    for done, format, original in written:
        found = open_set(done.folder, name="back", model=Outline(FACTS))
        assert found.format == format
        assert found.layout.dtypes == (("F16" if dtype == "float16" else "BF16"), "F32")
        check_same(found.load(found.layers[0]), half_rounded(original, kind))
        assert f"weights are rounded to {dtype}" in " ".join(done.notes)
    with pytest.raises(AssertionError):  # the rounding is there to be seen
        check_same(found.load(found.layers[0]), original)


def test_weights_that_are_of_the_type_already_are_not_said_to_be_rounded(tmp_path):
    one = half_rounded(made(0, skip=True), torch.float16)
    assert write_circuit_tracer(tmp_path / "set", [one], dtype="float16").notes == ()


# --- refused --------------------------------------------------------------------------------------------


def changed(dictionary, **tensors):
    """With other values at [1, 2] of W_enc or W_dec, or at [1] of b_out."""
    encoder, write = dictionary.encoders[0], dictionary.writes[0]
    for key, value in tensors.items():
        old = encoder.W_enc if key == "W_enc" else getattr(write, key)
        new = old.clone()
        new[(1, 2) if new.dim() == 2 else (1,)] = value
        if key == "W_enc":
            encoder = dataclasses.replace(encoder, W_enc=new)
        else:
            write = dataclasses.replace(write, **{key: new})
    return dataclasses.replace(dictionary, encoders=(encoder,), writes=(write,))


def neurons():
    up = dataclasses.replace(made().encoders[0], reading="up")
    gate = dataclasses.replace(up, reading="gate")
    return dataclasses.replace(made(), encoders=(gate, up), gate=GatedMLP("silu"))


def cross_layer():
    one = made()
    return dataclasses.replace(one, writes=(*one.writes, dataclasses.replace(one.writes[0], layer=2)))


OVERFLOW = r"layer 1: W_enc\[1, 2\] is 100000, and float16 ends at 65504; write it as bfloat16 or float32"
NAN = r"layer 1: b_out\[1\] is nan; expected finite weights"
HUGE = changed(made(), W_dec=3.4028e38)
BOTH = [
    ("no dictionary to write", [], {}),
    ("two dictionaries for layer 1", [made(), made()], {}),
    ("dtype: 'float61' is not known; did you mean 'float16'", [made()], {"dtype": "float61"}),
    (OVERFLOW, [made(0), changed(made(), W_enc=1e5)], {"dtype": "float16"}),
    (r"W_dec\[1, 2\] is -70000", [changed(made(), W_dec=-7e4)], {"dtype": "float16"}),
    (r"W_dec\[1, 2\] is 3.4028e\+38, and bfloat16", [HUGE], {"dtype": "bfloat16"}),
    (NAN, [changed(made(), b_out=torch.nan)], {}),
    ("threshold.* is inf", [made(gate=JumpReLU(torch.full((F,), torch.inf), True))], {}),
    ("writes to layers 1, 2; cross-layer", [cross_layer()], {}),
    ("has the gate GatedMLP", [neurons()], {}),
    ("has the gate Pointwise", [made(gate=Pointwise("gelu"))], {}),
    ("has the gate GroupMax", [made(gate=GroupMax(4))], {}),
    ("gated", [made(gate="gated")], {}),
]  # fmt: skip
BY_MAGNITUDE = r"its TopK keeps negative values"
TOPK = [made(gate="topk")]
GIVEN = lambda layer, values: {"topk": "jumprelu", "thresholds": {layer: values}}  # noqa: E731
CIRCUIT_TRACER = [
    (r"holds transcoders of MLPs alone; write it with write_saelens", [sae()], {}),
    (r"reads attn\.z and writes attn\.z", [sae(site="attn.z", at=At.MODULE)], {}),
    ("and writes resid_post", [made(write=("resid_post", At.STREAM))], {}),
    ("config.yaml has one hook for all", [made(0), made(1, read=RAW)], {}),
    ("config.yaml has one hook for all", [made(0), made(1, write=("mlp", At.STREAM))], {}),
    ("layers have no TopK, TopK 4; config.yaml has one", [made(0), made(1, "topk")], {}),
    ("layers have TopK 4, TopK 5; config.yaml has one", [made(0, "topk"), made(1, TopK(5))], {}),
    ("normalises its input", [made(input_norm=LayerNormInput(restores=False))], {}),
    ("extra: modelname: unknown key; did you mean 'model_name'", [made()], {"extra": {"modelname": "x"}}),
    ("topk: expected keep or jumprelu, found 'drop'", [made()], {"topk": "drop"}),
    ("no thresholds for layer 1", TOPK, {"topk": "jumprelu"}),
    ("no thresholds for layer 1", TOPK, GIVEN(0, torch.ones(F))),
    (r"have shape \(19,\); expected \(20,\)", TOPK, GIVEN(1, torch.ones(19))),
    ("not all finite", TOPK, GIVEN(1, torch.tensor(torch.nan))),
    (BY_MAGNITUDE, [made(gate="abstopk")], {}),
    (BY_MAGNITUDE, [made(gate="abstopk")], GIVEN(1, torch.ones(F))),
    ("weighs a latent by 0", [made(gate="topk", decoder_norm_in_gate=torch.zeros(F))], {}),
]  # fmt: skip
NO_HOOK = made(read=Read("resid_mid", Space.NORMALISED))
SAELENS = [
    ("no thresholds for layer 1, and TopK 4", [made(gate="topk")], {}),
    ("20 thresholds are negative .* circuit-tracer's layout", [made(gate="one negative threshold")], {}),
    (r"\d+ thresholds are negative", [sae(gate="negative thresholds")], {}),
    ("neither of the largest above 0 nor", [sae(gate=TopK(4, relu_too=False))], {}),
    ("extra: hook_name: is written from the dictionary", [sae()], {"extra": {"hook_name": "x"}}),
    ("the norm of the input undone", [sae(input_norm=LayerNormInput(restores=False))], {}),
    ("the norm of the input not undone", [made(input_norm=LayerNormInput())], {}),
    ("an eps of 1e-5", [sae(input_norm=LayerNormInput(eps=1e-6))], {}),
    (r"a norm of sqrt\(8\)", [sae(input_norm=RescaledInput(8.0))], {}),
    (r"reads resid_mid \(normalised\), which no hook shows", [NO_HOOK], {}),
    ("a gate's scale is not above 0", [sae(gate=Gated(torch.zeros(F), torch.zeros(F)))], {}),
]  # fmt: skip
CASES = [
    *((write, *case) for write in (write_circuit_tracer, write_saelens) for case in BOTH),
    *((write_circuit_tracer, *case) for case in CIRCUIT_TRACER),
    *((write_saelens, *case) for case in SAELENS),
]


@pytest.mark.parametrize(("write", "message", "dictionaries", "options"), CASES)
def test_what_cannot_be_said_is_refused_in_one_line_before_anything_is_written(
    write, message, dictionaries, options, tmp_path
):
    with pytest.raises(InputError) as caught:
        write(tmp_path / "set", dictionaries, **options)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path):
    written = write_circuit_tracer(tmp_path / "set", [made(0)])
    before = {path.name: path.read_bytes() for path in written.folder.iterdir()}
    for write in (write_circuit_tracer, write_saelens):
        with pytest.raises(InputError, match="set: exists"):
            write(written.folder, [made(0, "topk")])
    assert {path.name: path.read_bytes() for path in written.folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    assert back(write_saelens(tmp_path / "empty", [sae()]), "saelens").keys() == {1}


@pytest.mark.parametrize("write", [write_circuit_tracer, write_saelens])
def test_nothing_half_written_stays_where_a_disk_is_full(write, tmp_path, monkeypatch):
    real, calls = Path.write_text, []

    def full(path, text, **options):
        calls.append(path)
        real(path, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(InputError, match=r"set: cannot be written \(No space left on device\)"):
        write(tmp_path / "set", [made(0), made(1)])
    assert calls
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "file" / "set", [made(0)])
