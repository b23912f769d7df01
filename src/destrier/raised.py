"""Exceptions on their way from one process to another."""

from __future__ import annotations

import pickle
import traceback

__all__ = ["RemoteTraceback", "portable"]


class RemoteTraceback(Exception):  # noqa: N818 - it is the cause of an error, as in multiprocessing
    """Shows where in the worker an exception was raised."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def portable(error: BaseException) -> tuple[BaseException, str]:
    """The exception if it survives pickling, else what it said, and its traceback."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        text = str(error)
    except Exception:
        return RuntimeError(f"{type(error).__name__}, which has no text"), trace
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just pickled
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {text}"), trace
    return error, trace
