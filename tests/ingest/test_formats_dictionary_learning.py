"""dictionary_learning's folders, written here from known tensors and read as each class computes, in
float64."""

import json

import numpy as np
import pytest
import torch

from ingest.dictionaries import (
    At,
    Declared,
    JumpReLU,
    Read,
    ReLU,
    ScalarThreshold,
    Space,
    TopK,
    describe_set,
)
from ingest.dictionaries.encode import decode, encode
from ingest.errors import InputError
from tests.ingest.small_dictionaries import Facts, opened
from tests.ingest.torch_files import numbers

D, F, K = 8, 20, 4
FACTS = Facts(n_layers=6)
X = 2 * numbers(40, D, seed=9)
RELU, TOPK, BATCH, JUMP = "AutoEncoder", "AutoEncoderTopK", "BatchTopKSAE", "JumpReluAutoEncoder"
NEW, GATED, MATRYOSHKA = "AutoEncoderNew", "GatedAutoEncoder", "MatryoshkaBatchTopKSAE"


def state(kind, dtype=torch.float32):
    """A state dict with the class's keys: random, no symmetry, biases far from zero."""
    linear = {
        "encoder.weight": numbers(F, D, seed=1),
        "encoder.bias": 0.5 * numbers(F, seed=2),
        "decoder.weight": numbers(D, F, seed=3) * (0.4 + numbers(F, seed=4).abs()),
    }
    plain = {
        "W_enc": numbers(D, F, seed=1),
        "b_enc": 0.5 * numbers(F, seed=2),
        "W_dec": numbers(F, D, seed=3),
        "b_dec": numbers(D, seed=5),
    }
    scalars = {"k": torch.tensor(K, dtype=torch.int32), "threshold": torch.tensor(0.7)}
    made = {
        RELU: {**linear, "bias": numbers(D, seed=5)},
        NEW: {**linear, "decoder.bias": numbers(D, seed=5)},
        GATED: {
            "decoder_bias": numbers(D, seed=5),
            "r_mag": 0.5 * numbers(F, seed=6),
            "gate_bias": numbers(F, seed=7),
            "mag_bias": numbers(F, seed=8),
            **{key: linear[key] for key in ("encoder.weight", "decoder.weight")},
        },
        TOPK: {"b_dec": numbers(D, seed=5), **scalars, **linear},
        BATCH: {"b_dec": numbers(D, seed=5), **scalars, **linear},
        JUMP: {**plain, "threshold": 0.3 + numbers(F, seed=6).abs()},
        MATRYOSHKA: {**plain, **scalars, "group_sizes": torch.tensor([3, 7, 10])},
    }[kind]
    return {key: value if key in scalars else value.to(dtype) for key, value in made.items()}


TRAINERS = {
    RELU: "StandardTrainer", NEW: "StandardTrainerAprilUpdate", GATED: "GatedSAETrainer", TOPK: "TopKTrainer",
    BATCH: "BatchTopKTrainer", JUMP: "JumpReluTrainer", MATRYOSHKA: "MatryoshkaBatchTopKTrainer",
}  # fmt: skip


