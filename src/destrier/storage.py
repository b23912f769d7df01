"""Object stores: how long one is waited for, and which of its failures pass by themselves."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["passes", "patience", "with_defaults"]

# Lance sends a request up to (1 + client_max_retries) x (1 + lance_aimd_max_retries) x 4 times,
# each of which may wait for `timeout`: half an hour with its own defaults of 3, 3 and 30 s where a
# store never answers. With these it gives up after 8 waits of 5 s. Every failure that it does not
# hide by the first of the three makes it halve its rate of requests, so that one is not 0.
_DEFAULTS = {
    "client_max_retries": "2",
    "client_retry_timeout": "5",
    "lance_aimd_max_retries": "1",
    "read_timeout": "5s",
}
_SECONDS = 60.0
_STATUS = re.compile(r"status code: (\d{3})")
_BROKEN = re.compile(
    r"error sending request|body error|timed out|connection (reset|closed|refused)", re.IGNORECASE
)
_BUSY = (408, 429)


def with_defaults(options: Mapping[str, str]) -> dict[str, str]:
    """Add to storage options what bounds retries, where they do not say otherwise.

    Example:
        >>> with_defaults({"read_timeout": "30s"})["read_timeout"]
        '30s'
    """
    given = {name.lower() for name in options}
    ours = {name: value for name, value in _DEFAULTS.items() if name not in given}
    return {**ours, **options}


def patience(options: Mapping[str, str]) -> float:
    """Seconds for which a failed read is tried again: `client_retry_timeout`, or 60."""
    for name, value in options.items():
        if name.lower() == "client_retry_timeout" and value.strip().isdigit():
            return float(value)
    return _SECONDS


def passes(text: str) -> bool:
    """Whether an error of Lance tells of a store that is busy or cannot be reached just now.

    Example:
        >>> passes("Generic S3 error: ... status code: 503 Service Unavailable")
        True
    """
    status = _STATUS.search(text)
    if status is not None:
        return int(status[1]) >= 500 or int(status[1]) in _BUSY
    return " error: " in text and _BROKEN.search(text) is not None
