"""Dictionaries of every gate and place, made of random tensors, and what it means that one read back computes
the same."""

import dataclasses

import torch

from ingest.dictionaries import (
    At,
    Dictionary,
    Encoder,
    Gated,
    JumpReLU,
    Read,
    ReLU,
    ScalarThreshold,
    Space,
    TopK,
    Write,
    open_set,
)
from ingest.dictionaries.encode import decode, encode
from ingest.models import Norm
from tests.ingest import small_dictionaries
from tests.ingest.small_dictionaries import Outline

D, F = 8, 20
LAYER_NORM = Norm(centred=True, gain="weight", bias=True, eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Facts(small_dictionaries.Facts):
    positions: str = "rotary"
    embedding_norm: bool = False


FACTS = Facts()
GAIN, NORMALISED, RAW = (
    Read("mlp.in", space) for space in (Space.NORMALISED_WITH_GAIN, Space.NORMALISED, Space.RAW)
)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = (2 * random(99, 200, D) + 0.7).double()  # a mean that is not zero
GATES = {
    "relu": ReLU(),
    "jumprelu": JumpReLU(0.3 + random(1, F).abs(), relu_too=False),
    "jumprelu with relu": JumpReLU(0.3 + random(1, F).abs(), relu_too=True),
    "negative thresholds": JumpReLU(random(1, F), relu_too=False),
    "negative thresholds with relu": JumpReLU(random(1, F), relu_too=True),
    "one threshold": ScalarThreshold(0.7),
    "one negative threshold": ScalarThreshold(-0.4, relu_too=False),
    "topk": TopK(4),
    "abstopk": TopK(4, by_magnitude=True, relu_too=False),
    "gated": Gated(0.5 + random(2, F).abs(), random(3, F)),
}


def made(layer=1, gate="relu", read=GAIN, write=("mlp", At.MODULE), *, skip=False, b_in=None, **also):
    """A dictionary with random tensors; b_in None, "own" or "b_out"."""
    seed = 1000 * (layer + 1)
    b_out = random(seed + 5, D)
    return Dictionary(
        set="",
        kind="transcoder",
        layer=layer,
        read=read,
        encoders=(Encoder("in", random(seed + 1, F, D), 0.5 * random(seed + 2, F)),),
        writes=(Write(layer, *write, random(seed + 3, F, D) * (0.4 + random(seed + 4, F, 1).abs()), b_out),),
        gate=GATES[gate] if isinstance(gate, str) else gate,
        b_in={"own": random(seed + 6, D), "b_out": b_out}.get(b_in),
        W_skip=random(seed + 7, D, D) if skip else None,
        **also,
    )


def sae(layer=1, gate="relu", site="resid_post", at=At.STREAM, **also):
    read = {
        "mlp": Read("mlp.out", Space.BRANCH_OUTPUT),
        "attn": Read("attn.out", Space.BRANCH_OUTPUT),
        "attn.z": Read("attn.z", Space.Z),
    }.get(site) or Read(site, Space.RAW)
    return made(layer, gate, read, (site, at), **also)


def back(written, format, facts=FACTS):
    """What was written, by our reader: {layer: dictionary}."""
    found = open_set(written.folder, name="back", model=Outline(facts))
    assert found.format == format
    return {layer: found.load(layer) for layer in found.layers}


def place(dictionary):
    return dictionary.read, [(write.layer, write.site, write.at) for write in dictionary.writes]


def check_same(again, original, tolerance=1e-6):
    """The same activations, as many of them, and the same outputs, in float64 on the tensors as they are."""
    wanted, found = encode(original, X), encode(again, X)
    assert torch.equal(wanted != 0, found != 0)
    assert 0 < (wanted != 0).double().mean() < 1
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()
    out, out_again = decode(original, wanted, X)[0], decode(again, found, X)[0]
    assert (out_again - out).abs().max() <= tolerance * out.abs().max()
