"""Files made to run code, or to fill the memory: refused in one line, and the marker that the payload would
leave is not there. `test_the_payloads_are_real` shows that it would be."""

import builtins
import contextlib
import gzip
import io
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from ingest.dictionaries.pickled_tensors import read_pickled, read_pickled_tensors
from ingest.errors import InputError
from tests.ingest.torch_files import a_class, numbers, save, write_zip

KINDS = ["zip", "old", "pickle", "gzip"]
CONFIG = "lab.config.RunConfig"
STORAGE = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ"  # four numbers
FOUR = struct.pack("<4f", 1, 2, 3, 4)


class Reduce:
    """Pickles as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call

    def __call__(self):
        """So that it may stand where a pickle calls."""


class Stateful:
    """Pickles as a call whose result is then given a state, items and entries."""

    def __init__(self, *call):
        self.call = call

    def __reduce_ex__(self, protocol):
        return self.call


def payloads(marker):
    """Values whose ordinary unpickling makes the marker."""
    code = f"open({str(marker)!r}, 'w').close()"
    inner = pickle.dumps(Reduce(exec, (code,)))
    return {
        "system": Reduce(os.system, (f"touch {marker}",)),
        "exec": Reduce(exec, (code,)),
        "eval": Reduce(eval, (code,)),
        "open": Reduce(open, (str(marker), "w")),
        "getattr": Reduce(Reduce(getattr, (marker, "touch")), ()),
        "nested in arguments": Reduce(OrderedDict, ([("a", Reduce(exec, (code,)))],)),
        "loads": Reduce(pickle.loads, (inner,)),
        "torch.load": Reduce(torch.storage._load_from_bytes, (_torch_bytes(Reduce(exec, (code,))),)),
        "state": Stateful(OrderedDict, (), Reduce(exec, (code,))),
        "item": Stateful(list, (), None, iter([Reduce(exec, (code,))])),
        "entry": Stateful(dict, (), None, None, iter([("a", Reduce(exec, (code,)))])),
        "key": {Reduce(str, (Reduce(exec, (code,)),)): 1},
        "map": Reduce(list, (Reduce(map, (builtins.exec, [code])),)),
    }


def _torch_bytes(value):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


NAMES = list(payloads(Path("x")))


def refused(path, classes=frozenset({CONFIG})):
    with pytest.raises(InputError) as caught:
        file = read_pickled(path, classes)
        read_pickled_tensors(file, file.value)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    assert len(line) < 1000
    return line.removeprefix(f"{path}: ")


# --- code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs(tmp_path, name, kind):
    marker = tmp_path / "ran"
    path = save(tmp_path / "file", {"W": numbers(3), "x": payloads(marker)[name]}, kind)
    line = refused(path)
    assert "refused" in line or "truncated, damaged or no pickle of tensors" in line
    assert not marker.exists()


@pytest.mark.parametrize("name", NAMES)
def test_the_payloads_are_real(tmp_path, name):
    marker = tmp_path / "ran"
    path = save(tmp_path / "file", {"W": numbers(3), "x": payloads(marker)[name]}, "zip")
    with contextlib.suppress(TypeError, AttributeError):  # after the payload has run
        torch.load(path, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_class_does_not_admit_what_is_under_it(tmp_path, kind):
    marker = tmp_path / "ran"
    with a_class("lab.config", "RunConfig") as made:
        config = made()
        config.layer, config.path = 3, payloads(marker)["exec"]
        path = save(tmp_path / "file", {"cfg": config}, kind)
    assert "asks for " in (line := refused(path))
    assert "exec" in line
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"), ("posix", "system"), ("builtins", "eval"), ("__builtin__", "exec"),
        ("builtins", "getattr"), ("torch", "load"), ("torch.serialization", "load"), ("torch.hub", "load"),
        ("torch", "_utils._import_dotted_name"), ("torch", "FloatStorage.from_file"), ("torch", "ops"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("collections", "OrderedDict.fromkeys"),
        ("lab.config", "RunConfig.__init__"), ("lab.config", "os.system"), ("lab", "config"),
        ("copyreg", "_reconstructor"), ("functools", "partial"), ("", ""), ("torch.device", ""),
        ("subprocess", "Popen"), ("numpy.core.multiarray", "scalar"), ("_codecs", "encode"),
        ("a\tb", "\u202e"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_names_are_known_exactly_or_not_at_all(tmp_path, module, name, protocol):
    if protocol == 2:
        program = b"\x80\2c" + f"{module}\n{name}\n".encode() + b"."
    else:
        texts = [b"\x8c" + bytes([len(text.encode())]) + text.encode() for text in (module, name)]
        program = b"\x80\4" + b"".join(texts) + b"\x93."
    assert "asks for " in refused(write_zip(tmp_path / "file", program))


def test_a_known_name_is_no_value(tmp_path):
    """The value itself may be a type; a function, a class or a storage is not data."""
    for name in (
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ccollections\nOrderedDict\n",
        b"clab.config\nRunConfig\n",
    ):
        assert "holds " in refused(write_zip(tmp_path / "file", b"\x80\2]" + name + b"a."))
    assert "holds Storage" in refused(write_zip(tmp_path / "file", b"\x80\2" + STORAGE + b".", {"0": FOUR}))
    assert "holds Blob" in refused(write_zip(tmp_path / "file", b"\x80\2C\3abc."))


# --- known names, used otherwise ----------------------------------------------------------------------------

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n("
HOOKS = b"\x89ccollections\nOrderedDict\n)R"


@pytest.mark.parametrize(
    "program",
    [
        b"ccollections\nOrderedDict\n]\x85R",  # an argument
        b"ccollections\nOrderedDict\n]R",  # arguments that are no tuple
        b"ccollections\nOrderedDict\n)RX\1\0\0\0aK\1\x86b",  # a state that is no dictionary
        b"ccollections\nOrderedDict\n)R}X\1\0\0\0aK\1sb",  # a state of unknown keys
        b"}}X\1\0\0\0aK\1sb",  # a plain dictionary with a state
        b"clab.config\nRunConfig\n)R",  # called, not made
        b"clab.config\nRunConfig\nK\1\x85\x81",  # made with an argument
        b"clab.config\nRunConfig\n)\x81K\1b",  # a state that is a number
        b"clab.config\nRunConfig\n)\x81N}\x86b",  # slots
        b"clab.config\nRunConfig\n)\x81}b}b",  # a second state
        b"clab.config\nRunConfig\n)\x81X\1\0\0\0aK\1s",  # an entry of an object that is no dictionary
        b"ccollections\nOrderedDict\n)\x81",  # made, not called
        b"clab.config\nRunConfig\n)}\x92",  # NEWOBJ_EX
        b"(clab.config\nRunConfig\no",  # OBJ
        b"(ilab.config\nRunConfig\n",  # INST
        b"\x82\1",  # an extension
        b"\x97",  # a buffer from outside
        b"K\1K\2R",
        b"K\1)R",
        b"ctorch\ndevice\n)R",
        b"ctorch\ndevice\nK\1\x85R",
        b"ctorch\ndevice\nX\4\0\0\0cudaX\1\0\0\0a\x86R",
        b"ctorch\nSize\n]\x85R",
        b"ctorch\nSize\nX\1\0\0\0a\x85\x85R",
        b"ctorch\nfloat32\n)R",
        b"ctorch\nFloatStorage\nK\4\x85R",
        b"ctorch\nfloat32\n)\x81",
        b"ctorch.storage\n_load_from_bytes\nC\1a\x85R",  # not in this container
        b"ctorch._utils\n_rebuild_parameter\nK\1\x89}\x87R",
        b"ctorch._utils\n_rebuild_parameter\n)R",
        TENSOR + b"tR",
        TENSOR + b"K\1K\0K\4\x85K\1\x85" + HOOKS + b"tR",  # no storage
        TENSOR + STORAGE + b"K\0K\4\x85K\1\x85\x89" + b"}X\1\0\0\0aK\1stR",  # hooks
        TENSOR + STORAGE + b"K\0K\4\x85K\1\x85" + HOOKS + b"}X\1\0\0\0aK\1stR",  # metadata
        TENSOR + STORAGE + b"K\0K\5\x85K\1\x85" + HOOKS + b"tR",  # one number too many
        TENSOR + STORAGE + b"K\1K\4\x85K\1\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0K\2\x85K\4\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0K\2K\2\x86K\3K\1\x86" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0K\2K\2\x86K\1\x85" + HOOKS + b"tR",  # axes and strides differ
        TENSOR + STORAGE + b"J\xff\xff\xff\xffK\2\x85K\1\x85" + HOOKS + b"tR",  # before its beginning
        TENSOR + STORAGE + b"K\3K\2\x85J\xff\xff\xff\xff\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0J\xff\xff\xff\xff\x85K\1\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0\x88\x85K\1\x85" + HOOKS + b"tR",  # true is no size
        TENSOR + STORAGE + b"K\0NK\1\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0]K\1a]K\1a" + HOOKS + b"tR",
        TENSOR + STORAGE + b"NK\4\x85K\1\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0\x8a\x0a" + b"\xff" * 9 + b"\0\x85K\0\x85" + HOOKS + b"tR",
        TENSOR + STORAGE + b"K\0(" + b"K\1" * 9 + b"t(" + b"K\1" * 9 + b"t" + HOOKS + b"tR",  # nine axes
        b"K\1Q",
        b"(X\6\0\0\0moduleNNNNtQ",
        b"(X\7\0\0\0storageNX\1\0\0\x000X\3\0\0\0cpuK\4tQ",
        b"(X\7\0\0\0storagectorch\nfloat32\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ",
        b"(X\7\0\0\0storagectorch\nFloatStorage\nK\0X\3\0\0\0cpuK\4tQ",
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000K\0K\4tQ",
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuJ\xff\xff\xff\xfftQ",
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu\x88tQ",
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\5tQ",  # longer than its record
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\3tQ",  # shorter
        b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x001X\3\0\0\0cpuK\4tQ",  # no such record
        b"(X\7\0\0\0storagectorch\nDoubleStorage\nX\1\0\0\x000X\3\0\0\0cpuK\4tQ",
    ],
)  # fmt: skip
def test_known_names_used_as_torch_save_does_not(tmp_path, program):
    """Each stands where a list's one item would; the list alone is read."""
    path = write_zip(tmp_path / "file", b"\x80\2]" + program + b"a.", {"0": FOUR})
    line = refused(path)
    assert "refused" in line or "damaged" in line or "described as torch.save does not" in line


