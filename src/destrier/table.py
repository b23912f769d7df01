"""A table: a Lance dataset at a URI, pinned at one version."""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import lance
import pyarrow as pa

from destrier.errors import (
    ArgumentError,
    ColumnError,
    DestrierWarning,
    TableError,
    VersionError,
)
from destrier.lancecalls import brief, cause, redact, shown_uri
from destrier.process import check_process
from destrier.refreshing import Namespace, Refreshing
from destrier.storage import passes, patience, with_defaults
from destrier.uring import uring_uri

if TYPE_CHECKING:
    from collections.abc import Mapping

    import lancedb.table

    from destrier.refreshing import StorageOptions

    TableLike: TypeAlias = (
        "str | os.PathLike[str] | lance.LanceDataset | lancedb.table.Table | Table"
    )

__all__ = ["Table", "open_table"]

# A take costs one lookup per fragment it meets: 129 ms instead of 8 ms over 2,000 fragments.
_MANY_FRAGMENTS = 64
_SMALL_FRAGMENT_ROWS = 16_384

# Lance's own defaults hold up to 7 GiB per opened table; training reads each page about once.
_INDEX_CACHE_BYTES = 64 << 20
_METADATA_CACHE_BYTES = 256 << 20

_bulk_lock = threading.Lock()

_LOCAL_SCHEMES = ("file", "file-object-store", "file+uring")


