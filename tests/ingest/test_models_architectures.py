"""Every accepted architecture: logits are Hugging Face's, sums close, and a vector written at a source moves
a reading by exactly the weight, patterns and norms frozen in the real model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingest.dictionaries.types import At, Dictionary, Encoder, Read, ReLU, Space
from ingest.dictionaries.types import Write as Decoder
from ingest.models import Write, open_model, reading_vectors, replay, writing_vectors
from tests.ingest.tiny_models import TINY, tokens

torch.set_num_threads(1)
TINY_MODELS = Path(__file__).with_name("tiny_models.py")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """All tiny models on disk, and Hugging Face's logits from a process that never built a bridge."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([sys.executable, str(TINY_MODELS), str(folder)], check=True)
    return folder, load_file(folder / "logits.safetensors")


@pytest.fixture(scope="module", params=sorted(TINY))
def opened(request, saved):
    """The model, its trace and Hugging Face's logits. The real model then runs in float64 on the same float32
    weights, so that an intervention shows the weight and not rounding."""
    folder, logits = saved
    model = open_model(folder / request.param)
    single = model.trace(tokens())
    close(single.logits, logits[request.param], 3e-6)
    model.bridge.double()
    return model, model.trace(tokens()), logits[request.param]


def latents(model, layer, at=At.MODULE, seed=0, n=5):
    """Random latents that read and write the MLP of a layer."""
    make = torch.Generator().manual_seed(seed)
    d = model.facts.d_model
    encoder = Encoder("in", torch.randn(n, d, generator=make), torch.zeros(n))
    decoder = Decoder(layer, "mlp", at, torch.randn(n, d, generator=make), None)
    read = Read("mlp.in", Space.NORMALISED_WITH_GAIN)
    return Dictionary("random", "transcoder", layer, read, (encoder,), (decoder,), ReLU())


def close(found, expected, tolerance=1e-8):
    """Equal relative to the largest expected value."""
    found, expected = found.double(), expected.double()
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def at_token(model, s, vector, n=9):
    """(T, d): the vector at token s, nothing elsewhere."""
    vectors = torch.zeros(n, model.facts.d_model, dtype=torch.float64)
    vectors[s] = vector.double()
    return vectors


def change(model, trace, write, heads=()):
    """What a write changes in the real model: with it less without it, everything frozen but `heads`."""
    after, before = (model.run_frozen(trace, writes, live_heads=heads) for writes in ((write,), ()))
    return lambda name: getattr(after, name).double() - getattr(before, name).double()


def through_head(model, trace, layer, head, omega, s):
    """(T, d_model): what a vector at token s adds to the stream through one head, all frozen."""
    x = model.attention_input(layer, omega[None].double()) / trace.sigma1[layer, s]
    moved = (x @ model.W_V(layer)[model.kv(head)].double() @ model.W_O(layer)[head])[0]
    return trace.pattern[layer, head, :, s].double()[:, None] * moved / trace.sigma_post1[layer][:, None]


def test_frozen_forward_repeats_the_forward(opened):
    """And that is Hugging Face's."""
    model, trace, logits = opened
    for heads in ((), "all"):
        frozen = model.run_frozen(trace, live_heads=heads)
        close(frozen.logits, trace.logits, 1e-5)  # norms run in float32 inside the libraries
        close(frozen.logits, logits, 1e-5)


def test_pre_activation_is_the_sum_of_named_terms(opened):
    """encoder row · MLP input = embedding + position + heads + MLP outputs + every bias by its name."""
    model, trace, _ = opened
    facts, last = model.facts, model.facts.n_layers - 1
    rows = latents(model, last)
    rho = reading_vectors(model, rows)
    terms = [
        torch.cat([model.token_vectors(t, t + 1) for t in trace.tokens.tolist()]),
        model.position_vectors(9),
    ]
    for layer in range(last + 1):
        if not (facts.parallel and layer == last):
            scale = trace.sigma_post1[layer][:, None]
            for head in range(facts.n_heads):
                x = (
                    model.attention_input(layer, trace.resid_pre[layer].double())
                    / trace.sigma1[layer][:, None]
                )
                v = x @ model.W_V(layer)[model.kv(head)].double()
                terms.append(trace.pattern[layer, head].double() @ v @ model.W_O(layer)[head] / scale)
                terms.append(model.value_bias(layer)[head] / scale)
            terms += [model.output_bias(layer) / scale, model.post_bias(layer, "attn").expand(9, -1)]
        if layer < last:
            terms.append(trace.mlp_out[layer].double())
    stream = sum(terms)
    e = rows.encoders[0].W_enc.double()
    found = stream @ rho.T / trace.sigma2[last][:, None] + model.input_bias("mlp.in", last) @ e.T
    close(found, trace.mlp_in[last].double() @ e.T, 1e-5)


