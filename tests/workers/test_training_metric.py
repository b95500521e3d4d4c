"""An error measured by what the loss feels: the metric is the gradients' second moment, a coder trained on
rows through its root has the weighted error's gradients, and what comes back is the same map."""

import dataclasses

import numpy as np
import pytest
import torch

from ingest.contexts import make_contexts
from ingest.corpora import open_corpus
from ingest.dictionaries import At, Read, Space
from ingest.dictionaries.encode import decode, encode
from ingest.models import open_model
from ingest.models.capture import capture, loss_gradients
from tests.ingest.tiny_models import tiny_model
from workers.training.coder import BatchTopKGate, JumpReLUGate, ReLUGate, TopKGate
from workers.training.metric import EXTREME, gradient_moments, root_of, shortened
from workers.training.run import TrainingPlan, train
from workers.training.trainee import Job, Trainee

torch.set_num_threads(1)
MLP_IN, OUT = Read("mlp.in", Space.NORMALISED_WITH_GAIN), ("mlp", At.MODULE)
RESIDUAL = Read("resid_post", Space.RAW)
GATES = [TopKGate(5), BatchTopKGate(5), JumpReLUGate(5, weight=0.3, bandwidth=0.4), ReLUGate(0.01)]
JOBS = (
    Job("felt", 1, MLP_IN, OUT, 48, TopKGate(6), rate=5e-3, gradients=0.9),
    Job("plain", 1, MLP_IN, OUT, 48, TopKGate(6), rate=5e-3),
    Job("skip", 0, MLP_IN, OUT, 48, BatchTopKGate(6), skip=True, rate=5e-3, gradients=0.5),
    Job("sae", 1, RESIDUAL, None, 48, TopKGate(6), rate=5e-3, gradients=0.9),
)
PLAN = TrainingPlan(JOBS, tokens=6000, reuse=4, buffer=2400, batch=200, gradient_tokens=600)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    return open_model(folder, check=False)


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    np.save(file, np.random.default_rng(0).integers(1, 61, (400, 13)))
    return make_contexts(open_corpus(file), None, pad=60, first=0, length=14, part="train")


@pytest.fixture(scope="module")
def moments(model, contexts):
    return gradient_moments(model, contexts, [job.point for job in JOBS], PLAN.gradient_tokens)


@pytest.fixture(scope="module")
def undisturbed(model, contexts):
    return train(model, contexts, PLAN)


def rows_of(model, contexts, job, count=60):
    """What a job reads and is to write, of scored tokens."""
    ids = contexts.tokens[:count].astype(np.int64)
    found = capture(model, torch.from_numpy(ids), [(job.layer, job.read)], [job.point])
    scored = torch.from_numpy(contexts.scored(ids))
    return found.inputs[job.layer, job.read][scored], found.outputs[job.point][scored]


