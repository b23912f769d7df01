"""Members of a tar grouped to samples, and samples to batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from destrier.errors import SourceError
from destrier.formats.webdataset.members import Cells
from destrier.formats.webdataset.reader import Reader
from destrier.formats.webdataset.tar import Member, Tar
from destrier.writing.source import BATCH_BYTES

__all__ = ["Batch", "Want", "batches", "fetch", "split_name"]

_MAX_ROWS = 8192  # in a batch, where rows are small
_CELL_BYTES = 16  # what a value takes in a batch besides its bytes
_LINK_BYTES = 80  # what a link takes in a batch

Want: TypeAlias = Callable[[str, str], "tuple[bool, bool]"]
"""From an extension and a member's name: whether its bytes are needed, or at least its place."""

_Parts: TypeAlias = "dict[str, tuple[int, int, memoryview | None]]"
_Sample: TypeAlias = "tuple[str, _Parts, int]"


@dataclass
class Batch:
    """Consecutive samples: their keys, and their members by extension.

    Attributes:
        first: Number of the first sample in its tar.
        keys: Of the samples.
        cells: The members of each extension.
        held: Roughly, the bytes of it all.
    """

    first: int
    keys: list[str] = field(default_factory=list)
    cells: dict[str, Cells] = field(default_factory=dict)
    held: int = 0

    def add(self, key: str, parts: _Parts, held: int) -> None:
        """Add a sample."""
        row = len(self.keys)
        self.keys.append(key)
        self.held += held
        for extension, (position, size, payload) in parts.items():
            cells = self.cells.get(extension)
            if cells is None:
                cells = self.cells[extension] = Cells()
            cells.rows.append(row)
            cells.positions.append(position)
            cells.sizes.append(size)
            if payload is not None:
                cells.payloads.append(payload)


def batches(tar: Tar, want: Want, *, headers_only: bool) -> Iterator[Batch]:
    """Group the members of a tar to batches of at most `BATCH_BYTES` or one sample.

    Args:
        tar: The tar.
        want: What is needed of an extension's members; asked once for each extension.
        headers_only: Whether the bytes of most members are not needed.

    Raises:
        SourceError: If the tar is damaged, a member has no key, or a key or an extension comes
            twice.
    """
    hashes = array("q")
    batch = Batch(0)
    with tar.open(headers_only=headers_only) as reader:
        for key, parts, held in _samples(reader, tar.members(reader), want):
            hashes.append(hash(key))
            rows = len(batch.keys)
            if rows and (batch.held + held > BATCH_BYTES or rows >= _MAX_ROWS):
                yield batch
                batch = Batch(batch.first + rows)
            batch.add(key, parts, held)
    if batch.keys:
        yield batch
    values, counts = np.unique(np.frombuffer(hashes, np.int64), return_counts=True)
    if (counts > 1).any():
        _check_keys(tar, set(values[counts > 1].tolist()))


def _samples(reader: Reader, members: Iterable[Member], want: Want) -> Iterator[_Sample]:
    wanted: dict[str, tuple[bool, bool]] = {}
    parts: _Parts = {}
    current: str | None = None
    held = count = 0
    for name, position, size in members:
        key, extension = split_name(name, reader.shown)
        if key != current:
            if current is not None:
                yield current, parts, held
                count += 1
            parts, current, held = {}, key, len(key) + _CELL_BYTES
        if extension not in wanted:
            wanted[extension] = want(extension, name)
        if extension in parts:
            raise SourceError(
                f"{reader.shown}: sample {key!r} has two members {extension!r}, the second is "
                f"{name!r}; leave one out with skip=, or mend the tar",
                file=reader.shown,
                row=count,
            )
        fetched, placed = wanted[extension]
        payload = fetch(reader, name, position, size, count) if fetched else None
        held += size + _CELL_BYTES if fetched else _LINK_BYTES * placed
        parts[extension] = position, size, payload
    if current is not None:
        yield current, parts, held


def fetch(reader: Reader, name: str, position: int, size: int, row: int | None) -> memoryview:
    """The bytes of a member.

    Raises:
        SourceError: If the tar ends inside it.
    """
    payload = reader.view(position, size)
    if len(payload) < size:
        raise SourceError(
            f"{reader.shown} ends inside member {name!r}: the file is cut",
            file=reader.shown,
            row=row,
        )
    return payload


def _check_keys(tar: Tar, hashes: set[int]) -> None:
    """Raise if a key comes again after others, among those that hash like another."""
    seen: set[str] = set()
    current = None
    with tar.open(headers_only=True) as reader:
        for name, _, _ in tar.members(reader):
            key, _ = split_name(name, tar.shown)
            if key != current and hash(key) in hashes:
                if key in seen:
                    raise SourceError(
                        f"{tar.shown}: member {name!r} belongs to sample {key!r}, which ended "
                        "before others began; the members of a sample stand together: write the "
                        "tar again, for example with tar --sort=name, or leave members out with "
                        "skip=",
                        file=tar.shown,
                    )
                seen.add(key)
            current = key


def split_name(name: str, shown: str) -> tuple[str, str]:
    """Key and extension: what stands before and after the first dot of the name in its folder."""
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot <= start or dot == len(name) - 1:
        raise SourceError(
            f"{shown}: member {name!r} has no key and extension, so it belongs to no sample; "
            f"leave such members out with skip=[{name!r}]",
            file=shown,
        )
    return name[:dot], name[dot + 1 :].lower()