def test_the_same_used_well_is_read(tmp_path):
    tensor = TENSOR + STORAGE + b"K\0K\2K\2\x86K\1K\2\x86" + HOOKS + b"tR"
    file = read_pickled(write_zip(tmp_path / "file", b"\x80\2]" + tensor + b"a.", {"0": FOUR}))
    found = read_pickled_tensors(file, {"W": file.value[0]})["W"]
    assert found.tolist() == [[1, 3], [2, 4]]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (b"}X\1\0\0\0aK\1sX\1\0\0\0aK\2s", "the key a stands there twice"),
        (b"}K\1K\2s", "a key is of type int"),
        (b"}(X\1\0\0\0au", "a key is without its value"),
        (b"}X\3\0\0\0a\nbK\1s", r"the key a\nb is no name"),
        (b"}X\3\0\0\0\x1b[2K\1s", r"the key \x1b[2 is no name"),
        (b"h\1", "it recalls a value that it never kept"),
        (b"j\xff\xff\xff\xff", "it recalls a value that it never kept"),
        (b"s", "it takes a value that is not there"),
        (b"(K\1\x86t", "it takes a value that is not there"),  # under its mark
        (b"t", "it ends a sequence that never began"),
        (b"K\1K\2", "values are left over at its end"),
        (b"(K\1", "values are left over at its end"),
        (b"K\1X\1\0\0\0aa", "nothing can be added to"),
        (b"X\2\0\0\0\xff\xfe", "a text is not UTF-8"),
        (b"X\xff\xff\xff\x7fa", "it ends too early"),
        (b"\x8e" + b"\xff" * 8, "it ends too early"),
        (b"c" + b"a" * 2000 + b"\nb\n", "a name is longer than 1000 bytes"),
        (b"K\1K\2\x93", "a name is not a text"),
        (b"I1\n", "is none that torch.save writes"),
        (b"\x8b\xff\xff\xff\x7f", "is none that torch.save writes"),
    ],
)
def test_damaged_programs_say_what_is_wrong(tmp_path, program, said):
    assert said in refused(write_zip(tmp_path / "file", b"\x80\2" + program + b"."))


