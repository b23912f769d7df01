"""Numbers that are kept as text: exact at any size."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from destrier.errors import ArgumentError, SourceError
from destrier.formats.mds.cells import Cells
from destrier.formats.mds.encodings import Encoding, Fail

__all__ = ["Number", "number_type", "parse"]

_DECIMAL = re.compile(r"decimal(?:128|256)?\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_LARGEST_PRECISION = 76
_PLAIN = {
    "int64": r"^-?[0-9]{1,19}$",
    "float64": r"^-?([0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?|inf|nan)$",
    "decimal": r"^-?[0-9]+(\.[0-9]+)?$",
}
"""What Python writes, and Arrow reads as Python does; all else is read by Python, row by row."""


def number_type(choice: str) -> pa.DataType:
    """The type that ``decimals=`` names.

    Args:
        choice: ``"text"``, ``"int64"`` or ``"decimal(38, 0)"``.

    Raises:
        ArgumentError: If it is another text.
    """
    if choice == "text":
        return pa.string()
    if choice == "int64":
        return pa.int64()
    if found := _DECIMAL.fullmatch(choice):
        precision, scale = int(found[1]), int(found[2])
        if 1 <= precision <= _LARGEST_PRECISION and scale <= precision:
            return (pa.decimal128 if precision <= 38 else pa.decimal256)(precision, scale)
    raise ArgumentError(
        f"decimals= names {choice!r}, which is not 'text', 'int64' or 'decimal(P, S)' with S <= P "
        f"<= {_LARGEST_PRECISION}"
    )


@dataclass(frozen=True)
class Number(Encoding):
    """``str_int``, ``str_float`` or ``str_decimal``."""

    name: str
    kind: pa.DataType

    @property
    def type(self) -> pa.DataType:
        """Text, or what ``decimals=`` says; always float64 for ``str_float``."""
        return self.kind

    def decode(self, cells: Cells) -> pa.Array:
        """Read the text, exactly."""
        texts = cells.text()
        return parse(texts, self.kind, cells.differ)

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:  # noqa: ARG002
        """Write the text as Python does."""
        if not pa.types.is_string(self.kind):
            array = pa.array([str(value) for value in array.to_pylist()], pa.string())
        return array.cast(pa.large_binary())


def parse(
    texts: pa.StringArray, kind: pa.DataType, fail: Callable[[int, str, str], SourceError]
) -> pa.Array:
    """Read numbers from text, none rounded.

    Args:
        texts: One a row.
        kind: Text, int64, float64 or a decimal.
        fail: Makes the error for a row: its index, the problem and the way out.

    Raises:
        SourceError: If a text is no such number, or does not fit exactly.
    """
    if pa.types.is_string(kind):
        return texts
    plain = _PLAIN["decimal" if pa.types.is_decimal(kind) else str(_python_name(kind))]
    if pc.all(pc.match_substring_regex(texts, plain)).as_py() is not False:
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            pass  # the slow way names the row
    return pa.array(
        [_parse_one(text, kind, index, fail) for index, text in enumerate(texts.to_pylist())], kind
    )


def _python_name(kind: pa.DataType) -> str:
    return "float64" if pa.types.is_floating(kind) else "int64"


def _parse_one(
    text: str, kind: pa.DataType, index: int, fail: Callable[[int, str, str], SourceError]
) -> Any:
    from decimal import Decimal, InvalidOperation

    try:
        if pa.types.is_floating(kind):
            return float(text)
        value = Decimal(text) if pa.types.is_decimal(kind) else int(text)
    except (ValueError, InvalidOperation):
        raise fail(index, f"holds {text[:40]!r}, which is no number", "") from None
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, OverflowError, ValueError):
        raise fail(
            index,
            f"holds {text[:40]}, which does not fit {kind} exactly",
            "name another type for it in decimals=, such as 'text' or 'decimal(38, 0)'",
        ) from None
