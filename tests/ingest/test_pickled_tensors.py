"""torch's files read without torch's loader: the same numbers, every damage one clear line."""

import gzip
import pickle
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

from ingest.dictionaries.pickled_tensors import (
    Configuration,
    Named,
    pickle_head,
    read_numbers,
    read_pickled,
    read_pickled_tensors,
)
from ingest.errors import InputError
from tests.ingest.torch_files import a_class, numbers, read, save, write_zip

KINDS = ["zip", "old", "pickle", "gzip"]
CONFIG = "lab.config.RunConfig"


def state():
    """A state dict as a module gives it, with what torch hangs on it."""
    module = torch.nn.Linear(5, 7)
    module.weight.data, module.bias.data = numbers(7, 5), numbers(7, seed=1)
    return module.state_dict()


def refused(path, classes=frozenset()):
    with pytest.raises(InputError) as caught:
        read(path, classes)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


# --- what is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_in_every_container(tmp_path, kind):
    saved = state()
    assert saved._metadata
    found = read(save(tmp_path / "file", saved, kind))
    assert list(found) == ["weight", "bias"]
    for key, tensor in found.items():
        assert torch.equal(tensor, saved[key])
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_headers_come_before_numbers(tmp_path, kind):
    file = read_pickled(save(tmp_path / "file", {"W": numbers(3, 4, 5, dtype=torch.float16)}, kind))
    entry = file.value["W"]
    assert (entry.dtype, entry.shape, entry.stride, entry.offset) == ("F16", (3, 4, 5), (20, 5, 1), 0)
    assert (entry.count, entry.bytes) == (60, 120)
    assert file.tensors == (entry,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zip", "old", "gzip"])
def test_every_type_is_widened_exactly(tmp_path, dtype, kind):
    saved = torch.cat([numbers(50, dtype=dtype), torch.tensor([0.0, -0.0, 1e-7], dtype=dtype)])
    found = read(save(tmp_path / "file", {"W": saved}, kind))["W"]
    assert torch.equal(found.double(), saved.double())
    assert found[-2].signbit()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
)
def test_what_float32_holds_of_other_types(tmp_path, dtype):
    saved = torch.tensor([0, 1, 7, 100], dtype=dtype)
    assert torch.equal(read(save(tmp_path / "file", {"k": saved}))["k"], saved.float())


@pytest.mark.parametrize(
    "saved",
    [
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(2**24 + 1),
        torch.tensor(1e300, dtype=torch.float64),
    ],
)
def test_no_number_is_rounded(tmp_path, saved):
    line = refused(save(tmp_path / "file", {"threshold": torch.stack([saved, saved * 0])}))
    assert "threshold" in line
    assert "1 of 2 numbers are no float32" in line


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_one_storage(tmp_path, kind):
    """Transposed, cut out of a larger one, spread, and shared: each with its own numbers afterwards."""
    whole = numbers(6, 8)
    saved = {
        "whole": whole,
        "turned": whole.T,
        "part": whole[1:5, 2:7:2],
        "spread": whole[2, 3].expand(4, 3),
        "scalar": whole[5, 7],
        "same": whole,
    }
    found = read(save(tmp_path / "file", saved, kind))
    for key, tensor in saved.items():
        assert torch.equal(found[key], tensor)
        assert found[key].is_contiguous()
    found["whole"].zero_()
    assert torch.equal(found["same"], whole)
    assert torch.equal(found["turned"], whole.T)


def test_parameters_are_tensors(tmp_path):
    found = read(save(tmp_path / "file", {"W": torch.nn.Parameter(numbers(4))}))
    assert torch.equal(found["W"], numbers(4))


@pytest.mark.parametrize("kind", ["zip", "old"])
def test_the_device_in_the_file_does_not_matter(tmp_path, kind):
    """A dictionary trained on a GPU says so in every storage; written here, where there is none."""
    path = save(tmp_path / "file", state(), kind)
    if kind == "zip":
        with zipfile.ZipFile(path) as archive:
            parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        program = parts.pop("data.pkl").replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0")
        write_zip(path, program, {key[5:]: data for key, data in parts.items() if key.startswith("data/")})
        assert b"cuda:0" in path.read_bytes()
    else:
        data = path.read_bytes()
        path.write_bytes(data.replace(b"X\3\0\0\0cpu", b"X\6\0\0\0cuda:0"))
    assert torch.equal(read(path)["weight"], state()["weight"])


def test_an_empty_tensor_has_its_shape(tmp_path):
    assert read(save(tmp_path / "file", {"W": torch.empty(0, 3)}))["W"].shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_is_its_plain_attributes(tmp_path, kind):
    with a_class("lab.config", "RunConfig") as made:
        config = made()
        config.__dict__ |= {
            "layer": 3, "rate": 1e-3, "name": "gelu ü", "tokens": 3_000_000_000_000, "missing": None,
            "flags": (False,), "sizes": [1, -2, 70_000], "inner": {"on": True}, "size": torch.Size([2, 3]),
            "device": torch.device("cuda:0"), "dtype": torch.float32,
        }  # fmt: skip
        path = save(tmp_path / "file", {"cfg": config, "state_dict": state()}, kind)
    file = read_pickled(path, {CONFIG})
    assert file.value["cfg"] == Configuration(
        CONFIG,
        {
            **config.__dict__,
            "device": "cuda:0",
            "dtype": Named("torch.float32"),
            "size": (2, 3),
        },
    )
    assert torch.equal(read_pickled_tensors(file, file.value["state_dict"])["bias"], state()["bias"])
    assert f"asks for {CONFIG}, which no dictionary needs" in refused(path)


