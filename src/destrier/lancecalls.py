"""Calls into Lance, and what their errors show."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from destrier.errors import ReadError, StorageError
from destrier.process import check_process
from destrier.storage import passes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["brief", "cause", "hide", "lance_call", "redact", "shown_uri"]

_LONGEST_PAUSE = 5.0  # seconds
_SECRET_LENGTH = 4  # shorter values are flags, and stand in any text


def redact(text: str) -> str:
    """Remove credentials that may stand in URIs: user info, query strings and fragments."""
    text = re.sub(r"(\w://)(?:[^/\s]*|\S*:\S*)@", r"\1", text)
    text = re.sub(r"(\w://[^\s?#'\"]*)[?#](?:[^\s'\"]|'[^'\s]*'(?=&))*", r"\1", text)
    return re.sub(r"[?&#](sig|token|key|secret|password)=[^\s'\"]*", "", text)


def shown_uri(uri: str) -> str:
    """A URI for messages; one may have blanks, which `redact` takes for its end."""
    return redact(re.split("[?#]", uri)[0] if "://" in uri else uri)


def hide(text: str, secrets: Iterable[str]) -> str:
    """Redact a text, in which values of storage options may stand too."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SECRET_LENGTH:
            text = text.replace(secret, "***")
    return redact(text)


def lance_call(
    what: str,
    function: Callable[[], Any],
    secrets: Iterable[str] = (),
    *,
    patience: float | None = None,
) -> Any:
    """Run a call into Lance; whatever it raises surfaces as a `ReadError`.

    Lance is Rust: some bad inputs panic, which reaches Python as a BaseException that
    ``except Exception`` would let through, so that a thread would die without a word.

    Args:
        what: What the call was to do, for the error.
        function: The call.
        secrets: What the error must not show.
        patience: Seconds for which the call is made again where an object store fails as it does
            in passing. None makes it once, and takes such a failure like any other.

    Raises:
        StorageError: If an object store still fails after that time.
        ReadError: If the call fails otherwise.
    """
    check_process()
    began, tries = time.monotonic(), 0
    while True:
        tries += 1
        started = time.monotonic()
        try:
            return function()
        except Exception as error:
            if patience is None or not passes(str(error)):
                raise ReadError(f"{what}: {brief(error, secrets)}") from cause(error, secrets)
            now = time.monotonic()
            pause = min(_LONGEST_PAUSE, 0.25 * 2**tries)
            # A try that took long, as those that wait for an answer do, would again.
            if now - began + pause + (now - started) > patience:
                raise StorageError(
                    f"{what}: the object store failed {tries} times in {now - began:.0f} s: "
                    f"{brief(error, secrets)}. Go on from the last state when it answers again; "
                    "storage_options={'client_retry_timeout': SECONDS} waits longer"
                ) from cause(error, secrets)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ReadError(f"{what}: Lance panicked: {brief(error, secrets)}") from None
        time.sleep(pause)


def cause(error: Exception, secrets: Iterable[str]) -> Exception | None:
    """The error as the cause of ours, unless its text, which a traceback shows, has credentials."""
    return error if hide(str(error), secrets) == str(error) else None


def brief(error: BaseException, secrets: Iterable[str]) -> str:
    """The text of an error without credentials, places in Lance's source and what is too long."""
    text = hide(str(error).strip() or type(error).__name__, secrets)
    text = re.sub(r",?\s*\S*/rustc?/\S+\.rs:\d+(:\d+)?", "", text)
    return text if len(text) <= 500 else text[:500] + " ..."
