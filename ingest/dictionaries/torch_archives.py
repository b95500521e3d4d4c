"""The containers in which torch keeps pickled tensors, opened without torch and without running what they
say: `inert_pickle` does what is in them, on plain values.

    torch.save since 1.6   a zip: NAME/data.pkl refers to storages that lie in NAME/data/KEY, uncompressed
    torch.save before      pickles one after another: a magic number, a version, the machine's sizes, the
                           value and the storages' keys; then for each key its length (8 bytes) and numbers
    pickle.dump            one pickle; each tensor's storage is a whole file of the kind before, as bytes
    gzip                   of one of the last two

Sizes are believed only as far as the file bears them out, before memory is asked for.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ingest.dictionaries.inert_pickle import Machine
from ingest.dictionaries.inert_values import Blob, PickledTensor, Storage, one_line, settled, storage_of
from ingest.dictionaries.tensor_files import check_file
from ingest.errors import InputError

__all__ = ["Numbers", "PickledFile", "opened", "pickle_head"]

_MAGIC = 0x1950A86A20F9469CFC6C
_KIND = "a file of torch.save"
_LONGEST_PICKLE = 16 << 20  # of a zip's data.pkl, which holds no numbers
_CHUNK = 1 << 20
_HEAD = 1 << 16
_ROOM, _EXPANSION = 64 << 20, 16  # weights hardly compress: more than this is made to fill the memory
_BESIDE = {"data.pkl", "version", "byteorder"}
_ENCRYPTED = 0x1
# What zipfile and gzip raise of a damaged archive: their own, and what their parsing runs into.
_DAMAGE = (
    gzip.BadGzipFile, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError,
    OverflowError, RuntimeError,
)  # fmt: skip

Numbers = Callable[[Storage], bytearray]


@dataclass(frozen=True)
class PickledFile:
    """A file's value, of dictionaries, lists, texts, numbers, `Configuration`s and the headers of tensors."""

    path: Path
    value: Any
    tensors: tuple[PickledTensor, ...]  # every one in it
    classes: Set[str]