def some_root(d, share=0.8):
    g = torch.randn(3 * d, d, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    g = g * torch.linspace(0.1, 3, d)
    moment = g.T @ g
    return moment, root_of(moment, share)


def test_the_root_squares_to_the_metric_and_has_an_inverse():
    moment, root = some_root(10)
    expected = 0.8 * moment * 10 / moment.trace() + 0.2 * torch.eye(10, dtype=torch.float64)
    assert torch.allclose(root @ root, expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(root, root.T, atol=1e-12)
    assert float((root @ root).trace()) == pytest.approx(10)
    assert torch.allclose(root @ torch.linalg.inv(root), torch.eye(10).double(), atol=1e-12)
    assert torch.allclose(root_of(moment, 0.0), torch.eye(10).double(), atol=1e-12)
    assert torch.equal(root_of(torch.zeros(4, 4), 0.9), torch.eye(4).double())


def test_a_few_very_long_gradients_are_shortened():
    rows = torch.ones(9, 4)
    rows[3], rows[5] = 0.5 * EXTREME, -100.0
    expected = rows.clone()
    expected[5] = -EXTREME
    assert torch.allclose(shortened(rows), expected)
    assert torch.equal(shortened(torch.zeros(3, 2)), torch.zeros(3, 2))


def test_moments_are_those_of_single_contexts(model, contexts, moments):
    points = sorted(moments)
    sums, rows = dict.fromkeys(points, 0.0), 0
    count = -(-PLAN.gradient_tokens // contexts.length)
    for row in contexts.tokens[:count].astype(np.int64):
        there = (torch.from_numpy(row) != 60) & (torch.arange(len(row)) > 0)
        found = loss_gradients(model, torch.from_numpy(row)[None], points, (there[:-1] & there[1:])[None])
        rows += int(there.sum())
        for point in points:
            for g in found[point][0][there].double():
                sums[point] = sums[point] + torch.outer(g, g)
    for point in points:
        expected = sums[point] / rows
        assert torch.allclose(moments[point], expected, rtol=1e-4, atol=1e-6 * float(expected.max()))


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_a_step_has_the_weighted_errors_gradients_and_the_dictionary_its_value(gate, skip):
    """Against autograd of (y - ŷ) M (y - ŷ)ᵀ in raw units, ŷ by the dictionary's own map."""
    make = torch.Generator().manual_seed(3)
    x, y = torch.randn(64, 12, generator=make), 2 + 3 * torch.randn(64, 10, generator=make)
    _, root = some_root(10)
    trainee = Trainee(Job("t", 0, MLP_IN, OUT, 40, gate, skip, seed=4), x, y, root=root)
    coder = trainee.coder
    coder.b_dec += torch.randn(10, generator=make)
    if skip:
        coder.W_skip += 0.3 * torch.randn(12, 10, generator=make)
    coder.batch_threshold = 0.0
    scaled = (x - trainee.mean_x) / trainee.scale_x
    _, gradients, squared = coder.dense(scaled, trainee._given(y))
    activations = coder._gated(coder.pre_activations(scaled)).double()
    written = {
        name: p.double().requires_grad_() for name, p in coder.parameters().items() if "_enc" not in name
    }
    back = torch.linalg.inv(root) * trainee.scale_y
    out = (activations @ written["W_dec"] + written["b_dec"]) @ back + trainee.mean_y
    if skip:
        out = out + scaled.double() @ written["W_skip"] @ back
    error = y.double() - out
    felt = ((error @ root @ root) * error).sum(-1) / trainee.scale_y**2
    (felt.sum() / y.numel()).backward()
    assert torch.allclose(squared.double(), felt, rtol=1e-3, atol=1e-5)
    for name in ("W_dec", "b_dec", *(["W_skip"] if skip else [])):
        expected = written[name].grad
        if name == "W_dec":
            unit = written[name].detach()
            expected = expected - (expected * unit).sum(-1, keepdim=True) * unit
        assert torch.allclose(gradients[name].double(), expected, rtol=1e-3, atol=1e-6), name
    # The finished dictionary has these activations, in its units, and gives this output.
    coder.batch_threshold = coder.batch_threshold * (1 - 1e-4)  # a strict threshold, at an activation itself
    dictionary = trainee.dictionary()
    found = encode(dictionary, x)
    assert torch.allclose(found.double(), activations * trainee.scale_y, rtol=1e-3, atol=1e-3)
    assert torch.allclose(decode(dictionary, found, x)[0].double(), out.detach(), rtol=1e-3, atol=1e-3)


def test_a_metric_that_is_the_identity_changes_nothing():
    make = torch.Generator().manual_seed(5)
    x, y = torch.randn(300, 12, generator=make), torch.randn(300, 10, generator=make)
    job = Job("t", 0, MLP_IN, OUT, 40, TopKGate(5), rate=1e-3, seed=4)
    one, other = Trainee(job, x, y), Trainee(job, x, y, root=torch.eye(10, dtype=torch.float64))
    for _ in range(20):
        first, second = one.step(x, y, 1.0, None), other.step(x, y, 1.0, None)
    assert first.loss == pytest.approx(second.loss, rel=1e-4)
    for name, parameter in one.coder.parameters().items():
        assert torch.allclose(parameter, other.coder.parameters()[name], atol=1e-4), name


def test_less_of_what_the_loss_feels_is_left_for_more_variance(model, contexts, moments, undisturbed):
    x, y = rows_of(model, contexts, JOBS[0])
    root = root_of(moments[JOBS[0].point], 0.9)
    left = {}
    for trainee in undisturbed.trainees[:2]:
        dictionary = trainee.dictionary()
        error = (y - decode(dictionary, encode(dictionary, x), x)[0]).double()
        left[trainee.job.set] = (float((error @ root).pow(2).sum()), float(error.pow(2).sum()))
    assert left["felt"][0] < 0.985 * left["plain"][0] and left["felt"][1] > left["plain"][1]


def test_a_set_without_it_is_trained_as_if_alone(model, contexts, undisturbed):
    alone = train(model, contexts, dataclasses.replace(PLAN, jobs=JOBS[1:2]))
    assert alone.trainees[0].root is None and undisturbed.trainees[1].root is None
    for name, parameter in alone.trainees[0].coder.parameters().items():
        assert torch.equal(parameter, undisturbed.trainees[1].coder.parameters()[name]), name


def test_a_run_that_was_stopped_takes_its_metric_with_it(model, contexts, undisturbed, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    checkpoint = tmp_path / "checkpoint.pt"

    def stop(progress):
        if checkpoint.exists():
            raise Stop

    with pytest.raises(Stop):
        train(model, contexts, PLAN, checkpoint, stop, every=0, tell_every=0)
    monkeypatch.setattr("workers.training.run.gradient_moments", None)  # not measured again
    resumed = train(model, contexts, PLAN, checkpoint, every=0)
    for one, other in zip(resumed.trainees, undisturbed.trainees, strict=True):
        for name, parameter in other.coder.parameters().items():
            assert torch.allclose(one.coder.parameters()[name], parameter, rtol=1e-4, atol=1e-5), name
        x, _ = rows_of(model, contexts, other.job, 4)
        found, expected = (decode(d, encode(d, x), x)[0] for d in (one.dictionary(), other.dictionary()))
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_another_share_is_another_run(model, contexts, tmp_path):
    from ingest.errors import InputError

    small = dataclasses.replace(PLAN, jobs=JOBS[:1], tokens=1200)
    train(model, contexts, small, tmp_path / "c.pt", every=0)
    for other in (
        dataclasses.replace(small, jobs=(dataclasses.replace(JOBS[0], gradients=0.8),)),
        dataclasses.replace(small, gradient_tokens=500),
    ):
        with pytest.raises(InputError, match="of another run"):
            train(model, contexts, other, tmp_path / "c.pt")


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_what_goes_on_from_a_dictionary_begins_as_that_dictionary(gate, skip):
    make = torch.Generator().manual_seed(3)
    x, y = torch.randn(300, 12, generator=make), 2 + 3 * torch.randn(300, 10, generator=make)
    first = Trainee(Job("t", 0, MLP_IN, OUT, 40, gate, skip, rate=3e-3), x, y, root=some_root(10)[1])
    for _ in range(30):
        first.step(x, y, 1.0, None)
    given = first.dictionary()
    # In the metric it was trained in, to the last number; with other first rows, other scales.
    same = Trainee(first.job, 2 * x[:200] + 1, y[100:] * 0.5, root=first.root)
    same.go_on_from(given)
    same.coder.batch_threshold = first.coder.batch_threshold * first.scale_y / same.scale_y
    found = same.dictionary()
    activations = encode(given, x)
    assert torch.allclose(encode(found, x), activations, rtol=1e-3, atol=1e-4)
    assert torch.allclose(decode(found, activations, x)[0], decode(given, activations, x)[0], atol=1e-3)
    # In another metric latents have other units, and write what they wrote.
    other = Trainee(first.job, x, y)
    other.go_on_from(given)
    norm = given.writes[0].W_dec.norm(dim=-1)
    pre = [
        one.encoders[0].W_enc @ x.T + one.encoders[0].b_enc[:, None] for one in (given, other.dictionary())
    ]
    assert torch.allclose(pre[1], pre[0] * norm[:, None], rtol=1e-3, atol=1e-3)
    assert torch.allclose(
        other.dictionary().writes[0].W_dec, given.writes[0].W_dec / norm[:, None], atol=1e-5
    )
