"""Inputs of a function: sequences, and streams that are read here and sent to workers."""

from __future__ import annotations

import inspect
import pickle
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.jobs.calls import failure

__all__ = ["ALL_DONE", "Stream", "is_sequence"]

_PULLED_BYTES = 32 << 20  # of inputs that travel to a worker at once
_WAIT_SECONDS = 1.0  # for them, where they come slowly


class _AllDone:
    """The end of a queue of inputs.

    Example:
        >>> import queue
        >>> inputs = queue.Queue()
        >>> inputs.put(7)
        >>> inputs.put(ALL_DONE)
    """

    __slots__ = ()

    def __reduce__(self) -> str:
        return "ALL_DONE"

    def __repr__(self) -> str:
        return "ALL_DONE"


ALL_DONE = _AllDone()
"""What a queue of inputs ends with: ``queue.put(ALL_DONE)``."""


def is_sequence(inputs: Any) -> bool:
    """Whether inputs have a length and are reached by number; else they come one after another.

    Raises:
        ArgumentError: If they are neither, or it is not clear what the inputs are.
    """
    kind = type(inputs)
    hint = ""
    if isinstance(inputs, str | bytes):
        hint = "pass a list of them"
    elif isinstance(inputs, Mapping):
        hint = "pass list(inputs.items())"
    elif isinstance(inputs, set | frozenset):
        hint = "pass sorted(inputs): a set has no order"
    elif kind.__module__.split(".")[0] in ("pandas", "polars"):
        frame = kind.__name__ in ("DataFrame", "LazyFrame")
        rows = "inputs.to_dict('records')" if "pandas" in kind.__module__ else "inputs.to_dicts()"
        hint = f"pass {rows if frame else 'inputs.tolist()'}"
    elif isinstance(inputs, pa.Table | pa.RecordBatch):
        hint = "pass inputs.to_pylist() for rows, or a list of batches"
    if hint:
        raise ArgumentError(f"inputs is a {kind.__name__}: {hint}")
    indexed = _has(inputs, "__len__", "__getitem__") and not _is_torch_stream(inputs)
    if isinstance(inputs, Sequence) or indexed:
        return True
    if hasattr(inputs, "__iter__") or _has(inputs, "get"):
        return False
    raise ArgumentError(f"inputs must be a sequence, an iterable or a queue, got a {kind.__name__}")


def _is_torch_stream(inputs: Any) -> bool:
    """Whether it is an iterable of torch, which has a method to reach items that only raises."""
    data = sys.modules.get("torch.utils.data")  # which has been imported if it is one
    return data is not None and isinstance(inputs, data.IterableDataset)


def _has(value: Any, *names: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


class Stream:
    """Inputs that come one after another, pickled in chunks for the workers.

    Args:
        inputs: An iterable, or a queue that ends with `ALL_DONE`.
    """

    def __init__(self, inputs: Any) -> None:
        self._take = iter(inputs).__next__ if hasattr(inputs, "__iter__") else _queued(inputs)
        self._timed = not hasattr(inputs, "__iter__") and _has_timeout(inputs)
        self._returned: list[bytes] = []  # the last one comes first
        self.count = 0
        self.ended = False

    def chunk(self, most: int, least: int = 1) -> tuple[int, list[bytes]] | None:
        """Number of the first and all of the next inputs.

        Args:
            most: How many at most.
            least: So many are waited for; of more, those that come in about a second. (An iterable
                is not left while it makes one.) 0 waits for none.

        Returns:
            None at the end. There may be none yet.

        Raises:
            SourceError: If the next one cannot be had or sent.
        """
        start = self.count
        pulled: list[bytes] = []
        held = 0
        until = time.monotonic() + _WAIT_SECONDS
        while len(pulled) < most and held < _PULLED_BYTES:
            left = None if len(pulled) < least else until - time.monotonic()
            if left is not None and left < 0:
                break
            data = self._next(left)
            if data is None:
                break
            pulled.append(data)
            held += len(data)
            self.count += 1
        return (start, pulled) if pulled or not (self.ended and not self._returned) else None

    def give_back(self, pulled: list[bytes]) -> None:
        """Take the last inputs of the last chunk again; they come with the next one."""
        self._returned.extend(reversed(pulled))
        self.count -= len(pulled)

    def _next(self, seconds: float | None) -> bytes | None:
        """The next input, or None at the end; or if it does not come in time, from a queue."""
        if self._returned:
            return self._returned.pop()
        if self.ended:
            return None
        try:
            item = self._take(timeout=seconds) if self._timed else self._take()
        except StopIteration:
            self.ended = True
            return None
        except Exception as error:
            if isinstance(error, queue.Empty) and self._timed and seconds is not None:
                return None
            raise SourceError(
                f"input {self.count} could not be had: {failure(error)}", row=self.count
            ) from error
        return _pickled(item, self.count)


def _queued(inputs: Any) -> Callable[..., Any]:
    def take(**options: Any) -> Any:
        item = inputs.get(**options)
        if item is ALL_DONE:
            raise StopIteration
        return item

    return take


def _has_timeout(inputs: Any) -> bool:
    try:
        return "timeout" in inspect.signature(inputs.get).parameters
    except (TypeError, ValueError):
        return False


def _pickled(item: Any, number: int) -> bytes:
    try:
        return pickle.dumps(item, protocol=5)
    except Exception:
        import cloudpickle

        try:
            return bytes(cloudpickle.dumps(item))
        except Exception as error:
            raise SourceError(
                f"input {number} ({type(item).__name__}) cannot be sent to a worker process: "
                f"{failure(error)}",
                row=number,
            ) from error