def test_small_numbers_are_read_without_torch(tmp_path):
    saved = {"k": torch.tensor(7, dtype=torch.int32), "t": torch.tensor([0.5, -1]), "W": numbers(40, 40)}
    path = save(tmp_path / "file", saved)
    code = f"""
import sys
from pathlib import Path
from ingest.dictionaries.pickled_tensors import read_numbers, read_pickled
file = read_pickled(Path({str(path)!r}))
print(read_numbers(file, {{key: file.value[key] for key in ("k", "t")}}), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'k': [7], 't': [0.5, -1.0]} False"
    file = read_pickled(path)
    with pytest.raises(InputError, match="W has 1600 numbers"):
        read_numbers(file, {"W": file.value["W"]})


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_holds_the_texts(tmp_path, kind):
    assert b"weight" in pickle_head(save(tmp_path / "file", state(), kind))


# --- what is wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty (0 bytes); expected a file of torch.save"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"hello", "truncated or not a file of torch.save"),
        (b"(dp0\nS'W'\np1\nI1\ns.", "truncated or not a file of torch.save"),  # protocol 0
        (b"PK\5\6" + bytes(18), "a zip archive without NAME/data.pkl"),
        (b"PK\3\4", "truncated or damaged"),
        (b"\x1f\x8bhello", "truncated or damaged"),
        (b"\x80", "truncated, damaged or no pickle of tensors (it ends too early)"),
        (bytes(257) + b"ustar" + bytes(300), "a tar archive, as torch wrote before 0.1.10"),
    ],
)
def test_a_file_that_is_none(tmp_path, content, said):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert said in refused(path)


def test_a_missing_file(tmp_path):
    assert "no such file" in refused(tmp_path / "file")
    assert pickle_head(tmp_path / "file") == b""
    assert "is not a file" in refused(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite(tmp_path, kind):
    saved = numbers(4, 4)
    saved[2, 1] = torch.nan
    assert "W[2, 1] is NaN (1 of 16" in refused(save(tmp_path / "file", {"W": saved}, kind))


def test_an_archive_of_something_else(tmp_path):
    path = tmp_path / "file"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    assert "a TorchScript program, which is code" in refused(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "hello")
    assert "a zip archive without NAME/data.pkl" in refused(path)


def test_a_compressed_archive(tmp_path):
    path = save(tmp_path / "good", state())
    with (
        zipfile.ZipFile(path) as good,
        zipfile.ZipFile(tmp_path / "file", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in good.namelist():
            packed.writestr(name, good.read(name))
    assert "is compressed or encrypted, which torch.save never does" in refused(tmp_path / "file")


def test_another_byte_order(tmp_path):
    path = write_zip(tmp_path / "file", pickle.dumps({}, 2), byteorder="big")
    assert "byteorder is big, expected little" in refused(path)


def test_a_record_left_over(tmp_path):
    path = write_zip(tmp_path / "file", pickle.dumps({}, 2), {"7": b"abcd"})
    assert "its record name/data/7 belongs to no tensor" in refused(path)
    assert "name/extra in it is not torch.save's" in refused(write_zip(path, pickle.dumps({}, 2), extra="?"))


@pytest.mark.parametrize("kind", ["old", "pickle"])
def test_bytes_left_over(tmp_path, kind):
    path = save(tmp_path / "file", state(), kind)
    path.write_bytes(path.read_bytes() + b"\0\0")
    assert "2 bytes are left over behind its end" in refused(path)


def test_a_file_that_changes(tmp_path):
    path = save(tmp_path / "file", {"W": numbers(4)})
    file = read_pickled(path)
    save(path, {"W": numbers(5)})
    with pytest.raises(InputError, match="has changed since it was opened"):
        read_pickled_tensors(file, file.value)


# --- damage -------------------------------------------------------------------------------------------------


def small():
    return OrderedDict(W=numbers(4, 3), b=numbers(4, seed=1, dtype=torch.bfloat16), k=torch.tensor(3))


def survives(path, exact=True):
    """A damaged file is refused in one line, or read as it was."""
    try:
        found = read(path)
    except InputError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)
        return False
    if exact:
        assert list(found) == ["W", "b", "k"]
        assert all(torch.equal(found[key], value.float()) for key, value in small().items())
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(tmp_path, kind):
    path = save(tmp_path / "file", small(), kind)
    data = path.read_bytes()
    for length in range(0, len(data), 11):
        path.write_bytes(data[:length])
        assert not survives(path)


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bytes_are_seen_where_there_is_a_checksum_and_never_raise_anything_else(tmp_path, kind):
    path = save(tmp_path / "file", small(), kind)
    data, chance = path.read_bytes(), random.Random(4)
    for _ in range(250):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        survives(path, exact=kind in ("zip", "gzip"))


@pytest.mark.parametrize("kind", ["zip", "gzip"])
def test_flipped_bytes_behind_a_right_checksum(tmp_path, kind):
    """What the machine makes of a damaged program: refused or read, never anything else."""
    good = save(tmp_path / "good", small(), "zip" if kind == "zip" else "pickle")
    records = {}
    data = good.read_bytes()
    if kind == "zip":
        with zipfile.ZipFile(good) as archive:
            data = archive.read("good/data.pkl")
            records = {str(i): archive.read(f"good/data/{i}") for i in range(3)}
    chance = random.Random(5)
    read_at_all = 0
    for _ in range(400):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] = chance.randrange(256)
        path = tmp_path / "file"
        if kind == "zip":
            write_zip(path, bytes(damaged), records)
        else:
            path.write_bytes(gzip.compress(bytes(damaged), 1))
        read_at_all += survives(path, exact=False)
    assert read_at_all < 300
