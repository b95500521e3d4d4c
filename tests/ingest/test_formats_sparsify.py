"""EleutherAI's sparsify, written from known tensors in its layout; every expectation is computed here, in
float64, from those tensors."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from ingest.dictionaries import At, GroupMax, Read, Space, TopK
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.layout import Declared
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Facts, opened

D, F, K = 8, 24, 4
CONFIG = {
    "activation": "topk", "expansion_factor": 3, "normalize_decoder": True, "num_latents": 0, "k": K,
    "multi_topk": False, "skip_connection": False, "transcode": False, "d_in": D,
}  # fmt: skip
X = torch.randn(40, D, generator=torch.Generator().manual_seed(7)) * torch.logspace(-1, 1, 40)[:, None]


def tensors(seed=0, skip=False, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    found = {
        "encoder.weight": random(F, D),
        "encoder.bias": 0.5 * random(F),
        "W_dec": random(F, D),
        "b_dec": random(D),
    }
    if skip:
        found["W_skip"] = random(D, D)
    return {key: value.to(dtype) for key, value in found.items()}


def write(folder, values=None, without=(), **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors() if values is None else values, str(folder / "sae.safetensors"))
    keys = {key: value for key, value in {**CONFIG, **config}.items() if key not in without}
    (folder / "cfg.json").write_text(json.dumps(keys))
    return folder


def expected(values, transcode=False, groups=0, signed=False):
    """(activations, outputs) in float64, by loops over tokens."""
    values = {key: value.double() for key, value in values.items()}
    x = X.double()
    pre = (x if transcode else x - values["b_dec"]) @ values["encoder.weight"].T + values["encoder.bias"]
    acts = torch.zeros_like(pre)
    for token, row in enumerate(pre):
        if groups:
            size = F // groups
            kept = [max(range(g * size, (g + 1) * size), key=lambda j: row[j]) for g in range(groups)]
        else:
            kept = sorted(range(F), key=lambda j: -abs(row[j]) if signed else -row[j])[:K]
        for j in kept:
            acts[token, j] = row[j] if signed else max(row[j], 0.0)
    out = acts @ values["W_dec"] + values["b_dec"]
    return acts, out + x @ values["W_skip"].T if "W_skip" in values else out


def check(folder, values, facts=None, declared=None, **meaning):
    found = opened(folder, facts, **({"declared": declared} if declared else {}))
    dictionary = found.load(found.layers[0])
    acts, out = expected(values, **meaning)
    got = encode(dictionary, X)
    assert (got - acts).abs().max() < 2e-5
    assert (decode(dictionary, got, X)[0] - out).abs().max() < 5e-5
    assert torch.equal((got != 0).sum(-1), (acts != 0).sum(-1))
    return found, dictionary


def test_an_sae_subtracts_its_decoder_bias_from_the_input(tmp_path):
    values = tensors()
    found, dictionary = check(write(tmp_path / "layers.2", values), values)
    assert (found.format, found.kind, found.layers) == ("sparsify", "sae", (2,))
    assert dictionary.read == Read("resid_post", Space.RAW)
    assert found.layout.writes == {2: ((2, "resid_post", At.STREAM),)}
    assert found.layout.l0 == {2: 4.0}
    assert found.layout.bytes == {2: 4 * sum(value.numel() for value in values.values())}


def test_a_transcoder_does_not(tmp_path):
    values = tensors(1)
    found, dictionary = check(
        write(tmp_path / "layers.1.mlp", values, transcode=True), values, transcode=True
    )
    assert (found.kind, dictionary.b_in) == ("transcoder", None)
    assert dictionary.read == Read("mlp.in", Space.NORMALISED_WITH_GAIN)
    assert found.layout.writes == {1: ((1, "mlp", At.MODULE),)}


@pytest.mark.parametrize("transcode", [False, True])
def test_the_skip_is_transposed_and_reads_the_raw_input(tmp_path, transcode):
    values = tensors(2, skip=True)
    folder = write(tmp_path / "layers.1.mlp", values, transcode=transcode, skip_connection=True)
    found, _ = check(folder, values, transcode=transcode)
    assert found.layout.activation == "TopK 4 with skip"


def test_groupmax_keeps_one_latent_of_each_group(tmp_path):
    values = tensors(3)
    folder = write(tmp_path / "h.0.mlp", values, transcode=True, activation="groupmax", k=6)
    _, dictionary = check(folder, values, transcode=True, groups=6)
    assert dictionary.gate == GroupMax(6)


def test_signed_latents_of_early_versions_are_chosen_by_magnitude(tmp_path):
    values = tensors(4)
    without = ("activation", "transcode", "skip_connection")  # as the versions that had it
    _, dictionary = check(write(tmp_path / "layers.0", values, without, signed=True), values, signed=True)
    assert dictionary.gate == TopK(K, by_magnitude=True, relu_too=False)
    assert (encode(dictionary, X) < 0).any()


def test_multi_topk_concerns_training_only(tmp_path):
    values = tensors()
    found, _ = check(write(tmp_path / "layers.2", values, multi_topk=True), values)
    assert "multi_topk is a loss in training: 4 latents are kept, not 16" in found.notes


def test_bfloat16_is_widened_exactly(tmp_path):
    values = tensors(dtype=torch.bfloat16)
    found, dictionary = check(write(tmp_path / "layers.2", values), values)
    assert found.layout.dtypes == ("BF16",)
    assert torch.equal(dictionary.encoders[0].W_enc, values["encoder.weight"].float())


def test_one_folder_for_each_layer_makes_a_set(tmp_path):
    for layer in (0, 2, 10):
        write(tmp_path / f"layers.{layer}.mlp", tensors(layer), transcode=True)
    found = opened(tmp_path, Facts(n_layers=12))
    assert found.layers == (0, 2, 10)
    assert torch.equal(found.load(10).writes[0].W_dec, tensors(10)["W_dec"])
    assert opened(tmp_path, Facts(n_layers=12), layers=[2]).layers == (2,)


def test_runs_of_several_seeds_are_told_apart_by_their_path(tmp_path):
    for seed in (0, 1):
        write(tmp_path / "layers.1.mlp" / f"seed{seed}", tensors(seed), transcode=True)
    with pytest.raises(InputError, match=r"layer 1 has 2 dictionaries: .*seed0, .*seed1; .* deeper path"):
        opened(tmp_path)
    found = opened(tmp_path / "layers.1.mlp" / "seed1")
    assert found.layers == (1,) and torch.equal(found.load(1).writes[0].W_dec, tensors(1)["W_dec"])


def test_a_file_means_its_folder(tmp_path):
    folder = write(tmp_path / "layers.2")
    assert opened(folder / "sae.safetensors").hash == opened(folder).hash


def test_the_users_word_is_above_the_folders_name(tmp_path):
    values = tensors()
    folder = write(tmp_path / "layers.2.mlp", values)
    assert opened(folder).layout.read == Read("mlp.out", Space.BRANCH_OUTPUT)
    found, _ = check(folder, values, declared=Declared(reads="resid_post", layer=1))
    assert (found.layers, found.layout.writes) == ((1,), {1: ((1, "resid_post", At.STREAM),)})
    found, _ = check(folder, values, declared=Declared(reads="hook_mlp_out"))
    assert found.layout.writes == {2: ((2, "mlp", At.STREAM),)}


def test_a_folder_of_another_name_needs_the_users_word(tmp_path):
    folder = write(tmp_path / "mine", tensors(), transcode=True)
    with pytest.raises(InputError, match=r"mine: the folder's name should be a module.*say reads and writes"):
        opened(folder)
    with pytest.raises(InputError, match="should be a module"):
        opened(folder, declared=Declared(reads="mlp.in", layer=1))
    with pytest.raises(InputError, match="neither the folder's name nor reads says the layer"):
        opened(folder, declared=Declared(reads="mlp.in", writes="mlp.out"))
    found = opened(folder, declared=Declared(reads="mlp.in", writes="mlp.out", layer=1))
    assert found.layout.writes == {1: ((1, "mlp", At.MODULE),)}


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Declared(reads="blocks.1.hook_resid_post", layer=2), "is of layer 1, but layer says 2"),
        (Declared(reads="hook_resid_posts"), "unknown hook 'hook_resid_posts'; did you mean"),
        (Declared(writes="blocks.0.hook_mlp_out"), "reads layer 2 and writes layer 0; expected none before"),
    ],
)
def test_declarations_that_cannot_be(tmp_path, declared, message):
    with pytest.raises(InputError, match=message):
        opened(write(tmp_path / "layers.2.mlp", tensors(), transcode=True), declared=declared)


def test_a_layer_cannot_be_said_of_several(tmp_path):
    for layer in (0, 1):
        write(tmp_path / f"layers.{layer}")
    with pytest.raises(InputError, match="holds 2 dictionaries, layer says 1 of one; give the deeper path"):
        opened(tmp_path, declared=Declared(layer=1))


def test_two_sites_or_two_kinds_under_one_path_are_refused(tmp_path):
    write(tmp_path / "layers.0")
    write(tmp_path / "layers.1.mlp")
    with pytest.raises(InputError, match=r"several sites .* resid_post .* mlp.out .* deeper path"):
        opened(tmp_path)
    write(tmp_path / "b" / "layers.0.mlp", transcode=True)
    write(tmp_path / "b" / "layers.1.mlp")
    with pytest.raises(InputError, match=r"several sites"):
        opened(tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 25}, r"cfg.json: k: expected at most the 24 latents, found 25"),
        ({"k": 0}, r"cfg.json: k: expected 1 or more, found 0"),
        ({"k": 5, "activation": "groupmax"}, r"k: groupmax cuts 24 latents into k equal groups"),
        ({"k": "4"}, r'cfg.json: k: expected a whole number, found "4"'),
        ({"activation": "relu"}, r'activation: expected one of "topk", "groupmax", found "relu"'),
        ({"embed_skip": True}, r"embed_skip: a dictionary that reads the embeddings too is not supported"),
        ({"gram_lookup": True}, r"gram_lookup: .* not supported"),
        ({"signed": True, "activation": "groupmax"}, r"signed: belongs to topk"),
        ({"expansion": 3}, r"expansion: unknown key; did you mean 'expansion_factor'\?"),
        ({"num_latents": 48}, r"encoder.weight has shape \(24, 8\), expected \(48, 8\): cfg.json says 48"),
        ({"expansion_factor": 4}, r"encoder.weight has shape \(24, 8\), expected \(32, 8\)"),
        ({"skip_connection": True}, r"tensor missing: W_skip; expected .* found W_dec, b_dec, encoder.bias"),
        ({"d_in": 0}, r"d_in: expected 1 or more, found 0"),
    ],
)
def test_a_configuration_that_does_not_hold(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        opened(write(tmp_path / "layers.2", **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: v.pop("b_dec"),
            r"tensor missing: b_dec; expected .*, found W_dec, encoder.bias, encoder.weight",
        ),
        (lambda v: v.update(W_skip=torch.zeros(D, D)), r"tensor left over: W_skip"),
        (
            lambda v: v.update(W_dec=v["W_dec"].T.contiguous()),
            r"W_dec has shape \(8, 24\), expected \(24, 8\)",
        ),
        (
            lambda v: v.update({"encoder.bias": torch.zeros(D)}),
            r"encoder.bias has shape \(8\), expected \(24\)",
        ),
        (lambda v: v.update(b_dec=torch.zeros(F)), r"b_dec has shape \(24\), expected \(8\)"),
        (lambda v: v.update(b_dec=v["b_dec"].double()), r"b_dec: type F64"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    values = tensors()
    change(values)
    with pytest.raises(InputError, match=message):
        opened(write(tmp_path / "layers.2", values))


def test_a_missing_k_is_the_librarys_default_and_told(tmp_path):
    values = tensors()
    wide = {key: value.repeat(2, *[1] * (value.dim() - 1)) for key, value in values.items() if key != "b_dec"}
    folder = write(tmp_path / "layers.2", {**wide, "b_dec": values["b_dec"]}, ("k",), expansion_factor=6)
    found = opened(folder)
    assert found.load(2).gate == TopK(32) and "k is not in cfg.json: the library's default, 32" in found.notes


def test_truncated_and_not_finite(tmp_path):
    folder = write(tmp_path / "layers.2")
    content = (folder / "sae.safetensors").read_bytes()
    (folder / "sae.safetensors").write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"sae.safetensors: truncated or no safetensors file"):
        opened(folder)
    values = tensors()
    values["W_dec"][3, 1] = float("nan")
    with pytest.raises(InputError, match=r"W_dec\[3, 1\] is NaN"):
        opened(write(tmp_path / "layers.1", values)).verify()


def test_another_models_dictionary_is_refused(tmp_path):
    folder = write(tmp_path / "layers.2")
    with pytest.raises(InputError, match=r"encoder.weight has width 8, the model's d_model is 16"):
        opened(folder, Facts(d_model=16))
    with pytest.raises(InputError, match="has a dictionary for layer 2, the model has layers 0 to 1"):
        opened(folder, replace(Facts(), n_layers=2))


def test_both_files_are_needed(tmp_path):
    folder = write(tmp_path / "layers.2")
    (folder / "cfg.json").unlink()
    with pytest.raises(InputError, match=r"no folder here holds cfg.json and sae.safetensors"):
        opened(folder, format="sparsify")


@pytest.mark.parametrize("factor", ["NaN", "Infinity", "1e400"])
def test_a_factor_that_is_no_number_is_refused(tmp_path, factor):
    folder = write(tmp_path / "layers.1.mlp")
    text = json.dumps(CONFIG).replace('"expansion_factor": 3', f'"expansion_factor": {factor}')
    (folder / "cfg.json").write_text(text)
    with pytest.raises(InputError, match="expansion_factor: expected a finite number"):
        opened(folder)