def write(folder, kind, tensors=None, *, trainer=(), buffer=(), **beside):
    """The folder of one dictionary; None in `trainer` or `buffer` leaves a field out."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors if tensors is not None else state(kind), folder / "ae.pt")
    said = {
        "trainer_class": TRAINERS[kind], "dict_class": RELU if kind == NEW else kind, "activation_dim": D,
        "dict_size": F, "lr": 1e-3, "steps": 10, "device": "cuda:0", "layer": 4, "lm_name": "tiny/model",
        "submodule_name": "resid_post_layer_4", **dict(trainer),
    }  # fmt: skip
    held = {"d_submodule": D, "io": "out", "n_ctxs": 10, "ctx_len": 16, "device": "cpu", **dict(buffer)}
    config = {
        "trainer": {key: value for key, value in said.items() if value is not None},
        "buffer": {key: value for key, value in held.items() if value is not None},
        **beside,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def defined(kind, tensors, x, use_threshold=False):
    """Activations and output by the class's definition, in float64."""
    f = {key: value.to(torch.float64).numpy() for key, value in tensors.items()}
    x = x.to(torch.float64).numpy()
    relu = lambda pre: np.maximum(pre, 0)  # noqa: E731
    if kind in (RELU, NEW):
        bias = f["bias"] if kind == RELU else f["decoder.bias"]
        acts = relu((x - bias * (kind == RELU)) @ f["encoder.weight"].T + f["encoder.bias"])
        return acts, acts @ f["decoder.weight"].T + bias
    if kind == GATED:
        pre = (x - f["decoder_bias"]) @ f["encoder.weight"].T
        acts = (pre + f["gate_bias"] > 0) * relu(np.exp(f["r_mag"]) * pre + f["mag_bias"])
        return acts, acts @ f["decoder.weight"].T + f["decoder_bias"]
    if kind in (TOPK, BATCH):
        acts = relu((x - f["b_dec"]) @ f["encoder.weight"].T + f["encoder.bias"])
        if kind == BATCH or use_threshold:
            acts = acts * (acts > f["threshold"])
        else:
            acts = acts * (acts >= np.sort(acts, axis=1)[:, -K][:, None])
        return acts, acts @ f["decoder.weight"].T + f["b_dec"]
    if kind == JUMP:
        pre = x @ f["W_enc"] + f["b_enc"]
        acts = relu(pre * (pre > f["threshold"]))
    else:
        acts = relu((x - f["b_dec"]) @ f["W_enc"] + f["b_enc"])
        acts = acts * (acts > f["threshold"])
    return acts, acts @ f["W_dec"] + f["b_dec"]


def close(dictionary, expected):
    acts = encode(dictionary, X)
    np.testing.assert_allclose(acts.numpy(), expected[0], atol=1e-5)
    np.testing.assert_allclose(decode(dictionary, acts, X)[0].numpy(), expected[1], atol=5e-5)
    assert (acts != 0).sum() == (expected[0] != 0).sum() > 0


def refused(folder, **options):
    with pytest.raises(InputError) as caught:
        opened(folder, FACTS, **options).verify()
    line = str(caught.value)
    assert "\n" not in line
    return line


# --- what each class computes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_class_computes_what_the_library_does(tmp_path, kind, dtype):
    found = opened(write(tmp_path, kind, tensors := state(kind, dtype)), FACTS)
    assert (found.format, found.kind, found.layers, dict(found.sizes)) == (
        "dictionary_learning",
        "sae",
        (4,),
        {4: F},
    )
    dictionary = found.load(4)
    close(dictionary, defined(kind, tensors, X))
    assert dictionary.read == Read("resid_post", Space.RAW)
    assert [(one.layer, one.site, one.at) for one in dictionary.writes] == [(4, "resid_post", At.STREAM)]
    assert dictionary.signed is False


def test_the_keys_decide_whether_the_bias_is_subtracted(tmp_path):
    """config.json says AutoEncoder of both; the two readings differ."""
    tensors = state(NEW)
    layout = opened(write(tmp_path, NEW), FACTS).layout
    assert any(
        "config.json says AutoEncoder, the keys are those of AutoEncoderNew" in n for n in layout.notes
    )
    other = {**tensors, "bias": tensors["decoder.bias"]}
    assert np.abs(defined(NEW, tensors, X)[0] - defined(RELU, other, X)[0]).max() > 0.1


@pytest.mark.parametrize("kind", [RELU, NEW])
def test_activations_are_the_files_own(tmp_path, kind):
    """Not rescaled to decoder rows of length one, as the library's loader does with an AutoEncoder."""
    dictionary = opened(write(tmp_path, kind), FACTS).load(4)
    norms = dictionary.writes[0].W_dec.norm(dim=1)
    assert (norms - 1).abs().max() > 0.5
    assert torch.equal(dictionary.encoders[0].W_enc, state(kind)["encoder.weight"])


def test_the_threshold_of_a_topk_is_not_applied(tmp_path):
    found = opened(write(tmp_path, TOPK), FACTS)
    assert found.load(4).gate == TopK(K)
    assert (found.layout.activation, dict(found.layout.l0)) == (f"TopK {K}", {4: K})
    assert any("threshold in the file is TopK's for another use" in note for note in found.notes)
    tensors = state(TOPK)
    assert np.abs(defined(TOPK, tensors, X)[0] - defined(TOPK, tensors, X, use_threshold=True)[0]).max() > 0.1