def test_logits_are_the_sum_of_terms(opened):
    model, trace, logits = opened
    summed = replay(model, trace)
    read = model.final_input(summed.resid_post) / trace.sigma_final[:, None]
    expected = read @ model.unembedding().T + model.logit_bias()
    if (cap := model.facts.logit_cap) is not None:
        expected = cap * torch.tanh(expected / cap)
    close(logits, expected, 1e-5)


@pytest.mark.parametrize("at", list(At))
def test_a_direct_edge_is_the_change_of_the_reading(opened, at):
    """MLP of layer 0 -> each later MLP and the logits; and nothing where the source is not before the cut."""
    model, trace, _ = opened
    facts, s = model.facts, 4
    source = latents(model, 0, at)
    omega = writing_vectors(model, source)[2]
    written = source.writes[0].W_dec[2]
    moved = change(model, trace, Write("mlp", 0, at_token(model, s, written), str(at)))
    sigma = trace.sigma_post2[0, s] if at is At.MODULE else 1.0
    for layer in range(facts.n_layers):
        target = latents(model, layer, seed=1)
        found = moved("mlp_in")[layer] @ target.encoders[0].W_enc.double().T
        if model.event("mlp", 0) < model.cut("mlp.in", layer):
            weight = reading_vectors(model, target) @ omega
            close(found[s], weight / sigma / trace.sigma2[layer, s])
            found[s] = 0
        assert found.abs().max() == 0
    if facts.logit_cap is None:
        logits = model.final_input(omega[None])[0] @ model.unembedding().T
        close(moved("logits")[s], logits / sigma / trace.sigma_final[s])


def test_an_edge_through_a_head_is_the_change_of_the_reading(opened):
    """MLP of layer 0 -> every head of the later layers, one at a time -> every later MLP."""
    model, trace, _ = opened
    facts, s = model.facts, 3
    omega = writing_vectors(model, latents(model, 0, At.STREAM))[1]
    write = Write("mlp", 0, at_token(model, s, omega))
    direct = change(model, trace, write)("mlp_in")
    for layer in range(1, facts.n_layers):
        for head in range(facts.n_heads):
            through = change(model, trace, write, [(layer, head)])("mlp_in") - direct
            joins = through_head(model, trace, layer, head, omega, s)
            for target in range(facts.n_layers):
                rows = latents(model, target, seed=1)
                found = through[target] @ rows.encoders[0].W_enc.double().T
                if model.event("mlp", 0) < model.cut("attn.in", layer) < model.cut("mlp.in", target):
                    close(found, joins @ reading_vectors(model, rows).T / trace.sigma2[target][:, None])
                else:
                    assert found.abs().max() == 0


def test_an_embedding_reaches_its_readers_directly_and_through_a_head(opened):
    model, trace, _ = opened
    s, head = 2, model.facts.n_heads - 1
    token = model.token_vectors(40, 41)[0]
    write, target = Write("embed", 0, at_token(model, s, token)), latents(model, 1, seed=2)
    e, rho = target.encoders[0].W_enc.double(), reading_vectors(model, target)
    direct = change(model, trace, write)("mlp_in")[1]
    close((direct @ e.T)[s], rho @ token / trace.sigma2[1, s])
    through = change(model, trace, write, [(0, head)])("mlp_in")[1] - direct
    joins = through_head(model, trace, 0, head, token, s)
    close(through @ e.T, joins @ rho.T / trace.sigma2[1][:, None])


def test_every_composition_of_heads_is_the_algebras(opened):
    """With all heads live a write moves the real model as the algebra's own forward says."""
    model, trace, _ = opened
    make = torch.Generator().manual_seed(3)
    vectors = torch.randn(9, model.facts.d_model, generator=make)
    for write in (Write("embed", 0, vectors), Write("attn", 0, vectors, "module"), Write("mlp", 1, vectors)):
        moved = change(model, trace, write, "all")
        with_it, without = replay(model, trace, (write,)), replay(model, trace)
        close(moved("resid_post"), with_it.resid_post - without.resid_post)
