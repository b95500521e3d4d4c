"""transcoder_circuits' files, written here from known tensors under the library's class name, and read as the
format defines, in float64."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from ingest.dictionaries import At, Declared, Read, Space, describe_set
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from ingest.models import Norm
from tests.ingest.small_dictionaries import Facts, opened
from tests.ingest.torch_files import a_class, numbers, save

D, F = 8, 20
FACTS = Facts(n_layers=6)
LAYER_NORM = dataclasses.replace(FACTS, norm=Norm(centred=True, gain="weight", bias=True, eps=1e-5))
X = 2 * numbers(40, D, seed=9) + 0.7
MODULE, NAME = "sae_training.config", "LanguageModelSAERunnerConfig"
TRANSCODER = {
    "hook_point": "blocks.3.ln2.hook_normalized", "hook_point_layer": 3, "is_transcoder": True,
    "out_hook_point": "blocks.3.hook_mlp_out", "out_hook_point_layer": 3, "d_out": D,
}  # fmt: skip
SAE = {
    "hook_point": "blocks.3.hook_resid_post", "hook_point_layer": 3, "is_transcoder": False, "d_out": None,
    "out_hook_point": None, "out_hook_point_layer": None,
}  # fmt: skip


def state(transcoder=True, seed=0, dtype=torch.float32):
    """Random, no symmetry, biases far from zero."""
    made = {
        "W_enc": numbers(D, F, seed=seed + 1),
        "b_enc": 0.5 * numbers(F, seed=seed + 2),
        "W_dec": numbers(F, D, seed=seed + 3),
        "b_dec": numbers(D, seed=seed + 4),
    }
    if transcoder:
        made["b_dec_out"] = numbers(D, seed=seed + 5)
    return {key: value.to(dtype) for key, value in made.items()}


def write(path, tensors=None, kind="zip", values=None, plain=False, **cfg):
    """One file. A field of cfg that is `...` is left out; `plain`: cfg is a dictionary, not an object."""
    transcoder = cfg.get("is_transcoder", True) is True
    fields = {
        "model_name": "gpt2-small", **(TRANSCODER if transcoder else SAE), "d_in": D, "d_sae": F,
        "hook_point_head_index": None, "dataset_path": "corpus", "lr": 3e-4, "l1_coefficient": 1e-3,
        "device": torch.device("cuda:0"), "dtype": torch.float32, "use_ghost_grads": (False,),
        "is_sparse_connection": False, "total_training_tokens": 2_000_000, "run_name": "20-L1", **cfg,
    }  # fmt: skip
    fields = {key: value for key, value in fields.items() if value is not ...}
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = state(transcoder) if tensors is None else tensors
    with a_class(MODULE, NAME) as made:
        config = made()
        config.__dict__ |= fields
        whole = {"cfg": fields if plain else config, "state_dict": tensors}
        save(path, whole if values is None else values(config, tensors), kind)
    return path


def defined(tensors, x):
    """Activations and output by the format's definition, in float64."""
    f = {key: value.to(torch.float64).numpy() for key, value in tensors.items()}
    acts = np.maximum((x.to(torch.float64).numpy() - f["b_dec"]) @ f["W_enc"] + f["b_enc"], 0)
    return acts, acts @ f["W_dec"] + f.get("b_dec_out", f["b_dec"])


def close(dictionary, expected, x=X):
    acts = encode(dictionary, x)
    np.testing.assert_allclose(acts.numpy(), expected[0], atol=2e-5)
    np.testing.assert_allclose(decode(dictionary, acts, x)[0].numpy(), expected[1], atol=1e-4)
    assert (acts != 0).sum() == (expected[0] != 0).sum() > 0


