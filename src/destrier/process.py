"""Whether this process may use Lance at all."""

from __future__ import annotations

import os

from destrier.errors import IterationError

__all__ = ["check_process"]

_used = False  # whether Lance was used here, so that its threads run
_lost = False  # whether it was used in a process from which this one was forked


def _note_fork() -> None:
    global _lost  # noqa: PLW0603 - it is a property of the process
    _lost = _lost or _used


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def check_process() -> None:
    """Note that Lance is used, and raise in a process forked from one that had used it.

    Its threads do not survive a fork: reads would crash or wait for ever.

    Raises:
        IterationError: Naming the start methods that work.
    """
    global _used  # noqa: PLW0603 - it is a property of the process
    if _lost:
        raise IterationError(
            "this process was forked, and Lance's threads do not survive a fork; start processes "
            "by another method: DataLoader(..., multiprocessing_context='spawn') or 'forkserver', "
            "multiprocessing.get_context('spawn')"
        )
    _used = True
