"""Captured values are the trace's, in a batch too; what is put in place acts, and nothing else does."""

import pytest
import torch

from ingest.dictionaries import At, Dictionary, Encoder, Read, ReLU, Space, Write, open_set
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.in_place import in_place
from ingest.errors import InputError
from ingest.models import open_model
from ingest.models.capture import capture, logits_with
from tests.ingest.tiny_models import tiny_model

torch.set_num_threads(1)
TOKENS = torch.tensor([[(5 + 17 * at + 7 * row) % 61 for at in range(9)] for row in range(3)])
GAIN, NORMALISED, RAW = Space.NORMALISED_WITH_GAIN, Space.NORMALISED, Space.RAW
POINTS = [
    (0, "embed", At.STREAM),
    *((layer, site, At.STREAM) for layer in (0, 2) for site in ("resid_pre", "resid_mid", "resid_post")),
    *((layer, site, at) for layer in (0, 1, 2) for site in ("attn", "mlp") for at in At),
    (1, "attn.z", At.MODULE),
]
# Sequential and parallel blocks, grouped heads, norms behind branches, a multiplier.
SOME = ["gpt2", "llama", "gpt_neox-parallel", "falcon-parallel", "gemma2", "olmo2", "granite", "cohere"]
# Learned positions with an offset, fused matrices, positions in the scores, one norm for two branches, …
MORE = ["opt", "bloom", "phi", "phi3", "gptj", "mpt", "stablelm-parallel", "glm4", "qwen3"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Opens a tiny model once."""
    kept = {}

    def open_(name):
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            tiny_model(name).save_pretrained(folder)
            kept[name] = open_model(folder, check=False)
        return kept[name]

    return open_


def close(found, expected, tolerance=2e-5):
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def traced(model):
    """{name: (B, layers, T, d)} of single traces."""
    traces = [model.trace(row) for row in TOKENS]
    names = ("resid_pre", "attn_in", "mlp_in", "attn_out", "mlp_out", "attn_module", "mlp_module", "z",
             "resid_mid", "sigma1", "sigma2")  # fmt: skip
    return {name: torch.stack([getattr(trace, name) for trace in traces]).float() for name in names} | {
        "resid_post": torch.stack([trace.resid_post for trace in traces])
    }


@pytest.mark.parametrize("name", SOME + MORE)
def test_a_batch_holds_what_single_traces_hold(opened, name):
    model = opened(name)
    expected, last = traced(model), model.facts.n_layers - 1
    raw2 = expected["resid_pre" if model.facts.parallel else "resid_mid"]

    def normalised(stream, sigma):
        centred = stream - stream.mean(-1, keepdim=True) if model.facts.norm.centred else stream
        return centred / sigma[..., None] if model.facts.norm_before else stream

    reads = {
        Read("attn.in", GAIN): expected["attn_in"],
        Read("attn.in", NORMALISED): normalised(expected["resid_pre"], expected["sigma1"]),
        Read("attn.in", RAW): expected["resid_pre"],
        Read("mlp.in", GAIN): expected["mlp_in"],
        Read("mlp.in", NORMALISED): normalised(raw2, expected["sigma2"]),
        Read("mlp.in", RAW): raw2,
        Read("resid_pre", RAW): expected["resid_pre"],
        Read("resid_pre", GAIN): expected["attn_in"],
        Read("resid_mid", RAW): expected["resid_mid"],
        Read("mlp.out", Space.BRANCH_OUTPUT): expected["mlp_module"],
        Read("attn.out", Space.BRANCH_OUTPUT): expected["attn_module"],
        Read("attn.z", Space.Z): expected["z"].flatten(-2),
    }
    writes = {
        ("attn", At.MODULE): expected["attn_module"],
        ("attn", At.STREAM): expected["attn_out"],
        ("mlp", At.MODULE): expected["mlp_module"],
        ("mlp", At.STREAM): expected["mlp_out"],
    }
    layers = (0, 1, last)
    found = capture(
        model,
        TOKENS,
        [*((layer, read) for layer in layers for read in reads), (0, Read("embed", RAW))],
        [*((layer, *write) for layer in layers for write in writes), (last, "resid_post", At.STREAM)],
    )
    for layer in layers:
        for read, values in reads.items():
            close(found.inputs[layer, read], values[:, layer])
        for write, values in writes.items():
            close(found.outputs[layer, *write], values[:, layer])
    close(found.inputs[0, Read("embed", RAW)], expected["resid_pre"][:, 0])
    close(found.outputs[last, "resid_post", At.STREAM], expected["resid_post"])
    # A layer's end is the next one's beginning.
    behind = capture(model, TOKENS, [(0, Read("resid_post", RAW)), (0, Read("resid_post", GAIN))])
    close(behind.inputs[0, Read("resid_post", RAW)], expected["resid_pre"][:, 1])
    close(behind.inputs[0, Read("resid_post", GAIN)], expected["attn_in"][:, 1])


def test_a_pass_stops_behind_the_last_thing_asked_for(opened):
    model = opened("llama")
    ran = []
    handles = [block.register_forward_hook(lambda *_, at=at: ran.append(at))
               for at, block in enumerate(model.bridge.blocks)]  # fmt: skip
    capture(model, TOKENS, [(1, Read("mlp.in", GAIN))])
    assert ran == [0]
    assert capture(model, TOKENS, [(1, Read("mlp.in", GAIN))], logits=True).logits.shape == (3, 9, 61)
    assert ran == [0, 0, 1, 2]
    for handle in handles:
        handle.remove()
    assert not model.running.locked()


@pytest.mark.parametrize("name", SOME)
def test_the_same_put_in_place_changes_no_bit(opened, name):
    model = opened(name)
    plain = logits_with(model, TOKENS, {})
    with torch.no_grad():
        assert torch.equal(plain, model.bridge(TOKENS))
    for point in POINTS:
        seen = []
        same = logits_with(model, TOKENS, {point: lambda own, _, seen=seen: seen.append(own) or own.clone()})
        assert torch.equal(same, plain), point
        assert len(seen) == 1
        close(seen[0], capture(model, TOKENS, outputs=[point]).outputs[point])
        moved = logits_with(model, TOKENS, {point: lambda own, _: own + 1.0 + own.roll(1, -1)})
        assert not torch.equal(moved, plain), point


@pytest.mark.parametrize("name", [name for name in SOME if name != "cohere"])
@pytest.mark.parametrize("layers", [[1], "all"])
def test_the_models_own_neurons_in_place_are_the_model(opened, name, layers):
    model = opened(name)
    neurons = open_set(None, name="n", model=model, format="neurons", layers=layers)
    put = in_place([neurons.load(layer) for layer in neurons.layers])
    assert len(put.replace) == len(neurons.layers)
    close(logits_with(model, TOKENS, put.replace, put.reads), logits_with(model, TOKENS, {}))


@pytest.mark.parametrize("name", SOME + MORE)
def test_a_pass_that_begins_in_the_middle_is_the_whole_pass(opened, name):
    model = opened(name)
    begun = capture(model, TOKENS, outputs=[(1, "mlp", At.MODULE)], logits=True, starts=(0, 1, 2))
    assert sorted(begun.starts) == [1, 2]
    for layer, start in begun.starts.items():
        assert torch.equal(logits_with(model, TOKENS, {}, start=start), begun.logits)
        change = {(layer, "attn", At.MODULE): lambda own, _: own.roll(1, -1)}
        assert torch.equal(
            logits_with(model, TOKENS, change, start=start), logits_with(model, TOKENS, change)
        )
    assert torch.equal(logits_with(model, TOKENS, {}), begun.logits)  # nothing stays behind
    with pytest.raises(ValueError, match="does not see layer 0"):
        logits_with(model, TOKENS, {(0, "mlp", At.MODULE): lambda own, _: own}, start=begun.starts[1])


def test_layers_below_the_start_are_not_computed(opened):
    model = opened("llama")
    start = capture(model, TOKENS, [(2, Read("mlp.in", GAIN))], starts=(2,)).starts[2]
    ran = []
    watched = [component.register_forward_hook(lambda *_, at=at: ran.append(at))
               for at, component in enumerate(block.attn.o for block in model.bridge.blocks)]  # fmt: skip
    logits_with(model, TOKENS, {}, start=start)
    for handle in watched:
        handle.remove()
    assert ran == [2]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_in_bfloat16_the_model_is_near_and_dictionaries_are_exact(opened, name):
    model, key, point = opened(name), (1, Read("mlp.in", GAIN)), (1, "mlp", At.MODULE)
    exact, rough = (capture(model, TOKENS, [key], [point], autocast=mixed) for mixed in (False, True))
    for one, other in ((exact.inputs[key], rough.inputs[key]), (exact.outputs[point], rough.outputs[point])):
        assert other.dtype == torch.float32
        close(other, one, 0.1)
        assert not torch.equal(other, one)
    one = latents(1, key[1], [point], 7)
    seen = []

    def change(own, inputs):
        seen.append((inputs[key], in_place([one]).replace[point](own, inputs)))
        return seen[0][1]

    logits_with(model, TOKENS, {point: change}, [key], autocast=True)
    x, out = seen[0]
    assert torch.equal(out, decode(one, encode(one, x), x)[0])  # no product of it in bfloat16


def test_a_dictionary_of_the_folded_model_is_given_what_that_model_has():
    """There streams and branch outputs have mean 0; behind the norm they have it anyway."""
    make = torch.Generator().manual_seed(0)
    y = torch.randn(2, 5, 32, generator=make) + 3
    sae = latents(1, Read("mlp.out", Space.BRANCH_OUTPUT), [(1, "mlp", At.STREAM)], 1)
    stream = latents(1, Read("mlp.in", RAW), [(1, "mlp", At.STREAM)], 2)
    normal = latents(1, Read("mlp.in", NORMALISED), [(1, "mlp", At.STREAM)], 3)
    point, inputs = (1, "mlp", At.STREAM), {(1, stream.read): y, (1, normal.read): y}
    centred = y - y.mean(-1, keepdim=True)
    for one, x in ((sae, centred), (stream, centred), (normal, y)):
        found = in_place([one], centred=True).replace[point](y, inputs)
        assert torch.equal(found, decode(one, encode(one, x), x)[0])


def test_positions_that_are_not_scored_keep_the_models_own_value(opened):
    model = opened("gpt2")
    scored = torch.ones(TOKENS.shape, dtype=torch.bool)
    scored[:, 0], scored[1] = False, False
    point = (0, "mlp", At.MODULE)
    found = logits_with(model, TOKENS, {point: lambda own, _: torch.zeros_like(own)}, scored=scored)
    plain = logits_with(model, TOKENS, {})
    assert torch.equal(found[:, 0], plain[:, 0])
    assert torch.equal(found[1], plain[1])
    assert not torch.equal(found[0, 1:], plain[0, 1:])


# --- against Hugging Face's model, changed by hand ----------------------------------------------------------


def latents(layer, read, writes, seed, n=12, d=32):
    make = torch.Generator().manual_seed(seed)
    encoder = Encoder("in", torch.randn(n, d, generator=make), torch.randn(n, generator=make))
    decoders = tuple(
        Write(at, site, where, 0.3 * torch.randn(n, d, generator=make), torch.randn(d, generator=make))
        for at, site, where in writes
    )
    return Dictionary("random", "transcoder", layer, read, (encoder,), decoders, ReLU())


def by_hand(name, change):
    model = tiny_model(name)
    change(model)
    with torch.no_grad():
        return model(TOKENS).logits


class Instead(torch.nn.Module):
    def __init__(self, dictionary):
        super().__init__()
        self.dictionary = dictionary

    def forward(self, x):
        return decode(self.dictionary, encode(self.dictionary, x), x)[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_transcoders_in_every_layer_compound(opened, name):
    read = Read("mlp.in", GAIN)
    dictionaries = [latents(at, read, [(at, "mlp", At.MODULE)], at) for at in range(3)]

    def change(model):
        for at, one in enumerate(dictionaries):
            model.model.layers[at].mlp = Instead(one)

    put = in_place(dictionaries)
    close(logits_with(opened(name), TOKENS, put.replace, put.reads), by_hand(name, change))


def test_autoencoders_on_streams_and_outputs(opened):
    embedding = latents(0, Read("embed", RAW), [(0, "embed", At.STREAM)], 1)
    stream = latents(1, Read("resid_post", RAW), [(1, "resid_post", At.STREAM)], 2)
    attention = latents(1, Read("attn.out", Space.BRANCH_OUTPUT), [(1, "attn", At.MODULE)], 3)
    mlp = latents(2, Read("mlp.out", Space.BRANCH_OUTPUT), [(2, "mlp", At.STREAM)], 4)

    def change(model):
        layers = model.model.layers
        layers[0].register_forward_pre_hook(lambda _, args: (Instead(embedding)(args[0]), *args[1:]))
        layers[1].register_forward_hook(lambda _, __, out: Instead(stream)(out))
        layers[1].self_attn.o_proj.register_forward_hook(lambda _, __, out: Instead(attention)(out))
        layers[2].mlp.register_forward_hook(lambda _, __, out: Instead(mlp)(out))

    put = in_place([embedding, stream, attention, mlp])
    assert put.reads == ()  # each reads what it replaces
    close(logits_with(opened("llama"), TOKENS, put.replace, put.reads), by_hand("llama", change))


def test_a_write_to_the_middle_of_the_stream_reaches_the_skip_path(opened):
    one = latents(1, Read("resid_mid", RAW), [(1, "resid_mid", At.STREAM)], 5)

    def change(model):
        norm = model.model.layers[1].post_attention_layernorm

        # What attention adds is changed so that the stream between the branches is the dictionary's.
        def middle(_, args, kwargs, out):
            attended, *rest = out
            stream = before[0] + attended
            return (attended + Instead(one)(stream) - stream, *rest)

        before = []
        model.model.layers[1].register_forward_pre_hook(lambda _, args: before.append(args[0]))
        model.model.layers[1].self_attn.register_forward_hook(middle, with_kwargs=True)
        assert norm is not None

    put = in_place([one])
    close(logits_with(opened("llama"), TOKENS, put.replace, put.reads), by_hand("llama", change), 1e-4)


def test_a_cross_layer_transcoder_writes_every_later_mlp(opened):
    read = Read("mlp.in", GAIN)
    dictionaries = [latents(at, read, [(to, "mlp", At.MODULE) for to in range(at, 3)], at) for at in range(3)]
    activations = {}

    class Sum(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            activations[self.layer] = encode(dictionaries[self.layer], x)
            return sum(
                activations[one.layer] @ write.W_dec + write.b_out
                for one in dictionaries[: self.layer + 1]
                for write in one.writes
                if write.layer == self.layer
            )

    def change(model):
        for at in range(3):
            model.model.layers[at].mlp = Sum(at)

    put = in_place(dictionaries)
    model = opened("llama")
    for _ in range(2):  # nothing stays from a pass before
        close(logits_with(model, TOKENS, put.replace, put.reads), by_hand("llama", change))
    close(
        logits_with(model, TOKENS.flip(1), put.replace, put.reads),
        logits_with(model, TOKENS.flip(1), in_place(dictionaries).replace, put.reads),
        0.0,
    )


def test_what_the_model_does_not_have(opened):
    model = opened("gpt2")
    for inputs, outputs, said in [
        ([(3, Read("mlp.in", GAIN))], [], "layers 0 to 2"),
        ([(1, Read("embed", RAW))], [], "embed is layer 0"),
        ([(1, Read("resid_pre", Space.Z))], [], "has no space 'z'"),
        ([], [(0, "mlp.in", At.MODULE)], "nothing that can be written"),
    ]:
        with pytest.raises(InputError, match=said):
            capture(model, TOKENS, inputs, outputs)
    with pytest.raises(InputError, match="token id 61"):
        capture(model, TOKENS + 61 - TOKENS.max(), [(0, Read("mlp.in", GAIN))])
    with pytest.raises(InputError, match=r"70 tokens: .* has 64 positions"):
        capture(model, torch.zeros(1, 70, dtype=torch.long), [(0, Read("mlp.in", GAIN))])
    assert not model.running.locked()
