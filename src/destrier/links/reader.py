"""Reading linked values: ranges of files that stay where they are.

Lance stores of a linked value its file's URI, position and size, and would serve another file of
that name. So size and time of the whole file are stored beside it, and are compared before the
first byte of a file is read.

Local files are read here, with one copy; a file that is cut while it is read is an error, where a
map of it would end the process. Files in remote stores are read by Lance.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from destrier.errors import LinkError
from destrier.keyed import Ints
from destrier.links.files import (
    Linked,
    announce,
    beyond,
    changed,
    gone,
    open_linked,
    read_at_once,
    read_linked,
    split_uri,
    stat_files,
)

__all__ = ["EXTERNAL", "BrokenLinksError", "LinkReader"]

EXTERNAL = 3
"""The kind of a blob, in Lance's descriptors, that lies in a file elsewhere."""

_OPEN_FILES = 64  # at once in a thread
_REMEMBERED = 1 << 15  # remote files that were looked at; beyond, the oldest are looked at again
_LOCAL = "file:///"
_SPECIAL = "%?#"
_NEAR = 64 << 10  # the system is asked in one go for ranges that lie so close


@dataclass(frozen=True)
class _Files:
    """Values by the files that they are in, and by what was recorded of these.

    There may be a file for each value, and an object for each would wake Python's collector time
    and again: so these are lists of numbers and text.

    Attributes:
        uris: Of the files.
        sizes: What was recorded of them.
        stamps: And their times.
        places: Of the values, file by file, in order of position.
        bounds: Where each file's places begin; one more than there are files.
    """

    uris: list[str]
    sizes: list[int]
    stamps: list[int]
    places: Ints
    bounds: list[int]

    def of(self, file: int) -> Ints:
        """The places of a file's values."""
        return self.places[self.bounds[file] : self.bounds[file + 1]]

    def recorded(self, file: int) -> Linked:
        """What was recorded of a file."""
        return Linked(self.sizes[file], self.stamps[file])


@dataclass(frozen=True)
class _Ranges:
    """Where values are in their files, and where they go in memory."""

    positions: NDArray[np.uint64]
    bounds: Ints
    memory: memoryview


class _Parts(NamedTuple):
    """The same, file by file: numbers of Python's, which are read one by one."""

    starts: list[int]
    begin: list[int]
    end: list[int]
    memory: memoryview


class _Unread(NamedTuple):
    """A file that is open, and which parts of it were not read yet."""

    descriptor: int
    file: int
    parts: range


