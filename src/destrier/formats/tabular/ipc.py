"""Arrow IPC: files, whose units are runs of record batches, and streams, which are one unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import pyarrow as pa

from destrier.errors import SourceError
from destrier.files import File
from destrier.formats.tabular.typed import FileInfo, TypedSource
from destrier.writing.source import Unit

__all__ = ["ArrowSource"]

_UNIT_BYTES = 64 << 20
_WIDE = 1 << 16  # bits: columns of text, bytes and nested values are read after all numbers
_MAGIC = b"ARROW1"
_FEATHER1 = b"FEA1"
_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_OLD_END = b"\x00\x00\x00\x00"  # of streams from before version 0.15
_CONTINUED = b"\xff\xff\xff\xff"


@dataclass(frozen=True)
class Batches:
    """The place of a unit: a run of record batches of a file, or a whole stream.

    Attributes:
        stop: None for a stream.
        first_row: Number of the rows before, None if it is not known.
    """

    path: str
    size: int
    start: int
    stop: int | None
    first_row: int | None


class ArrowSource(TypedSource):
    """Rows of Arrow IPC files and streams."""

    format: ClassVar[str] = "arrow"
    _counted: tuple[str | None, list[int]] = (None, [])  # the rows of each batch of a file

    def look(self, file: File) -> FileInfo:
        """The schema, and the runs of record batches."""
        shown = self.store.show(file.path)
        with self.store.open(file.path) as opened:
            try:
                head = opened.read(8)
                if head.startswith(_FEATHER1):
                    raise SourceError(
                        f"{shown} is of Feather's first version, which is not read here; write it "
                        "anew with pyarrow.feather.write_feather",
                        file=shown,
                    )
                if not head.startswith(_MAGIC):
                    return self._look_at_stream(opened, file, shown)
                opened.seek(0)
                reader = pa.ipc.open_file(opened)
                batches = reader.num_record_batches
                cheap = self.store.local and any(
                    pa.types.is_primitive(field.type) for field in reader.schema
                )
                counts = _counts(opened, batches) if cheap else None
                return reader.schema, _runs(file, shown, batches, counts)
            except (pa.ArrowException, OSError, ValueError, LookupError, MemoryError) as error:
                if isinstance(error, SourceError):
                    raise
                raise SourceError(
                    f"{shown} is no Arrow IPC file, or is damaged: {error}", file=shown
                ) from None

    @staticmethod
    def _look_at_stream(opened: pa.NativeFile, file: File, shown: str) -> FileInfo:
        if file.size < len(_END):
            raise SourceError(f"{shown} is no Arrow IPC file: it has {file.size} bytes", file=shown)
        opened.seek(0)
        old = opened.read(4) != _CONTINUED
        end = _OLD_END if old else _END
        opened.seek(file.size - len(end))
        if opened.read(len(end)) != end:
            raise SourceError(
                f"{shown} is no Arrow IPC file, or a stream that is cut or still being written: it "
                "does not end as a stream does",
                file=shown,
            )
        opened.seek(0)
        schema = pa.ipc.open_stream(opened).schema
        place = Batches(file.path, file.size, 0, None, 0)
        return schema, [Unit(shown, None, file.size, place, file=shown)]

    def origins(self, unit: Unit, start: int, count: int) -> tuple[pa.Array, pa.Array]:
        """See `Source.origins`; the rows of the batches before the unit's are counted, once."""
        place: Batches = unit.place
        if unit.first_row is None:
            if self._counted[0] != place.path:
                try:
                    with self.store.open(place.path) as file:
                        total = pa.ipc.open_file(file).num_record_batches
                        self._counted = place.path, _counts(file, total)
                except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
                    if isinstance(error, SourceError):
                        raise
                    raise SourceError(f"{unit.name}: {error}", file=unit.file) from None
            unit = replace(unit, first_row=sum(self._counted[1][: place.start]))
        return super().origins(unit, start, count)

    def batches(self, unit: Unit) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """The record batches of a unit."""
        place: Batches = unit.place
        shown = self.store.show(place.path)
        with self.store.open(place.path) as file:
            if file.size() != place.size:
                raise SourceError(
                    f"{shown} has {file.size()} bytes, and had {place.size} when it was first "
                    "looked at",
                    file=shown,
                )
            row = place.first_row
            for batch in (
                self._stream(file, shown) if place.stop is None else self._run(file, place)
            ):
                yield row, _aligned(batch.select(self.names_in(batch.schema)))
                row = None if row is None else row + batch.num_rows

    def _run(self, file: pa.NativeFile, place: Batches) -> Iterator[pa.RecordBatch]:
        options = self._options(pa.ipc.open_file(file).schema)
        reader = pa.ipc.open_file(file, options=options)
        for index in range(place.start, place.stop or 0):
            yield reader.get_batch(index)

    def _stream(self, file: pa.NativeFile, shown: str) -> Iterator[pa.RecordBatch]:
        options = self._options(pa.ipc.open_stream(file).schema)
        file.seek(0)
        yield from pa.ipc.open_stream(file, options=options)
        if file.tell() != file.size():
            raise SourceError(
                f"{shown}: the stream ends at byte {file.tell()} of {file.size()}; what follows "
                "would be lost",
                file=shown,
            )

    def _options(self, schema: pa.Schema) -> pa.ipc.IpcReadOptions:
        """Read only the columns that are asked for; none would be taken for all."""
        wanted = [schema.get_field_index(name) for name in self.names_in(schema)]
        return pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)


def _counts(file: pa.NativeFile, batches: int) -> list[int]:
    """The rows of each record batch, by the column that is read at the least cost."""
    schema = pa.ipc.open_file(file).schema
    widths = [f.type.bit_width if pa.types.is_primitive(f.type) else _WIDE for f in schema]
    wanted = [widths.index(min(widths))] if widths else None
    options = pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False)
    narrow = pa.ipc.open_file(file, options=options)
    return [narrow.get_batch(index).num_rows for index in range(batches)]


def _runs(file: File, shown: str, count: int, rows: list[int] | None) -> list[Unit]:
    """Runs of record batches of about so many bytes, and at least one unit."""
    step = max(_UNIT_BYTES * count // max(file.size, 1), 1)
    units = []
    first = 0
    for start in range(0, max(count, 1), step):
        stop = min(start + step, count)
        known = None if rows is None else sum(rows[start:stop])
        before = first if rows is not None or not start else None
        place = Batches(file.path, file.size, start, stop, before)
        name = f"{shown}, record batches {start} to {stop - 1}" if count else shown
        nbytes = file.size * (stop - start) // max(count, 1)
        units.append(Unit(name, known, nbytes, place, file=shown, first_row=before))
        first += known or 0
    return units


def _aligned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Lance wants decimals at multiples of 16 bytes; in a mapped file they are at those of 8."""
    if not any(_holds_decimals(field.type) for field in batch.schema):
        return batch
    # joining copies, also views, of which there is no take
    columns = [pa.concat_arrays([column, column.slice(0, 0)]) for column in batch.columns]
    return pa.record_batch(columns, schema=batch.schema)


def _holds_decimals(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_decimals(kind.storage_type)
    if pa.types.is_decimal(kind):
        return True
    return any(_holds_decimals(kind.field(i).type) for i in range(kind.num_fields))
