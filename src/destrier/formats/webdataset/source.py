"""Tars of samples as a source: one row a sample, one column an extension."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import translate
from typing import Any, ClassVar

import pyarrow as pa

from destrier.errors import ArgumentError, ColumnError
from destrier.files import File, Store
from destrier.formats.media import link_uri
from destrier.formats.webdataset.members import KINDS
from destrier.formats.webdataset.paths import tars
from destrier.formats.webdataset.plan import Filler, Options, Survey
from destrier.formats.webdataset.reader import compression
from destrier.formats.webdataset.samples import batches
from destrier.formats.webdataset.tar import Tar
from destrier.writing.source import FileSource, Unit

__all__ = ["WebDatasetSource", "open_source"]

_LINKED_SHARE = 16  # a linked tar is written as about so small a part of its size
_META = re.compile(r"__[^/]*__(?:$|/)")
_APPLE_DOUBLE = re.compile(r"(?:^|/)\._[^/]*$")


def open_source(
    store: Store,
    *,
    columns: Sequence[str] | None = None,
    link: bool = False,
    extensions: Mapping[str, str | None] | Sequence[str] | None = None,
    skip: Sequence[str] = (),
    key_column: str | None = "key",
    require_end: bool = True,
) -> WebDatasetSource:
    """Open tars of samples as a source.

    Args:
        store: A tar, a folder of tars, or a pattern such as ``train-{000..123}.tar``.
        columns: The columns to keep; members of other extensions are left out.
        link: Keep bytes where they are, and store where that is. Plain tars only.
        extensions: Extensions that samples may have besides those in the first tar; as a mapping
            also what they are read as: ``"int"``, ``"string"``, ``"json"``, ``"tensor"``,
            ``"ragged"``, ``"bytes"``, or None for the usual.
        skip: Patterns of member names that are left out on purpose, such as ``"*.md"``.
        key_column: Name of the column of keys; None leaves it out.
        require_end: Whether a tar without its end is an error.

    Raises:
        ArgumentError: If the tars cannot be linked, or an option cannot be used.
        SourceError: If there are no tars.

    Example:
        >>> source = open_source(Store("data/train-{000..003}.tar"))  # doctest: +SKIP
    """
    if isinstance(extensions, str) or isinstance(columns, str) or isinstance(skip, str):
        raise ArgumentError("columns, extensions and skip are lists of texts, not one text")
    declared = (
        dict(extensions) if isinstance(extensions, Mapping) else dict.fromkeys(extensions or ())
    )
    for extension, kind in declared.items():
        if kind is not None and kind not in KINDS:
            raise ArgumentError(
                f"extensions[{extension!r}] is {kind!r}, not one of {', '.join(KINDS)}"
            )
    if columns is not None and len(set(columns)) < len(columns):
        raise ColumnError(f"columns names one twice: {', '.join(columns)}")
    base, files = tars(store)
    packed = next((file.path for file in files if compression(file.path)), None)
    if link and packed is not None:
        raise _not_linkable(base.show(packed))
    options = Options(
        columns=None if columns is None else tuple(columns),
        link=link,
        extensions={name.lower(): kind for name, kind in declared.items()},
        key_column=key_column,
    )
    return WebDatasetSource(
        base, files, options, address=store.shown, skip=skip, require_end=require_end
    )


def _not_linkable(shown: str) -> ArgumentError:
    return ArgumentError(
        f"{shown} is compressed, so its members have no place of their own to link to; copy them "
        "with destrier.convert, or unpack the tar first"
    )


class WebDatasetSource(FileSource):
    """Tars of samples; made by `open_source`."""

    format: ClassVar[str] = "webdataset"

    def __init__(
        self,
        store: Store,
        files: list[File],
        options: Options,
        *,
        address: str,
        skip: Sequence[str],
        require_end: bool,
    ) -> None:
        self.store = store
        self.files = files
        self.options = options
        self.address = address
        self.skip = tuple(skip)
        self.require_end = require_end

    @property
    def shown(self) -> str:
        """Its address without credentials, for messages."""
        return self.address

    def units(self) -> list[Unit]:
        """One for each tar."""
        share = _LINKED_SHARE if self.options.link else 1
        return [
            Unit(shown, None, file.size // share, file, file=shown)
            for file in self.files
            for shown in [self.store.show(file.path)]
        ]

    def identity(self) -> Iterable[Any]:
        """The tars with size and time, and the options."""
        yield from ([file.path, file.size, file.stamp] for file in self.files)
        yield [self.store.uri, asdict(self.options), self.skip, self.require_end]

    def read(self, unit: Unit, schema: pa.Schema | None) -> Iterator[pa.RecordBatch]:
        """Read a tar; see `destrier.writing.source.Source.read`."""
        file: File = unit.place
        link = self.options.link
        tar = Tar(self.store, file, _skipped(self.skip), self.require_end)
        if link:
            with tar.open(headers_only=True) as reader:
                if reader.size is None:
                    raise _not_linkable(tar.shown)
        if schema is None:
            survey = Survey(self.options, tar.shown)
            survey.read(tar)
            schema = survey.schema(self.shown)
        filler = Filler(self.options, schema, file, tar.shown, link_uri(self.store, file.path))
        for batch in batches(tar, filler.want, headers_only=link):
            yield filler.fill(batch)


def _skipped(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A function that tells which members are left out.

    Besides those of the patterns they are webdataset's own metadata, and what macOS writes beside
    each file.
    """
    globs = re.compile("|".join(translate(glob) for glob in patterns)) if patterns else None

    def skipped(name: str) -> bool:
        if globs is not None and globs.match(name):
            return True
        if name.startswith("__") and _META.match(name):
            return True
        return "._" in name and _APPLE_DOUBLE.search(name) is not None

    return skipped
