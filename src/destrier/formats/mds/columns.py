"""From the columns of a dataset and the user's options to encodings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError, SourceError
from destrier.formats.mds.arrays import Ragged, array_encoding
from destrier.formats.mds.encodings import DTYPES, Binary, Encoding, Scalar, Text
from destrier.formats.mds.images import Items, Pil
from destrier.formats.mds.index import Shape
from destrier.formats.mds.numbers import Number, number_type
from destrier.formats.mds.text import TEXT_KINDS
from destrier.formats.media import CONTENT_TYPE_KEY
from destrier.writing.source import ENCODING_KEY, LINK

__all__ = ["PREFIX", "Column", "Options", "by_name", "choose_columns", "is_open"]

PREFIX = b"mds:"
"""Of an encoding of MDS in a field's metadata."""

_JPEG, _PNG, _JSON = b"image/jpeg", b"image/png", b"application/json"
_BAD_UTF8 = ("error", "binary")
_NUMBERS = ("str_int", "str_decimal")
_TEXT_ENCODINGS = {"str": "str", "int": "int", "float": "float64"}  # to what MDS itself has


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        link: Leave large values where they are.
        check_hashes: Compare files with the hashes of the index.
        allow_pickle: Unpickle columns of the encoding ``pkl``.
        signed: Read uint8 and uint16 as signed.
        bad_utf8: ``"error"``, or ``"binary"`` to read text as bytes.
        decimals: What numbers kept as text become, of all columns or by column.
        ragged: The columns whose arrays keep their shapes beside their values; True for all.
        raw_arrays: The columns whose arrays keep their dtypes, too; True for all.
    """

    link: bool = False
    check_hashes: bool = False
    allow_pickle: bool = False
    signed: bool = False
    bad_utf8: str = "error"
    decimals: str | Mapping[str, str] = "text"
    ragged: bool | tuple[str, ...] = False
    raw_arrays: bool | tuple[str, ...] = False

    def __post_init__(self) -> None:
        if self.bad_utf8 not in _BAD_UTF8:
            raise ArgumentError(f"bad_utf8 is {self.bad_utf8!r}, not one of {', '.join(_BAD_UTF8)}")
        choices = [self.decimals] if isinstance(self.decimals, str) else self.decimals.values()
        for choice in choices:
            number_type(choice)

    def array_form(self, column: str) -> str | None:
        """What arrays of any shape become: ``struct``, ``raw``, or None to see the first row."""
        for form, chosen in (("raw", self.raw_arrays), ("struct", self.ragged)):
            if chosen is True or (chosen and column in chosen):
                return form
        return None

    def number(self, column: str, default: str) -> pa.DataType:
        """The type of a column of numbers that are kept as text."""
        if isinstance(self.decimals, str):
            return number_type(default if self.decimals == "text" else self.decimals)
        return number_type(self.decimals.get(column, default))


@dataclass(frozen=True)
class Column:
    """A column that is read.

    Attributes:
        name: Its name.
        original: Its encoding in the shard.
        encoding: How it is read; of a text shard only what it would be in MDS.
        kind: Its type if the encoding does not say.
        linked: Whether values stay where they are.
    """

    name: str
    original: str
    encoding: Encoding
    kind: pa.DataType | None = None
    linked: bool = False

    @property
    def field(self) -> pa.Field:
        """In the schema, with what an export needs to know."""
        kind = LINK if self.linked else self.encoding.type if self.kind is None else self.kind
        metadata: dict[bytes, bytes] = {}
        if not (self.original == "pkl" or _changed(self)):
            metadata[ENCODING_KEY] = PREFIX + self.encoding.name.encode()
        if self.encoding.content_type is not None:
            metadata[CONTENT_TYPE_KEY] = self.encoding.content_type
        return pa.field(self.name, kind, metadata=metadata or None)


def _changed(column: Column) -> bool:
    """Whether it is read as another type than its encoding's, and so exported by that type."""
    encoding = column.encoding
    return isinstance(encoding, Binary) and column.original in ("str", "json")


def choose_columns(
    shape: Shape, wanted: Sequence[str] | None, options: Options, where: str
) -> list[Column]:
    """How the columns of a dataset are read.

    Args:
        shape: Of its shards.
        wanted: The columns to read, in this order; None reads all.
        options: The user's.
        where: The dataset's name, for messages.

    Raises:
        ColumnError: If a name is not there or stands twice.
        ArgumentError: If an option names a column that it is not for, or pickles are not allowed.
        SourceError: If an encoding is unknown.
    """
    for name in wanted or ():
        if name not in shape.names:
            raise ColumnError(f"no column {name!r} in {where}; there are {', '.join(shape.names)}")
        if list(wanted or ()).count(name) > 1:
            raise ColumnError(f"columns names {name!r} twice")
    columns = []
    for name in shape.names if wanted is None else wanted:
        place = shape.names.index(name)
        original = shape.encodings[place]
        if shape.format == "mds":
            encoding = _encoding(original, name, options, where)
            if encoding.width != shape.sizes[place]:
                raise SourceError(
                    f"column {name!r} of {where} has the encoding {original!r} and "
                    f"{shape.sizes[place]} for the size of its values, not {encoding.width}; "
                    "leave it out with columns= if it cannot be mended",
                    column=name,
                )
            columns.append(Column(name, original, encoding))
        else:
            columns.append(_text_column(name, original, options, where))
    if not columns:
        raise ColumnError(f"{where} has no columns to read")
    if isinstance(options.decimals, Mapping):
        _check_decimals(options.decimals, shape, where)
    for option in ("ragged", "raw_arrays"):
        _check_arrays(option, getattr(options, option), shape, where)
    return columns


