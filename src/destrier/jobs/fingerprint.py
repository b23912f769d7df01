"""Digests of functions and inputs, by which a job that was not finished is known again."""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import io
import pickle
import sys
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["fingerprint"]

_GROUP = 4096  # inputs that are pickled at once


def fingerprint(*values: Any) -> str:
    """A digest of values that is the same in another process.

    Functions are named by module, name, code, defaults, the values that they close over and what
    they use of their own module; comments and line numbers do not matter. An object that is
    called as a function counts by its class in the same way, and by what it holds. Inputs count by
    value, objects that cannot be pickled by what they hold. What does not tell that either, such as
    a lock or an open file, gives a digest that no other has; but where a function only uses it from
    its own module, it counts by its type, for each process makes its own.
    """
    digest = _Digest()
    try:
        for value in values:
            digest.call(value)
            digest.add(value)
    except RecursionError:  # nested too deeply
        digest.put(uuid.uuid4().bytes)
    return digest.hash.hexdigest()


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)
        self.seen: dict[int, int] = {}  # functions and classes, which may refer to each other
        self.kept: list[Any] = []  # so that no identity is used twice
        self.inside: set[int] = set()  # containers, which may hold themselves
        self.modules = {"__main__"}  # whose classes count by content, for they may be edited

    def put(self, *words: Any) -> None:
        for word in words:
            data = word if isinstance(word, bytes) else repr(word).encode("utf-8", "replace")
            self.hash.update(len(data).to_bytes(8, "little"))
            self.hash.update(data)

    def call(self, value: Any) -> None:
        """If it is an object that is called, its class counts by content, as a function would."""
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
            self.modules.add(_module(type(value)))

    def add(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.put("method")
            self.add(value.__func__)
            self.add(value.__self__)
        elif isinstance(value, functools.partial):
            self.put("partial")
            self.add([value.func, list(value.args), value.keywords])
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self.put("module", value.__name__)
        elif type(value) in (dict, list, tuple):
            self._container(value)
        elif isinstance(value, set | frozenset):
            self.put("set", sorted(fingerprint(item) for item in value))
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUMm":
            self.put("array", value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        else:
            self._object(value)

    def _once(self, value: Any, name: str) -> bool:
        number = self.seen.setdefault(id(value), len(self.seen))
        self.put(name, number)
        if number < len(self.kept):
            return False
        self.kept.append(value)
        return True

    def _function(self, function: types.FunctionType) -> None:
        if not self._once(function, "function"):
            return
        self.put(_module(function), function.__qualname__)
        self.modules.add(_module(function))
        self._code(function.__code__)
        self.add(function.__defaults__)
        self.add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # not filled yet
                self.put("empty")
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                self.put(name)
                self._used(function.__globals__[name], function)

    def _used(self, value: Any, function: types.FunctionType) -> None:
        """What a function uses of its module: its own things by content, others by name."""
        if isinstance(value, types.FunctionType | type) and _module(value) != _module(function):
            self.put(_module(value), value.__qualname__)
        else:
            self._own(value)

    def _own(self, value: Any) -> None:
        """What a module or class has at hand."""
        opaque = not isinstance(value, _NAMED) and _parts(value) is None
        self.add(type(value) if opaque else value)

    def _class(self, kind: type) -> None:
        if not self._once(kind, "class"):
            return
        self.put(_module(kind), kind.__qualname__)
        if _module(kind) not in self.modules and "<locals>" not in kind.__qualname__:
            return
        self.add(kind.__bases__)  # it may have been edited, or be one of several
        for name, value in sorted(vars(kind).items()):
            if isinstance(value, staticmethod | classmethod):
                self.put(name)
                self._own(value.__func__)
            elif isinstance(value, property):
                self.put(name)
                self.add([value.fget, value.fset])
            elif isinstance(value, types.FunctionType) or not (
                # what Python makes with every class
                name.startswith(("__", "_abc_")) or hasattr(type(value), "__get__")
            ):
                self.put(name)
                self._own(value)

    def _code(self, code: types.CodeType) -> None:
        self.put(code.co_code, code.co_names, code.co_varnames, code.co_freevars)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            elif isinstance(constant, frozenset):
                self.put(sorted(map(repr, constant)))
            else:
                self.put(constant)

    def _container(self, value: Any) -> None:
        if id(value) in self.inside:
            self.put("itself")
            return
        self.inside.add(id(value))
        if type(value) is dict:
            self._dict(value)
        else:
            self._sequence(value)
        self.inside.discard(id(value))

    def _dict(self, value: Mapping[Any, Any]) -> None:
        self.put("dict", len(value))
        for key, item in value.items():
            self.add(key)
            self.add(item)

    def _sequence(self, values: Sequence[Any]) -> None:
        self.put(type(values).__name__, len(values))
        for start in range(0, len(values), _GROUP):
            group = values[start : start + _GROUP]
            if set(map(type, group)) <= _PLAIN:
                self.put(_pickled(list(group)))
            else:
                for value in group:
                    self.add(value)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or kind is range:
            self.put(kind.__name__, value)
            return
        self.add(kind)
        if kind.__module__ == "__main__":  # it may hold what has been edited
            self._opened(value)
            return
        if isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            self.add(value.__wrapped__)
            return
        try:
            self.put(_pickled(value))
        except Exception:
            self._opened(value)

    def _opened(self, value: Any) -> None:
        """What an object holds that cannot be pickled as it is."""
        if id(value) in self.inside:
            self.put("itself")
            return
        parts = _parts(value)
        if parts is None:
            self.put(uuid.uuid4().bytes)
            return
        self.inside.add(id(value))
        self.add(parts)
        self.inside.discard(id(value))


_NAMED = (types.FunctionType, types.MethodType, types.ModuleType, type)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class _Pickler(pickle.Pickler):
    """Takes tensors of torch by value: pickled they are another one in each process."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # which has been imported if it is a tensor
        if torch is None or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return NotImplemented
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().tobytes()
        return bytes, (data, str(value.dtype), tuple(value.shape), value.requires_grad)


def _pickled(value: Any) -> bytes:
    """Pickled without a memo, which would tell equal values from the same one."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=4)
    pickler.fast = True
    try:
        pickler.dump(value)
    except (ValueError, RecursionError):  # it refers to itself
        return pickle.dumps(value, protocol=4)
    return stream.getvalue()


def _parts(value: Any) -> list[Any] | None:
    """What pickle would make an object of, or None if it could not."""
    try:
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return [reduced]
        make, *parts = reduced
        # a function of C is known by its name; lists and dicts come as iterators
        return [
            make.__qualname__ if isinstance(make, types.BuiltinFunctionType) else make,
            *(list(part) if isinstance(part, Iterator) else part for part in parts),
        ]
    except Exception:
        return None


def _module(value: Any) -> str:
    name = str(value.__module__)
    return "__main__" if name == "__mp_main__" else name


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function and those inside it use."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
