"""Evaluation: identities that must hold exactly, and every figure computed once more in float64, token by
token, on Hugging Face's own model."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from ingest.contexts import Contexts
from ingest.dictionaries import open_set
from ingest.errors import InputError
from ingest.models import open_model
from tests.ingest.small_dictionaries import tensors, write_set
from tests.ingest.tiny_models import tiny_model
from workers.evaluation import evaluate
from workers.measures import Ratio, difference

torch.set_num_threads(1)


def contexts(n=7, length=10, first_scored=1, pad=None, seed=5):
    """Random rows; some end in padding where there is a pad token."""
    rows = np.random.default_rng(seed).integers(1, 61, (n, length)).astype(np.int32)
    if pad is not None:
        for at in range(n):
            rows[at, length - at % 4 :] = pad
    if first_scored:
        rows[:, 0] = 0
    return Contexts(
        rows, np.arange(n, dtype=np.int32), tuple(f"{at:064x}" for at in range(n)), first_scored, pad
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    kept = {}

    def open_(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            tiny_model(name).save_pretrained(folder)
            kept[name] = open_model(folder, check=False)
        return kept[name]

    return open_


def neurons(model, layers="all", name="neurons"):
    return open_set(None, name=name, model=model, format="neurons", layers=layers)


def random_set(folder, model, name, seeds, scale=0.2, **also):
    values = {layer: tensors(seed, size=24, width=32, **also) for layer, seed in seeds.items()}
    for one in values.values():
        one["W_dec"] *= scale
    return open_set(write_set(folder / name, values), name=name, model=model)


# --- identities ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "granite", "gpt_neox-parallel"])
def test_the_models_own_neurons_leave_nothing_out(models, name):
    model = models(name)
    found = evaluate(model, [neurons(model)], contexts(), batch=3)
    (figures,) = found.sets
    assert [one.layer for one in figures.layers] == [0, 1, 2]
    for one in figures.layers:
        assert one.fvu.value < 1e-10
        assert one.ce.value == pytest.approx(found.ce.value, abs=1e-6)
        assert one.recovered.value == pytest.approx(1.0, abs=1e-5)
        assert abs(one.ce_zero.value - found.ce.value) > 1e-3
        assert one.ce_mean.value != one.ce_zero.value
    assert figures.together.ce.value == pytest.approx(found.ce.value, abs=1e-5)
    assert (found.tokens, found.predicted) == (7 * 9, 7 * 8)


def test_a_dictionary_of_zeros_is_zero_ablation(models, tmp_path):
    model = models("llama")
    nothing = {key: torch.zeros_like(one) for key, one in tensors(width=32).items()}
    zeros = open_set(write_set(tmp_path, {0: nothing, 2: nothing}), name="zeros", model=model)
    (figures,) = evaluate(model, [zeros], contexts()).sets
    for one in (*figures.layers, figures.together):
        assert one.ce == one.ce_zero
        assert one.recovered.value == 0.0
        assert one.recovered.se == 0.0
        assert one.l0.value == 0.0
    for one in figures.layers:
        assert (one.dead, one.dead_share) == (20, 1.0)
        assert one.fvu.value >= 1.0  # |y|² against |y - ȳ|²


def test_a_dictionary_of_means_is_mean_ablation_and_explains_nothing(models, tmp_path):
    model = models("llama")
    nothing = {key: torch.zeros_like(one) for key, one in tensors(width=32).items()}
    rows = contexts()
    ids = torch.from_numpy(rows.tokens).long()
    outputs = []
    hf = tiny_model("llama")
    hf.model.layers[1].mlp.register_forward_hook(lambda _, __, out: outputs.append(out))
    with torch.no_grad():
        hf(ids)
    nothing["b_dec"] = outputs[0][:, 1:].double().mean((0, 1)).float()
    means = open_set(write_set(tmp_path, {1: nothing}), name="means", model=model)
    (figures,) = evaluate(model, [means], rows).sets
    (one,) = figures.layers
    assert one.fvu.value == pytest.approx(1.0, abs=1e-6)
    assert one.ce.value == pytest.approx(one.ce_mean.value, abs=1e-6)


def test_a_set_and_itself_differ_by_nothing(models, tmp_path):
    model = models("gpt2")
    first = random_set(tmp_path, model, "first", {0: 1, 1: 2, 2: 3})
    second = dataclasses.replace(first, name="second")
    found = evaluate(model, [first, second], contexts(), batch=2)
    assert found.sets[0].layers == found.sets[1].layers
    assert {one.quantity for one in found.differences} == {"fvu", "l0", "ce", "recovered"}
    assert {one.layer for one in found.differences} == {0, 1, 2, None}
    for one in found.differences:
        assert (one.estimate.value, one.estimate.se) == (0.0, 0.0)


def test_figures_do_not_depend_on_the_batch_or_the_other_sets(models, tmp_path):
    model = models("llama")
    a = random_set(tmp_path, model, "a", {1: 1, 2: 2})
    b = random_set(tmp_path, model, "b", {2: 5}, threshold=True)
    both = evaluate(model, [a, b], contexts(), batch=7)
    for position, one in enumerate((a, b)):
        alone = evaluate(model, [one], contexts(), batch=2).sets[0]
        for x, y in zip(alone.layers, both.sets[position].layers, strict=True):
            assert x.dead == y.dead
            for name in ("fvu", "l0", "ce", "ce_zero", "ce_mean", "recovered"):
                assert getattr(x, name).value == pytest.approx(getattr(y, name).value, abs=2e-6)


# --- once more, by hand -------------------------------------------------------------------------------------


class Instead(torch.nn.Module):
    def __init__(self, inner, rows, change):
        super().__init__()
        self.inner, self.rows, self.change = inner, rows, change

    def forward(self, x):
        y = self.inner(x)
        self.seen = (x, y)
        return torch.where(self.rows[..., None], self.change(x, y), y) if self.change else y


def by_hand(ids, scored, changes):
    """(nats (n, T-1), {layer: (x, y)}) of Hugging Face's Llama in float64."""
    hf = tiny_model("llama").double()
    for layer in range(3):
        block = hf.model.layers[layer]
        block.mlp = Instead(block.mlp, scored, changes.get(layer))
    with torch.no_grad():
        logits = hf(ids).logits
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return nats.view(len(ids), -1), {layer: hf.model.layers[layer].mlp.seen for layer in range(3)}


