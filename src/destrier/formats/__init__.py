"""The formats that tables come from and go to, one module or package each.

Each gives ``detect(store)``, ``open_source(store, *, columns, link, ...)`` and, where tables can go
there, ``open_sink(...)``; what else the two take are the options of the format.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from destrier.errors import ArgumentError, SourceError
from destrier.files import Store
from destrier.sink import Sink
from destrier.writing.source import Source

__all__ = ["EXPORTS", "FORMATS", "detect", "open_sink", "open_source"]

# In the order in which they are looked for: a folder of files is whatever is nothing else.
_MODULES = {
    "litdata": "litdata",
    "mds": "mds",
    "webdataset": "webdataset",
    "hf": "tabular",
    "parquet": "tabular",
    "arrow": "tabular",
    "csv": "tabular",
    "jsonl": "tabular",
    "folder": "folder",
}
FORMATS = tuple(_MODULES)
"""Names of the formats that can be converted."""
EXPORTS = ("litdata", "mds", "parquet", "webdataset")
"""Names of the formats that a table can be exported to."""


def detect(store: Store) -> str:
    """Find out which format lies there.

    Raises:
        SourceError: If nothing is there, or nothing that is known.
    """
    if store.is_folder("_versions"):
        raise SourceError(f"{store.shown} is a Lance table already: streams read it as it is")
    for module in dict.fromkeys(_MODULES.values()):
        found = _module(module).detect(store)
        if found:
            return found if isinstance(found, str) else module
    raise SourceError(
        f"{store.shown} is nothing that can be converted: there is no file, or none of the formats "
        f"{', '.join(FORMATS)}; format='folder' takes any files as bytes"
    )


def open_source(
    store: Store,
    format: str = "auto",
    *,
    columns: Sequence[str] | None = None,
    link: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Source:
    """Open a source.

    Args:
        store: Where it lies.
        format: Its format; ``"auto"`` finds out.
        columns: The columns to read; None reads all.
        link: Give large values as links.
        options: Those of the format.

    Raises:
        ArgumentError: If the format or an option is not known.
        SourceError: If it is damaged.
    """
    if format == "auto":
        format = detect(store)
    if format not in _MODULES:
        raise ArgumentError(f"format {format!r} is not one of auto, {', '.join(FORMATS)}")
    name = _MODULES[format]
    function = _module(name).open_source
    more = {"format": format} if "format" in inspect.signature(function).parameters else {}
    _check_options(function, format, options or {}, ("store", "columns", "link", "format"))
    source: Source = function(store, columns=columns, link=link, **more, **(options or {}))
    return source


def open_sink(format: str, options: Mapping[str, Any] | None = None) -> Sink:
    """Make what writes an export.

    Raises:
        ArgumentError: If the format or an option is not known.
    """
    if format not in EXPORTS:
        raise ArgumentError(f"format {format!r} is not one of {', '.join(EXPORTS)}")
    function = _module(_MODULES[format]).open_sink
    _check_options(function, format, options or {}, ())
    sink: Sink = function(**(options or {}))
    return sink


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"destrier.formats.{name}")


def _check_options(
    function: Callable[..., Any], format: str, options: Mapping[str, Any], ours: Sequence[str]
) -> None:
    known = [name for name in inspect.signature(function).parameters if name not in ours]
    for name in options:
        if name not in known:
            said = f"its options are: {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"{name!r} is no option of the format {format}; {said}")
