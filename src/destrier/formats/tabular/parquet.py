"""Parquet files: units are runs of row groups, read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from destrier.errors import SourceError
from destrier.files import File
from destrier.formats.batches import gathered
from destrier.formats.tabular.footer import Chunk, row_groups
from destrier.formats.tabular.lines import open_file
from destrier.formats.tabular.typed import FileInfo, TypedSource
from destrier.writing.source import Unit

__all__ = ["ParquetSource"]

_UNIT_BYTES = 64 << 20
_READ_BYTES = 8 << 20  # what a read of rows is to hold, decoded
_BOUND = 128 << 20  # what it may hold of a column if every row had its longest text
_RATIO = 8  # how much longer than in the file a dictionary is taken to be
_ROWS = 65536
_FEWEST = 256  # where the file does not say how long texts are: most are short
_MAGIC = b"PAR1"
_ENCRYPTED = b"PARE"
_TAIL = 8
_BUFFER = 1 << 20
_LAST_TIME = (1 << 63) // 1000  # in microseconds


@dataclass(frozen=True)
class Groups:
    """The place of a unit: a run of row groups of a file."""

    path: str
    size: int
    start: int
    stop: int
    first_row: int
    rows: int


class ParquetSource(TypedSource):
    """Rows of Parquet files."""

    format: ClassVar[str] = "parquet"
    _last: tuple[str, list[list[Chunk]]] | None = None

    def look(self, file: File) -> FileInfo:
        """The schema and the runs of row groups, from the footer."""
        shown = self.store.show(file.path)
        with self._open(file.path, file.size) as parquet:
            try:
                schema = parquet.schema_arrow
                groups = [
                    (
                        parquet.metadata.row_group(i).num_rows,
                        parquet.metadata.row_group(i).total_byte_size,
                    )
                    for i in range(parquet.metadata.num_row_groups)
                ]
            except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
                raise SourceError(f"{shown}: the footer is damaged: {error}", file=shown) from None
            total = parquet.metadata.num_rows
        if any(rows < 0 for rows, _ in groups) or sum(rows for rows, _ in groups) != total:
            raise SourceError(
                f"{shown}: the footer is damaged: it says {total} rows in all, and "
                f"{sum(rows for rows, _ in groups)} in its row groups",
                file=shown,
            )
        return schema, _runs(file, shown, groups)

    def batches(self, unit: Unit) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """The rows of a run of row groups."""
        place: Groups = unit.place
        shown = self.store.show(place.path)
        row = place.first_row
        info = self.store.stat(place.path)
        size = info.size if info else 0
        if size != place.size:
            raise SourceError(
                f"{shown} has {size} bytes, and had {place.size} when it was first looked at",
                file=shown,
            )
        with self._open(place.path, size) as parquet:
            names = self.names_in(parquet.schema_arrow)
            old = _old_times(parquet)
            chunks = self._chunks(place.path, size)
            for group in range(place.start, place.stop):
                meta = parquet.metadata.row_group(group)
                rows = _check_group(chunks[group], meta.num_rows, size, shown, group)
                end = row + meta.num_rows
                if not names:  # all columns are missing in this file
                    for batch in _empty(meta.num_rows):
                        yield row, batch
                        row += batch.num_rows
                    continue
                self._check_times(place, group, rows, [n for n in old if n in names])
                read = parquet.iter_batches(rows, [group], names, use_threads=False)
                for batch in gathered(batch.select(names) for batch in read):
                    yield row, batch
                    row += batch.num_rows
                if row != end:
                    raise SourceError(
                        f"{shown}: row group {group} holds {row - end + meta.num_rows} rows, but "
                        f"the footer says {meta.num_rows}",
                        file=shown,
                        row=row,
                    )

    def _check_times(self, place: Groups, group: int, rows: int, names: list[str]) -> None:
        """Look at old timestamps as microseconds: are they in the range of nanoseconds?"""
        if not names:
            return
        shown = self.store.show(place.path)
        with self._open(place.path, place.size, coerce_int96_timestamp_unit="us") as parquet:
            for batch in parquet.iter_batches(rows, [group], names, use_threads=False):
                for name in names:
                    for times in _times(batch[name]):
                        found = pc.min_max(times.cast(pa.int64())).as_py()
                        if max(abs(found["min"] or 0), abs(found["max"] or 0)) > _LAST_TIME:
                            raise SourceError(
                                f"{shown}, row group {group}, column {name!r}: an INT96 timestamp "
                                "beyond the years 1677 to 2262, which nanoseconds cannot hold; "
                                "write the column as TIMESTAMP_MICROS, or leave it out with "
                                "columns=[...]",
                                file=shown,
                                column=name,
                            )

    def _chunks(self, path: str, size: int) -> list[list[Chunk]]:
        """The columns of each row group; those of the last file are kept in mind."""
        if self._last is None or self._last[0] != path:
            shown = self.store.show(path)
            with open_file(self.store, path) as file:
                file.seek(size - _TAIL)
                length = int.from_bytes(file.read(4), "little")
                file.seek(size - _TAIL - length)
                try:
                    self._last = path, row_groups(file.read(length))
                except ValueError as error:
                    raise SourceError(f"{shown}: {error}", file=shown) from None
        return self._last[1]

    def _open(self, path: str, size: int, **options: str) -> pq.ParquetFile:
        """Open a file, after a look at where its footer is said to begin."""
        shown = self.store.show(path)
        file = open_file(self.store, path)
        try:
            if size < len(_MAGIC) + _TAIL:
                raise SourceError(f"{shown} is no Parquet file: it has {size} bytes", file=shown)
            file.seek(size - _TAIL)
            tail = file.read(_TAIL)
            if tail[4:] == _ENCRYPTED:
                raise SourceError(f"{shown} is encrypted, which is not read here", file=shown)
            if tail[4:] != _MAGIC:
                raise SourceError(
                    f"{shown} is no Parquet file, or is cut: it ends in {tail[4:]!r}", file=shown
                )
            length = int.from_bytes(tail[:4], "little")
            if length > size - _TAIL - len(_MAGIC):
                raise SourceError(
                    f"{shown}: a footer of {length} bytes does not fit into {size} bytes",
                    file=shown,
                )
            return pq.ParquetFile(
                file,
                pre_buffer=False,
                buffer_size=_BUFFER,
                page_checksum_verification=True,
                **options,
            )
        except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            file.close()
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{shown}: the footer cannot be read: {error}", file=shown) from None


def _runs(file: File, shown: str, groups: list[tuple[int, int]]) -> list[Unit]:
    """Runs of row groups of about so many bytes."""
    units = []
    start = row = 0
    rows = nbytes = 0
    for index, (count, size) in enumerate(groups):
        if index > start and nbytes + size > _UNIT_BYTES:
            units.append(
                _unit(shown, Groups(file.path, file.size, start, index, row, rows), nbytes)
            )
            start, row, rows, nbytes = index, row + rows, 0, 0
        rows, nbytes = rows + count, nbytes + max(size, 0)
    if rows or not units:
        units.append(
            _unit(shown, Groups(file.path, file.size, start, len(groups), row, rows), nbytes)
        )
    return units


def _unit(shown: str, place: Groups, nbytes: int) -> Unit:
    several = f"row groups {place.start} to {place.stop - 1}"
    name = (
        f"{shown}, {several}"
        if place.stop - place.start > 1
        else f"{shown}, row group {place.start}"
    )
    return Unit(name, place.rows, nbytes, place, file=shown, first_row=place.first_row)


def _check_group(chunks: list[Chunk], rows: int, size: int, shown: str, group: int) -> int:
    """Check where a row group's columns lie; how many of its rows to read at a time."""
    nbytes = 0
    most = _ROWS
    for chunk in chunks:
        end = chunk.start + chunk.size
        if chunk.start < 0 or chunk.size < 0 or end > size:
            raise SourceError(
                f"{shown}: row group {group}: a column's bytes {chunk.start} to {end} are not in "
                f"the file of {size} bytes",
                file=shown,
            )
        nbytes += max(chunk.uncompressed, chunk.decoded)
        if chunk.dictionary and not 0 < chunk.decoded <= _BOUND:
            # a long text may be there once, and be the value of many rows
            longest = min(chunk.uncompressed, _RATIO * chunk.dictionary)
            fewest = 1 if chunk.decoded else _FEWEST
            most = min(most, max(_BOUND // max(longest, 1), fewest))
    return max(min(most, _READ_BYTES // max(nbytes // max(rows, 1), 1)), 1)


def _old_times(parquet: pq.ParquetFile) -> list[str]:
    """The columns with timestamps of 96 bits, which overflow in silence as nanoseconds."""
    columns = (parquet.schema.column(i) for i in range(len(parquet.schema)))
    return sorted({c.path.split(".")[0] for c in columns if c.physical_type == "INT96"})


def _times(array: pa.Array) -> Iterator[pa.Array]:
    if pa.types.is_struct(array.type):
        for i in range(array.type.num_fields):
            yield from _times(array.field(i))
    elif pa.types.is_nested(array.type):
        yield from _times(array.flatten())
    elif pa.types.is_timestamp(array.type) and array.type.unit == "us":
        yield array


def _empty(rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, _ROWS):
        count = min(_ROWS, rows - start)
        yield pa.record_batch({"": pa.nulls(count)}).select([])
