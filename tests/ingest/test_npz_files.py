""".npz files: exact widening, both orders, and nothing but numbers; a damaged or hostile file is one clear
error."""

import io
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from ingest.dictionaries.npz_files import read_npz, read_npz_header
from ingest.errors import InputError


def read(path):
    return read_npz(path, read_npz_header(path))


def refused(path):
    with pytest.raises(InputError) as error:
        read(path)
    message = str(error.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def npy(header: str, numbers: bytes = b"") -> bytes:
    """A .npy array with any header."""
    text = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + numbers


def write_members(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_every_accepted_type_and_order_gives_the_same_numbers(save, tmp_path):
    exact = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float16)
    arrays = {
        "half": exact,
        "single": exact.astype(np.float32),
        "double": exact.astype(np.float64),
        "columns": np.asfortranarray(exact.astype(np.float32)),
        "big_endian": exact.astype(">f4"),
    }
    save(tmp_path / "a.npz", **arrays, scalar=np.float32(0.1), empty=np.empty((0, 3), np.float32))
    header = read_npz_header(tmp_path / "a.npz")
    assert {key: header[key].dtype for key in ("half", "single", "double")} == {
        "half": "F16", "single": "F32", "double": "F64",
    }  # fmt: skip
    assert header["half"].bytes == 30
    found = read_npz(tmp_path / "a.npz", header)
    for key in arrays:
        assert found[key].dtype == torch.float32
        assert found[key].is_contiguous()
        assert np.array_equal(found[key].numpy(), exact.astype(np.float32)), key
    assert found["scalar"].shape == ()
    assert found["scalar"] == np.float32(0.1)
    assert found["empty"].shape == (0, 3)


def test_a_float64_that_float32_does_not_hold_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", b=np.array([0.5, 0.1]))
    assert "b: float64, and 1 of 2 numbers" in refused(tmp_path / "a.npz")


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w').close()",)


def test_an_array_of_objects_is_refused_and_its_pickle_not_run(tmp_path):
    marker = tmp_path / "ran"
    array = np.array([Payload(marker), 1.0], object)
    np.savez(tmp_path / "a.npz", W_enc=np.zeros(3, np.float32), W_dec=array)
    assert "W_dec is an array of Python objects" in refused(tmp_path / "a.npz")
    pickled = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", pickle.dumps(Payload(marker)))
    write_members(tmp_path / "b.npz", {"W.npy": pickled})
    assert "so 8 bytes" in refused(tmp_path / "b.npz")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }", "so 12 bytes, the file holds 8"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999, 9), }", "the file holds 8"),
        ("{'descr': '<i4', 'fortran_order': False, 'shape': (2,), }", "type <i4, expected float32"),
        ("{'descr': '|V2', 'fortran_order': False, 'shape': (4,), }", "raw bytes (bfloat16?)"),
        ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }", "not of one plain type"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }", "not of one plain type"),
        ("{'descr': '<f4', 'fortran_order': False, }", "not of one plain type"),
        ("{'descr': True, 'fortran_order': False, 'shape': (2,)}", "not of one plain type"),
        ("{'descr': '', 'fortran_order': False, 'shape': (2,)}", "type , expected float32"),
        ("{'descr': __import__('os').system('true')}", "not of one plain type"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1" * 5000 + ")}", "not of one plain type"),
        ("[" * 5000, "not of one plain type"),
        (" " * 20_000, "is no .npy array"),
    ],
)  # fmt: skip
def test_a_header_that_is_not_true_or_not_plain(header, told, tmp_path):
    write_members(tmp_path / "a.npz", {"W.npy": npy(header, b"\0" * 8)})
    message = refused(tmp_path / "a.npz")
    assert told in message
    assert "W" in message


def test_headers_other_writers_make_are_read(tmp_path):
    """Another order of the three, other blanks, version 2."""
    header = b"{'shape':(1,2),'descr':'<f4','fortran_order':False}\n"
    numbers = np.array([1.5, -2], np.float32).tobytes()
    data = b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header + numbers
    write_members(tmp_path / "a.npz", {"W.npy": data})
    assert read(tmp_path / "a.npz")["W"].tolist() == [[1.5, -2.0]]


def test_sizes_that_the_bytes_cannot_bear_out_are_refused_before_memory_is_asked_for(tmp_path):
    """A zip whose directory claims a terabyte behind a few bytes."""
    path = write_members(
        tmp_path / "a.npz",
        {"W.npy": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (262144, 1048576), }", b"\0" * 800)},
        zipfile.ZIP_DEFLATED,
    )
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    with zipfile.ZipFile(path) as archive:
        assert int.from_bytes(data[at + 24 : at + 28], "little") == archive.infolist()[0].file_size
    data[at + 24 : at + 28] = (2**32 - 16).to_bytes(4, "little")
    path.write_bytes(data)
    assert "claims 4294967280 bytes" in refused(path)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "a.npz"
    assert "no such file" in refused(path)
    path.write_bytes(b"")
    assert "is empty" in refused(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "Git LFS pointer" in refused(path)
    path.write_bytes(b"no zip at all")
    assert "truncated, damaged or no .npz file" in refused(path)
    write_members(path, {"readme.txt": b"hello"})
    assert "readme.txt is no .npy array" in refused(path)
    write_members(path, {})
    assert "holds no array" in refused(path)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "w") as archive:
        for _ in range(2):
            archive.writestr("W.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}"))
    assert "W stands there twice" in refused(path)


def test_nan_and_infinity_are_named_with_their_place(tmp_path):
    np.savez(tmp_path / "a.npz", W=np.array([[1, 2], [np.nan, 4]], np.float32))
    assert "W[1, 0] is NaN" in refused(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", W=np.array([1, np.inf], np.float16))
    assert "W[1] is infinite" in refused(tmp_path / "a.npz")


def test_a_file_that_changed_since_its_header_was_read(tmp_path):
    np.savez(tmp_path / "a.npz", W=np.zeros((2, 2), np.float32))
    header = read_npz_header(tmp_path / "a.npz")
    for arrays in ({"W": np.zeros((4, 1), np.float32)}, {"V": np.zeros((2, 2), np.float32)}):
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(InputError, match="has changed since it was opened"):
            read_npz(tmp_path / "a.npz", header)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_anywhere_gives_one_error_or_the_numbers(save, tmp_path):
    """Bytes changed, cut out and cut off at random: never another exception, never other numbers."""
    values = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    buffer = io.BytesIO()
    save(buffer, W=values)
    sound, rng, path = buffer.getvalue(), random.Random(0), tmp_path / "a.npz"
    errors = 0
    for _ in range(400):
        data = bytearray(sound)
        match rng.randrange(3):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(1, len(data)) :]
            case 2:
                at = rng.randrange(len(data))
                del data[at : at + rng.randrange(1, 8)]
        path.write_bytes(data)
        try:
            found = read(path)
        except InputError:
            errors += 1
        else:
            assert all(np.array_equal(tensor.numpy(), values) for tensor in found.values())
    assert errors > 300
