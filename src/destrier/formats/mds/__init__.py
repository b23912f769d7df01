"""MDS, the format of MosaicML Streaming: shards of rows and an `index.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from destrier.errors import ArgumentError
from destrier.files import Store
from destrier.formats.mds.columns import Options
from destrier.formats.mds.discover import detect
from destrier.formats.mds.export import MdsSink, open_sink
from destrier.formats.mds.source import MdsSource

__all__ = ["MdsSink", "MdsSource", "detect", "open_sink", "open_source"]


def open_source(
    store: Store,
    *,
    columns: Sequence[str] | None = None,
    link: bool = False,
    check_hashes: bool = False,
    allow_pickle: bool = False,
    signed: bool = False,
    bad_utf8: str = "error",
    decimals: str | Mapping[str, str] = "text",
    ragged: bool | Sequence[str] = False,
    raw_arrays: bool | Sequence[str] = False,
) -> MdsSource:
    """Open an MDS dataset.

    Args:
        store: Its folder, its index, or a shard. A folder without an index is searched for parts
            that have one, and for shards.
        columns: Those to read, in this order; None reads all.
        link: Leave the values of ``jpeg``, ``png`` and large ``bytes`` columns in their shards.
        check_hashes: Compare each file with the hashes in the index.
        allow_pickle: Unpickle ``pkl`` columns, which runs code of whoever wrote them.
        signed: Read ``uint8`` and ``uint16`` as ``int8`` and ``int16``: Spark writes signed numbers
            so.
        bad_utf8: ``"error"`` where text is not UTF-8, or ``"binary"`` to read all ``str`` and
            ``json`` columns as bytes.
        decimals: What ``str_int`` and ``str_decimal`` columns, and ``int`` columns of text shards,
            become: ``"text"`` (int64 in text shards), ``"int64"`` or ``"decimal(P, S)"``; for all
            of them, or by column.
        ragged: The ``ndarray`` columns that are structs of shape and values even if the array of
            the first row has one dimension, which otherwise makes lists; True for all.
        raw_arrays: The ``ndarray`` columns that are structs of dtype, shape and bytes, for arrays
            of more than one dtype; True for all.

    Raises:
        SourceError: If the dataset is damaged or an encoding is unknown.
        ArgumentError: If it cannot be read as asked.
        MissingDependencyError: While reading, if hashes need the package xxhash.

    Example:
        >>> source = open_source(Store("datasets/c4"))  # doctest: +SKIP
        >>> source.total_rows  # doctest: +SKIP
        364868892
    """
    options = Options(
        link=link,
        check_hashes=check_hashes,
        allow_pickle=allow_pickle,
        signed=signed,
        bad_utf8=bad_utf8,
        decimals=decimals,
        ragged=_columns("ragged", ragged),
        raw_arrays=_columns("raw_arrays", raw_arrays),
    )
    return MdsSource(store, columns, options)


def _columns(option: str, chosen: bool | Sequence[str]) -> bool | tuple[str, ...]:
    if isinstance(chosen, str):
        raise ArgumentError(f"{option} is True or a list of columns: pass [{chosen!r}]")
    return chosen if isinstance(chosen, bool) else tuple(chosen)