class Table:
    """A Lance dataset pinned at one version.

    Pickles to its address: another process opens the same version at first use.

    Attributes:
        uri: Where the dataset lies.
        version: The pinned version.
        storage_options: Passed to Lance; never shown, never in a state.
    """

    def __init__(
        self,
        uri: str,
        version: int,
        *,
        storage_options: Mapping[str, str] | None = None,
        dataset: lance.LanceDataset | None = None,
    ) -> None:
        self.uri = uri
        self.version = version
        self.storage_options: Mapping[str, str] = _kept(storage_options)
        self._dataset = dataset
        self._bulk: lance.LanceDataset | None = None
        self._identity: str | None = None

    def __repr__(self) -> str:
        return f"Table({shown_uri(self.uri)!r}, version={self.version})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None, "_bulk": None}

    @cached_property
    def name(self) -> str:
        """The URI without credentials and the version, for messages."""
        return f"{shown_uri(self.uri)} (version {self.version})"

    @property
    def dataset(self) -> lance.LanceDataset:
        """The open dataset; opened at first use in each process."""
        if self._dataset is None:
            self._dataset = _open(self.uri, self.version, self.storage_options)
        return self._dataset

    @property
    def bulk(self) -> lance.LanceDataset:
        """The dataset as many rows are read from it: local files through io_uring."""
        with _bulk_lock:
            if self._bulk is None:
                self._bulk = self._open_bulk()
            return self._bulk

    def _open_bulk(self) -> lance.LanceDataset:
        fast = None if self.storage_options else uring_uri(self.uri)
        if fast is None:
            return self.dataset
        try:
            return _open(fast, self.version, {})
        except TableError:
            return self.dataset

    def read_plainly(self) -> bool:
        """Read without io_uring from now on; False if that was so before."""
        with _bulk_lock:
            before, self._bulk = self._bulk, self.dataset
        return before is not self.dataset

    @property
    def secrets(self) -> list[str]:
        """What no text may show: the URI as it is, and the values of storage options."""
        return _secrets(self.uri, self.storage_options)

    @property
    def patience(self) -> float | None:
        """Seconds for which reads are tried again, None for a table on this machine."""
        return patience(self.storage_options) if self.remote else None

    def io(self) -> tuple[int, int]:
        """Requests and bytes that were read of the table so far, by this process."""
        opened = [self.dataset]
        if self._bulk is not None and self._bulk is not self.dataset:
            opened.append(self._bulk)
        stats = [dataset.io_stats_snapshot() for dataset in opened]
        return sum(int(s.read_iops) for s in stats), sum(int(s.read_bytes) for s in stats)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the pinned version."""
        return self.dataset.schema

    @cached_property
    def num_rows(self) -> int:
        """Live rows, from the manifest, without I/O."""
        return int(sum(f.metadata.num_rows for f in self.dataset.get_fragments()))

    @cached_property
    def remote(self) -> bool:
        """Whether the URI's scheme names an object store."""
        return _is_remote(self.uri)

    @cached_property
    def row_bytes(self) -> float:
        """Average bytes of a row over all columns, from the sizes in the manifest.

        Those of values outside the data files, as linked ones, are taken from some rows.
        """
        from destrier.links.columns import outside_row_bytes

        rows = self.num_rows
        stored = sum(
            int(file.file_size_bytes or 0)
            for fragment in self.dataset.get_fragments()
            for file in fragment.metadata.files
        )
        fixed = sum(_fixed_width(field.type) for field in self.schema)
        # Compression makes files smaller than the rows that memory must hold.
        outside = outside_row_bytes(self, self.schema.names)
        return max(stored / rows + outside if rows else 0.0, fixed, 1.0)

    @property
    def identity(self) -> str:
        """A digest of the manifest's fragment list: what the rows are and where they lie.

        It survives copying and moving the table, and does not survive rewriting it.
        """
        if self._identity is None:
            digest = hashlib.blake2b(digest_size=16)
            for line in self._fragment_lines():
                digest.update(line.encode())
            self._identity = digest.hexdigest()
        return self._identity

    def _fragment_lines(self) -> list[str]:
        return [
            f"{m.id}|{','.join(f.path for f in m.files)}|{m.physical_rows}|{_deletions(m)}\n"
            for m in (fragment.metadata for fragment in self.dataset.get_fragments())
        ]

    def same_rows(self, other: Table) -> bool:
        """Whether the other version has the same rows, so that at most columns were changed."""

        def rows(table: Table) -> list[tuple[Any, ...]]:
            metadata = (fragment.metadata for fragment in table.dataset.get_fragments())
            return [(m.id, m.physical_rows, _deletions(m)) for m in metadata]

        return rows(self) == rows(other)

    def at(self, version: int | str) -> Table:
        """Return the table pinned at another version.

        Raises:
            VersionError: If the version or tag is not there.
        """
        dataset = _open(self.uri, version, self.storage_options)
        return Table(
            self.uri, dataset.version, storage_options=self.storage_options, dataset=dataset
        )

    def pin(self, name: str) -> None:
        """Tag the version, so that a cleanup cannot remove it.

        Raises:
            VersionError: If the tag names another version.
        """
        tags = self.dataset.tags
        try:
            tags.create(name, self.version)
        except Exception as error:
            existing = tags.list().get(name)
            if existing is None:
                raise TableError(
                    f"cannot tag {self.name} as {name!r}: {brief(error, self.secrets)}"
                ) from cause(error, self.secrets)
            if int(existing["version"]) != self.version:
                raise VersionError(
                    f"pin={name!r} is already the tag of version {existing['version']} of "
                    f"{shown_uri(self.uri)}, not of version {self.version}: choose another name, "
                    f"or open the tagged version with version={name!r}"
                ) from None

    def check_columns(self, columns: list[str]) -> None:
        """Raise unless every name is a top-level column and none comes twice.

        Raises:
            ColumnError: If one is not, naming the table's columns.
        """
        names = self.schema.names
        for i, column in enumerate(columns):
            if column not in names:
                raise ColumnError(
                    f"no column {column!r} in {self.name}; its columns are: {', '.join(names)}"
                )
            if column in columns[:i]:
                raise ColumnError(f"column {column!r} is named twice")

    def warn_if_scattered(self) -> None:
        """Warn if the table consists of many small fragments."""
        fragments = len(self.dataset.get_fragments())
        if fragments >= _MANY_FRAGMENTS and self.num_rows < fragments * _SMALL_FRAGMENT_ROWS:
            warnings.warn(
                f"{self.name} consists of {fragments} fragments of "
                f"{self.num_rows // fragments} rows on average, which makes reads many times "
                "slower; compact it before training: lance.dataset(uri).optimize.compact_files(), "
                "or table.optimize() in LanceDB",
                DestrierWarning,
                stacklevel=3,
            )


def _is_remote(uri: str) -> bool:
    scheme, separator, _ = uri.partition("://")
    return bool(separator) and scheme not in _LOCAL_SCHEMES


