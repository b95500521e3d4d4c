"""Files in torch's layouts: as its own functions write them, and with a pickle made by hand."""

import gzip
import pickle
import sys
import types
import zipfile
from contextlib import contextmanager

import torch

from ingest.dictionaries.pickled_tensors import read_pickled, read_pickled_tensors


def numbers(*shape, seed=0, dtype=torch.float32):
    """Random, far from zero."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def save(path, value, kind="zip"):
    """As torch.save writes it now (zip) or wrote it before 1.6 (old), or a pickle, plain or gzipped."""
    if kind in ("zip", "old"):
        torch.save(value, path, _use_new_zipfile_serialization=kind == "zip")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(value))
    else:
        path.write_bytes(gzip.compress(pickle.dumps(value)))
    return path


def write_zip(path, program, records=None, **beside):
    """torch's zip with the bytes of its data.pkl and of its storages given."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("name/data.pkl", program)
        for key, data in (records or {}).items():
            archive.writestr(f"name/data/{key}", data)
        for name, data in {"version": "3\n", **beside}.items():
            archive.writestr(f"name/{name}", data)
    return path


def read(path, classes=frozenset()):
    """The value, with tensors read where the file holds a dictionary of them."""
    file = read_pickled(path, classes)
    return read_pickled_tensors(file, file.value)


@contextmanager
def a_class(module, name):
    """A class that pickles under that name, as long as it is written; gone again when it is read."""
    parts = module.split(".")
    made = type(name, (), {"__module__": module})
    for end in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:end])] = types.ModuleType(".".join(parts[:end]))
    setattr(sys.modules[module], name, made)
    try:
        yield made
    finally:
        for end in range(1, len(parts) + 1):
            del sys.modules[".".join(parts[:end])]
