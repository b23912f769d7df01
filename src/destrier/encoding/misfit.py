"""A value that does not fit its column, before it is known which row and column that is."""

from __future__ import annotations

from typing import Any

__all__ = ["Misfit", "shown"]

_SHOWN = 40


class Misfit(Exception):  # noqa: N818 - it becomes an error where row and column are known
    """A value does not fit.

    Attributes:
        index: Of the value among those that were encoded.
        text: What is wrong with it.
        path: From the column to the value inside it, such as ``[3].name``.
        refused: Whether no column could hold it.
    """

    def __init__(self, index: int, text: str, *, path: str = "", refused: bool = False) -> None:
        super().__init__(text)
        self.index = index
        self.text = text
        self.path = path
        self.refused = refused

    def at(self, index: int, path: str = "") -> Misfit:
        """The same as a fault of the value that holds it."""
        return Misfit(index, self.text, path=path + self.path, refused=self.refused)


def shown(value: Any) -> str:
    """A value's type, and itself where that is short."""
    name = type(value).__name__
    dtype = getattr(value, "dtype", None)
    shape = getattr(value, "shape", None)
    if dtype is not None and shape:
        return f"{name} of {dtype} and shape {tuple(shape)}"
    try:
        text = value.isoformat() if hasattr(value, "isoformat") else repr(value)
    except Exception:
        return name
    if isinstance(value, int) and len(text) > _SHOWN:
        text = f"{text[:8]}... of {len(text)} digits"
    return f"{name} {text}" if len(text) <= _SHOWN else f"{name} {text[: _SHOWN - 3]}..."
