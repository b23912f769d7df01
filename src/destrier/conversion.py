"""Datasets of other formats as tables: copied, or linked where they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from destrier.files import Store
from destrier.formats import open_source
from destrier.writing.write import Written, write_table

__all__ = ["convert", "link"]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "auto",
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    num_workers: int | None = None,
    mode: str = "create",
    restart: bool = False,
    provenance: bool = False,
    compression: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
    source_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Written:
    """Copy a dataset of another format into a table, exactly: every value, type and byte.

    Rows come in the order of the dataset. Killed, it leaves the table as it was, and the same call
    goes on where it stopped.

    Args:
        src: The dataset: a file, a folder, a pattern of files, or a URI of a store that pyarrow or
            fsspec opens.
        dst: URI or path of the table.
        format: ``"litdata"``, ``"mds"``, ``"webdataset"``, ``"parquet"``, ``"arrow"``, ``"csv"``,
            ``"jsonl"``, ``"hf"``, ``"folder"``; ``"auto"`` finds out.
        columns: The columns to keep; None keeps all.
        filter: The rows to keep, in Lance's SQL.
        num_workers: Processes; None is one a processor, 0 works in this process.
        mode: ``"create"``, ``"append"``, or ``"overwrite"`` (a new version of the table).
        restart: Drop what an unfinished call has written.
        provenance: Keep file and row of the source, in the columns ``source_file`` and
            ``source_row``.
        compression: By column: ``"zstd"``, ``"zstd:9"``, ``"lz4"``, ``"fsst"`` or ``"none"``.
        storage_options: Of the table, as `lance.write_dataset` takes them.
        source_options: Of the dataset's store: for ``s3://`` as Lance takes them, for others as
            fsspec does.
        options: Those of the format, which its page in the documentation names.

    Returns:
        Address, version and counts of what was written.

    Raises:
        SourceError: If the dataset is damaged, or holds what cannot be kept exactly.
        WriteError: If something is there already, or it cannot be written there.
        WorkerError: If a worker died; the same call goes on from what was finished.

    Example:
        >>> import destrier
        >>> destrier.convert("data/chunks", "data/digits.lance")  # doctest: +SKIP
    """
    return _write(
        src,
        dst,
        link=False,
        format=format,
        columns=columns,
        filter=filter,
        num_workers=num_workers,
        mode=mode,
        restart=restart,
        provenance=provenance,
        compression=compression,
        storage_options=storage_options,
        source_options=source_options,
        options=options,
    )


def link(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "auto",
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    num_workers: int | None = None,
    mode: str = "create",
    restart: bool = False,
    provenance: bool = False,
    crc: bool = False,
    storage_options: Mapping[str, str] | None = None,
    source_options: Mapping[str, str] | None = None,
    **options: Any,
) -> Written:
    """Make a table of a dataset whose large values stay where they are.

    Small columns are read and stored; each large value becomes a range of bytes in its file. Size
    and time of the files are stored too, and a stream compares them when it first reads a file.

    Args:
        src: A folder of files, WebDataset tars, uncompressed MDS shards, or uncompressed classic
            LitData chunks.
        dst: URI or path of the table.
        format: As for `convert`.
        columns: The columns to keep; None keeps all.
        filter: The rows to keep, in Lance's SQL, over the small columns.
        num_workers: Processes; None is one a processor, 0 works in this process.
        mode: ``"create"``, ``"append"`` or ``"overwrite"``.
        restart: Drop what an unfinished call has written.
        provenance: Keep file and row of the source.
        crc: Read all values once and store their CRCs, so that `verify` finds files that were
            changed with size and time kept.
        storage_options: Of the table.
        source_options: Of the dataset's store; streams read the files with the table's.
        options: Those of the format.

    Returns:
        Address, version and counts of what was written.

    Raises:
        ArgumentError: If the dataset cannot be linked; the message says why.
        SourceError: If the dataset is damaged.
        WriteError: If something is there already, or it cannot be written there.

    Example:
        >>> import destrier
        >>> destrier.link("data/tars", "data/photos.lance")  # doctest: +SKIP
    """
    return _write(
        src,
        dst,
        link=True,
        format=format,
        columns=columns,
        filter=filter,
        num_workers=num_workers,
        mode=mode,
        restart=restart,
        provenance=provenance,
        crc=crc,
        storage_options=storage_options,
        source_options=source_options,
        options=options,
    )


def _write(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    link: bool,
    format: str,
    columns: Sequence[str] | None,
    filter: str | None,
    source_options: Mapping[str, str] | None,
    options: Mapping[str, Any],
    **writing: Any,
) -> Written:
    source = open_source(
        Store(src, source_options),
        format,
        columns=None if filter is not None else columns,  # a filter may name any column
        link=link,
        options=options,
    )
    return write_table(source, dst, columns=columns, filter=filter, **writing)