@contextmanager
def opened(path: Path, classes: Set[str]) -> Iterator[tuple[PickledFile, Numbers]]:
    """A file's value, and its storages' bytes as long as it is open."""
    size = check_file(path, _KIND)
    with ExitStack() as stack:
        with _reading(path), path.open("rb") as raw:
            begin = raw.read(4)
        if begin.startswith(b"PK"):
            with _reading(path):
                archive = stack.enter_context(zipfile.ZipFile(path))
                value = _zip_value(path, archive, classes, size)
            numbers = partial(_record, path, archive)
        else:
            with _reading(path):
                packed = begin.startswith(b"\x1f\x8b")
                body = memoryview(_decompressed(path, size) if packed else path.read_bytes())
            value, begins = _stream_value(path, body, classes)
            numbers = partial(_slice, body, begins)
        yield _settled(path, value, classes, size), numbers


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What reading a damaged or unreadable file raises becomes an InputError."""
    try:
        yield
    except _DAMAGE as error:
        raise InputError(
            f"{path}: truncated or damaged ({one_line(error)}); copy or download it again"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or one_line(error)})") from error


def _settled(path: Path, value: object, classes: Set[str], size: int) -> PickledFile:
    plain, tensors = settled(str(path), value)
    room = _ROOM + _EXPANSION * size
    needed = sum(4 * tensor.count for tensor in tensors)
    if needed > room:
        raise InputError(
            f"{path}: its tensors would take up {needed} bytes, the file has {size}; refused: expected no"
            f" more than {room}"
        )
    return PickledFile(path, plain, tensors, classes)


# torch.save since 1.6


def _zip_value(path: Path, archive: zipfile.ZipFile, classes: Set[str], size: int) -> object:
    prefix, members = _members(path, archive, size)
    order = (
        archive.read(prefix + "byteorder").decode("latin-1") if prefix + "byteorder" in members else "little"
    )
    if order != "little":
        raise InputError(
            f"{path}: byteorder is {one_line(order)}, expected little; save it on another machine"
        )
    if members[prefix + "data.pkl"].file_size > _LONGEST_PICKLE:
        raise InputError(
            f"{path}: its data.pkl has more than {_LONGEST_PICKLE} bytes; refused: it holds no numbers"
        )
    body = memoryview(archive.read(prefix + "data.pkl"))
    used: set[str] = set()

    def storage(fields: tuple[Any, ...]) -> Storage:
        found = storage_of(str(path), fields)
        name = f"{prefix}data/{found.key}"
        if name not in members or members[name].file_size != found.bytes:
            has = f"{members[name].file_size} bytes" if name in members else "no such record"
            raise InputError(
                f"{path}: storage {one_line(found.key)} needs {found.bytes} bytes, the file has {has};"
                " truncated or damaged: copy or download it again"
            )
        used.add(name)
        return Storage(name, found.dtype, found.count)

    value, end = Machine(str(path), body, 0, len(body), classes=classes, storage=storage).run()
    unused = [name for name in members if name.startswith(f"{prefix}data/") and name not in used]
    if end != len(body) or unused:
        what = f"its record {one_line(unused[0])}" if unused else "what stands behind its pickle"
        raise InputError(f"{path}: {what} belongs to no tensor; expected {_KIND}")
    return value


def _members(path: Path, archive: zipfile.ZipFile, size: int) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """`NAME/`, under which all stands, and what stands there: uncompressed, and no more than the file has."""
    members = {member.filename: member for member in archive.infolist()}
    prefix = _prefix(path, members)
    for name, member in members.items():
        if member.flag_bits & _ENCRYPTED or member.compress_type != zipfile.ZIP_STORED:
            raise InputError(
                f"{path}: {one_line(name)} is compressed or encrypted, which torch.save never does; pack it"
                " again uncompressed"
            )
    claimed = sum(member.compress_size for member in archive.infolist())
    if claimed > size or any(member.file_size != member.compress_size for member in members.values()):
        raise InputError(f"{path}: its records claim more bytes than the file has; copy or download it again")
    if len(members) < len(archive.infolist()):
        raise InputError(f"{path}: a record stands in it twice; expected {_KIND}")
    return prefix, members


def _prefix(path: Path, members: Mapping[str, object]) -> str:
    """`NAME/`, under which all stands that torch.save writes, and nothing else."""
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if not pickles:
        raise InputError(f"{path}: a zip archive without NAME/data.pkl; expected {_KIND}")
    prefix = pickles[0].removesuffix("data.pkl")
    for name in members:
        inside = name.removeprefix(prefix)
        if inside == name or not (inside in _BESIDE or inside.startswith(("data/", "."))):
            what = (
                "a TorchScript program, which is code" if inside.startswith("code/") else "not torch.save's"
            )
            raise InputError(f"{path}: {one_line(name)} in it is {what}; expected {_KIND}")
    return prefix


def _record(path: Path, archive: zipfile.ZipFile, storage: Storage) -> bytearray:
    """The bytes of a storage; read to the end, where its checksum is compared."""
    data, got = bytearray(storage.bytes), 0
    with _reading(path), archive.open(storage.key) as file:
        while chunk := file.read(_CHUNK):
            data[got : got + len(chunk)] = chunk
            got += len(chunk)
    if got != storage.bytes:
        raise InputError(f"{path}: {one_line(storage.key)} is not as long as when it was opened; start again")
    return data


# pickles one after another, in memory


def _decompressed(path: Path, size: int) -> bytearray:
    """All of a gzip file; its checksum is compared at the end."""
    data, room = bytearray(), _ROOM + _EXPANSION * size
    with gzip.open(path) as file:
        while chunk := file.read(_CHUNK):
            data += chunk
            if len(data) > room:
                raise InputError(
                    f"{path}: {size} bytes decompress to more than {room}; refused: weights do not compress"
                    " so well"
                )
    return data


def _stream_value(path: Path, body: memoryview, classes: Set[str]) -> tuple[object, dict[str, int]]:
    """Of a file that is one pickle, or torch's own before 1.6: its value, and where its storages begin."""
    if body[257:262] == b"ustar":
        raise InputError(
            f"{path}: a tar archive, as torch wrote before 0.1.10; load it there and save it anew"
        )
    if body[:1] != b"\x80":
        raise InputError(
            f"{path}: truncated or not {_KIND} ({len(body)} bytes: neither a zip archive nor a pickle); copy"
            " or download it again"
        )
    begins: dict[str, int] = {}
    if _is_old(body[:64]):
        value, end = _old_archive(path, body, 0, len(body), classes, begins)
    else:
        nested = partial(_nested, path, body, begins)
        value, end = Machine(str(path), body, 0, len(body), classes=classes, nested=nested).run()
    if end != len(body):
        raise InputError(f"{path}: {len(body) - end} bytes are left over behind its end; expected {_KIND}")
    return value, begins


