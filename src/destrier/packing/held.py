"""All documents in memory, where they fit: blocks that move are cut from them in every epoch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from destrier.keyed import Ints
from destrier.memory import fresh
from destrier.packing.copying import copy_runs
from destrier.packing.lengths import Lengths
from destrier.packing.source import Documents

__all__ = ["HeldDocuments"]

_PART_BYTES = 16 << 20
_PART_DOCUMENTS = 1 << 16


class HeldDocuments:
    """Documents that stay once they are read.

    Whoever asks for documents reads a part of all of them too, in their order, which is many times
    cheaper than in any other; once all parts are there, nothing is read any more. So no batch
    waits for all documents, and no thread is needed. What could not be read is tried again
    when somebody asks: the storage may have been away. Safe to call from several threads.

    Args:
        read: Reads documents by their places.
        lengths: Of all documents.
        token_bytes: Of a token in memory, with the parallel values.
    """

    def __init__(
        self, read: Callable[[Ints], Documents], lengths: Lengths, *, token_bytes: int
    ) -> None:
        self._read = read
        sizes = lengths.values.astype(np.int64)
        ends = np.cumsum(sizes)
        self._starts = ends - sizes
        self._sizes = sizes
        self._tokens = int(ends[-1])
        count = max(self._tokens * token_bytes // _PART_BYTES, len(sizes) // _PART_DOCUMENTS)
        self._part = -(-len(sizes) // (count + 1))
        self._here = np.zeros(-(-len(sizes) // self._part), np.bool_)
        self._left = deque(range(len(self._here)))  # parts that nobody reads yet
        self._begun = False  # the first call reads no part: a first batch waits for it
        self._values: dict[str, NDArray[Any]] = {}
        self._bad = np.empty(0, np.int64)  # documents of parts that are here, but for these
        self._lock = threading.Lock()

    def documents(self, places: Ints) -> Documents:
        """Some documents, from memory if they are there.

        Args:
            places: In the selection, ascending, each once.
        """
        self._go_on()
        if not len(places) or not self._here[np.unique(places // self._part)].all():
            return self._read(places)
        if len(self._bad) and np.isin(places, self._bad).any():
            return self._read(places)
        starts, sizes = self._starts[places], self._sizes[places]
        return Documents(self._values, dict.fromkeys(self._values, starts), sizes, {})

    def _go_on(self) -> None:
        """Read the next part, if there is one that nobody reads."""
        with self._lock:
            begun, self._begun = self._begun, True
            if not begun or not self._left:
                return
            number = self._left.popleft()
        try:
            self._keep(number)
        except BaseException:
            with self._lock:
                self._left.append(number)
            raise

    def _keep(self, number: int) -> None:
        """Read a part, and keep it."""
        first = number * self._part
        places = np.arange(first, min(first + self._part, len(self._sizes)))
        found = self._read(places)
        with self._lock:
            for name, values in found.values.items():
                if name not in self._values:
                    self._values[name] = fresh((self._tokens,), values.dtype)
        good = np.ones(len(places), np.bool_)
        good[list(found.errors)] = False
        chosen = places[good]
        for name, values in found.values.items():
            copy_runs(
                values,
                found.starts[name][good],
                self._values[name],
                self._starts[chosen],
                self._sizes[chosen],
            )
        with self._lock:
            self._bad = np.append(self._bad, places[~good])
            self._here[number] = True
