"""Gemma Scope's params.npz, written here from known tensors; every expectation is computed here, in float64,
from those tensors."""

import numpy as np
import pytest

from ingest.dictionaries import At, JumpReLU, Read, Space, describe_set
from ingest.dictionaries.encode import decode, encode
from ingest.dictionaries.layout import Declared
from ingest.errors import InputError
from tests.ingest.gemma_files import GEMMA, D, F, X, activations, params, single, tensor
from tests.ingest.small_dictionaries import Facts, opened

RES, TRANSCODERS = "gemma-scope-2b-pt-res", "gemma-scope-2b-pt-transcoders"
FOLDER = "layer_2/width_16k/average_l0_71"


def write(folder, values=None, **also):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "params.npz", **single(params() if values is None else values), **also)
    return folder


def refused(where, facts=GEMMA, **options):
    with pytest.raises(InputError) as error:
        opened(where, facts, **options).verify()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_sae_computes_what_its_tensors_say(tmp_path):
    values = params()
    found = opened(write(tmp_path / RES / FOLDER, values), GEMMA)
    assert (found.format, found.kind, found.layers) == ("gemma-scope", "sae", (2,))
    dictionary = found.load(2)
    assert dictionary.read == Read("resid_post", Space.RAW)
    assert [(w.layer, w.site, w.at) for w in dictionary.writes] == [(2, "resid_post", At.STREAM)]
    assert isinstance(dictionary.gate, JumpReLU)
    acts = encode(dictionary, tensor(X))
    want = activations(values, X)
    assert np.abs(acts.numpy() - want).max() < 1e-5
    assert 0 < (want != 0).mean() < 0.6
    out = want @ values["W_dec"] + values["b_dec"]
    assert np.abs(decode(dictionary, acts)[0].numpy() - out).max() < 1e-4
    assert found.layout.l0 == {2: 71.0}
    assert found.layout.bytes == {2: 4 * (2 * D * F + 2 * F + D)}


def test_b_dec_is_not_subtracted_from_the_input(tmp_path):
    """At x = b_dec, where a subtraction would leave the encoder's bias alone."""
    values = params()
    dictionary = opened(write(tmp_path / RES / FOLDER, values), GEMMA).load(2)
    assert dictionary.b_in is None
    x = values["b_dec"][None]
    assert np.abs(encode(dictionary, tensor(x)).numpy() - activations(values, x)).max() < 1e-5
    subtracted = activations(values, 0 * x)
    assert np.abs(activations(values, x) - subtracted).max() > 0.5


@pytest.mark.parametrize(
    ("repository", "read", "written", "kind"),
    [
        (RES, Read("resid_post", Space.RAW), ("resid_post", At.STREAM), "sae"),
        ("gemma-scope-9b-it-mlp", Read("mlp.out", Space.BRANCH_OUTPUT), ("mlp", At.STREAM), "sae"),
        ("gemma-scope-2b-pt-att", Read("attn.z", Space.Z), ("attn.z", At.MODULE), "sae"),
        (TRANSCODERS, Read("mlp.in", Space.NORMALISED), ("mlp", At.STREAM), "transcoder"),
        ("models--google--gemma-scope-2b-pt-res-canonical", Read("resid_post", Space.RAW),
         ("resid_post", At.STREAM), "sae"),
    ],
)  # fmt: skip
def test_the_repositorys_name_says_the_site_and_that_is_said(repository, read, written, kind, tmp_path):
    write(tmp_path / repository / "snapshots" / FOLDER)
    layout = describe_set(tmp_path / repository, GEMMA)
    assert (layout.read, layout.kind) == (read, kind)
    assert layout.writes == {2: ((2, *written),)}
    assert any(repository.removeprefix("models--google--") in note for note in layout.notes)


def test_an_attention_sae_is_as_wide_as_the_heads(tmp_path):
    facts = Facts(n_heads=3, d_head=4)
    values = params(d_in=12, d_out=12)
    where = write(tmp_path / "gemma-scope-2b-pt-att" / FOLDER, values)
    assert opened(where, facts).load(2).encoders[0].W_enc.shape == (F, 12)
    assert "n_heads times d_head is 8" in refused(where)


def test_what_the_user_says_wins_over_folders_names(tmp_path):
    where = write(tmp_path / RES / FOLDER)
    layout = describe_set(where, GEMMA, declared=Declared("blocks.3.hook_mlp_out", None, None))
    assert layout.read.site == "mlp.out"
    assert layout.writes == {3: ((3, "mlp", At.STREAM),)}
    assert not any(RES in note for note in layout.notes)
    declared = Declared("mlp.hook_in", "mlp.hook_out", 1)
    layout = describe_set(where, GEMMA, declared=declared)
    assert layout.kind == "transcoder"
    assert layout.read == Read("mlp.in", Space.NORMALISED_WITH_GAIN)
    assert layout.writes == {1: ((1, "mlp", At.MODULE),)}
    layout = describe_set(where, GEMMA, declared=Declared(reads="mlp.hook_in"))
    assert layout.writes == {2: ((2, "mlp", At.STREAM),)}


