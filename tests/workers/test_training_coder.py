"""A coder's step: its written-out gradients against autograd, the sparse way against the dense one."""

import dataclasses

import pytest
import torch

from workers.training.coder import BatchTopKGate, Coder, JumpReLUGate, ReLUGate, TopKGate

N, D_IN, D_OUT, SIZE = 64, 12, 10, 40
GATES = [TopKGate(5), BatchTopKGate(5), JumpReLUGate(5, weight=0.3, bandwidth=0.4), ReLUGate(0.01)]


def data(seed=0):
    make = torch.Generator().manual_seed(seed)
    return torch.randn(N, D_IN, generator=make), torch.randn(N, D_OUT, generator=make)


def coder(gate, skip=False, seed=1):
    x, y = data()
    found = Coder.random(gate, SIZE, x, y, skip, torch.Generator().manual_seed(seed), tied=False)
    make = torch.Generator().manual_seed(7)
    found.b_enc += 0.1 * torch.randn(SIZE, generator=make)
    found.b_dec += torch.randn(D_OUT, generator=make)
    if skip:
        found.W_skip += 0.3 * torch.randn(D_IN, D_OUT, generator=make)
    return found


def doubled(found):
    parameters = {name: p.double() for name, p in found.parameters().items()}
    return dataclasses.replace(found, **parameters, quiet=found.quiet.clone())


class Step(torch.autograd.Function):
    """[p > θ] with a rectangle of width ε for a derivative in θ: JumpReLU's pseudo-derivative as defined."""

    @staticmethod
    def forward(ctx, p, theta, width):
        ctx.save_for_backward(p, theta)
        ctx.width = width
        return (p > theta).double()

    @staticmethod
    def backward(ctx, g):
        p, theta = ctx.saved_tensors
        near = ((p - theta).abs() < ctx.width / 2).double()
        return None, -(g * near).sum(0) / ctx.width, None


def loss_of(gate, parameters, x, y):
    """The module docstring's loss, as autograd sees it."""
    p = x @ parameters["W_enc"].T + parameters["b_enc"]
    penalty = 0.0
    match gate:
        case TopKGate(k=k):
            mask = torch.zeros_like(p).scatter(-1, p.topk(k).indices, 1.0)
            a = p.relu() * mask
        case BatchTopKGate(k=k):
            a = p.relu() * (p > p.flatten().sort().values[-k * len(p) - 1])
        case ReLUGate(l1=l1):
            a = p.relu()
            penalty = l1 * a.sum() / len(p)
        case JumpReLUGate(l0=target, weight=weight, bandwidth=width):
            theta = parameters["log_threshold"].exp()
            on = Step.apply(p, theta, width)
            # p H(p - θ), whose derivative in θ is -θ/ε in the rectangle: the value there is θ's.
            a = p * on.detach() + theta.detach() * (on - on.detach())
            penalty = weight * (on.sum() / len(p) / target - 1) ** 2
    out = a @ parameters["W_dec"] + parameters["b_dec"]
    if "W_skip" in parameters:
        out = out + x @ parameters["W_skip"]
    return (y - out).pow(2).mean() + penalty


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_gradients_are_autograds(gate, skip):
    found = doubled(coder(gate, skip))
    x, y = (part.double() for part in data(3))
    parameters = {name: p.clone().requires_grad_() for name, p in found.parameters().items()}
    loss = loss_of(gate, parameters, x, y)
    loss.backward()
    figures, gradients, squared = found.dense(x, y)
    assert figures.loss == pytest.approx(loss.item(), rel=1e-9)
    assert squared.sum() / y.pow(2).sum() == pytest.approx(figures.fvu, rel=1e-9)
    assert set(gradients) == set(parameters)
    for name, parameter in parameters.items():
        expected = parameter.grad
        if name == "W_dec":  # without the part along each decoder
            unit = parameter.detach()
            expected = expected - (expected * unit).sum(-1, keepdim=True) * unit
        assert torch.allclose(gradients[name], expected, rtol=1e-7, atol=1e-10), name


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: type(gate).__name__)
def test_the_sparse_step_is_the_dense_one(gate, skip):
    one, other = coder(gate, skip), coder(gate, skip)
    x, y = data(4)
    sparse, dense = one.sparse(x, y), other.dense(x, y)
    assert dataclasses.astuple(sparse[0]) == pytest.approx(dataclasses.astuple(dense[0]), rel=1e-4)
    for name, gradient in dense[1].items():
        assert torch.allclose(sparse[1][name], gradient, rtol=1e-3, atol=1e-6), name
    assert torch.equal(one.quiet, other.quiet)
    assert one.batch_threshold == pytest.approx(other.batch_threshold, rel=1e-5)


def test_a_choice_in_bfloat16_keeps_float32_values():
    found = coder(TopKGate(5))
    x, y = data(5)
    found.bf16 = True
    figures, gradients, _ = found.sparse(x, y)
    # What bfloat16 chose, with float32's own values: the loss of exactly that code.
    rough = found.pre_activations(x)
    p = x @ found.W_enc.T + found.b_enc
    assert (rough - p).abs().max() > 1e-3
    a = torch.zeros_like(p).scatter(-1, rough.topk(5).indices, 1.0) * p.relu()
    error = y - found.b_dec - a @ found.W_dec
    assert figures.fvu == pytest.approx(float(error.pow(2).sum() / y.pow(2).sum()), rel=1e-5)
    assert torch.allclose(gradients["b_dec"], -2 * error.sum(0) / y.numel(), rtol=1e-4, atol=1e-7)


def test_a_start_is_no_worse_than_the_mean_and_lets_through_what_is_wanted():
    x, y = data()
    for gate in GATES[:3]:
        found = Coder.random(gate, SIZE, x, y, False, torch.Generator().manual_seed(0), tied=False)
        figures, _, _ = found.dense(x, y - y.mean(0))
        assert figures.fvu < 1.1
        assert figures.l0 == pytest.approx(5, abs=1.0)


def test_quiet_latents_begin_anew_where_the_error_is():
    found = coder(TopKGate(5))
    x, y = data(6)
    found.quiet[:] = 0
    found.quiet[[3, 8]] = 1000
    squared = torch.zeros(N)
    squared[[17, 40]] = 1.0  # two tokens alone are badly reconstructed
    others = found.W_dec[0].clone()
    dead = found.revive(1000, x, y, squared, torch.Generator().manual_seed(0))
    assert dead.tolist() == [3, 8]
    wanted = y[[17, 40]] - found.b_dec
    wanted = wanted / wanted.norm(dim=-1, keepdim=True)
    assert torch.allclose((found.W_dec[[3, 8]] @ wanted.T).max(0).values, torch.ones(2), atol=1e-5)
    assert torch.equal(found.W_dec[0], others)
    assert found.quiet[[3, 8]].tolist() == [0, 0]
