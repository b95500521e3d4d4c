"""What names of hooks mean, which folders under a path hold dictionaries, and no field left unread."""

import json
from pathlib import Path

import pytest

from ingest.dictionaries.configs import Fields, read_json
from ingest.dictionaries.folders import dictionary_folders, one_per_layer
from ingest.dictionaries.hooks import mlp_input, read_hook, write_hook
from ingest.dictionaries.types import At, Read, Space
from ingest.errors import InputError
from ingest.models import Norm
from tests.ingest.small_dictionaries import Facts

RMS, LAYER_NORM = Norm(False, "weight", False, 1e-6), Norm(True, "weight", True, 1e-5)
WITH_GAIN, NORMALISED = Space.NORMALISED_WITH_GAIN, Space.NORMALISED


@pytest.mark.parametrize(
    ("name", "layer", "site", "space"),
    [
        ("hook_embed", 0, "embed", Space.RAW),
        ("blocks.5.hook_resid_post", 5, "resid_post", Space.RAW),
        ("hook_resid_pre", None, "resid_pre", Space.RAW),
        ("blocks.12.mlp.hook_in", 12, "mlp.in", WITH_GAIN),
        ("blocks.0.hook_mlp_in", 0, "mlp.in", Space.RAW),
        ("blocks.3.attn.hook_z", 3, "attn.z", Space.Z),
        ("blocks.3.hook_mlp_out", 3, "mlp.out", Space.BRANCH_OUTPUT),
        ("attn.hook_out", None, "attn.out", Space.BRANCH_OUTPUT),
        ("model.layers.12.output", 12, "resid_post", Space.RAW),
        ("model.layers.12.pre_feedforward_layernorm.output", 12, "mlp.in", WITH_GAIN),
        ("model.layers.12.post_feedforward_layernorm.output", 12, "mlp.out", Space.BRANCH_OUTPUT),
        ("model.layers.12.self_attn.o_proj.input", 12, "attn.z", Space.Z),
        ("transformer.h.3.ln_2.output", 3, "mlp.in", WITH_GAIN),
        ("gpt_neox.layers.3.attention.dense.input", 3, "attn.z", Space.Z),
        ("layers.3.mlp.output", 3, "mlp.out", Space.BRANCH_OUTPUT),
        ("layers.2.input", 2, "resid_pre", Space.RAW),
        ("model.embed_tokens.output", 0, "embed", Space.RAW),
        ("resid_post_layer_4", 4, "resid_post", Space.RAW),
        ("mlp_out_layer_11", 11, "mlp.out", Space.BRANCH_OUTPUT),
        ("mlp.in", None, "mlp.in", WITH_GAIN),
        ("attn.z", None, "attn.z", Space.Z),
        ("resid_mid", None, "resid_mid", Space.RAW),
    ],
)
def test_every_way_to_name_a_site_that_is_read(name, layer, site, space):
    hook = read_hook(name, Facts(), "cfg.json: hook_name")
    assert (hook.layer, hook.read, hook.note) == (layer, Read(site, space), None)


@pytest.mark.parametrize(
    ("name", "site", "at"),
    [
        ("blocks.5.hook_resid_post", "resid_post", At.STREAM),
        ("blocks.5.mlp.hook_out", "mlp", At.MODULE),
        ("blocks.5.hook_mlp_out", "mlp", At.STREAM),
        ("attn.hook_out", "attn", At.MODULE),
        ("hook_attn_out", "attn", At.STREAM),
        ("blocks.5.attn.hook_z", "attn.z", At.MODULE),
        ("layers.5.mlp.output", "mlp", At.MODULE),
        ("layers.5.mlp.down_proj.output", "mlp", At.MODULE),
        ("model.layers.5.post_feedforward_layernorm.output", "mlp", At.STREAM),
        ("hook_embed", "embed", At.STREAM),
        ("mlp.out", "mlp", At.MODULE),
    ],
)
def test_what_is_written_and_on_which_side_of_a_norm_behind_the_branch(name, site, at):
    hook = write_hook(name, Facts(), "cfg.json: hook_name")
    assert (hook.site, hook.at, hook.note) == (site, at, None)