class BrokenLinksError(Exception):
    """Some values could not be read; the others can.

    Attributes:
        errors: Why, by place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[int, LinkError] = {}

    def add(self, places: Ints, error: LinkError) -> None:
        """Note values that cannot be read."""
        self.errors.update(dict.fromkeys(places.tolist(), error))

    def raise_any(self) -> None:
        """Raise itself if there are any."""
        if self.errors:
            raise self


class LinkReader:
    """Reads linked values.

    Safe to call from several threads.

    Args:
        options: The table's storage options, for remote files.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = options
        self._lock = threading.Lock()
        # Threads that make many short calls of the system wait for the interpreter after each of
        # them: one at a time is twice as fast, and the disk is asked for many files at once anyway.
        self._turn = threading.Lock()
        self._looked_at: dict[tuple[str, Linked], None] = {}

    def read(
        self,
        values: pa.StructArray,
        recorded: pa.StructArray,
        fetch: Callable[[Ints], list[bytes | None]],
    ) -> pa.Array:
        """Read the values of some rows.

        Args:
            values: What Lance keeps of them.
            recorded: What their files were when they were linked.
            fetch: Reads values by place through Lance: those in remote files, and those that are
                in the table.

        Raises:
            BrokenLinksError: If files of some of them are gone, or are not those that were linked.
        """
        broken = BrokenLinksError()
        valid = _valid(values)
        external = valid & (_numbers(values, "kind") == EXTERNAL)
        positions = _numbers(values, "position")
        sizes = np.where(valid, _numbers(values, "size"), np.uint64(0))
        broken.add(np.flatnonzero(external & ~_valid(recorded)), _unrecorded())
        broken.raise_any()
        lengths = _numbers(recorded, "file_size")
        _check_ranges(values, external, positions, sizes, lengths, broken)
        broken.raise_any()
        # To Lance, no size is all from the position on.
        sizes = np.where(external & (sizes == 0), lengths - positions, sizes)
        files = _files(values, recorded, external, positions)
        paths = _paths(files.uris)
        remote = [file for file, path in enumerate(paths) if path is None]
        self._look_at(files, remote, broken)
        broken.raise_any()
        buffer = _allocate(sizes)
        bounds = np.zeros(len(values) + 1, np.int64)
        np.cumsum(sizes.astype(np.int64), out=bounds[1:])
        ranges = _Ranges(positions, bounds, memoryview(buffer).cast("B"))
        by_lance = valid & ~external & (sizes > 0)
        for file in remote:
            by_lance[files.of(file)] = True
        if by_lance.any():
            places = np.flatnonzero(by_lance)
            _place(places, fetch(places), ranges)
        with self._turn:
            _read_local(files, paths, ranges, broken)
        broken.raise_any()
        bits = None
        if values.null_count:
            bits = pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
        return pa.Array.from_buffers(
            pa.large_binary(), len(values), [bits, pa.py_buffer(bounds), buffer], values.null_count
        )

    def _look_at(self, files: _Files, remote: list[int], broken: BrokenLinksError) -> None:
        """Check remote files that were not checked before."""
        if not remote:
            return
        keys = {file: (files.uris[file], files.recorded(file)) for file in remote}
        with self._lock:
            new = [file for file in remote if keys[file] not in self._looked_at]
        found = stat_files([files.uris[file] for file in new], self._options)
        for file, now in zip(new, found, strict=True):
            uri, recorded = keys[file]
            if now is None:
                broken.add(files.of(file), gone(uri))
            elif not now.may_be(recorded):
                broken.add(files.of(file), changed(uri, now, recorded))
            else:
                with self._lock:
                    self._looked_at[uri, recorded] = None
        with self._lock:
            while len(self._looked_at) > _REMEMBERED:
                del self._looked_at[next(iter(self._looked_at))]


def _read_local(
    files: _Files, paths: list[str | None], ranges: _Ranges, broken: BrokenLinksError
) -> None:
    """Read the values in local files.

    What the system has in memory is read as soon as its file is open. Other files are collected,
    so that the disk is asked for many of them at once.
    """
    begin, end = ranges.bounds[files.places], ranges.bounds[files.places + 1]
    starts = ranges.positions[files.places].astype(np.int64)
    parts = _Parts(starts.tolist(), begin.tolist(), end.tolist(), ranges.memory)
    unread: list[_Unread] = []
    try:
        for file, path in enumerate(paths):
            if path is None:
                continue
            uri = files.uris[file]
            try:
                descriptor = open_linked(uri, path, files.sizes[file], files.stamps[file])
            except LinkError as error:
                broken.add(files.of(file), error)
                continue
            first, last = files.bounds[file], files.bounds[file + 1]
            unread.append(_Unread(descriptor, file, range(first, last)))
            for part in range(first, last):
                low, high = parts.begin[part], parts.end[part]
                if not read_at_once(descriptor, parts.starts[part], parts.memory[low:high]):
                    unread[-1] = _Unread(descriptor, file, range(part, last))
                    break
            else:
                unread.pop()
                os.close(descriptor)
            if len(unread) == _OPEN_FILES:
                _read_unread(unread, files, parts, broken)
        _read_unread(unread, files, parts, broken)
    finally:
        for left in unread:
            os.close(left.descriptor)


def _read_unread(
    unread: list[_Unread], files: _Files, parts: _Parts, broken: BrokenLinksError
) -> None:
    """Read what was not in memory, and close the files."""
    for left in unread:
        for start, stop in _runs(parts, left.parts):
            announce(left.descriptor, start, stop)
    while unread:
        descriptor, file, rest = unread[-1]
        try:
            for part in rest:
                into = parts.memory[parts.begin[part] : parts.end[part]]
                read_linked(descriptor, files.uris[file], parts.starts[part], into)
        except LinkError as error:
            broken.add(files.of(file), error)
        unread.pop()
        os.close(descriptor)


