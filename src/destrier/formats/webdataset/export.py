"""Tables as tars of samples, which webdataset reads."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError, SourceError
from destrier.files import Store
from destrier.formats.gather import bounds_of
from destrier.formats.media import CONTENT_TYPE_KEY, content_type
from destrier.formats.ragged import is_ragged
from destrier.formats.webdataset.members import default_kind
from destrier.formats.webdataset.npy import npy_bytes
from destrier.formats.webdataset.plan import column_name
from destrier.formats.webdataset.tar import BLOCK
from destrier.sink import Back, Sink
from destrier.writing.source import ENCODING_KEY

__all__ = ["WebDatasetSink", "open_sink"]

_ENCODING = "webdataset:"
_KEY = "__key__"
_EXTENSIONS = {"image/jpeg": "jpg", "image/png": "png", "audio/wav": "wav"}
_RECORD_BLOCKS = 20  # tars are filled up to whole records of 10,240 bytes
_META = re.compile(r"__[^/]*__(?:$|/)")
_MAX_SIZE = 1 << 33  # what an octal size can say

Encoder = Callable[[pa.Array], list["bytes | memoryview | None"]]


class WebDatasetSink(Sink):
    """Writes one tar for each range of rows: ``shard-000000.tar`` and so on.

    Args:
        key_column: The column of keys. ``"auto"`` takes the one that came from tars, else one of
            text that is called ``key``, else the number of the tar and of the row in it. None
            always takes the numbers; a column of keys is then left out.

    Example:
        >>> sink = WebDatasetSink(key_column="name")  # doctest: +SKIP
    """

    format: ClassVar[str] = "webdataset"

    def __init__(self, *, key_column: str | None = "auto") -> None:
        self.key_column = key_column

    def check(self, schema: pa.Schema) -> None:
        """Raise unless every column can be members of a tar."""
        self._plan(schema)

    def back(self, schema: pa.Schema) -> Back:
        """How an export of these columns is read again."""
        key, columns = self._plan(schema)
        names = {name: column_name(extension) for name, (extension, _) in columns.items()}
        kinds = {
            extension: _read_as(schema.field(name).type, encode)
            for name, (extension, encode) in columns.items()
        }
        keys = {} if key is None else {key: _KEY}
        return Back({**names, **keys}, {"extensions": kinds, "key_column": keys.get(key or "")})

    def write(self, store: Store, number: int, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        """Write a range of rows as a tar.

        Raises:
            SourceError: If a tar cannot hold a row.
        """
        name = f"shard-{number:06d}.tar"
        keys: set[str] = set()
        rows = blocks = 0
        with store.create(name) as out:
            for batch in batches:
                key, columns = self._plan(batch.schema)
                names = _keys(batch, key, number, rows)
                members = []
                for column, (extension, encode) in columns.items():
                    members.append((extension, _encoded(batch, column, encode, rows)))
                for row, sample in enumerate(names):
                    if sample in keys:
                        raise SourceError(
                            f"it has the key {sample!r} of a row before it in {name}; a tar holds "
                            "a key once: pass key_column=None to number the rows instead",
                            row=rows + row,
                            column=key,
                        )
                    keys.add(sample)
                    written = 0
                    for extension, values in members:
                        value = values[row]
                        if value is not None:
                            written += _write_member(out, f"{sample}.{extension}", value)
                    if not written:
                        raise SourceError(
                            "it is null in all columns, and a tar cannot hold a sample without "
                            "members; leave such rows out with filter=",
                            row=rows + row,
                        )
                    blocks += written
                rows += batch.num_rows
            end = -(blocks + 2) % _RECORD_BLOCKS + 2
            out.write(bytes(end * BLOCK))
        return {"name": name, "rows": rows}

    def finish(self, store: Store, infos: list[Any]) -> None:
        """Nothing belongs to the whole: webdataset takes a list of tars."""

    def _plan(self, schema: pa.Schema) -> tuple[str | None, dict[str, tuple[str, Encoder]]]:
        """The column of keys, and for each other column its extension and encoder."""
        came = [f.name for f in schema if _came_as(f) == _KEY]
        key = self.key_column
        if key == "auto":
            named = [f.name for f in schema if f.name == "key" and _is_text(f.type)]
            key = (came or named or [None])[0]
        elif key is not None and (key not in schema.names or not _is_text(schema.field(key).type)):
            raise ArgumentError(
                f"key_column={key!r} is not a column of text; the columns are: "
                f"{', '.join(schema.names)}"
            )
        columns: dict[str, tuple[str, Encoder]] = {}
        refused: list[str] = []
        taken: dict[str, str] = {}
        for column in schema:
            if column.name == key or column.name in came:
                continue
            try:
                extension, encode = _encoding(column)
                if extension in taken:
                    raise ValueError(f"its extension {extension!r} is that of {taken[extension]!r}")
            except ValueError as error:
                refused.append(f"{column.name!r} ({column.type}): {error}")
                continue
            taken[extension] = column.name
            columns[column.name] = extension, encode
        if refused:
            raise ColumnError(
                f"tars cannot hold these columns: {'; '.join(refused)}. Leave them out with "
                "columns=, or cast them first"
            )
        if not columns:
            raise ColumnError("there is no column to write as members, only the keys")
        return key, columns


def open_sink(*, key_column: str | None = "auto") -> WebDatasetSink:
    """Make what writes tars; see `WebDatasetSink`."""
    return WebDatasetSink(key_column=key_column)


def _came_as(column: pa.Field) -> str:
    """The extension that a column had in the tars it came from, or an empty text."""
    encoding = str((column.metadata or {}).get(ENCODING_KEY, b"").decode())
    return encoding.removeprefix(_ENCODING) if encoding.startswith(_ENCODING) else ""


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _encoding(column: pa.Field) -> tuple[str, Encoder]:
    """The extension of a column, and how its values become bytes.

    Raises:
        ValueError: Saying why a tar cannot hold it.
    """
    suffix, encode = _natural(column)
    extension = _came_as(column)
    if not extension or (suffix == "npy") != extension.endswith("npy"):
        name = column.name.lower()
        own = name.rpartition(".")[2]
        same = default_kind(own) == default_kind(suffix) and content_type(own) == content_type(
            suffix
        )
        extension = name if own == suffix or (same and own in _KNOWN) else f"{name}.{suffix}"
    if not re.fullmatch(r"[^/\0.][^/\0]*", extension):
        raise ValueError(f"{extension!r} cannot be the extension of a file")
    return extension, encode


# extensions that columns are commonly called by
_KNOWN = {"jpeg", "text", "transcript", "index", "inx", "id", "class"}


def _natural(column: pa.Field) -> tuple[str, Encoder]:
    """The extension that members of a type usually have, and their encoder."""
    kind = column.type
    declared = (column.metadata or {}).get(CONTENT_TYPE_KEY, b"").decode()
    was_array = _came_as(column).endswith("npy")
    if _is_text(kind):
        return ("json" if declared == "application/json" else "txt"), _texts
    if _is_bytes(kind):
        return _extension(declared), _plain
    # an integer that 64 signed bits cannot hold is not read from text again
    if pa.types.is_uint64(kind) or (was_array and (_is_number(kind) or pa.types.is_boolean(kind))):
        return "npy", _scalars
    if pa.types.is_integer(kind):
        return "cls", _integers
    if _is_array(kind):
        return "npy", _arrays
    _check_json(kind)
    return "json", _json


def _read_as(kind: pa.DataType, encode: Encoder) -> str:
    """What members are read as, to get the values that were encoded."""
    if encode is _arrays:
        fixed = isinstance(kind, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(kind)
        return "tensor" if fixed else "ragged"
    return _KINDS[encode]


def _is_array(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    if is_ragged(kind):
        return _is_number(kind.field("values").type.value_type)
    return _is_list(kind) and _is_number(kind.value_type)


def _extension(declared: str) -> str:
    if declared in _EXTENSIONS:
        return _EXTENSIONS[declared]
    subtype = declared.rpartition("/")[2]
    return subtype if content_type(subtype) == declared and declared else "bin"


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _check_json(kind: pa.DataType) -> None:
    """Raise a ValueError unless JSON says values of the type exactly."""
    if isinstance(kind, pa.BaseExtensionType):
        raise ValueError(f"JSON has no {kind}")
    if pa.types.is_struct(kind):
        for child in kind:
            _check_json(child.type)
    elif _is_list(kind):
        _check_json(kind.value_type)
    elif not (_is_number(kind) or _is_text(kind) or pa.types.is_boolean(kind)):
        raise ValueError(f"JSON has no {kind}")


def _encoded(
    batch: pa.RecordBatch, column: str, encode: Encoder, first: int
) -> list[bytes | memoryview | None]:
    values = batch.column(column)
    try:
        return encode(values)
    except (ValueError, OverflowError):
        for row in range(len(values)):  # which one it is
            try:
                encode(values.slice(row, 1))
            except (ValueError, OverflowError) as error:
                raise SourceError(
                    f"column {column!r}: {error}", row=first + row, column=column
                ) from None
        raise


def _plain(values: pa.Array) -> list[bytes | memoryview | None]:
    if not (pa.types.is_large_binary(values.type) or pa.types.is_binary(values.type)):
        values = values.cast(pa.large_binary())
    wide = pa.types.is_large_binary(values.type)
    _, offsets, data = values.buffers()
    kind = np.int64 if wide else np.int32
    ends = np.frombuffer(offsets, kind)[values.offset : values.offset + len(values) + 1].tolist()
    view = memoryview(data if data is not None else b"")
    valid = values.is_valid().to_pylist()
    return [view[ends[i] : ends[i + 1]] if valid[i] else None for i in range(len(values))]


def _texts(values: pa.Array) -> list[bytes | memoryview | None]:
    return _plain(values.cast(pa.large_string()).view(pa.large_binary()))


def _integers(values: pa.Array) -> list[bytes | memoryview | None]:
    return [None if value is None else b"%d" % value for value in values.to_pylist()]


def _json(values: pa.Array) -> list[bytes | memoryview | None]:
    return [
        None if value is None else json.dumps(value, ensure_ascii=False).encode()
        for value in values.to_pylist()
    ]


def _scalars(values: pa.Array) -> list[bytes | memoryview | None]:
    dtype = values.type.to_pandas_dtype()
    return [None if v is None else npy_bytes(np.asarray(v, dtype)) for v in values.to_pylist()]


_KINDS: dict[Encoder, str] = {
    _plain: "bytes",
    _texts: "string",
    _integers: "int",
    _json: "json",
    _scalars: "tensor",
}


def _arrays(values: pa.Array) -> list[bytes | memoryview | None]:
    kind = values.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _fixed(values.storage, tuple(kind.shape))
    if pa.types.is_fixed_size_list(kind):
        return _fixed(values, (kind.list_size,))
    shapes: list[list[int] | None] | None = None
    valid = values.is_valid().to_pylist()
    if pa.types.is_struct(kind):
        shapes = values.field("shape").to_pylist()
        values = values.field("values")
    bounds = bounds_of(values)
    flat = _numbers(values.values.slice(bounds[0], bounds[-1] - bounds[0]))
    ends = (bounds - bounds[0]).tolist()
    arrays: list[bytes | memoryview | None] = []
    for i, present in enumerate(valid):
        array_ = flat[ends[i] : ends[i + 1]]
        if present and shapes is not None:
            array_ = array_.reshape(shapes[i] or ())
        arrays.append(npy_bytes(array_) if present else None)
    return arrays


def _fixed(lists: pa.Array, shape: tuple[int, ...]) -> list[bytes | memoryview | None]:
    size = lists.type.list_size
    whole = lists.values.slice(lists.offset * size, len(lists) * size)
    valid = lists.is_valid()
    if lists.null_count:  # what lies under a null list may be null itself
        inner = lists.filter(valid).flatten()
        rows = iter(_numbers(inner).reshape(-1, *shape))
    else:
        rows = iter(_numbers(whole).reshape(-1, *shape))
    return [npy_bytes(next(rows)) if present else None for present in valid.to_pylist()]


def _numbers(values: pa.Array) -> np.ndarray[Any, Any]:
    if values.null_count:
        raise ValueError("a null among the numbers of a list, which an .npy file cannot hold")
    result: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return result


def _keys(batch: pa.RecordBatch, key: str | None, number: int, first: int) -> list[str]:
    if key is None:
        return [f"{number:06d}_{first + row:08d}" for row in range(batch.num_rows)]
    names: list[str | None] = batch.column(key).to_pylist()
    for row, name in enumerate(names):
        parts = (name or "").split("/")
        if not parts[-1] or "." in parts[-1] or "\0" in (name or "") or _META.match(name or ""):
            why = "a key has a name after its last slash, without dots"
        elif not parts[0] or ".." in parts:
            why = "unpacking such a tar would write outside its folder"
        else:
            continue
        raise SourceError(
            f"it has the key {name!r} in column {key!r}: {why}; pass key_column=None to number the "
            "rows instead",
            row=first + row,
            column=key,
        )
    return [name or "" for name in names]


def _write_member(out: pa.NativeFile, name: str, value: bytes | memoryview) -> int:
    """Write a member and return the blocks it took. The header says nothing but name and size."""
    header = _header(name, len(value))
    out.write(header)
    out.write(value)
    rest = -len(value) % BLOCK
    if rest:
        out.write(bytes(rest))
    return (len(header) + len(value) + rest) // BLOCK


def _header(name: str, size: int) -> bytes:
    if name.isascii() and len(name) <= 100 and size < _MAX_SIZE:
        text = b"%s%s0000444\x000000000\x000000000\x00%011o\x0000000000000\x00" % (
            name.encode(),
            bytes(100 - len(name)),
            size,
        )
        rest = b"0" + bytes(100) + b"ustar\x0000" + bytes(247)
        total = sum(text) + sum(rest) + 8 * 32
        return b"%s%06o\x00 %s" % (text, total, rest)
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