def test_hook_normalized_is_behind_the_gain_of_a_layer_norm_and_before_that_of_an_rms_norm():
    name = "blocks.3.ln2.hook_normalized"
    assert read_hook(name, Facts(norm=LAYER_NORM), "f: k").read == Read("mlp.in", WITH_GAIN)
    assert read_hook(name, Facts(norm=RMS), "f: k").read == Read("mlp.in", NORMALISED)
    assert read_hook(name, Facts(norm=LAYER_NORM), "f: k", folded=True).read == Read("mlp.in", NORMALISED)
    unknown = read_hook(name, None, "f: k")
    assert unknown.read == Read("mlp.in", NORMALISED)
    assert "say which model" in unknown.note
    with pytest.raises(InputError, match="without a norm"):
        read_hook(name, Facts(norm_before=False), "f: k")


def test_the_norm_after_attention_is_told_from_the_one_before_the_mlp_by_the_facts():
    name = "model.layers.3.post_attention_layernorm.output"
    assert read_hook(name, Facts(), "f: k").read == Read("mlp.in", WITH_GAIN)
    behind = Facts(norm_before=False, norm_after=True)
    assert read_hook(name, behind, "f: k").read == Read("attn.out", Space.BRANCH_OUTPUT)
    assert write_hook(name, behind, "f: k").at is At.STREAM
    for facts in (None, Facts(norm_after=True)):
        with pytest.raises(InputError, match="ambiguous"):
            read_hook(name, facts, "f: k")


def test_an_output_that_does_not_say_on_which_side_is_refused_where_it_matters():
    assert write_hook("mlp.out", None, "f: k").note
    for facts in (Facts(norm_after=True), Facts(branch_multiplier=0.5)):
        with pytest.raises(InputError, match=r"f: k: mlp\.out is not enough on Small.*mlp\.hook_out"):
            write_hook("mlp.out", facts, "f: k")
        assert write_hook("hook_mlp_out", facts, "f: k").at is At.STREAM


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("blocks.5.hook_resid_pots", "unknown hook.*did you mean 'hook_resid_post'"),
        ("layers.5.mlp", r"say layers\.5\.mlp\.input or layers\.5\.mlp\.output"),
        ("blocks.5.mlp.hook_post", "neurons"),
        ("model.layers.5.mlp.down_proj.input", "neurons"),
        ("", "expected the name of a hook"),
        (7, "expected the name of a hook.*found 7"),
    ],
)
def test_names_that_are_no_site(name, said):
    with pytest.raises(InputError, match=rf"cfg\.json: hook_name: .*{said}"):
        read_hook(name, Facts(), "cfg.json: hook_name")


def test_nothing_is_written_at_the_input_of_an_mlp():
    with pytest.raises(InputError, match="does not join the residual stream"):
        write_hook("blocks.3.ln2.hook_normalized", Facts(), "f: k")


def test_resid_mid_is_the_mlps_raw_input_for_a_transcoder_and_is_not_there_in_parallel_blocks():
    assert mlp_input(read_hook("hook_resid_mid", Facts(), "f: k").read) == Read("mlp.in", Space.RAW)
    assert mlp_input(Read("resid_post", Space.RAW)) == Read("resid_post", Space.RAW)
    with pytest.raises(InputError, match="parallel blocks"):
        read_hook("hook_resid_mid", Facts(parallel=True), "f: k")


# --- folders ------------------------------------------------------------------------------------------------


