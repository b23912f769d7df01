"""What a table is, as plain data for people and scripts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from destrier.errors import DestrierWarning
from destrier.lancecalls import lance_call, redact
from destrier.read import Reader
from destrier.table import Table

if TYPE_CHECKING:
    import lance

__all__ = ["ColumnReport", "TableReport", "blob_columns", "report_table", "stored_bytes"]


@dataclass(frozen=True)
class ColumnReport:
    """A column of a table.

    Attributes:
        bytes: What it takes on disk, compressed.
        metadata: Of the field, as text.
    """

    name: str
    type: str
    nullable: bool
    bytes: int
    metadata: dict[str, str]


@dataclass(frozen=True)
class TableReport:
    """A table at one version.

    Attributes:
        uri: Without credentials.
        identity: Of the rows, as states name it.
        bytes: Of the data files, compressed.
        row_bytes: Of a row in memory, about; sizes of clumps follow from it.
        versions: Number and time of each version that is there.
        tags: From name to version.
        warnings: What makes reading slow.
    """

    uri: str
    version: int
    latest_version: int
    identity: str
    rows: int
    deleted_rows: int
    fragments: int
    bytes: int
    row_bytes: float
    columns: list[ColumnReport]
    versions: list[dict[str, Any]]
    tags: dict[str, int]
    indices: list[str]
    warnings: list[str]


def report_table(table: Table) -> TableReport:
    """Describe a table from its manifests and the footers of its files."""

    def look() -> TableReport:
        dataset = table.dataset
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        stored = stored_bytes(table)
        rows = table.num_rows
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DestrierWarning)
            table.warn_if_scattered()
        return TableReport(
            uri=redact(table.uri),
            version=table.version,
            latest_version=int(dataset.latest_version),
            identity=table.identity,
            rows=rows,
            deleted_rows=sum(fragment.physical_rows for fragment in fragments) - rows,
            fragments=len(fragments),
            bytes=_file_bytes(dataset),
            row_bytes=table.row_bytes,
            columns=[
                ColumnReport(
                    name=field.name,
                    type=str(field.type),
                    nullable=field.nullable,
                    bytes=stored[field.name],
                    metadata=_as_text(field.metadata),
                )
                for field in table.schema
            ],
            versions=_versions(dataset),
            tags={name: int(tag["version"]) for name, tag in sorted(dataset.tags.list().items())},
            indices=[index.name for index in dataset.describe_indices()],
            warnings=[str(warning.message) for warning in caught],
        )

    report: TableReport = lance_call(f"describing {table.name}", look)
    return report


def _versions(dataset: lance.LanceDataset) -> list[dict[str, Any]]:
    versions: list[Any] = list(dataset.versions())
    return [
        {"version": int(v["version"]), "time": v["timestamp"].isoformat(timespec="seconds")}
        for v in versions
    ]


def stored_bytes(table: Table) -> dict[str, int]:
    """Bytes on disk of each top-level column. Blobs are the rest of the files, in equal parts."""
    dataset = table.dataset
    fields: Any = dataset.stats.data_stats().fields  # a list, whatever its annotation says
    by_field = {field.id: int(field.bytes_on_disk) for field in fields}

    def total(field: Any) -> int:
        return by_field.get(field.id(), 0) + sum(total(child) for child in field.children())

    stored = {field.name(): total(field) for field in dataset.lance_schema.fields()}
    blobs = blob_columns(table)
    rest = max(0, _file_bytes(dataset) - sum(stored.values()))
    return {
        name: size + (rest // len(blobs) if name in blobs else 0) for name, size in stored.items()
    }


def blob_columns(table: Table) -> list[str]:
    """The columns whose values Lance keeps outside the pages of the column."""
    # A reader's schema is the table's, but for blobs, which arrive as their bytes.
    read = Reader(table, table.schema.names).schema
    return [f.name for f in table.schema if not f.equals(read.field(f.name), check_metadata=True)]


def _file_bytes(dataset: lance.LanceDataset) -> int:
    return sum(
        int(file.file_size_bytes or 0)
        for fragment in dataset.get_fragments()
        for file in fragment.metadata.files
    )


def _as_text(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {
        k.decode(errors="replace"): v.decode(errors="replace") for k, v in (metadata or {}).items()
    }