# --- size ---------------------------------------------------------------------------------------------------


GROWING = {
    "nested tuples": b")" + b"\x85" * 100_000,
    "nested lists": b"]" + b"]" * 99_999 + b"a" * 99_999,
    "a list in itself": b"]q\0h\0a",
    "a dictionary in itself": b"}q\0X\1\0\0\0ah\0s",
    "2 ** 16 times the same": b")" + b"q\0h\0\x86" * 16,
    "50 ** 12 times the same": b"]" + b"".join(b"q\0](" + b"h\0" * 50 + b"e" for _ in range(12)),
    "many values": b"](" + b"N" * 150_000 + b"e",
    "many instructions": b"]" + b"NN\x86q\0" * 70_000,
    "many marks": b"(" * 250_000,
}


@pytest.mark.parametrize("program", GROWING.values(), ids=GROWING)
def test_programs_that_grow_are_stopped(tmp_path, program):
    line = refused(write_zip(tmp_path / "file", b"\x80\2" + program + b"."))
    assert "holds more than" in line or "damaged" in line


def test_a_recall_of_a_high_number_costs_nothing(tmp_path):
    """Python's own unpickler makes room for every number below."""
    file = read_pickled(write_zip(tmp_path / "file", b"\x80\2]r\xff\xff\xff\xffj\xff\xff\xff\xff\x86."))
    assert file.value == ([], [])