def _deletions(metadata: Any) -> str:
    file = metadata.deletion_file
    return "" if file is None else f"{file.read_version}.{file.id}.{file.num_deleted_rows}"


def _fixed_width(kind: pa.DataType) -> float:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_fixed_size_list(kind):
        return float(kind.list_size * _fixed_width(kind.value_type))
    try:
        return float(kind.bit_width / 8)
    except ValueError:
        return 4.0


def _open(uri: str, version: int | str | None, options: Mapping[str, str]) -> lance.LanceDataset:
    check_process()
    shown = shown_uri(uri)
    session = lance.Session(  # type: ignore[attr-defined]
        index_cache_size_bytes=_INDEX_CACHE_BYTES, metadata_cache_size_bytes=_METADATA_CACHE_BYTES
    )
    try:
        if isinstance(options, Refreshing):
            through = Namespace(uri, options).open_arguments()
            return lance.dataset(version=version, session=session, **through)
        passed = _passed(uri, options)
        return lance.dataset(uri, version=version, storage_options=passed, session=session)
    except Exception as error:
        secrets = _secrets(uri, options)
        if version is not None and not passes(str(error)) and _opens(uri, options):
            raise VersionError(
                f"version {version!r} of {shown} is gone or was never there; pin= keeps the "
                "version of a run from being cleaned up"
            ) from cause(error, secrets)
        raise TableError(
            f"cannot open {shown} as a Lance table: {brief(error, secrets)}"
        ) from cause(error, secrets)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise TableError(
            f"cannot open {shown} as a Lance table: {brief(error, _secrets(uri, options))}"
        ) from None


def _secrets(uri: str, options: Mapping[str, str]) -> list[str]:
    shown = [uri] if shown_uri(uri) != uri else []
    values = options.given if isinstance(options, Refreshing) else options.values()
    return [*shown, *(str(value) for value in values)]


def _kept(options: Mapping[str, str] | None) -> Mapping[str, str]:
    return options if isinstance(options, Refreshing) else dict(options or {})


def _passed(uri: str, options: Mapping[str, str]) -> dict[str, str] | None:
    return (with_defaults(options) if _is_remote(uri) else dict(options)) or None


def _opens(uri: str, options: Mapping[str, str]) -> bool:
    try:
        lance.dataset(uri, storage_options=_passed(uri, options))
    except Exception:
        return False
    return True


def open_table(
    source: TableLike,
    *,
    version: int | str | None = None,
    storage_options: StorageOptions | None = None,
    pin: str | None = None,
) -> Table:
    """Open a table at one version.

    Args:
        source: A URI or path of a Lance dataset, a `lance.LanceDataset`, or a LanceDB table.
        version: A version number or a tag. None is the latest version of a URI, and the version
            that an open dataset or LanceDB table is at.
        storage_options: Passed to Lance, as `lance.dataset` takes them, with limits on retries
            where they name none; or a function that returns them, which is called again before
            their ``expires_at_millis``. None takes those of an open dataset or LanceDB table.
        pin: Tag the version under this name, so that a cleanup cannot remove it.

    Raises:
        ArgumentError: If the source is of no known kind, or is a table without files.
        TableError: If nothing can be opened there.
        VersionError: If the version is not there, or the pin names another one.

    Example:
        >>> table = open_table("data/digits.lance")  # doctest: +SKIP
    """
    if callable(storage_options):
        storage_options = Refreshing(storage_options)
    table = _resolve(source, version, storage_options)
    if pin is not None:
        table.pin(pin)
    return table


