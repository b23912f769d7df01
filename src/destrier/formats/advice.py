"""The way out that an error of the encoder names, where the format has another."""

from __future__ import annotations

import re

__all__ = ["with_way_out"]

_DECLARE = re.compile(r"(, or|[:;])? declare schema=.*", re.DOTALL)


def with_way_out(text: str, way_out: str) -> str:
    """An encoder's message that does not ask for ``schema=``, which the format does not have.

    Example:
        >>> with_way_out("got int 1: convert it, or declare schema=", "or leave the column out")
        'got int 1: convert it; or leave the column out'
    """
    return f"{_DECLARE.sub('', text)}; {way_out}"
