"""How the text of a CSV column becomes values, and only where writing them gives the same text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["TEXT", "Form", "declared", "first_bad", "forms", "narrowed"]


class Form:
    """A way to write values as text, which a column keeps to.

    Attributes:
        kind: The Arrow type of the values.
        name: For messages.
    """

    kind: pa.DataType
    name: str

    def values(self, text: pa.Array) -> pa.Array | None:
        """The values of a column's text, or None if one of them is not written in this way."""
        raise NotImplementedError


class _Text(Form):
    kind = pa.string()
    name = "text"

    def values(self, text: pa.Array) -> pa.Array | None:
        return text


class _Int(Form):
    kind = pa.int64()
    name = "a whole number such as -7"

    def values(self, text: pa.Array) -> pa.Array | None:
        found = _cast(text, self.kind)
        return found if found is not None and _all_equal(found.cast(pa.string()), text) else None


class _Float(Form):
    """Floats, shortest digits; whole ones with ``.0`` as Python writes them, or without."""

    kind = pa.float64()

    def __init__(self, *, point: bool) -> None:
        self.point = point
        self.name = f"a number such as 1.5 or {'2.0' if point else '2'}"

    def values(self, text: pa.Array) -> pa.Array | None:
        found = _cast(text, self.kind)
        if found is None:
            return None
        back = found.cast(pa.string())
        whole = pc.match_substring_regex(back, r"^-?[0-9]+$")
        wanted = pc.if_else(whole, pc.binary_join_element_wise(back, ".0", ""), back)
        differs = pc.fill_null(pc.not_equal(text, wanted if self.point else back), fill_value=False)
        # Python writes 1e-05 and 1000000000000000.0 where pyarrow writes 0.00001 and 1e+15
        for index in np.flatnonzero(differs.to_numpy(zero_copy_only=False)):
            written = text[int(index)].as_py()
            styled = self.point or not written.endswith(".0")
            if not styled or written != repr(found[int(index)].as_py()):
                return None
        return found


class _Bool(Form):
    kind = pa.bool_()

    def __init__(self, yes: str, no: str) -> None:
        self.yes, self.no = yes, no
        self.name = f"{yes} or {no}"

    def values(self, text: pa.Array) -> pa.Array | None:
        yes = pc.equal(text, self.yes)
        known = pc.or_(yes, pc.equal(text, self.no))
        return yes if pc.all(known, min_count=0).as_py() else None


class _Declared(Form):
    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.name = f"a value of the declared type {kind}"

    def values(self, text: pa.Array) -> pa.Array | None:
        return _cast(text, self.kind)


TEXT: Form = _Text()
"""Text as it stands."""


def declared(kind: pa.DataType) -> Form:
    """The form of a column whose type the user declares: what pyarrow casts from text.

    Raises:
        pa.ArrowException: If it casts no text to the type.
    """
    pa.array([], pa.string()).cast(kind)
    return TEXT if kind.equals(TEXT.kind) else _Declared(kind)


def forms() -> list[Form]:
    """The forms that a column is tried for, in this order; text is what all else is."""
    return [
        _Int(),
        _Float(point=True),
        _Float(point=False),
        _Bool("true", "false"),
        _Bool("True", "False"),
        TEXT,
    ]


def first_bad(form: Form, text: pa.Array) -> tuple[int, str]:
    """The first value that is not written in a form, which some value of the column is not."""
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        if form.values(text.slice(low, middle - low)) is None:
            high = middle
        else:
            low = middle
    return low, text[low].as_py()


def _cast(text: pa.Array, kind: pa.DataType) -> pa.Array | None:
    try:
        return text.cast(kind)
    except pa.ArrowException:
        return None


def _all_equal(one: pa.Array, other: pa.Array) -> bool:
    return bool(pc.all(pc.equal(one, other), min_count=0).as_py())


def narrowed(candidates: list[Form], text: pa.Array) -> Iterator[Form]:
    """Those of the forms that all of a column's text is written in."""
    return (form for form in candidates if form.values(text) is not None)