@pytest.mark.parametrize("pad", [None, 60])
def test_every_figure_is_what_float64_by_hand_gives(models, tmp_path, pad):
    model, rows = models("llama"), contexts(pad=pad)
    layers = {0: 3, 2: 4}
    given = random_set(tmp_path, model, "tc", layers, threshold=True)
    found = evaluate(model, [given], rows, batch=3)
    ids = torch.from_numpy(rows.tokens).long()
    scored = torch.ones(ids.shape, dtype=torch.bool) if pad is None else ids != pad
    scored[:, 0] = False
    predicted = scored[:, :-1] if pad is None else scored[:, :-1] & (ids[:, 1:] != pad)
    values = {at: {key: one.double() for key, one in tensors(seed, 24, 32, threshold=True).items()}
              for at, seed in layers.items()}  # fmt: skip

    def activations(layer, x):
        one = values[layer]
        pre = x @ one["W_enc"].T + one["b_enc"]
        return torch.where(pre > one["activation_function.threshold"], pre, 0.0)

    def transcoder(layer):
        one = values[layer]
        return lambda x, _: activations(layer, x) @ (0.2 * one["W_dec"]) + one["b_dec"]

    def ce(changes):
        per_row = (by_hand(ids, scored, changes)[0] * predicted).sum(-1)
        return per_row, float(per_row.sum() / predicted.sum())

    _, seen = by_hand(ids, scored, {})
    zero = lambda _, y: torch.zeros_like(y)  # noqa: E731
    means = {layer: seen[layer][1][scored].mean(0) for layer in layers}
    close = lambda estimate, value: pytest.approx(value, rel=1e-4, abs=1e-5) == estimate.value  # noqa: E731
    original, value = ce({})
    assert close(found.ce, value)
    assert (found.tokens, found.predicted) == (int(scored.sum()), int(predicted.sum()))
    for one in found.sets[0].layers:
        x, y = seen[one.layer]
        acts, out = activations(one.layer, x), transcoder(one.layer)(x, y)
        assert close(one.l0, float((acts != 0)[scored].sum(-1).double().mean()))
        assert one.dead == int((~(acts != 0)[scored].any(0)).sum())
        error, variance = ((y - other)[scored].pow(2).sum() for other in (out, means[one.layer]))
        assert close(one.fvu, float(error / variance))
        own, zeroed = ce({one.layer: transcoder(one.layer)}), ce({one.layer: zero})
        mean = ce({one.layer: lambda _, y, at=one.layer: means[at].expand_as(y)})
        assert close(one.ce, own[1])
        assert close(one.added, own[1] - value)
        assert close(one.ce_zero, zeroed[1])
        assert close(one.ce_mean, mean[1])
        assert close(one.recovered, float((zeroed[0] - own[0]).sum() / (zeroed[0] - original).sum()))
    together = found.sets[0].together
    assert close(together.ce, ce({layer: transcoder(layer) for layer in layers})[1])
    assert close(together.ce_zero, ce(dict.fromkeys(layers, zero))[1])