def test_the_k_of_a_batchtopk_is_not_applied(tmp_path):
    found = opened(write(tmp_path, BATCH), FACTS)
    dictionary = found.load(4)
    assert dictionary.gate == ScalarThreshold(float(torch.tensor(0.7)))
    assert dict(found.layout.l0) == {4: K}
    assert len(set((encode(dictionary, X) != 0).sum(-1).tolist())) > 1
    assert any("k (4) was for training" in note for note in found.notes)


@pytest.mark.parametrize("kind", [BATCH, MATRYOSHKA, JUMP])
def test_thresholds_are_strict_and_pass_the_value_whole(tmp_path, kind):
    tensors = state(kind)
    threshold = tensors["threshold"].expand(F)
    W, b = ("encoder.weight", "encoder.bias") if kind == BATCH else ("W_enc", "b_enc")
    tensors |= {W: torch.zeros_like(tensors[W]), b: threshold.clone()}
    tensors[b][0] += 0.5
    acts = encode(opened(write(tmp_path, kind, tensors), FACTS).load(4), X[:1])[0]
    assert acts[0] == tensors[b][0]
    assert (acts[1:] == 0).all()


@pytest.mark.parametrize("kind", [BATCH, MATRYOSHKA])
def test_a_threshold_never_set_keeps_every_positive_value(tmp_path, kind):
    tensors = {**state(kind), "threshold": torch.tensor(-1.0)}
    found = opened(write(tmp_path, kind, tensors), FACTS)
    dictionary = found.load(4)
    assert dictionary.gate == ReLU()
    assert dict(found.layout.l0) == {}
    assert any("its threshold, -1, was never set" in note for note in found.notes)
    close(dictionary, defined(kind, tensors, X))


def test_a_negative_threshold_passes_no_negative_value(tmp_path):
    tensors = state(JUMP)
    tensors["threshold"][3] = -10
    dictionary = opened(write(tmp_path, JUMP, tensors), FACTS).load(4)
    assert isinstance(dictionary.gate, JumpReLU)
    assert dictionary.gate.relu_too
    acts, out = defined(JUMP, tensors, X)
    assert (acts >= 0).all()
    assert (X.double() @ tensors["W_enc"].double() + tensors["b_enc"])[:, 3].min() < 0
    close(dictionary, (acts, out))


@pytest.mark.parametrize("kind", [JUMP, MATRYOSHKA])
def test_only_jumprelu_leaves_its_input_alone(tmp_path, kind):
    dictionary = opened(write(tmp_path, kind), FACTS).load(4)
    assert (dictionary.b_in is None) is (kind == JUMP)


# --- TopK and BatchTopK -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "dict_class", "kind"),
    [
        ("TopKTrainer", None, TOPK),
        ("TrainerTopK", RELU, TOPK),
        (None, BATCH, BATCH),
        ("BatchTopKTrainer", BATCH, BATCH),
        ("SomeTrainer", TOPK, TOPK),
    ],
)
def test_the_trainer_tells_them_apart(tmp_path, trainer, dict_class, kind):
    folder = write(tmp_path, TOPK, trainer={"trainer_class": trainer, "dict_class": dict_class})
    found = opened(folder, FACTS)
    close(found.load(4), defined(kind, state(TOPK), X))
    assert any(f"have the same tensors: config.json says {kind}" in note for note in found.notes)


@pytest.mark.parametrize(
    ("trainer", "dict_class", "said"),
    [
        (None, None, "does not say which"),
        ("TopKTrainer", BATCH, "says both"),
        ("StandardTrainer", RELU, "does not"),
    ],
)
def test_where_nothing_tells_them_apart(tmp_path, trainer, dict_class, said):
    folder = write(tmp_path, TOPK, trainer={"trainer_class": trainer, "dict_class": dict_class})
    line = refused(folder)
    assert f"config.json: trainer.trainer_class: {said}" in line
    assert '"trainer_class": "TopKTrainer"' in line


def test_without_config_a_topk_is_refused(tmp_path):
    (write(tmp_path, TOPK) / "config.json").unlink()
    assert "config.json: no such file; the tensors of ae.pt" in refused(
        tmp_path, declared=Declared(reads="resid_post", layer=4)
    )


