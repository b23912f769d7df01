"""Storage options with an end: a function gives them, and gives them again before they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from lance_namespace import DescribeTableRequest, DescribeTableResponse, LanceNamespace

from destrier.errors import ArgumentError
from destrier.storage import with_defaults

__all__ = ["Namespace", "Refreshing", "StorageOptions"]

StorageOptions: TypeAlias = "Mapping[str, str] | Callable[[], Mapping[str, str]]"
"""As `lance.dataset` takes them, or a function that returns them."""

_EXPIRES = "expires_at_millis"
_OFFSET = "refresh_offset_millis"
_DEFAULT_OFFSET = 60_000.0


class Refreshing(Mapping[str, str]):
    """What a function returns, which is called again before its values end.

    The values end at their ``expires_at_millis``, milliseconds since 1970, if they have one, and
    are asked for again ``refresh_offset_millis`` earlier, 60,000 by default. Pickles to the
    function, which is called in the other process too.

    Args:
        provide: Returns storage options.

    Example:
        >>> dict(Refreshing(lambda: {"region": "eu-central-1", "expires_at_millis": "0"}))
        {'region': 'eu-central-1'}
    """

    def __init__(self, provide: Callable[[], Mapping[str, str]]) -> None:
        self._provide = provide
        self._lock = threading.Lock()
        self._values: dict[str, str] | None = None
        self._given: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return (Refreshing, (self._provide,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refreshing) and self._provide == other._provide

    def __hash__(self) -> int:
        return hash(self._provide)

    def __repr__(self) -> str:
        return "Refreshing(...)"

    def fetch(self) -> dict[str, str]:
        """Call the function: its values with those that say when they end.

        Raises:
            ArgumentError: If it returns anything but options.
        """
        values = self._provide()
        if not isinstance(values, Mapping):
            raise ArgumentError(
                "the function given as storage_options must return a mapping from names to texts, "
                f"got {type(values).__name__}"
            )
        fetched = {str(name): str(value) for name, value in values.items()}
        self._given.update(fetched.values())
        self._values = fetched
        return fetched

    @property
    def given(self) -> list[str]:
        """All values so far, of which no text may show any."""
        return list(self._given)

    def _current(self) -> dict[str, str]:
        with self._lock:
            values = self._values
            if values is None or _is_late(values):
                values = self.fetch()
        return {name: value for name, value in values.items() if name not in (_EXPIRES, _OFFSET)}

    def __getitem__(self, name: str) -> str:
        return self._current()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())


def _is_late(values: Mapping[str, str]) -> bool:
    ends = values.get(_EXPIRES)
    if ends is None:
        return False
    return 1000 * time.time() > float(ends) - float(values.get(_OFFSET, _DEFAULT_OFFSET))


class Namespace(LanceNamespace):
    """One table, as Lance asks for it: where it lies, and by which options it is reached.

    Lance asks again before the options end.

    Args:
        uri: Of the table.
        options: Its options.
    """

    def __init__(self, uri: str, options: Refreshing) -> None:
        self._uri = uri
        self._options = options

    def namespace_id(self) -> str:
        """A name that says nothing of the options."""
        return f"destrier-{id(self._options)}"

    def describe_table(self, request: DescribeTableRequest) -> DescribeTableResponse:
        """The table, whichever is asked for."""
        del request
        return DescribeTableResponse(
            location=self._uri, storage_options=with_defaults(self._options.fetch())
        )

    def open_arguments(self) -> dict[str, Any]:
        """What `lance.dataset` takes in place of an address and options."""
        return {"namespace_client": self, "table_id": ["table"]}