def test_a_site_that_nothing_says_is_asked_for(tmp_path):
    message = refused(write(tmp_path / "downloads" / FOLDER))
    assert "nothing says what this dictionary reads" in message
    assert "reads" in message
    assert "nothing says its layer" in refused(write(tmp_path / RES / "mine"))


def test_an_embedding_sae_is_folded_for_the_stream(tmp_path):
    """Made for embeddings e; the stream holds s e, and its output there is s times that of the file."""
    values = params()
    where = write(tmp_path / RES / "embedding" / "width_4k" / "average_l0_6", values)
    found = opened(where, GEMMA)
    assert found.layout.read == Read("embed", Space.RAW)
    assert found.layout.writes == {0: ((0, "embed", At.STREAM),)}
    assert any("folded for the stream" in note for note in found.notes)
    dictionary, s = found.load(0), np.float32(8**0.5)
    acts = activations(values, X)
    in_stream = encode(dictionary, tensor(s * X))
    assert np.abs(in_stream.numpy() - acts).max() < 2e-5
    assert ((in_stream.numpy() != 0) == (acts != 0)).all()
    out = s * (acts @ values["W_dec"] + values["b_dec"])
    assert np.abs(decode(dictionary, in_stream)[0].numpy() - out).max() < 3e-4


def test_without_an_embedding_factor_nothing_is_folded(tmp_path):
    values = params()
    found = opened(write(tmp_path / RES / "embedding" / "average_l0_6", values), Facts())
    assert any("nothing was folded" in note for note in found.notes)
    assert np.abs(encode(found.load(0), tensor(X)).numpy() - activations(values, X)).max() < 1e-5


def test_a_set_is_one_dictionary_for_each_layer(tmp_path):
    for layer, l0 in ((0, 30), (2, 71), (2, 130), (3, 50)):
        write(tmp_path / RES / f"layer_{layer}" / "width_16k" / f"average_l0_{l0}", params(layer + l0))
    message = refused(tmp_path / RES)
    assert "2 dictionaries for layer 2" in message
    for l0 in (71, 130):
        assert f"layer_2/width_16k/average_l0_{l0}" in message
    found = opened(tmp_path / RES, GEMMA, layers=[0, 3])
    assert found.layers == (0, 3)
    assert found.layout.l0 == {0: 30.0, 3: 50.0}
    assert np.array_equal(found.load(3).writes[0].W_dec.numpy(), single(params(53))["W_dec"])
    assert "layer 1 was asked for" in refused(tmp_path / RES, layers=[1])
    assert "several dictionaries" in refused(tmp_path / RES, declared=Declared(layer=1))
    write(tmp_path / RES / "embedding" / "average_l0_6")
    assert "several sites" in refused(tmp_path / RES, layers=[0])


def test_the_file_itself_and_small_letters_are_read(tmp_path):
    values = {key.lower(): value for key, value in params().items()}
    where = write(tmp_path / RES / FOLDER, values)
    found = opened(where / "params.npz", GEMMA)
    assert found.format == "gemma-scope"
    assert np.abs(encode(found.load(2), tensor(X)).numpy() - activations(params(), X)).max() < 1e-5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"threshold": None}, "tensor missing: threshold"),
        ({"W_skip": np.zeros((D, D))}, "tensor left over: W_skip"),
        ({"W_enc": params()["W_enc"].T}, "looks transposed"),
        ({"W_dec": params()["W_dec"].T}, "looks transposed"),
        ({"b_enc": np.zeros(F - 1)}, "b_enc has shape (19), expected (20)"),
        ({"threshold": np.zeros((F, 1))}, "threshold has shape (20, 1), expected (20)"),
        ({"b_dec": np.zeros(D + 1)}, "b_dec has shape (9), expected (8)"),
        ({"b_dec": np.full(D, np.nan)}, "b_dec[0] is NaN"),
        (params(d_in=16, d_out=16), "width 16, the model's d_model is 8"),
        (params(d_out=9), "width 9, the model's d_model is 8"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_what_it_should_be(change, told, tmp_path):
    values = {key: value for key, value in (params() | change).items() if value is not None}
    message = refused(write(tmp_path / RES / FOLDER, values))
    assert told in message
    assert "params.npz" in message


def test_a_truncated_file_is_refused(tmp_path):
    where = write(tmp_path / RES / FOLDER)
    path = where / "params.npz"
    path.write_bytes(path.read_bytes()[:-100])
    assert "truncated, damaged or no .npz file" in refused(where)


def test_attentions_input_is_not_taken_for_the_mlps(tmp_path):
    line = refused(write(tmp_path / "layer_1"), declared=Declared(reads="ln1.hook_normalized"))
    assert "cannot be written to" in line