def _nested(path: Path, body: memoryview, begins: dict[str, int], blob: Blob) -> Storage:
    """The one storage of an archive inside a pickle, as torch.storage._load_from_bytes would give."""
    if not _is_old(body[blob.begin : blob.begin + 64]):
        raise InputError(
            f"{path}: a tensor in it is not as pickle.dump writes them; refused, nothing was run"
        )
    inside: dict[str, int] = {}
    value, end = _old_archive(path, body, blob.begin, blob.end, frozenset(), inside)
    if not isinstance(value, Storage) or end != blob.end:
        raise InputError(f"{path}: a tensor in it is no storage alone; refused, nothing was run")
    key = str(blob.begin)  # the archive's own key is an address, the same in another one perhaps
    begins[key] = inside[value.key]
    return Storage(key, value.dtype, value.count)


def _is_old(begin: memoryview) -> bool:
    """Whether an archive of torch before 1.6 begins so: its magic number, pickled by any protocol from 2."""
    return begin[:1] == b"\x80" and b"\x8a\x0a" + _MAGIC.to_bytes(10, "little") in bytes(begin[:24])


def _old_archive(
    path: Path, body: memoryview, begin: int, end: int, classes: Set[str], begins: dict[str, int]
) -> tuple[object, int]:
    """The value and where the archive ends; where each storage's numbers begin goes into `begins`."""
    where, at = str(path), begin
    storages: dict[str, Storage] = {}

    def storage(fields: tuple[Any, ...]) -> Storage:
        found = storage_of(where, fields[:-1] if fields[4:] == (None,) else fields)  # None: no view
        if storages.setdefault(found.key, found) != found:
            raise InputError(f"{path}: storage {one_line(found.key)} is described twice; copy it again")
        return found

    magic, at = Machine(where, body, at, end).run()
    version, at = Machine(where, body, at, end).run()
    machine, at = Machine(where, body, at, end).run()
    little = isinstance(machine, dict) and machine.get("little_endian") is True
    if (magic, version) != (_MAGIC, 1001) or not little:
        raise InputError(f"{path}: not as torch.save writes on a little-endian machine; save it on another")
    value, at = Machine(where, body, at, end, classes=classes, storage=storage).run()
    keys, at = Machine(where, body, at, end).run()
    if (
        type(keys) is not list
        or not all(type(key) is str for key in keys)
        or sorted(keys) != sorted(storages)
    ):
        raise InputError(
            f"{path}: its list of storages is not that of its tensors; copy or download it again"
        )
    for key in keys:
        begins[key] = at + 8
        count, at = int.from_bytes(body[at : at + 8], "little"), begins[key] + storages[key].bytes
        if count != storages[key].count or at > end:
            raise InputError(
                f"{path}: storage {one_line(key)} needs {storages[key].bytes} bytes, the file has"
                f" {max(0, end - begins[key])}; truncated or damaged: copy or download it again"
            )
    return value, at


def _slice(body: memoryview, begins: Mapping[str, int], storage: Storage) -> bytearray:
    return bytearray(body[begins[storage.key] : begins[storage.key] + storage.bytes])


def pickle_head(path: Path) -> bytes:
    """The first bytes of a file's pickle, by whose texts a format may be recognised; empty where it cannot be
    read, which whoever then reads it will report."""
    try:
        with path.open("rb") as raw:
            begin = raw.read(4)
        if begin == b"PK\3\4":
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.endswith("data.pkl")]
                with archive.open(names[0]) if names else path.open("rb") as file:
                    return file.read(_HEAD)
        with gzip.open(path) if begin[:2] == b"\x1f\x8b" else path.open("rb") as file:
            return file.read(_HEAD)
    except (OSError, KeyError, *_DAMAGE):
        return b""
