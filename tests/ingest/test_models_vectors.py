"""Reading and writing vectors: what a latent reads of the stream and adds to it, against the real model."""

from dataclasses import replace

import pytest
import torch

from ingest.dictionaries.types import At, Dictionary, Encoder, LayerNormInput, Read, ReLU, Space
from ingest.dictionaries.types import Write as Decoder
from ingest.errors import InputError
from ingest.models import Write, open_model, reading_vectors, writing_vectors
from ingest.models.rows import centre
from tests.ingest.tiny_models import tiny_model, tokens

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A function that opens a tiny model, saved once."""
    folder, found = tmp_path_factory.mktemp("models"), {}

    def opened(name):
        if name not in found:
            tiny_model(name).save_pretrained(folder / name)
            found[name] = open_model(folder / name)
        return found[name]

    return opened


def random_latents(layer=1, site="mlp.in", space=Space.NORMALISED_WITH_GAIN, writes=(), width=32, **more):
    make = torch.Generator().manual_seed(5)
    encoder = Encoder("in", torch.randn(4, width, generator=make), torch.zeros(4))
    return Dictionary("set", "sae", layer, Read(site, space), (encoder,), tuple(writes), ReLU(), **more)


def decoder(layer, site="mlp", at=At.MODULE, width=32):
    make = torch.Generator().manual_seed(6 + layer)
    return Decoder(layer, site, at, torch.randn(4, width, generator=make), None)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama", "olmo2", "gemma2"])
def test_a_reading_vector_reads_what_the_dictionary_reads(tiny, name):
    """x · ρ / σ is the encoder row on the site's value, by what the dictionary reads."""
    model = tiny(name)
    trace = model.trace(tokens())
    norm, layer = model.facts.norm, 1
    centring = (lambda x: x - x.mean(-1, keepdim=True)) if norm.centred else (lambda x: x)
    mid = trace.resid_pre if model.facts.parallel else trace.resid_mid
    sites = {
        "mlp.in": (mid[layer], trace.sigma2[layer], trace.mlp_in[layer], "mlp.in"),
        "resid_mid": (mid[layer], trace.sigma2[layer], trace.mlp_in[layer], "mlp.in"),
        "attn.in": (trace.resid_pre[layer], trace.sigma1[layer], trace.attn_in[layer], "attn.in"),
        "resid_pre": (trace.resid_pre[layer], trace.sigma1[layer], trace.attn_in[layer], "attn.in"),
        "resid_post": (trace.resid_pre[layer + 1], trace.sigma1[layer + 1], trace.attn_in[layer + 1], None),
    }
    for site, (stream, sigma, gained, biased) in sites.items():
        stream = stream.double()
        values = {
            Space.RAW: (stream, torch.ones(9)),
            Space.NORMALISED: (centring(stream) if model.facts.norm_before else stream, torch.ones(9)),
        }
        bias = model.input_bias(biased, layer) if biased else model.input_bias("attn.in", layer + 1)
        values[Space.NORMALISED_WITH_GAIN] = (gained.double() - bias, sigma)
        for space, (value, scale) in values.items():
            latents = random_latents(layer, site, space)
            found = stream @ reading_vectors(model, latents).T / scale[:, None]
            torch.testing.assert_close(
                found,
                value @ latents.encoders[0].W_enc.double().T,
                atol=2e-4,
                rtol=1e-4,
                msg=f"{site} {space}",
            )


def test_a_dictionary_that_centres_its_input_reads_the_centred_stream(tiny):
    model = tiny("llama")
    plain = random_latents(space=Space.RAW)
    found = reading_vectors(model, replace(plain, input_norm=LayerNormInput()))
    assert torch.equal(found, centre(plain.encoders[0].W_enc.double()))


def test_what_reads_no_stream_has_no_reading_vector(tiny):
    model = tiny("llama")
    for site, space in (("attn.z", Space.Z), ("mlp.out", Space.BRANCH_OUTPUT)):
        with pytest.raises(InputError, match="no stream"):
            reading_vectors(model, random_latents(site=site, space=space))
    with pytest.raises(InputError, match="no norm reads there"):
        reading_vectors(model, random_latents(site="embed"))
    with pytest.raises(InputError, match="length 16; llama has d_model 32"):
        reading_vectors(model, random_latents(width=16))
    with pytest.raises(InputError, match="no reading 'gate'"):
        reading_vectors(model, random_latents(), "gate")


@pytest.mark.parametrize("name", ["llama", "granite", "gemma2", "olmo2"])
@pytest.mark.parametrize("site", ["mlp", "attn"])
def test_a_writing_vector_is_what_joins_the_stream(tiny, name, site):
    """The change of the real stream by a write at the module's output is ω / σ_post."""
    model = tiny(name)
    trace = model.trace(tokens())
    write = decoder(1, site)
    omega = writing_vectors(model, random_latents(writes=[write]))
    vectors = torch.zeros(9, 32)
    vectors[4] = 100 * write.W_dec[2]
    after = model.run_frozen(trace, (Write(site, 1, vectors, "module"),))
    sigma = (trace.sigma_post2 if site == "mlp" else trace.sigma_post1)[1, 4]
    moved = (after.resid_pre[2] - model.run_frozen(trace).resid_pre[2])[4].double()
    torch.testing.assert_close(moved, 100 * omega[2] / sigma, atol=1e-3, rtol=1e-4)
    at_stream = writing_vectors(model, random_latents(writes=[decoder(1, site, At.STREAM)]))
    assert torch.equal(at_stream, write.W_dec.double())


def test_a_z_dictionary_writes_through_its_heads(tiny):
    model = tiny("granite")
    write = decoder(1, "attn.z", width=32)
    found = writing_vectors(model, random_latents(writes=[write]))
    by_head = write.W_dec.double().view(4, 4, 8)
    expected = torch.einsum("fhe,hed->fd", by_head, model.W_O(1))
    torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match="writes z of length 16"):
        writing_vectors(model, random_latents(writes=[decoder(1, "attn.z", width=16)]))


def test_a_cross_layer_transcoder_writes_what_lies_before_the_cut(tiny):
    model = tiny("llama")
    latents = random_latents(layer=0, writes=[decoder(0), decoder(1), decoder(2)])
    first, second, third = (write.W_dec.double() for write in latents.writes)
    assert torch.equal(writing_vectors(model, latents, model.cut("mlp.in", 1)), first)
    assert torch.equal(writing_vectors(model, latents, model.cut("attn.in", 2)), first + second)
    assert torch.equal(writing_vectors(model, latents), first + second + third)
    assert not writing_vectors(model, latents, model.cut("attn.in", 0)).any()
    behind = tiny("gemma2")
    with pytest.raises(InputError, match="no input-invariant sum on Gemma2ForCausalLM"):
        writing_vectors(behind, latents)
    writing_vectors(behind, latents, behind.cut("mlp.in", 1))  # one layer, one scale
    with pytest.raises(InputError, match="length 16; llama has d_model 32"):
        writing_vectors(model, random_latents(writes=[decoder(1, width=16)]))