def test_an_early_topk_has_its_k_in_the_config(tmp_path):
    tensors = {key: value for key, value in state(TOPK).items() if key not in ("k", "threshold")}
    found = opened(write(tmp_path, TOPK, tensors, trainer={"k": K}), FACTS)
    close(found.load(4), defined(TOPK, tensors, X))
    assert "k is in neither it nor config.json" in refused(write(tmp_path, TOPK, tensors))
    assert "tensor missing: threshold" in refused(write(tmp_path, BATCH, tensors, trainer={"k": K}))


def test_the_tensors_k_wins(tmp_path):
    found = opened(write(tmp_path, TOPK, trainer={"k": 9}), FACTS)
    assert found.load(4).gate == TopK(K)
    assert any("config.json says k 9, ae.pt has 4" in note for note in found.notes)


# --- where it stands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("submodule", "io", "read", "write_site"),
    [
        ("resid_post_layer_4", "out", Read("resid_post", Space.RAW), ("resid_post", At.STREAM)),
        ("model.layers.4", "out", Read("resid_post", Space.RAW), ("resid_post", At.STREAM)),
        ("model.layers.4", "in", Read("resid_pre", Space.RAW), ("resid_pre", At.STREAM)),
        ("gpt_neox.layers.4.mlp", "out", Read("mlp.out", Space.BRANCH_OUTPUT), ("mlp", At.MODULE)),
        ("model.layers.4.self_attn.o_proj", "in", Read("attn.z", Space.Z), ("attn.z", At.MODULE)),
        ("blocks.4.hook_mlp_out.output", "out", None, None),
    ],
)
def test_the_submodule_and_its_side(tmp_path, submodule, io, read, write_site):
    folder = write(tmp_path, RELU, trainer={"submodule_name": submodule}, buffer={"io": io})
    if read is None:
        assert "trainer.submodule_name: unknown hook" in refused(folder)
        return
    dictionary = opened(folder, FACTS).load(4)
    assert dictionary.read == read
    assert (dictionary.writes[0].site, dictionary.writes[0].at) == write_site


def test_a_side_that_is_not_said_is_noted(tmp_path):
    folder = write(tmp_path, RELU, trainer={"submodule_name": "model.layers.4.mlp"}, buffer={"io": None})
    assert any(
        "no buffer.io: model.layers.4.mlp is read at its output" in n for n in opened(folder, FACTS).notes
    )


def test_what_the_config_does_not_say_the_user_may(tmp_path):
    folder = write(tmp_path, RELU, trainer={"submodule_name": None, "layer": None})
    assert "trainer.submodule_name: is missing; say what it reads with reads" in refused(folder)
    assert "says none; say it with layer" in refused(folder, declared=Declared(reads="hook_mlp_out"))
    for declared in (Declared(reads="blocks.2.hook_mlp_out"), Declared(reads="hook_mlp_out", layer=2)):
        found = opened(folder, FACTS, declared=declared)
        assert found.layers == (2,)
        assert found.layout.writes == {2: ((2, "mlp", At.STREAM),)}
    (folder / "config.json").unlink()
    assert opened(folder, FACTS, declared=Declared(reads="hook_mlp_out", layer=2)).layers == (2,)
    assert "config.json: no such file; say what it reads" in refused(folder)


def test_a_name_not_known_gives_way_to_the_user(tmp_path):
    folder = write(tmp_path, RELU, trainer={"submodule_name": "stream"})
    assert "unknown hook 'stream'" in refused(folder)
    found = opened(folder, FACTS, declared=Declared(reads="hook_resid_pre"))
    assert found.layout.read == Read("resid_pre", Space.RAW)


def test_what_contradicts_itself(tmp_path):
    folder = write(tmp_path / "a", RELU, trainer={"layer": 3})
    assert "of which layer? trainer.layer says 3" in refused(folder)
    folder = write(tmp_path / "b", RELU)
    assert "reads resid_post (raw) of layer 4, but reads says hook_mlp_out" in refused(
        folder, declared=Declared(reads="hook_mlp_out")
    )
    assert "of which layer?" in refused(folder, declared=Declared(layer=1))
    folder = write(tmp_path / "c", RELU, buffer={"io": "in"})
    assert "resid_post_layer_4 is of an output, but buffer.io says in" in refused(folder)
    assert "in_and_out, a transcoder" in refused(write(folder, RELU, buffer={"io": "in_and_out"}))


