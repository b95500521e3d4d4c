"""What is read of a safetensors file besides whole tensors: single numbers, parts of a tensor, metadata."""

import pytest
import torch
from safetensors.torch import save_file

from ingest.dictionaries.tensor_files import read_header, read_metadata, read_numbers, read_part
from ingest.errors import InputError


@pytest.fixture
def path(tmp_path):
    stacked = torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4)
    found = {
        "single": torch.tensor(7.300000190734863),
        "short": torch.tensor(-1.5, dtype=torch.bfloat16),
        "half": torch.tensor([0.333], dtype=torch.float16),
        "stacked": stacked,
    }
    save_file(found, str(tmp_path / "x.safetensors"), {"version": "3"})
    return tmp_path / "x.safetensors"


def test_single_numbers_are_exact_in_every_type(path):
    half = float(torch.tensor(0.333, dtype=torch.float16))
    found = read_numbers(path, read_header(path), ["single", "short", "half"])
    assert found == {"single": 7.300000190734863, "short": -1.5, "half": half}
    with pytest.raises(InputError, match=r"stacked has shape \(2, 3, 4\) and type BF16, expected one number"):
        read_numbers(path, read_header(path), ["stacked"])


def test_a_part_along_either_axis(path):
    whole = torch.arange(24.0).reshape(2, 3, 4)
    for at in range(2):
        assert torch.equal(read_part(path, read_header(path), "stacked", at, axis=0), whole[at])
        assert torch.equal(read_part(path, read_header(path), "stacked", at), whole[:, at])


def test_a_file_replaced_in_between_is_noticed(path):
    header = read_header(path)
    save_file({"other": torch.zeros(2)}, str(path))
    with pytest.raises(InputError, match="has changed since it was opened"):
        read_numbers(path, header, ["single"])


def test_metadata(path, tmp_path):
    assert read_metadata(path) == {"version": "3"}
    save_file({"a": torch.zeros(1)}, str(tmp_path / "none.safetensors"))
    assert read_metadata(tmp_path / "none.safetensors") == {}
