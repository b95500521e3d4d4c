"""Messages quote names from strangers' files; a terminal must find nothing in them to act on."""

import json

import pytest
import torch
from safetensors.torch import save_file

from ingest.dictionaries import describe_set
from ingest.errors import InputError
from ingest.spec_text import Mistake, SpecError
from tests.ingest.small_dictionaries import tensors, write_set

EVIL = "\x1b[31m\nerror: forged\u202e\ud800"
SAID = r"\x1b[31m\nerror: forged\u202e\ud800"


def test_a_message_is_one_line_without_controls():
    assert str(InputError(f"file: {EVIL}: unknown key")) == f"file: {SAID}: unknown key"


def test_mistakes_of_a_spec_stand_in_lines_of_their_own():
    lines = str(SpecError("spec", [Mistake("a", 1, EVIL), Mistake("b", 2, "wrong")])).split("\n")
    assert lines == ["spec: 2 mistakes", f"  line 1: a: {SAID}", "  line 2: b: wrong"]


@pytest.mark.parametrize("where", ["tensor", "yaml", "json", "twice", "folder"])
def test_names_from_files_are_shown_as_text(tmp_path, where):
    evil = EVIL.removesuffix("\ud800")
    folder = write_set(tmp_path / ("s\x1b[31m" if where == "folder" else "set"), {0: tensors()})
    if where == "tensor":
        save_file({**tensors(), evil: torch.ones(1)}, str(folder / "layer_0.safetensors"))
    elif where == "yaml":
        write_set(folder, {}, **{evil: 1})
    elif where in ("json", "twice"):
        folder = tmp_path / "saelens"
        folder.mkdir()
        save_file({"W_enc": torch.ones(2, 2)}, str(folder / "sae_weights.safetensors"))
        sizes = {"architecture": "standard", "d_in": 8, "d_sae": 20, "metadata": {"hook_name": "h"}, evil: 1}
        text = json.dumps(sizes)
        (folder / "cfg.json").write_text(text if where == "json" else f"{{{json.dumps(evil)}: 1, {text[1:]}")
    else:
        (folder / "layer_0.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        describe_set(folder, None)
    assert str(caught.value).isprintable() and r"\x1b[31m" in str(caught.value)