def _runs(parts: _Parts, of_a_file: range) -> Iterator[tuple[int, int]]:
    """Ranges of a file that lie close to each other, as one."""
    start = stop = parts.starts[of_a_file[0]]
    for part in of_a_file:
        position = parts.starts[part]
        if position > stop + _NEAR:
            yield start, stop
            start = position
        stop = max(stop, position + parts.end[part] - parts.begin[part])
    yield start, stop


def _files(
    values: pa.StructArray,
    recorded: pa.StructArray,
    external: NDArray[np.bool_],
    positions: NDArray[np.uint64],
) -> _Files:
    """The external values by file."""
    places = np.flatnonzero(external)
    if not len(places):
        return _Files([], [], [], places, [0])
    names = values.field("blob_uri").dictionary_encode()
    files = names.indices.fill_null(0).to_numpy()[places]
    sizes = _numbers(recorded, "file_size")[places]
    stamps = _numbers(recorded, "file_stamp")[places]
    order = np.lexsort((positions[places], stamps, sizes, files))
    places, files, sizes, stamps = places[order], files[order], sizes[order], stamps[order]
    changes = (files[1:] != files[:-1]) | (sizes[1:] != sizes[:-1]) | (stamps[1:] != stamps[:-1])
    first = np.flatnonzero(np.append(True, changes))
    uris = names.dictionary.take(pa.array(files[first])).to_pylist()
    bounds = [*first.tolist(), len(places)]
    return _Files(uris, sizes[first].tolist(), stamps[first].tolist(), places, bounds)


def _paths(uris: list[str]) -> list[str | None]:
    """The paths of local files; None for remote ones."""
    together = "".join(uris)  # one look for each mark, not one for each file and mark
    plain = not any(mark in together for mark in _SPECIAL)
    start = len(_LOCAL) - 1
    return [uri[start:] if plain and uri.startswith(_LOCAL) else _local(uri) for uri in uris]


def _local(uri: str) -> str | None:
    root, path = split_uri(uri)
    return None if root else path


def _check_ranges(
    values: pa.StructArray,
    external: NDArray[np.bool_],
    positions: NDArray[np.uint64],
    sizes: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    broken: BrokenLinksError,
) -> None:
    """Find ranges that are not in their files."""
    left = lengths - np.minimum(positions, lengths)
    outside = external & ((positions > lengths) | (sizes > left))
    for i in np.flatnonzero(outside).tolist():
        uri = values.field("blob_uri")[i].as_py()
        error = beyond(uri, int(positions[i]), int(sizes[i]), int(lengths[i]))
        broken.add(np.array([i]), error)


def _unrecorded() -> LinkError:
    return LinkError(
        "the size and time of its file are not recorded, so that it cannot be checked: link the "
        "source again"
    )


def _allocate(sizes: NDArray[np.uint64]) -> pa.Buffer:
    total = sum(sizes.tolist())  # Python's, which do not overflow
    try:
        return pa.allocate_buffer(total)
    except (MemoryError, OverflowError, pa.ArrowException):
        raise LinkError(
            f"{len(sizes)} linked values have {total} bytes by the table, more than there is memory"
        ) from None


def _place(places: Ints, values: list[bytes | None], ranges: _Ranges) -> None:
    """Put values that Lance read where they belong."""
    begin, end = ranges.bounds[places].tolist(), ranges.bounds[places + 1].tolist()
    for value, start, stop in zip(values, begin, end, strict=True):
        if value is None or len(value) != stop - start:
            found = "null" if value is None else f"{len(value)} bytes"
            raise LinkError(f"Lance returned {found} for a value of {stop - start} bytes")
        ranges.memory[start:stop] = value


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _numbers(array: pa.StructArray, name: str) -> NDArray[Any]:
    numbers: NDArray[Any] = array.field(name).fill_null(0).to_numpy(zero_copy_only=False)
    return numbers