def test_an_autoencoder_and_a_transcoder_of_one_mlp_are_compared(models, tmp_path):
    """Both put something in place of the same output: zero and mean ablation are the same runs."""
    model = models("llama")
    first = random_set(tmp_path, model, "tc", {1: 1})
    one = tensors(seed=2, size=24, width=32)
    folder = tmp_path / "sae" / "layers.1.mlp"
    folder.mkdir(parents=True)
    save_file(
        {"encoder.weight": one["W_enc"], "encoder.bias": one["b_enc"], "W_dec": one["W_dec"],
         "b_dec": one["b_dec"]},
        folder / "sae.safetensors",
    )  # fmt: skip
    (folder / "cfg.json").write_text('{"num_latents": 24, "k": 4, "d_in": 32, "activation": "topk"}')
    second = open_set(folder, name="sae", model=model)
    assert (second.kind, second.layout.read.site) == ("sae", "mlp.out")
    found = evaluate(model, [first, second], contexts())
    a, b = (one.layers[0] for one in found.sets)
    assert (a.ce_zero, a.ce_mean) == (b.ce_zero, b.ce_mean)
    assert b.l0.value <= 4
    fvu = next(one for one in found.differences if one.quantity == "fvu" and one.layer == 1)
    assert fvu.estimate.value == pytest.approx(b.fvu.value - a.fvu.value)


def test_outputs_of_the_folded_model_are_compared_without_their_mean(models, tmp_path):
    """A LayerNorm takes the mean over components off whatever reads the stream: the folded model has none."""
    model, rows = models("gpt2"), contexts()
    plain = random_set(tmp_path, model, "tc", {1: 1})
    folded = dataclasses.replace(plain, name="folded", layout=dataclasses.replace(plain.layout, folded=True))
    found = evaluate(model, [plain, folded], rows)
    ids = torch.from_numpy(rows.tokens).long()
    outputs = []
    hf = tiny_model("gpt2")
    hf.transformer.h[1].mlp.register_forward_hook(lambda _, args, out: outputs.append((args[0], out)))
    with torch.no_grad():
        hf(ids)
    x, y = (one[:, 1:].reshape(-1, 32).double() for one in outputs[0])
    one = plain.load(1)
    out = (x @ one.encoders[0].W_enc.double().T + one.encoders[0].b_enc).relu() @ one.writes[0].W_dec.double()
    out = out + one.writes[0].b_out
    centred = y - y.mean(-1, keepdim=True)
    for figures, target in zip(found.sets, (y, centred), strict=True):
        fvu = (target - out).pow(2).sum() / (target - target.mean(0)).pow(2).sum()
        assert figures.layers[0].fvu.value == pytest.approx(float(fvu), rel=1e-4)
    a, b = (figures.layers[0] for figures in found.sets)
    assert a.ce == b.ce  # what is put in place is the same


# --- estimates ----------------------------------------------------------------------------------------------


def test_the_standard_error_is_that_of_resampled_contexts():
    """Against the spread of the same figure over 4,000 bootstrap samples."""
    random = np.random.default_rng(0)
    bottom = random.uniform(5, 15, 300)
    noise = random.normal(size=300)
    first, second = Ratio(0.4 * bottom + noise, bottom), Ratio(0.5 * bottom + noise + 0.1, bottom)
    samples = random.integers(0, 300, (4000, 300))
    ratio = lambda one: one.top[samples].sum(1) / one.bottom[samples].sum(1)  # noqa: E731
    assert first.estimate.se == pytest.approx(ratio(first).std(), rel=0.05)
    paired = difference(second, first)
    assert paired.value == pytest.approx(second.value - first.value)
    assert paired.se == pytest.approx((ratio(second) - ratio(first)).std(), rel=0.05)
    assert paired.se < first.estimate.se / 20  # the noise is common to both


def test_one_context_tells_no_error_and_nothing_over_nothing_no_figure():
    assert Ratio(np.array([2.0]), np.array([4.0])).estimate.se is None
    empty = Ratio(np.zeros(3), np.zeros(3))
    assert (empty.estimate.value, difference(empty, empty).value) == (None, None)
    assert math.isclose(Ratio(np.array([1.0, 3.0]), np.array([1.0, 1.0])).estimate.se, 1.0)


def test_contexts_that_do_not_fit(models):
    model = models("gpt2")
    with pytest.raises(InputError, match=r"70 tokens: .* has 64 positions; give a shorter length"):
        evaluate(model, [neurons(model, [0])], contexts(2, 70))
    with pytest.raises(InputError, match="a name of its own"):
        evaluate(model, [neurons(model, [0]), neurons(model, [1])], contexts())
    # A row may hold one token more than the model has positions: its last one is only predicted.
    found = evaluate(model, [neurons(model, [0])], contexts(2, 65))
    assert (found.tokens, found.predicted) == (2 * 63, 2 * 63)