def test_one_number_spread_over_a_huge_tensor(tmp_path):
    """Inside its storage, and far larger than the file."""
    tensor = TENSOR + STORAGE + b"K\0J\0\0\0\x10J\0\0\0\x10\x86K\0K\0\x86" + HOOKS + b"tR"
    line = refused(write_zip(tmp_path / "file", b"\x80\2]" + tensor + b"a.", {"0": FOUR}))
    assert "its tensors would take up" in line


def test_one_storage_read_a_thousand_times(tmp_path):
    whole = torch.zeros(400_000)
    path = save(tmp_path / "file", {f"W{i}": whole for i in range(100)})
    assert "its tensors would take up 160000000 bytes" in refused(path)


def test_a_gzip_bomb(tmp_path):
    path = tmp_path / "file.pkl.gz"
    with gzip.open(path, "wb", 9) as file:
        for _ in range(70):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 100_000
    assert "decompress to more than" in refused(path)


def test_records_that_overlap(tmp_path):
    """A directory whose entries all mean the same bytes."""
    path = write_zip(tmp_path / "file", b"\x80\2N.", {"0": bytes(5000)})
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.getinfo("name/data/0")
        for i in range(1, 50):
            again = zipfile.ZipInfo(f"name/data/{i}")
            again.header_offset, again.CRC = first.header_offset, first.CRC
            again.compress_size = again.file_size = first.file_size
            archive.filelist.append(again)
        archive._didModify = True
    assert "its records claim more bytes than the file has" in refused(path)


def test_a_record_that_stands_there_twice(tmp_path):
    path = write_zip(tmp_path / "file", b"\x80\2N.")
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("name/data.pkl", b"\x80\2K\1.")
    assert "a record stands in it twice" in refused(path)


def test_a_huge_program(tmp_path):
    path = write_zip(tmp_path / "file", b"\x80\2" + bytes(17 << 20))
    assert "its data.pkl has more than" in refused(path)


@pytest.mark.parametrize("change", [b"\0", b"\5", b"\xff"])
def test_an_archive_within_a_pickle_that_lies_about_its_length(tmp_path, change):
    data = pickle.dumps({"W": numbers(4)})
    at = data.index(struct.pack("<q", 4) + numbers(4).numpy().tobytes())
    (tmp_path / "file").write_bytes(data[:at] + change + data[at + 1 :])
    assert "storage " in refused(tmp_path / "file")


def test_an_archive_within_a_pickle_that_holds_more_than_a_storage(tmp_path):
    for value in ({"W": numbers(4)}, numbers(4), 1):
        inner = Reduce(torch.storage._load_from_bytes, (_torch_bytes(value),))
        line = refused(save(tmp_path / "file", {"x": inner}, "pickle"))
        assert "a tensor in it is no storage alone; refused" in line
    inner = Reduce(torch.storage._load_from_bytes, (pickle.dumps(1),))
    assert "not as pickle.dump writes them; refused" in refused(
        save(tmp_path / "file", {"x": inner}, "pickle")
    )
