"""circuit-tracer's per-layer directory: read as its definition says, from files this test writes."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ingest.dictionaries import At, JumpReLU, Read, ReLU, Space, TopK, describe_set
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from tests.ingest.small_dictionaries import THRESHOLD, Facts, Outline, opened, tensors, write_set

X = torch.randn(7, 8, generator=torch.Generator().manual_seed(9))


def defined(values, x, k=None):
    """Activations and output by the format's definition, in float64: x @ W_enc.T + b_enc, gate, W_dec, x @
    W_skip.T."""
    f = {key: value.to(torch.float64).numpy() for key, value in values.items()}
    x = x.to(torch.float64).numpy()
    pre = x @ f["W_enc"].T + f["b_enc"]
    if THRESHOLD in f:
        acts = pre * (pre > f[THRESHOLD])
    elif k is not None:
        acts = np.where(pre >= np.sort(pre, axis=1)[:, -k][:, None], np.maximum(pre, 0), 0)
    else:
        acts = np.maximum(pre, 0)
    out = acts @ f["W_dec"] + f["b_dec"]
    return acts, out + x @ f["W_skip"].T if "W_skip" in f else out


@pytest.mark.parametrize(
    ("made", "config", "gate"),
    [
        ({}, {}, ReLU),
        ({"dtype": torch.bfloat16}, {"activation": "relu"}, ReLU),
        ({"dtype": torch.float16}, {}, ReLU),
        ({"threshold": True}, {}, JumpReLU),
        ({"threshold": True}, {"activation": "jumprelu"}, JumpReLU),
        ({"skip": True}, {}, ReLU),
        ({"threshold": True, "skip": True}, {}, JumpReLU),
        ({}, {"activation": "topk", "k": 4}, TopK),
        ({"skip": True}, {"activation": "topk", "k": 19}, TopK),
    ],
)
def test_every_variant_computes_what_the_format_defines(tmp_path, made, config, gate):
    layers = {layer: tensors(layer, **made) for layer in range(3)}
    found = opened(write_set(tmp_path / "set", layers, **config))
    assert found.layers == (0, 1, 2)
    assert dict(found.sizes) == {0: 20, 1: 20, 2: 20}
    for layer, values in layers.items():
        dictionary = found.load(layer)
        assert isinstance(dictionary.gate, gate)
        acts, out = defined(values, X, config.get("k"))
        np.testing.assert_allclose(encode(dictionary, X).numpy(), acts, atol=1e-5)
        np.testing.assert_allclose(decode(dictionary, encode(dictionary, X), X)[0].numpy(), out, atol=2e-5)
        assert dictionary.signed is False
        assert dictionary.rescalable is True


def test_skip_is_not_transposed_twice(tmp_path):
    """A random W_skip is not symmetric: the wrong way round moves the output by more than the tolerance
    above."""
    values = tensors(skip=True)
    turned = {**values, "W_skip": values["W_skip"].T.contiguous()}
    assert np.abs(defined(values, X)[1] - defined(turned, X)[1]).max() > 0.1


def test_threshold_is_strict_and_the_value_passes_whole(tmp_path):
    values = tensors(threshold=True)
    values["W_enc"][:] = 0
    values["b_enc"] = values[THRESHOLD].clone()
    values["b_enc"][0] += 0.5
    acts = encode(opened(write_set(tmp_path / "set", {0: values})).load(0), X[:1])[0]
    assert acts[0] == values["b_enc"][0]  # over: whole, not less the threshold
    assert (acts[1:] == 0).all()  # at the threshold: nothing


def test_negative_threshold_passes_negative_values(tmp_path):
    """circuit-tracer applies no ReLU beside the threshold; so such a set is signed."""
    values = tensors(threshold=True)
    values[THRESHOLD][3] = -10.0
    dictionary = opened(write_set(tmp_path / "set", {0: values})).load(0)
    acts, _ = defined(values, X)
    assert (acts[:, 3] < 0).any()
    np.testing.assert_allclose(encode(dictionary, X).numpy(), acts, atol=1e-5)
    assert dictionary.signed is True


@pytest.mark.parametrize(
    ("hook", "read"),
    [
        ("mlp.hook_in", Read("mlp.in", Space.NORMALISED_WITH_GAIN)),
        ("hook_resid_mid", Read("mlp.in", Space.RAW)),
        ("hook_mlp_in", Read("mlp.in", Space.RAW)),
    ],
)
@pytest.mark.parametrize(("out", "at"), [("mlp.hook_out", At.MODULE), ("hook_mlp_out", At.STREAM)])
def test_hooks_say_what_is_read_and_where_it_is_written(tmp_path, hook, read, out, at):
    folder = write_set(tmp_path / "set", {1: tensors()}, feature_input_hook=hook, feature_output_hook=out)
    dictionary = opened(folder).load(1)
    assert dictionary.read == read
    assert [(write.layer, write.site, write.at) for write in dictionary.writes] == [(1, "mlp", at)]


def test_weights_are_widened_exactly(tmp_path):
    values = tensors(dtype=torch.float16)
    dictionary = opened(write_set(tmp_path / "set", {0: values})).load(0)
    for mine, theirs in (
        (dictionary.encoders[0].W_enc, values["W_enc"]),
        (dictionary.writes[0].W_dec, values["W_dec"]),
        (dictionary.writes[0].b_out, values["b_dec"]),
    ):
        assert mine.dtype == torch.float32
        assert torch.equal(mine.to(torch.float64), theirs.to(torch.float64))


def test_loaded_weights_outlive_the_file(tmp_path):
    """Not a view of the mapped file: overwriting it would change, or crash, a running build."""
    folder = write_set(tmp_path / "set", {0: tensors()})
    dictionary = opened(folder).load(0)
    before = dictionary.encoders[0].W_enc.clone()
    path = folder / "layer_0.safetensors"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(dictionary.encoders[0].W_enc, before)


def test_a_gap_in_the_layers_is_said(tmp_path):
    found = opened(write_set(tmp_path / "set", {1: tensors()}))
    assert found.layers == (1,)
    assert found.notes == ("no dictionary for layer 0, 2 of 0 to 2",)
    assert opened(tmp_path / "set", layers=[1]).notes == ()  # asked for: nothing to say


def test_layers_chosen_are_read_alone(tmp_path):
    """A damaged layer that nobody asked for is no obstacle."""
    folder = write_set(tmp_path / "set", {layer: tensors(layer) for layer in range(3)})
    (folder / "layer_1.safetensors").write_bytes(b"")
    assert opened(folder, layers=[2, 0]).layers == (0, 2)
    with pytest.raises(InputError, match="layer_1"):
        opened(folder)


def test_key_names_model_set_layer_and_site(tmp_path):
    found = opened(write_set(tmp_path / "set", {2: tensors()}))
    assert found.key(2) == "small/tc/L02.mlp"
    with pytest.raises(InputError, match="no dictionary for layer 1; it has layers 2"):
        found.key(1)


# --- hashes -------------------------------------------------------------------------------------------------


def hash_of(folder, layers, model=None, name="tc", **config):
    from ingest.dictionaries import open_set

    return open_set(write_set(folder, layers, **config), name=name, model=model or Outline()).hash_of(0)


def test_hash_is_of_meaning_not_of_name_or_type_on_disk(tmp_path):
    half = tensors(dtype=torch.float16)
    wide = {key: value.float() for key, value in half.items()}
    assert hash_of(tmp_path / "a", {0: half}) == hash_of(tmp_path / "b", {0: wide}, name="other", scan="x")


def test_hash_changes_with_all_that_changes_an_edge_or_an_activation(tmp_path):
    values = tensors()
    turned = {**values, "W_enc": values["W_enc"].flip(0)}
    hashes = [
        hash_of(tmp_path / "plain", {0: values}),
        hash_of(tmp_path / "turned", {0: turned}),
        hash_of(tmp_path / "raw", {0: values}, feature_input_hook="hook_resid_mid"),
        hash_of(tmp_path / "joins", {0: values}, feature_output_hook="hook_mlp_out"),
        hash_of(tmp_path / "top", {0: values}, activation="topk", k=4),
        hash_of(tmp_path / "top5", {0: values}, activation="topk", k=5),
        hash_of(tmp_path / "jump", {0: {**values, THRESHOLD: torch.zeros(20)}}),
        hash_of(tmp_path / "skip", {0: {**values, "W_skip": torch.zeros(8, 8)}}),
        hash_of(tmp_path / "model", {0: values}, model=dataclasses.replace(Outline(), hash="b" * 64)),
    ]
    assert len(set(hashes)) == len(hashes)


def test_same_tensors_at_another_layer_are_another_dictionary(tmp_path):
    found = opened(write_set(tmp_path / "set", {0: tensors(), 1: tensors()}))
    assert found.hash_of(0) != found.hash_of(1)
    assert found.load(1).hash == found.hash_of(1)
    assert found.load(1).set == "tc"


def test_verify_reads_every_layer_and_knows_every_hash(tmp_path):
    folder = write_set(tmp_path / "set", {layer: tensors(layer) for layer in range(3)})
    found, seen = opened(folder), []
    found.verify(lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for layer in range(3):
        (folder / f"layer_{layer}.safetensors").unlink()
    assert found.hash == opened(write_set(tmp_path / "again", {n: tensors(n) for n in range(3)})).hash


# --- headers alone ------------------------------------------------------------------------------------------


def test_describe_gives_sizes_without_reading_weights(tmp_path):
    folder = write_set(
        tmp_path / "set", {0: tensors(threshold=True), 2: tensors(size=30)}, scan="s", model_name="m"
    )
    layout = describe_set(folder, Facts())
    assert dict(layout.sizes) == {0: 20, 2: 30}
    assert layout.bytes[0] == 4 * (20 * 8 + 20 + 20 * 8 + 8 + 20)
    assert (layout.format, layout.kind, layout.dtypes) == ("circuit-tracer", "transcoder", ("F32",))
    assert layout.activation == "ReLU or JumpReLU"
    assert dict(layout.provenance) == {"scan": "s", "model_name": "m"}


def test_describe_imports_no_torch(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()})
    program = (
        "import sys\n"
        "from types import SimpleNamespace as N\n"
        "from ingest.dictionaries import describe_set\n"
        "facts = N(n_layers=3, d_model=8, d_mlp=12, architecture='S', parallel=False, gated=True,"
        f" activation='silu')\nassert describe_set({str(folder)!r}, facts).sizes == {{0: 20}}\n"
        "assert describe_set(None, facts, format='neurons').sizes == {0: 12, 1: 12, 2: 12}\n"
        "assert not {'torch', 'transformers', 'pandas'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_file_replaced_after_opening_is_noticed(tmp_path):
    folder = write_set(tmp_path / "set", {0: tensors()})
    found = opened(folder)
    save_file(tensors(size=21), str(folder / "layer_0.safetensors"))
    with pytest.raises(InputError, match=r"layer_0\.safetensors: has changed since it was opened"):
        found.load(0)


def test_listed_files_named_for_other_layers_are_refused(tmp_path):
    files = ["layer_1.safetensors", "layer_0.safetensors"]
    folder = write_set(tmp_path, {0: tensors(), 1: tensors(1)}, transcoders=files)
    with pytest.raises(InputError, match=r"layer_1\.safetensors stands in the place of layer 0"):
        opened(folder)