def test_one_folder_for_each_layer(tmp_path):
    for layer in (1, 5):
        trainer = {"layer": layer, "submodule_name": f"resid_post_layer_{layer}"}
        write(tmp_path / f"resid_post_layer_{layer}" / "trainer_0", RELU, trainer=trainer)
    found = opened(tmp_path, FACTS)
    assert found.layers == (1, 5)
    assert opened(tmp_path / "resid_post_layer_5" / "trainer_0" / "ae.pt", FACTS).layers == (5,)
    write(
        tmp_path / "resid_post_layer_1" / "trainer_1",
        RELU,
        trainer={"layer": 1, "submodule_name": "resid_post_layer_1"},
    )
    assert "layer 1 has 2 dictionaries" in refused(tmp_path)


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_tensor_counts(tmp_path, kind):
    """One missing or one left over is an error that names it."""
    optional = {TOPK: {"k", "threshold"}, BATCH: {"k"}, MATRYOSHKA: {"group_sizes", "k"}}.get(kind, set())
    for key in state(kind).keys() - optional:
        tensors = state(kind)
        del tensors[key]
        assert "tensor missing" in refused(write(tmp_path, kind, tensors))
    line = refused(write(tmp_path, kind, {**state(kind), "extra": torch.zeros(1)}))
    assert "tensor left over: extra" in line


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_shape_counts(tmp_path, kind):
    for key, value in state(kind).items():
        tensors = {**state(kind), key: torch.zeros(*value.shape, 2, dtype=value.dtype)}
        line = refused(write(tmp_path, kind, tensors))
        assert "ae.pt: " in line
        assert "shape" in line or "add up" in line


def test_sizes_that_differ_from_the_config(tmp_path):
    assert "config.json says dict_size 21" in refused(write(tmp_path, RELU, trainer={"dict_size": 21}))
    assert "config.json says activation_dim 9" in refused(
        write(tmp_path, RELU, trainer={"activation_dim": 9})
    )
    assert "the model's d_model is 16" in _for(write(tmp_path, RELU), Facts(n_layers=6, d_model=16))
    tensors = {**state(MATRYOSHKA), "group_sizes": torch.tensor([3, 7])}
    assert "group_sizes add up to other than the 20 latents" in refused(write(tmp_path, MATRYOSHKA, tensors))


def _for(folder, facts):
    with pytest.raises(InputError) as caught:
        describe_set(folder, facts)
    return str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("k", 0), ("k", F + 1), ("threshold", torch.nan)])
def test_numbers_that_make_no_sense(tmp_path, key, value):
    tensors = {**state(TOPK), key: torch.tensor(value)}
    assert f"{key} is {value}" in refused(write(tmp_path, TOPK, tensors))


def test_fields_not_known(tmp_path):
    assert "trainer.scale_factor: unknown key" in refused(
        write(tmp_path, RELU, trainer={"scale_factor": 2.0})
    )
    assert "norm: unknown key" in refused(write(tmp_path, RELU, norm=1))
    assert "buffer.io: expected one of" in refused(write(tmp_path, RELU, buffer={"io": "both"}))


def test_a_file_that_is_no_state_dict(tmp_path):
    folder = write(tmp_path, RELU, {"model": state(RELU), "step": 3})
    assert "ae.pt: expected a state dict, tensors by name; found model, step" in refused(folder)
    torch.save(numbers(3), folder / "ae.pt")
    assert "found PickledTensor" in refused(folder)
    (folder / "ae.pt").write_bytes((folder / "ae.pt").read_bytes()[:200])
    assert "ae.pt: truncated or damaged" in refused(folder)


def test_values_that_are_not_finite(tmp_path):
    tensors = state(GATED)
    tensors["r_mag"][2] = torch.inf
    assert "ae.pt: r_mag[2] is infinite" in refused(write(tmp_path, GATED, tensors))
    for value, said in ((200, "encoder.weight times exp(r_mag)[2, 0]"), (-200, "exp(-r_mag)[2]")):
        tensors["r_mag"][2] = value
        assert f"ae.pt: {said} is infinite" in refused(write(tmp_path, GATED, tensors))


def test_headers_need_no_model(tmp_path):
    layout = describe_set(write(tmp_path, TOPK), None)
    assert (layout.layers, layout.activation, layout.dtypes) == ((4,), "TopK 4", ("F32",))
    assert layout.bytes == {4: 4 * (2 * D * F + F + D + 2)}
    assert layout.provenance == {"model_name": "tiny/model"}