def _check_arrays(option: str, chosen: bool | tuple[str, ...], shape: Shape, where: str) -> None:
    for name in () if isinstance(chosen, bool) else chosen:
        if name not in shape.names:
            raise ColumnError(
                f"{option} names {name!r}, which {where} lacks; there are {', '.join(shape.names)}"
            )
        encoding = shape.encodings[shape.names.index(name)]
        if shape.format != "mds" or not isinstance(by_name(encoding), Ragged):
            raise ArgumentError(
                f"{option} names {name!r}, which is {encoding!r} in {where}; it is for arrays of "
                "any shape: 'ndarray' and 'ndarray:dtype'"
            )


def _check_decimals(decimals: Mapping[str, str], shape: Shape, where: str) -> None:
    numbers = _NUMBERS if shape.format == "mds" else ("int",)
    for name in decimals:
        if name not in shape.names:
            raise ColumnError(
                f"decimals names {name!r}, which {where} lacks; there are {', '.join(shape.names)}"
            )
        encoding = shape.encodings[shape.names.index(name)]
        if encoding not in numbers:
            raise ArgumentError(
                f"decimals names {name!r}, which is {encoding!r} in {where}; it is for "
                f"{' and '.join(numbers)}"
            )


def by_name(name: str) -> Encoding | None:
    """The encoding of a name, with what it becomes if no option says otherwise; None if unknown."""
    plain: dict[str, Encoding] = {
        "bytes": Binary("bytes"),
        "str": Text(),
        "int": Scalar("int", "int64"),
        "jpeg": Binary("jpeg", _JPEG),
        "png": Binary("png", _PNG),
        "json": Text("json", _JSON),
        "str_int": Number("str_int", pa.string()),
        "str_decimal": Number("str_decimal", pa.string()),
        "str_float": Number("str_float", pa.float64()),
        "pil": Pil(),
        "list[pil]": Items("list[pil]", Pil()),
        "list[jpeg]": Items("list[jpeg]", Binary("jpeg"), _JPEG),
        "list[png]": Items("list[png]", Binary("png"), _PNG),
    }
    if name in plain:
        return plain[name]
    if name in ("jpeg_array", "jpegarray"):
        return Items(name, Binary("jpeg"), _JPEG, reserved=False, may_be_empty=False)
    if name in DTYPES:
        return Scalar(name, name)
    try:
        return array_encoding(name)
    except ValueError:
        return None


def _encoding(original: str, column: str, options: Options, where: str) -> Encoding:
    if original == "pkl":
        if not options.allow_pickle:
            raise ArgumentError(
                f"column {column!r} of {where} is pickled, and reading a pickle runs code of "
                "whoever wrote it: pass allow_pickle=True if you trust them, or leave it out with "
                "columns="
            )
        from destrier.formats.mds.pickles import Pickle

        return Pickle()
    if options.signed and original in ("uint8", "uint16"):
        return Scalar(original[1:], original[1:])
    if options.bad_utf8 == "binary" and original in ("str", "json"):
        return Binary(original, _JSON if original == "json" else None)
    if original in _NUMBERS:
        return Number(original, options.number(column, "text"))
    found = by_name(original)
    if found is None:
        raise SourceError(
            f"column {column!r} of {where} has the encoding {original!r}, which is not one of "
            "MDS; leave it out with columns=, or write it again as bytes",
            column=column,
        )
    return found


def _text_column(name: str, original: str, options: Options, where: str) -> Column:
    if original not in TEXT_KINDS:
        raise SourceError(
            f"column {name!r} of {where} has the encoding {original!r}, not "
            f"{', '.join(TEXT_KINDS)}; leave it out with columns=",
            column=name,
        )
    kind = TEXT_KINDS[original]
    if original == "int":
        kind = options.number(name, "int64")
    elif original == "str" and options.bad_utf8 == "binary":
        return Column(name, original, Binary("str"), pa.large_binary())
    found: Any = by_name(_TEXT_ENCODINGS[original])
    if original == "int" and kind != pa.int64():
        found = Number("str_int", kind)
    return Column(name, original, found, kind)


def is_open(column: Column) -> bool:
    """Whether its type is known only when rows are seen."""
    return isinstance(column.encoding, Ragged) or column.original == "pkl"
