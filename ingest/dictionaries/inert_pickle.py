"""A pickle read as data: the few instructions that files of tensors need, on plain values of ours. Nothing a
file names is looked up, imported or called.

A pickle is a program for a stack machine, and Python's own machine calls what the program names. This one
knows by name an ordered dictionary, torch's storages, types and tensor rebuilding, and the configuration
classes its caller gives; each stands for an inert value here, and any other name is an InputError. So are
wrong arguments, more instructions or deeper nesting than a dictionary's file has, and damaged bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Set
from typing import Any, NoReturn

from ingest.dictionaries.inert_values import (
    DTYPES,
    LARGEST,
    Blob,
    Named,
    PickledTensor,
    Storage,
    Unfinished,
    one_line,
    storage_type,
)
from ingest.errors import InputError

__all__ = ["Machine"]

_MOST_INSTRUCTIONS = 200_000  # a state dict of ten thousand tensors; the real ones have about ten
_MOST_AXES = 8
_KNOWN = {
    "collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter",
    "torch.device", "torch.Size", "torch.storage._load_from_bytes", *DTYPES,
}  # fmt: skip


class _Ordered(dict[str, Any]):
    """An OrderedDict, which may be given attributes (a module's versions)."""


class Machine:
    """Runs the pickle in `body[begin:end]`; `where` begins every message.

    `storage(fields)` gives the storage of a persistent id ("storage" left out), `nested(blob)` the one of an
    archive within the pickle; without them a file has no business to ask.
    """

    def __init__(
        self,
        where: str,
        body: memoryview,
        begin: int,
        end: int,
        *,
        classes: Set[str] = frozenset(),
        storage: Callable[[tuple[Any, ...]], Storage] | None = None,
        nested: Callable[[Blob], Storage] | None = None,
    ) -> None:
        self._where, self._body, self._at, self._end = where, body, begin, end
        self._classes, self._storage, self._nested = classes, storage, nested
        self._stack: list[Any] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, Any] = {}

    def run(self) -> tuple[Any, int]:
        """The value, still to be `settled`, and where the pickle ends. Raises InputError."""
        if self._byte() != 0x80:
            self._damaged("it does not begin as a pickle of protocol 2 or later does")
        self._byte()
        for _ in range(_MOST_INSTRUCTIONS):
            instruction = self._byte()
            if instruction == ord("."):
                value = self._pop()
                if self._stack or self._marks:
                    self._damaged("values are left over at its end")
                return value, self._at
            self._do(chr(instruction))
        self._damaged(f"it has more than {_MOST_INSTRUCTIONS} instructions")

    def _do(self, instruction: str) -> None:
        stack = self._stack
        match instruction:
            case "\x95":  # FRAME: a hint for readers of streams
                self._take(8)
            case "(":
                self._marks.append(len(stack))
            case "N":
                stack.append(None)
            case "\x88" | "\x89":
                stack.append(instruction == "\x88")
            case "J":
                stack.append(int.from_bytes(self._take(4), "little", signed=True))
            case "K" | "M":
                stack.append(self._length(1 if instruction == "K" else 2))
            case "\x8a":  # LONG1
                stack.append(int.from_bytes(self._take(self._byte()), "little", signed=True))
            case "G":
                stack.append(struct.unpack(">d", self._take(8))[0])
            case "\x8c" | "X" | "\x8d":
                stack.append(
                    self._text(self._take(self._length({"\x8c": 1, "X": 4, "\x8d": 8}[instruction])))
                )
            case "C" | "B" | "\x8e":
                length = self._length({"C": 1, "B": 4, "\x8e": 8}[instruction])
                self._take(length)
                stack.append(Blob(self._at - length, self._at))
            case "}" | "]" | ")":
                stack.append({"}": dict, "]": list, ")": tuple}[instruction]())
            case "\x85" | "\x86" | "\x87":
                stack.append(tuple(reversed([self._pop() for _ in range(ord(instruction) - 0x84)])))
            case "t":
                stack.append(tuple(self._to_mark()))
            case "a" | "e":
                items = [self._pop()] if instruction == "a" else self._to_mark()
                self._top(list).extend(items)
            case "s" | "u":
                self._set_items(
                    [self._pop() for _ in range(2)][::-1] if instruction == "s" else self._to_mark()
                )
            case "q" | "r" | "\x94":
                key = (
                    len(self._memo) if instruction == "\x94" else self._length(1 if instruction == "q" else 4)
                )
                self._memo[key] = self._top(object)
            case "h" | "j":
                key = self._length(1 if instruction == "h" else 4)
                if key not in self._memo:
                    self._damaged("it recalls a value that it never kept")
                stack.append(self._memo[key])
            case "c":
                stack.append(self._named(self._line(), self._line()))
            case "\x93":
                name, module = self._pop(), self._pop()
                stack.append(self._named(module, name))
            case "R":
                arguments, function = self._pop(), self._pop()
                stack.append(self._call(function, arguments))
            case "\x81":  # NEWOBJ
                arguments, kind = self._pop(), self._pop()
                if not isinstance(kind, Named) or kind.name not in self._classes or arguments != ():
                    self._wrong("makes an object", kind)
                stack.append(Unfinished(kind.name))
            case "b":
                self._build(self._pop(), self._top(object))
            case "Q":
                stack.append(self._persistent(self._pop()))
            case _:
                self._damaged(f"instruction {instruction.encode('latin-1')!r} is none that torch.save writes")

    # --- bytes ---

    def _take(self, length: int) -> memoryview:
        if length > self._end - self._at:
            self._damaged("it ends too early")
        self._at += length
        return self._body[self._at - length : self._at]

    def _byte(self) -> int:
        return self._take(1)[0]

    def _length(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        begin = self._at
        while self._byte() != ord("\n"):
            if self._at - begin > 1000:
                self._damaged("a name is longer than 1000 bytes")
        return self._text(self._body[begin : self._at - 1])

    def _text(self, data: memoryview) -> str:
        try:
            return bytes(data).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self._damaged("a text is not UTF-8")

    # --- the stack ---

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._damaged("it takes a value that is not there")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        value = self._pop()
        if not isinstance(value, kind):
            self._damaged("it adds to a value that nothing can be added to")
        self._stack.append(value)
        return value

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            self._damaged("it ends a sequence that never began")
        height = self._marks.pop()
        items = self._stack[height:]
        del self._stack[height:]
        return items

    def _set_items(self, items: list[Any]) -> None:
        into = self._top(dict)
        if len(items) % 2:
            self._damaged("a key is without its value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                self._damaged(f"a key is of type {type(key).__name__}, expected a text")
            if not key.isprintable():  # names are printed
                self._damaged(f"the key {one_line(key)} is no name")
            if key in into:
                self._damaged(f"the key {one_line(key)} stands there twice")
            into[key] = value

    # --- names, and what is done with them ---

    def _named(self, module: object, name: object) -> Named:
        if type(module) is not str or type(name) is not str:
            self._damaged("a name is not a text")
        full = f"{module}.{name}"
        if full in _KNOWN or full in self._classes or storage_type(full):
            return Named(full)
        raise InputError(
            f"{self._where}: asks for {one_line(full)}, which no dictionary needs and which may run"
            " code; refused, nothing of it was run: take the file from someone you trust, as safetensors"
        )

    def _call(self, function: object, arguments: object) -> Any:
        if not isinstance(function, Named) or type(arguments) is not tuple:
            self._wrong("calls", function)
        match function.name, arguments:
            case "collections.OrderedDict", ():
                return _Ordered()
            case "torch._utils._rebuild_tensor_v2", (storage, offset, shape, stride, bool(), hooks):
                if isinstance(storage, Storage) and hooks in (None, {}):
                    return self._tensor(storage, offset, shape, stride)
            case "torch._utils._rebuild_parameter", (PickledTensor() as tensor, bool(), hooks):
                if hooks in (None, {}):
                    return tensor
            case "torch.device", (str(kind),) | (str(kind), int()):
                return f"{kind}:{arguments[1]}" if len(arguments) == 2 else kind
            case "torch.Size", (tuple(sizes),) if all(type(size) is int for size in sizes):
                return sizes
            case "torch.storage._load_from_bytes", (Blob() as blob,) if self._nested:
                return self._nested(blob)
        self._wrong("calls", function)

    def _tensor(self, storage: Storage, offset: object, shape: object, stride: object) -> PickledTensor:
        if not isinstance(shape, tuple) or not isinstance(stride, tuple) or not isinstance(offset, int):
            self._damaged("the shape, strides or offset of a tensor are no sizes")
        sizes = (offset, *shape, *stride)
        if len(sizes) > 2 * _MOST_AXES or not all(type(s) is int and 0 <= s < LARGEST for s in sizes):
            self._damaged("the shape, strides or offset of a tensor are no sizes")
        if len(shape) != len(stride):
            self._damaged(f"a tensor has {len(shape)} axes and {len(stride)} strides")
        last = offset + sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
        if 0 not in shape and last >= storage.count:
            self._damaged(
                f"a tensor of shape {shape} reaches number {last} of its storage, which has {storage.count}"
            )
        return PickledTensor(storage.dtype, shape, stride, offset, storage)

    def _build(self, state: object, into: object) -> None:
        if isinstance(into, Unfinished) and into.state is None and type(state) is dict:
            into.state = state
        elif not (isinstance(into, _Ordered) and type(state) is dict and set(state) <= {"_metadata"}):
            self._wrong("gives a state to", into)

    def _persistent(self, fields: object) -> Storage:
        if self._storage is None or type(fields) is not tuple or fields[:1] != ("storage",):
            self._damaged("it refers to something outside that is no storage")
        return self._storage(fields[1:])

    def _wrong(self, does: str, value: object) -> NoReturn:
        name = (
            value.name if isinstance(value, Named | Unfinished) else f"a value of type {type(value).__name__}"
        )
        raise InputError(
            f"{self._where}: {does} {one_line(name)} in a way that torch.save does not; refused, nothing was"
            " run: take the file from someone you trust, as safetensors"
        )

    def _damaged(self, why: str) -> NoReturn:
        raise InputError(
            f"{self._where}: truncated, damaged or no pickle of tensors ({why}); copy or download it again"
        )