def refused(path, facts=FACTS, **options):
    with pytest.raises(InputError) as caught:
        opened(path, facts, **options).verify()
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- what it computes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("a.pt", "zip"), ("a.pt", "old"), ("a.pkl.gz", "gzip"), ("a.pkl", "pickle")]
)
@pytest.mark.parametrize("transcoder", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_container_computes_what_the_format_defines(tmp_path, name, kind, transcoder, dtype):
    tensors = state(transcoder, dtype=dtype)
    found = opened(write(tmp_path / name, tensors, kind, is_transcoder=transcoder, dtype=dtype), FACTS)
    assert (found.format, found.layers, dict(found.sizes)) == ("transcoder_circuits", (3,), {3: F})
    assert found.kind == ("transcoder" if transcoder else "sae")
    dictionary = found.load(3)
    close(dictionary, defined(tensors, X))
    assert dictionary.signed is False
    assert found.layout.bytes == {3: 4 * sum(value.numel() for value in tensors.values())}
    assert found.layout.dtypes == (("F32",) if dtype == torch.float32 else ("F16",))


def test_a_transcoder_has_two_biases(tmp_path):
    """b_dec is subtracted from the input and not added; b_dec_out is added."""
    dictionary = opened(write(tmp_path / "a.pt"), FACTS).load(3)
    assert torch.equal(dictionary.b_in, state()["b_dec"])
    assert torch.equal(dictionary.writes[0].b_out, state()["b_dec_out"])
    tensors = state()
    for wrong in ({**tensors, "b_dec": tensors["b_dec"] * 0}, {**tensors, "b_dec_out": tensors["b_dec"]}):
        assert np.abs(defined(wrong, X)[1] - defined(tensors, X)[1]).max() > 0.1


def test_an_sae_has_one_on_both_sides(tmp_path):
    dictionary = opened(write(tmp_path / "a.pt", is_transcoder=False), FACTS).load(3)
    assert torch.equal(dictionary.b_in, state()["b_dec"])
    assert torch.equal(dictionary.writes[0].b_out, state()["b_dec"])
    assert dictionary.read == Read("resid_post", Space.RAW)
    assert [(one.layer, one.site, one.at) for one in dictionary.writes] == [(3, "resid_post", At.STREAM)]


def test_a_config_as_a_dictionary(tmp_path):
    """And one that does not know of transcoders: the tensors decide."""
    path = write(
        tmp_path / "sparse_autoencoder.pt", state(False), plain=True, **{**SAE, "is_transcoder": ...}
    )
    found = opened(path, FACTS)
    assert found.kind == "sae"
    close(found.load(3), defined(state(False), X))


# --- the folded model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("facts", [FACTS, LAYER_NORM, None])
def test_a_transcoder_reads_before_the_gain_whatever_the_norm(tmp_path, facts):
    """The folded model's norms have none; its `ln2.hook_normalized` is the same for LayerNorm and RMSNorm."""
    layout = describe_set(write(tmp_path / "a.pt"), facts)
    assert layout.read == Read("mlp.in", Space.NORMALISED)
    assert layout.writes == {3: ((3, "mlp", At.STREAM),)}
    assert layout.folded is True
    assert any("folded model" in note for note in layout.notes)
    assert "folded model" in layout.provenance["folded"]
    assert layout.provenance["model_name"] == "gpt2-small"


@pytest.mark.parametrize("hook", ["hook_resid_post", "hook_resid_pre", "hook_mlp_out", "hook_attn_out"])
def test_an_sae_of_a_centred_stream_reads_the_stream_as_it_is(tmp_path, hook):
    path = write(tmp_path / "a.pt", is_transcoder=False, hook_point=f"blocks.3.{hook}")
    centred = X - X.mean(dim=-1, keepdim=True)
    close(opened(path, LAYER_NORM).load(3), defined(state(False), centred))
    close(opened(path, FACTS).load(3), defined(state(False), X))  # an RMSNorm's stream has its mean
    assert np.abs(defined(state(False), X)[0] - defined(state(False), centred)[0]).max() > 0.1


def test_a_transcoder_of_the_stream_before_the_norm(tmp_path):
    path = write(tmp_path / "a.pt", hook_point="blocks.3.hook_resid_mid")
    dictionary = opened(path, LAYER_NORM).load(3)
    assert dictionary.read == Read("mlp.in", Space.RAW)
    close(dictionary, defined(state(), X - X.mean(dim=-1, keepdim=True)))


def test_headers_are_read_without_torch(tmp_path):
    for name, kind in (("a.pt", "zip"), ("a.pkl.gz", "gzip")):
        path = write(tmp_path / kind / name, kind=kind)
        code = f"""
import sys
from ingest.dictionaries import describe_set
print(dict(describe_set({str(path)!r}, None).sizes), "torch" in sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "{3: 20} False"


# --- where it stands ----------------------------------------------------------------------------------------


def test_a_folder_of_layers(tmp_path):
    """As the published ones are: one file each, beside what training left there."""
    for layer in (0, 2, 10):
        hook, out = f"blocks.{layer}.ln2.hook_normalized", f"blocks.{layer}.hook_mlp_out"
        write(
            tmp_path / f"final_sparse_autoencoder_gpt2-small_{hook}_20.pt", state(seed=layer),
            hook_point=hook, out_hook_point=out, hook_point_layer=layer, out_hook_point_layer=layer,
        )  # fmt: skip
    torch.save(numbers(F), tmp_path / "final_sparse_autoencoder_x_log_feature_sparsity.pt")
    torch.save({"optimizer": {}}, tmp_path / "state.pt")
    facts = dataclasses.replace(LAYER_NORM, n_layers=12)
    found = opened(tmp_path, facts)
    assert found.layers == (0, 2, 10)
    close(found.load(10), defined(state(seed=10), X))
    assert "holds 3 dictionaries, layer says 2 of one" in refused(tmp_path, facts, declared=Declared(layer=2))
    again = write(
        tmp_path / "deeper" / "sparse_autoencoder.pt",
        hook_point=hook,
        out_hook_point=out,
        hook_point_layer=10,
        out_hook_point_layer=10,
    )
    assert "layer 10 has 2 dictionaries" in refused(tmp_path, facts)
    write(again, is_transcoder=False)
    assert "several sites are read under one path" in refused(tmp_path, facts)


def test_a_transcoder_may_write_another_layer(tmp_path):
    path = write(tmp_path / "a.pt", out_hook_point="blocks.5.hook_mlp_out", out_hook_point_layer=5)
    assert opened(path, FACTS).layout.writes == {3: ((5, "mlp", At.STREAM),)}


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        ({"hook_point_layer": 2}, "of which layer? cfg.hook_point says 3, cfg.hook_point_layer says 2"),
        ({"out_hook_point_layer": 2}, "of which layer? cfg.out_hook_point says 3"),
        ({"out_hook_point": None}, "cfg.out_hook_point: is missing; say what it writes with writes"),
        ({"hook_point": None}, "cfg.hook_point: is missing; say what it reads with reads"),
        ({"hook_point": "blocks.3.mlp.hook_post"}, "cfg.hook_point: blocks.3.mlp.hook_post is the space of"),
        ({"hook_point": "blocks.3.attn.hook_z"}, "is without the values' biases"),
        ({"hook_point_head_index": 4}, "cfg.hook_point_head_index: 4, one head's output alone"),
        ({"is_transcoder": False}, "cfg.is_transcoder: false, but the tensors are W_dec, W_enc, b_dec"),
        ({"d_sae": 21}, "cfg.d_sae: 21, but W_enc is (8, 20)"),
        ({"d_in": 9}, "cfg.d_in: 9"),
        ({"d_out": 9}, "cfg.d_out: 9"),
        ({"d_in": "8"}, "cfg.d_in: expected a whole number"),
        ({"normalize_activations": "layer_norm"}, "cfg.normalize_activations: unknown key"),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path, cfg, said):
    line = refused(write(tmp_path / "a.pt", state(), **cfg))
    assert f"{tmp_path / 'a.pt'}: " in line
    assert said in line


def test_what_the_user_says_besides(tmp_path):
    path = write(tmp_path / "a.pt", hook_point=None, out_hook_point=None, out_hook_point_layer=None)
    found = opened(path, LAYER_NORM, declared=Declared(reads="ln2.hook_normalized", writes="mlp.hook_out"))
    assert found.layout.read == Read("mlp.in", Space.NORMALISED)
    assert found.layout.writes == {3: ((3, "mlp", At.MODULE),)}
    path = write(tmp_path / "a.pt")
    assert opened(path, LAYER_NORM, declared=Declared(reads="ln2.hook_normalized")).layers == (3,)
    assert "but reads says hook_resid_pre" in refused(path, declared=Declared(reads="hook_resid_pre"))


def test_types_declared_and_found(tmp_path):
    layout = opened(write(tmp_path / "a.pt", dtype=torch.bfloat16), FACTS).layout
    assert any("cfg says torch.bfloat16, the tensors are F32: they decide" in note for note in layout.notes)
    line = refused(write(tmp_path / "a.pt", {**state(), "b_dec": state()["b_dec"].double() / 3}))
    assert "b_dec: float64, and 6 of 8 numbers" in line
    assert "numbers are no float32" in line


# --- bad input ----------------------------------------------------------------------------------------------


def test_every_tensor_counts(tmp_path):
    for key in state(False):
        tensors = {name: value for name, value in state().items() if name != key}
        assert f"tensor missing: {key}" in refused(write(tmp_path / "a.pt", tensors))
    line = refused(write(tmp_path / "a.pt", {**state(), "threshold": torch.ones(F)}))
    assert "tensor left over: threshold" in line
    for key, value in state().items():
        line = refused(write(tmp_path / "a.pt", {**state(), key: value[..., None]}))
        assert f"{key} has shape" in line
    assert "the model's d_model is 16" in refused(write(tmp_path / "a.pt"), Facts(n_layers=6, d_model=16))


def test_values_that_are_not_finite(tmp_path):
    tensors = state()
    tensors["W_dec"][2, 1] = torch.nan
    assert "a.pt: W_dec[2, 1] is NaN" in refused(write(tmp_path / "a.pt", tensors))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda cfg, state: {"cfg": cfg}, "expected cfg and state_dict, found cfg"),
        (lambda cfg, state: {"cfg": cfg, "state_dict": state, "extra": 1}, "found cfg, state_dict, extra"),
        (lambda cfg, state: [cfg], "expected cfg and state_dict, found list"),
        (
            lambda cfg, state: {"cfg": 3, "state_dict": state},
            "cfg: expected the training script's configuration",
        ),
        (lambda cfg, state: {"cfg": cfg, "state_dict": 3}, "expected a state dict, tensors by name"),
        (lambda cfg, state: {"cfg": cfg, "state_dict": {**state, "n": 3}}, "expected a state dict"),
    ],
)
def test_a_file_of_other_things(tmp_path, values, said):
    assert said in refused(write(tmp_path / "sparse_autoencoder.pt", values=values))


@pytest.mark.parametrize(
    ("name", "kind"), [("sparse_autoencoder.pt", "zip"), ("sparse_autoencoder.pkl.gz", "gzip")]
)
def test_a_truncated_file_is_named(tmp_path, name, kind):
    path = write(tmp_path / name, kind=kind)
    data = path.read_bytes()
    for part in (0.1, 0.6, 0.99):
        path.write_bytes(data[: int(part * len(data))])
        assert f"{path}: truncated or damaged" in refused(tmp_path)


class Payload:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize(("name", "kind"), [("a.pt", "zip"), ("a.pt", "old"), ("a.pkl.gz", "gzip")])
@pytest.mark.parametrize("place", ["cfg", "state_dict", "beside"])
def test_a_payload_does_not_run(tmp_path, name, kind, place):
    """The class is known by name; that admits nothing within or beside it."""
    marker = tmp_path / "ran"
    payload = Payload(f"touch {marker}")

    def values(config, tensors):
        if place == "cfg":
            config.checkpoint_path = payload
        if place == "state_dict":
            tensors = {**tensors, "b_dec_out": payload}
        return {"cfg": config, "state_dict": tensors, **({"extra": payload} if place == "beside" else {})}

    path = write(tmp_path / "folder" / name, kind=kind, values=values)
    line = refused(path.parent)
    assert f"{path}: asks for {os.system.__module__}.system" in line
    assert not marker.exists()


@pytest.mark.parametrize(("module", "name"), [("sae_training.config", "Other"), ("other.config", NAME)])
def test_no_other_class_is_known(tmp_path, module, name):
    path = tmp_path / "sparse_autoencoder.pt"
    with a_class(module, name) as made:
        save(path, {"cfg": made(), "state_dict": state()})
    assert f"asks for {module}.{name}, which no dictionary needs" in refused(path)
