"""Inputs of a function: sequences, and streams that are read here and sent to workers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from destrier.errors import ArgumentError, SourceError
from destrier.jobs.calls import failure

__all__ = ["ALL_DONE", "Stream", "is_sequence"]

_PULLED_BYTES = 32 << 20  # of inputs that travel to a worker at once


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
    if isinstance(inputs, Sequence) or _has(inputs, "__len__", "__getitem__"):
        return True
    if hasattr(inputs, "__iter__") or _has(inputs, "get"):
        return False
    raise ArgumentError(f"inputs must be a sequence, an iterable or a queue, got a {kind.__name__}")


def _has(value: Any, *names: str) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


class Stream:
    """Inputs that come one after another, pickled in chunks for the workers.

    Args:
        inputs: An iterable, or a queue that ends with `ALL_DONE`.
    """

    def __init__(self, inputs: Any) -> None:
        self._items = iter(inputs) if hasattr(inputs, "__iter__") else _queued(inputs)
        self.count = 0
        self.ended = False

    def chunk(self, most: int) -> tuple[int, list[bytes]] | None:
        """Number of the first and all of the next inputs, as many as are asked for at most.

        Raises:
            SourceError: If the next one cannot be had or sent.
        """
        start = self.count
        pulled: list[bytes] = []
        held = 0
        while len(pulled) < most and held < _PULLED_BYTES and not self.ended:
            try:
                item = next(self._items)
            except StopIteration:
                self.ended = True
                break
            except Exception as error:
                raise SourceError(
                    f"input {self.count} could not be had: {failure(error)}", row=self.count
                ) from error
            pulled.append(_pickled(item, self.count))
            held += len(pulled[-1])
            self.count += 1
        return (start, pulled) if pulled else None


def _queued(inputs: Any) -> Iterator[Any]:
    while (item := inputs.get()) is not ALL_DONE:
        yield item


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
