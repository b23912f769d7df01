"""Which files of a file, a folder or a pattern are data, and of which format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from destrier.errors import ArgumentError, SourceError
from destrier.files import File, Store
from destrier.formats.listing import data_files, matching

__all__ = [
    "COMPRESSIONS",
    "EXTENSIONS",
    "HIDDEN",
    "Found",
    "find",
    "format_of",
    "listing",
    "tabular_format",
]

EXTENSIONS = {
    "parquet": ("parquet", "pq", "parq"),
    "arrow": ("arrow", "feather", "ipc", "arrows"),
    "csv": ("csv", "tsv"),
    "jsonl": ("jsonl", "ndjson"),
}
"""The formats, and the extensions by which their files are found in folders."""

COMPRESSIONS = {"gz": "gzip", "gzip": "gzip", "zst": "zstd", "zstd": "zstd"}
"""The extensions of compressed text files, and how pyarrow calls the compression."""

HIDDEN = "._"
"""What begins the names of files that are no data beside tables, such as ``_SUCCESS``."""

_FORMATS = {extension: name for name, known in EXTENSIONS.items() for extension in known}
_OTHER_COMPRESSIONS = ("bz2", "xz", "lz4", "lzma", "br", "snappy", "zip", "7z")
_BESIDE = ("md", "txt", "json", "yaml", "yml", "html", "py", "crc", "pdf", "rst", "cff", "toml")
_NAMES_BESIDE = ("license", "licence", "readme", "notice", "manifest", "changelog", "citation")
_SHOWN = 3


@dataclass(frozen=True)
class Found:
    """The data files of a source.

    Attributes:
        store: The folder that their paths start from, or the file itself.
        files: In natural order of their paths, or as a pattern names them.
        format: Of all of them.
    """

    store: Store
    files: tuple[File, ...]
    format: str


def format_of(path: str) -> tuple[str | None, str | None]:
    """The format and the compression that a file's name tells.

    Example:
        >>> format_of("data/part-0.csv.gz")
        ('csv', 'gzip')
    """
    parts = path.rpartition("/")[2].lower().split(".")
    compression = COMPRESSIONS.get(parts[-1]) if len(parts) > 2 else None
    extension = parts[-2] if compression else parts[-1]
    name = _FORMATS.get(extension) if len(parts) > 1 else None
    if compression and name not in ("csv", "jsonl"):
        return None, None
    return name, compression


def _is_beside(path: str) -> bool:
    """Whether a file is of those that lie beside data: a README, a license, notes, code."""
    name = path.rpartition("/")[2].lower()
    stem, dot, extension = name.rpartition(".")
    return extension in _BESIDE if dot and stem else name.startswith(_NAMES_BESIDE)


def listing(store: Store) -> tuple[Store, list[File]]:
    """The files that an address names: one file, those of a folder, or those of a pattern.

    Returns:
        The folder that the paths start from (or the one file), and the files, without hidden ones.
    """
    one = store.stat()
    if one is not None:
        return store, [one]
    return matching(store, HIDDEN) or (store, data_files(store, HIDDEN))


def _names(files: Sequence[File]) -> str:
    shown = ", ".join(file.path for file in files[:_SHOWN])
    return shown + (f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else "")


def tabular_format(store: Store, files: Sequence[File]) -> str | None:
    """The one format that all data files are of; None if there are none, or other data beside.

    Raises:
        SourceError: If files of several formats lie there, naming them.
    """
    groups: dict[str, list[File]] = {}
    others = []
    for file in files:
        name, _ = format_of(file.path or store.uri)
        if name is not None:
            groups.setdefault(name, []).append(file)
        elif not _is_beside(file.path or store.uri):
            others.append(file)
    if not groups or (others and not {"parquet", "arrow"} & groups.keys()):
        return None
    if len(groups) > 1:
        (one, some), (other, more) = list(groups.items())[:2]
        raise SourceError(
            f"{store.shown} holds files of several formats: {one} ({_names(some)}) and {other} "
            f"({_names(more)}); say which to read with format=, or give a pattern such as "
            f"{store.show('*.' + EXTENSIONS[one][0])}"
        )
    (name,) = groups
    if others:
        raise SourceError(
            f"{store.shown} holds {name} files ({_names(groups[name])}) and others "
            f"({_names(others)}); to read only the first, say format={name!r}"
        )
    return name


def find(store: Store, format: str) -> Found:
    """The files of a format at an address.

    Raises:
        SourceError: If there are none.
        ArgumentError: If the one file is compressed in a way that cannot be read.
    """
    root, files = listing(store)
    if root is store and len(files) == 1 and not files[0].path:
        _check_compression(store.uri, format)
        return Found(store, tuple(files), format)
    # a JSON file is taken for JSON lines only by one who says so: it lies beside other data, too
    taken = [
        file
        for file in files
        if format_of(file.path)[0] == format or (format == "jsonl" and _is_json(file.path))
    ]
    if not taken:
        known = ", ".join(f".{name}" for name in EXTENSIONS[format])
        what = f"no {format} files ({known}) among {len(files)} files" if files else "no files"
        raise SourceError(f"{store.shown}: there are {what} there")
    for file in taken:
        _check_compression(file.path, format)
    return Found(root, tuple(taken), format)


def _is_json(path: str) -> bool:
    name = path.rpartition("/")[2].lower()
    beside = ("dataset_info", "dataset_infos", "dataset_dict", "state", "index")
    return name.endswith(".json") and name.removesuffix(".json") not in beside


def _check_compression(path: str, format: str) -> None:
    extension = path.rpartition(".")[2].lower()
    if extension in _OTHER_COMPRESSIONS or (
        extension in COMPRESSIONS and format not in ("csv", "jsonl")
    ):
        raise ArgumentError(
            f"{path.rpartition('/')[2]} is compressed as .{extension}, which is not read here; "
            "unpack it first (CSV and JSON lines are read from .gz and .zst)"
        )
