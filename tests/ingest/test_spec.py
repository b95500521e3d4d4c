"""The spec: what a right one means, and every mistake of a wrong one with its path, line and what was
expected."""

import subprocess
import sys

import pytest

from ingest.dictionaries import Declared
from ingest.errors import InputError
from ingest.spec import (
    All_,
    Any_,
    EdgeRequest,
    Everything,
    SpecError,
    TokenRequest,
    Top,
    Z,
    load_spec,
    parse_spec,
    spec_for,
)

GOOD = """\
atlas: 1
models:
  small: {path: model, tokenizer: model/tokenizer.json}
dictionaries:
  neurons: {model: small, format: neurons, layers: all, alias: n}
  tc: {model: small, path: tc, layers: [0-2, 5], alias: tc}
edges:
  - {types: [DIRECT, VIA_HEAD], from: [neurons], to: [neurons], keep: {any: [{z: 6}, {top: 16, per: target}]}}
  - {types: DIRECT, from: tc, keep: everything}
  - {types: [EMBEDS, PROMOTES], from: [tc], to: [tc], keep: {top: 4}}
corpora: {}
runs: {}
"""


@pytest.fixture
def here(tmp_path):
    """A folder with what GOOD names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "tc").mkdir()
    return tmp_path


def mistakes(text, base):
    with pytest.raises(SpecError) as caught:
        parse_spec(text, base=base)
    return caught.value.mistakes


def changed(*pairs, text=GOOD):
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


# --- what a spec means --------------------------------------------------------------------------------------


def test_a_good_spec(here):
    (here / "spec.yaml").write_text(GOOD)
    spec = load_spec(here / "spec.yaml")
    assert spec.models["small"].where == str(here / "model")
    assert spec.models["small"].tokenizer == str(here / "model" / "tokenizer.json")
    assert spec.dictionaries["tc"].where == str(here / "tc")
    assert spec.dictionaries["tc"].layers == (0, 1, 2, 5)
    assert (spec.dictionaries["neurons"].layers, spec.dictionaries["neurons"].alias) == ("all", "n")
    both = Any_((Z(6.0), Top(16, "target")))
    assert spec.edges == (
        EdgeRequest(("DIRECT", "VIA_HEAD"), ("neurons",), ("neurons",), both),
        EdgeRequest(("DIRECT",), ("tc",), ("neurons", "tc"), Everything()),
    )
    assert spec.tokens == (
        TokenRequest("EMBEDS", ("tc",), 4),
        TokenRequest("PROMOTES", ("tc",), 4),
        TokenRequest("EMBEDS", ("neurons",), 16),
        TokenRequest("PROMOTES", ("neurons",), 16),
    )
    assert (spec.seed, spec.sets_of("small")) == (0, ("neurons", "tc"))


def test_rules_by_pair_of_sets(here):
    spec = parse_spec(GOOD, base=here)
    assert spec.rule("VIA_HEAD", "neurons", "neurons") == Any_((Z(6.0), Top(16, "target")))
    assert spec.rule("VIA_HEAD", "tc", "neurons") is None
    assert spec.rule("DIRECT", "tc", "neurons") == Everything()
    assert (spec.top("EMBEDS", "tc"), spec.top("PROMOTES", "neurons")) == (4, 16)


def test_an_edge_is_kept_if_any_entry_keeps_it(here):
    more = "  - {types: [DIRECT], keep: {all: [{z: 3}, {top: 2}]}}\ncorpora: {}"
    spec = parse_spec(changed(("corpora: {}", more)), base=here)
    every = All_((Z(3.0), Top(2, "target")))
    assert spec.rule("DIRECT", "tc", "neurons") == Any_((Everything(), every))
    assert spec.rule("DIRECT", "neurons", "tc") == every


def test_what_is_not_said_is_z_6_for_every_pair_and_16_tokens(here):
    text = "atlas: 1\nmodels: {m: {path: model}}\ndictionaries: {t: {model: m, path: tc}}\n"
    spec = parse_spec(text, base=here)
    assert spec.edges == (EdgeRequest(("DIRECT", "VIA_HEAD"), ("t",), ("t",), Z(6.0)),)
    assert spec.tokens == (TokenRequest("EMBEDS", ("t",), 16), TokenRequest("PROMOTES", ("t",), 16))


def test_tokens_can_be_turned_off(here):
    spec = parse_spec(
        changed(("keep: {top: 4}", "keep: {top: 0}"), ("from: [tc], to: [tc], ", "")), base=here
    )
    assert spec.tokens == (
        TokenRequest("EMBEDS", ("neurons", "tc"), 0),
        TokenRequest("PROMOTES", ("neurons", "tc"), 0),
    )


def test_sets_of_two_models_have_no_edges_between_them(here):
    text = changed(
        ("models:\n", "models:\n  other: {path: model}\n"),
        ("tc: {model: small", "tc: {model: other"),
    )
    spec = parse_spec(text, base=here)
    assert spec.rule("DIRECT", "tc", "neurons") is None
    assert spec.rule("DIRECT", "tc", "tc") == Everything()


@pytest.mark.parametrize(
    ("written", "layers"),
    [("all", "all"), ("5", (5,)), ("0-3", (0, 1, 2, 3)), ("[7, 0-1, 1]", (0, 1, 7)), ("[0]", (0,))],
)
def test_layers(here, written, layers):
    spec = parse_spec(changed(("[0-2, 5]", written)), base=here)
    assert spec.dictionaries["tc"].layers == layers


def test_canonical_form_is_itself_a_spec_from_anywhere(here, tmp_path_factory):
    spec = parse_spec(GOOD, base=here)
    again = parse_spec(spec.to_yaml(), base=tmp_path_factory.mktemp("elsewhere"))
    assert again.canonical() == spec.canonical()
    assert (again.edges, again.tokens) == (spec.edges, spec.tokens)
    assert again.models["small"].where == str(here / "model")


def test_what_the_files_do_not_say_is_carried_and_may_be_left_out(here):
    said = "path: tc, reads: blocks.5.hook_resid_post, writes: resid_post, layer: 5"
    spec = parse_spec(changed(("path: tc", said)), base=here)
    assert spec.dictionaries["tc"].declared == Declared("blocks.5.hook_resid_post", "resid_post", 5)
    again = parse_spec(spec.to_yaml(), base=here)
    assert again.dictionaries["tc"].declared == spec.dictionaries["tc"].declared
    plain = parse_spec(GOOD, base=here)
    assert plain.dictionaries["tc"].declared == Declared()
    assert set(plain.canonical()["dictionaries"]["tc"]) == {"model", "path", "layers", "alias"}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("path: tc, layer: -1", "expected a number of 0 or more, found -1"),
        ("path: tc, layer: five", "expected a whole number, found 'five'"),
        ("path: tc, reads: 5", "found 5"),
        ("path: tc, read: mlp.in", "did you mean 'reads'"),
        ("format: neurons, reads: mlp.in", "neurons have their own reads"),
    ],
)
def test_what_is_said_of_files_and_makes_no_sense(here, written, said):
    with pytest.raises(SpecError) as caught:
        parse_spec(changed(("path: tc", written)), base=here)
    assert said in str(caught.value)


# --- places -------------------------------------------------------------------------------------------------


def test_hub_names_stay_as_they_are(here):
    spec = parse_spec(changed(("path: tc", "path: owner/some-transcoders")), base=here)
    assert spec.dictionaries["tc"].where == "owner/some-transcoders"


def test_a_folder_of_a_hub_name_is_a_set_and_no_model(here):
    spec = parse_spec(changed(("path: tc", "path: owner/sets/layer_5")), base=here)
    assert spec.dictionaries["tc"].where == "owner/sets/layer_5"
    with pytest.raises(SpecError, match="no such file"):
        parse_spec(changed(("path: model,", "path: owner/models/small,")), base=here)


def test_an_existing_path_is_not_taken_for_a_hub_name(here):
    (here / "tc" / "inner").mkdir()
    spec = parse_spec(changed(("path: tc", "path: tc/inner")), base=here)
    assert spec.dictionaries["tc"].where == str(here / "tc" / "inner")


@pytest.fixture
def package(tmp_path_factory, monkeypatch):
    """An installed package whose import would leave a mark."""
    site = tmp_path_factory.mktemp("site")
    folder = site / "some_weights"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"open({str(site / 'ran')!r}, 'w')\n")
    (folder / "model.gguf").write_text("weights")
    (site / "secret").write_text("x")
    monkeypatch.syspath_prepend(str(site))
    return site


def test_a_file_of_a_package_is_found_and_the_package_never_run(here, package):
    text = changed(("path: model,", "path: 'package:some_weights/model.gguf',"))
    spec = parse_spec(text, base=here)
    assert spec.models["small"].where == str(package / "some_weights" / "model.gguf")
    assert spec.canonical()["models"]["small"]["path"] == "package:some_weights/model.gguf"
    assert not (package / "ran").exists()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("package:some_weights/other.gguf", "the package some_weights has no other.gguf"),
        ("package:some_weights/../secret", "leads out of the package"),
        ("package:not_installed_here/x", "the package not_installed_here is not installed; install it"),
        ("package:some_weights", "expected package:NAME/FILE"),
        ("package:some_weights.inner/x", "expected package:NAME/FILE"),
    ],
)
def test_a_file_of_a_package_that_is_not_there(here, package, path, said):
    (found,) = mistakes(changed(("path: model,", f"path: '{path}',")), here)
    assert (found.path, found.line) == ("models.small.path", 3)
    assert said in found.text
    assert not (package / "ran").exists()


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "path", "line", "said"),
    [
        (("atlas: 1", "atlas: 2"), "atlas", 1, "expected 1, found 2; it was written for a newer version"),
        (("atlas: 1", "atlas: x"), "atlas", 1, "expected 1, found 'x'"),
        (("atlas: 1\n", ""), "atlas", 1, "is missing; expected atlas: 1"),
        (("edges:", "edgse:"), "edgse", 7, "unknown key; did you mean 'edges'?"),
        (("tokenizer:", "tokeniser:"), "models.small.tokeniser", 3, "did you mean 'tokenizer'?"),
        (("alias: n}", "alais: n}"), "dictionaries.neurons.alais", 5, "did you mean 'alias'?"),
        (("from: tc", "form: tc"), "edges[1].form", 9, "did you mean 'from'?"),
        (("path: model,", "path: 3,"), "models.small.path", 3, "expected text, found 3"),
        (("path: model,", "path: modle,"), "models.small.path", 3, "no such file or directory"),
        (("path: model, ", ""), "models.small.path", 3, "is missing; expected where the model is"),
        (
            ("  small: {path: model, ", "  sm/all: {path: model, "),
            "models.sm/all",
            3,
            "expected a name of letters",
        ),
        (
            ("{path: model, tokenizer: model/tokenizer.json}", "model"),
            "models.small",
            3,
            "expected keys with values",
        ),
        (("model: small, path", "model: smal, path"), "dictionaries.tc.model", 6, "did you mean 'small'?"),
        (
            ("model: small, path", "path"),
            "dictionaries.tc.model",
            6,
            "expected the name of a model of this spec",
        ),
        (("path: tc, ", ""), "dictionaries.tc", 6, "expected path, or format: neurons"),
        (
            ("format: neurons,", "format: neurons, path: tc,"),
            "dictionaries.neurons.path",
            5,
            "leave path out",
        ),
        (
            ("[0-2, 5]", "[0-2, five]"),
            "dictionaries.tc.layers",
            6,
            "expected all, a layer (5), layers (0-11)",
        ),
        (("[0-2, 5]", "-1"), "dictionaries.tc.layers", 6, "found -1"),
        (("[0-2, 5]", "[]"), "dictionaries.tc.layers", 6, "found an empty list"),
        (
            ("alias: tc", "alias: t8"),
            "dictionaries.tc.alias",
            6,
            "a letter first and no digit last, found 't8'",
        ),
        (("alias: tc", "alias: n"), "dictionaries.tc.alias", 6, "'n' is already the alias of neurons"),
        (
            ("from: tc", "from: tcs"),
            "edges[1].from",
            9,
            "no dictionary set 'tcs' in this spec; did you mean 'tc'?",
        ),
        (("types: DIRECT", "types: DIRCT"), "edges[1].types[0]", 9, "did you mean 'DIRECT'?"),
        (("types: DIRECT", "types: []"), "edges[1].types", 9, "expected some of DIRECT, VIA_HEAD"),
        (("types: DIRECT", "types: [DIRECT, EMBEDS]"), "edges[1].types", 9, "expected an entry of their own"),
        (("z: 6", "z: six"), "edges[0].keep.any[0].z", 8, "expected a number of 0 or more, found 'six'"),
        (("per: target", "per: targets"), "edges[0].keep.any[1].per", 8, "found 'targets'"),
        (("keep: everything", "keep: {top: 0}"), "edges[1].keep.top", 9, "1 or more, found 0"),
        (("keep: {top: 4}", "keep: {z: 4}"), "edges[2].keep", 10, "expected {top: n}, tokens of each sign"),
        (("keep: {top: 4}", "keep: {top: -1}"), "edges[2].keep", 10, "expected {top: n}"),
        (
            ("[EMBEDS, PROMOTES]", "[EMBEDS]"),
            "edges[2].from",
            10,
            "EMBEDS has tokens there; expected to alone",
        ),
        (("corpora: {}", "corpora: {text: {}}"), "corpora", 11, "not read by this version"),
        (("runs: {}", "runs: {circuits: {}}"), "runs", 12, "leave it empty ({}) or out"),
        (("runs: {}", "seed: -1"), "seed", 12, "expected a number of 0 or more, found -1"),
        (("runs: {}", "seed: 1.5"), "seed", 12, "expected a whole number, found 1.5"),
        (("runs: {}", "floor: 0.1"), "floor", 12, "unknown key"),
        (("runs: {}", "corpora: {}"), "corpora", 12, "stands twice (first on line 11)"),
        (("alias: n}", "alias: n, model: small}"), "dictionaries.neurons.model", 5, "stands twice"),
    ],
)
def test_one_mistake(here, change, path, line, said):
    found = mistakes(changed(change), here)
    assert (path, line) in [(mistake.path, mistake.line) for mistake in found], found
    (mine,) = [mistake for mistake in found if (mistake.path, mistake.line) == (path, line)]
    assert said in mine.text
    assert "\n" not in str(mine)


def test_every_mistake_is_told_in_the_order_of_the_file(here):
    """Shape, references, paths and rules at once: one wrong section hides no other."""
    text = changed(
        ("path: model,", "path: nowhere,"),
        ("alias: n}", "alais: n}"),
        ("z: 6", "z: -6"),
        ("from: tc", "from: tcc"),
        ("runs: {}", "runs: {a: 1}"),
    )
    with pytest.raises(SpecError) as caught:
        parse_spec(text, source="my.yaml", base=here)
    assert [(mistake.line, mistake.path) for mistake in caught.value.mistakes] == [
        (3, "models.small.path"),
        (5, "dictionaries.neurons.alais"),
        (8, "edges[0].keep.any[0].z"),
        (9, "edges[1].from"),
        (12, "runs"),
    ]
    lines = str(caught.value).splitlines()
    assert lines[0] == "my.yaml: 5 mistakes"
    assert lines[1].startswith("  line 3: models.small.path: nowhere: no such file")
    assert len(lines) == 6


def test_entries_that_contradict_each_other(here):
    twice = "  - {types: [EMBEDS], to: [tc], keep: {top: 8}}\ncorpora: {}"
    (found,) = mistakes(changed(("corpora: {}", twice)), here)
    assert (found.path, found.line) == ("edges[3]", 11)
    assert found.text == "EMBEDS of tc is already said by edges[2]"


def test_from_and_to_on_different_models(here):
    text = changed(
        ("models:\n", "models:\n  other: {path: model}\n"),
        ("tc: {model: small", "tc: {model: other"),
        ("from: tc,", "from: tc, to: neurons,"),
    )
    (found,) = mistakes(text, here)
    assert (found.path, found.line) == ("edges[1]", 10)
    assert "share no model" in found.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"atlas: [1\n", "not YAML"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
        (b"- a\n", "expected a spec that begins with atlas: 1"),
        (b"just words\n", "expected a spec that begins with atlas: 1"),
        (b"# nothing but a comment\n", "expected a spec that begins with atlas: 1"),
        (b"a: &x [1]\nb: *x\n", "YAML aliases (*name) are not supported"),
        (b"a: !!python/object/apply:os.system ['true']\n", "not YAML"),
        (b"atlas: 1\nmodels:\n\t- a\n", "line 3: not YAML"),
        (b"seed: 2020-13-45\n", "not YAML"),
    ],
)
def test_files_that_are_no_spec(tmp_path, content, said):
    path = tmp_path / "spec.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_spec(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_spec_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no such file; expected a spec"):
        load_spec(tmp_path / "spec.yaml")
    with pytest.raises(InputError, match="is a directory"):
        load_spec(tmp_path)


# --- a spec from the command line ---------------------------------------------------------------------------


def test_spec_for_a_model_and_its_dictionaries(here):
    spec = spec_for("model", ["neurons", "tc", str(here / "tc")], base=here)
    assert list(spec.models) == ["model"]
    assert list(spec.dictionaries) == ["neurons", "tc", "tc-2"]
    assert spec.dictionaries["neurons"].format == "neurons"
    assert spec.dictionaries["tc"].where == spec.dictionaries["tc-2"].where == str(here / "tc")
    assert spec.rule("VIA_HEAD", "neurons", "tc") == Z(6.0)
    assert parse_spec(spec.to_yaml(), base=here).canonical() == spec.canonical()


def test_spec_for_takes_a_rule_and_a_tokenizer(here):
    spec = spec_for("model", tokenizer="model/tokenizer.json", keep=Top(3), base=here)
    assert spec.rule("DIRECT", "neurons", "neurons") == Top(3, "target")
    assert spec.models["model"].tokenizer == str(here / "model" / "tokenizer.json")


def test_spec_for_names_from_hub_names_and_odd_folders(here, package):
    (here / "_my model (v2)").mkdir()
    assert list(spec_for("owner/some-model", base=here).models) == ["some-model"]
    assert list(spec_for("_my model (v2)", base=here).models) == ["my-model-v2"]
    assert list(spec_for("package:some_weights/model.gguf", base=here).models) == ["model"]


def test_spec_for_what_is_not_there(here):
    with pytest.raises(SpecError, match="nowhere: no such file"):
        spec_for("nowhere", base=here)
    with pytest.raises(SpecError, match="nowhere: no such file"):
        spec_for("model", ["nowhere"], base=here)


def test_reading_a_spec_imports_nothing_heavy(here):
    program = (
        "import sys\nfrom ingest.spec import parse_spec\nfrom pathlib import Path\n"
        f"parse_spec({GOOD!r}, base=Path({str(here)!r}))\n"
        "assert not {'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