def _resolve(
    source: TableLike, version: int | str | None, options: Mapping[str, str] | None
) -> Table:
    if isinstance(version, bool) or not isinstance(version, int | str | None):
        raise ArgumentError(f"version must be a number or a tag, got {version!r}")
    if isinstance(source, Table):
        if options is not None and _kept(options) != source.storage_options:
            version = source.version if version is None else version
            dataset = _open(source.uri, version, options)
            return Table(source.uri, dataset.version, storage_options=options, dataset=dataset)
        return source if version is None else source.at(version)
    if isinstance(source, lance.LanceDataset):
        return _from_dataset(source, version, options)
    if isinstance(source, str | os.PathLike):
        uri = os.fspath(source)
        _refuse(uri)
        if "://" not in uri:
            uri = os.path.abspath(os.path.expanduser(uri))
            _check_path(uri)
        dataset = _open(uri, version, options or {})
        return Table(uri, dataset.version, storage_options=options, dataset=dataset)
    modules = [kind.__module__ for kind in type(source).__mro__]
    if any(module.startswith("lancedb.remote") for module in modules):
        _refuse("db://")
    if type(source).__name__ == "AsyncTable" and any(m.startswith("lancedb") for m in modules):
        raise ArgumentError(
            "an AsyncTable cannot be read here; pass its dataset: await table.to_lance()"
        )
    if any(m.startswith("lancedb") for m in modules) and hasattr(source, "to_lance"):
        return _from_lancedb(source, version, options)
    raise ArgumentError(
        "a table is a URI, a path, a lance.LanceDataset or a LanceDB table, "
        f"got {type(source).__name__}"
    )


def _from_dataset(
    dataset: lance.LanceDataset, version: int | str | None, options: Mapping[str, str] | None
) -> Table:
    _refuse(dataset.uri)
    if options is None:
        options = dataset.initial_storage_options
    uri = _address(dataset, options or {})
    table = Table(uri, dataset.version, storage_options=options, dataset=dataset)
    return table if version is None else table.at(version)


def _from_lancedb(
    table: Any, version: int | str | None, options: Mapping[str, str] | None
) -> Table:
    uri = str(table.uri)
    _refuse(uri)
    if options is None:
        # those of the connection are not among the table's own, though LanceDB reads with both
        connection = getattr(table, "_conn", None)
        shared = getattr(connection, "storage_options", None)
        options = {**(shared or {}), **(table.initial_storage_options() or {})}
    if version is None:
        version = table.version
    branch = table.current_branch()
    if branch is not None:
        uri = _branch_uri(uri, branch)
    dataset = _open(uri, version, options or {})
    return Table(uri, dataset.version, storage_options=options, dataset=dataset)


def _branch_uri(uri: str, branch: str) -> str:
    """A branch is a dataset of its own below the table."""
    return f"{uri.rstrip('/')}/tree/{branch}"


def _address(dataset: lance.LanceDataset, options: Mapping[str, str]) -> str:
    """The URI at which another process finds what the dataset shows.

    Lance leaves the table's URI on a dataset that was checked out from a branch.
    """
    uri = dataset.uri
    if "://" not in uri:
        uri = os.path.abspath(uri)
    if "/tree/" in uri:
        return uri
    branches = dataset.branches.list()
    if not branches:
        return uri
    shown = Table(uri, dataset.version, dataset=dataset).identity
    for candidate in (uri, *(_branch_uri(uri, name) for name in branches)):
        if _identity_at(candidate, dataset.version, options) == shown:
            return candidate
    raise ArgumentError(
        f"cannot tell which branch of {redact(uri)} the dataset shows; pass the branch by URI: "
        f"{redact(_branch_uri(uri, 'NAME'))}"
    )


def _identity_at(uri: str, version: int, options: Mapping[str, str]) -> str | None:
    try:
        return Table(uri, version, storage_options=options).identity
    except TableError:
        return None


def _refuse(uri: str) -> None:
    if uri.startswith("db://"):
        raise ArgumentError(
            "a db:// table (LanceDB Cloud or Enterprise) gives no access to its files; "
            "open the Lance dataset in its bucket by URI, or write the rows to a table of your own"
        )
    if uri.startswith("memory://"):
        raise ArgumentError(
            "a memory:// table exists in one process only, so workers and other ranks cannot read "
            "it; create it on disk instead: lancedb.connect('some/folder').create_table(...)"
        )


def _check_path(path: str) -> None:
    if not os.path.exists(path):
        raise TableError(f"cannot open {path} as a Lance table: no such file or directory")
    if os.path.isdir(path) and not os.path.isdir(os.path.join(path, "_versions")):
        tables = sorted(name for name in os.listdir(path) if name.endswith(".lance"))
        if tables:
            raise TableError(
                f"{path} is a folder of tables, not a table; pass one of them, for example "
                f"{os.path.join(path, tables[0])}"
            )
        what = "holds no table" if os.listdir(path) else "is empty"
        raise TableError(f"cannot open {path} as a Lance table: the folder {what}")