def made(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("")
    return root


def test_folders_that_hold_a_marker_in_the_order_of_their_numbers(tmp_path):
    made(tmp_path, "l.10/sae.x", "l.2/sae.x", "l.1/mlp/sae.x", ".hidden/sae.x", "l.3/other.x")
    found = dictionary_folders(tmp_path, "sae.x")
    assert [str(path.relative_to(tmp_path)) for path in found] == ["l.1/mlp", "l.2", "l.10"]
    assert dictionary_folders(tmp_path, lambda folder: (folder / "other.x").exists()) == [tmp_path / "l.3"]


def test_a_path_may_be_the_folder_or_the_marked_file_itself(tmp_path):
    made(tmp_path, "sae.x", "deep/a.y")
    assert dictionary_folders(tmp_path, "sae.x") == [tmp_path]
    assert dictionary_folders(tmp_path / "sae.x", "sae.x") == [tmp_path]
    assert dictionary_folders(tmp_path / "deep" / "a.y", "sae.x") == []


def test_a_loop_of_links_ends(tmp_path):
    made(tmp_path, "a/sae.x")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    assert dictionary_folders(tmp_path, "sae.x") == [tmp_path / "a"]


def test_one_dictionary_for_each_layer():
    post, pre = Read("resid_post", Space.RAW), Read("resid_pre", Space.RAW)
    a, b, c = Path("a"), Path("b"), Path("c")
    assert one_per_layer([(b, 4, post), (a, 2, post)]) == {2: a, 4: b}
    with pytest.raises(InputError, match=r"a reads resid_post .*b reads resid_pre .*deeper path"):
        one_per_layer([(a, 2, post), (b, 4, pre)])
    with pytest.raises(InputError, match=r"layer 2 has 2 dictionaries: a, c; .*deeper path"):
        one_per_layer([(a, 2, post), (b, 4, post), (c, 2, post)])


# --- configurations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("[1, 2]", r"expected keys and values, found \[1, 2\]"),
        ('{"k": 1, "k": 2}', "k: stands there twice"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
    ],
)
def test_what_is_no_configuration(tmp_path, text, said):
    (tmp_path / "cfg.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=rf"cfg\.json: {said}"):
        read_json(tmp_path / "cfg.json")
    with pytest.raises(InputError, match=r"none\.json: no such file"):
        read_json(tmp_path / "none.json")


def fields(**values):
    return Fields(Path("cfg.json"), json.loads(json.dumps(values)))


def test_fields_are_taken_by_kind():
    config = fields(k=4, scale=2, name="a", flag=True, none=None)
    assert config.take("k", int) == 4
    assert (scale := config.take("scale", float)) == 2.0 and type(scale) is float
    assert config.take("none", str, "b", note="none is taken as b") == "b"
    assert config.notes == ["none is taken as b"]
    for key, kind, said in [
        ("flag", int, "expected a whole number, found true"),
        ("k", bool, "expected true or false, found 4"),
        ("name", int | float, 'expected a whole number or a number, found "a"'),
        ("none", str, "is missing; expected a text"),
    ]:
        with pytest.raises(InputError, match=rf"cfg\.json: {key}: {said}"):
            config.take(key, kind)


def test_one_of_tells_false_from_zero():
    assert fields(mode=False).one_of("mode", [False, "a"]) is False
    with pytest.raises(InputError, match=r'cfg\.json: mode: expected one of false, "a", found 0'):
        fields(mode=0).one_of("mode", [False, "a"])


def test_a_field_that_nobody_looked_at_is_an_error_even_inside_a_section():
    config = fields(k=4, lr=1e-3, metadata={"hook_name": "x", "new": 1})
    config.take("k", int)
    config.ignore("lr", "wandb")
    inner = config.section("metadata")
    inner.take("hook_name", str)
    with pytest.raises(InputError, match=r"metadata\.new: unknown key"):
        config.done()
    inner.ignore("new")
    config.done()
    config.values["kk"] = 1
    with pytest.raises(InputError, match="kk: unknown key; did you mean 'k'"):
        config.done()
