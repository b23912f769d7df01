"""What a job has finished, kept beside its destination until it is published."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from destrier.errors import SourceError, WriteError
from destrier.files import Store

__all__ = ["Journal"]

_VERSION = 1
_JOB = "job.json"  # the first entry to come, and the last to go


class Journal:
    """A folder beside the destination: what the job is, which shards are done, and their files.

    Every entry is a file of its own, written in one go, so that a kill leaves whole entries only.

    Args:
        destination: The address of what is being written.
        storage_options: Of the destination.
        kind: Of the job, the ending of the folder's name: jobs of other kinds do not meet.
    """

    def __init__(
        self,
        destination: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        kind: str = "writing",
    ) -> None:
        self.store = Store(f"{destination.rstrip('/')}.{kind}", storage_options)
        self._lock: int | None = None

    @property
    def shown(self) -> str:
        """Its address, for messages."""
        return self.store.shown

    def read(self, name: str) -> dict[str, Any] | None:
        """An entry, or None if it was never written, or not to its end.

        Raises:
            SourceError: If the store cannot be read now.
        """
        if self.store.stat(name) is None:
            return None
        try:
            value = json.loads(self.store.read(name).to_pybytes())
        except ValueError as error:
            if isinstance(error, SourceError):
                raise
            return None
        return value if isinstance(value, dict) else None

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write an entry."""
        text = json.dumps(value).encode()
        if not self.store.local:
            with self.store.create(name) as file:
                file.write(text)
            return
        path = self.store.address(name)
        draft = f"{path}.{uuid.uuid4().hex}"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(draft, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise WriteError(f"cannot write {path}: {error}") from error

    def publishing(self) -> dict[str, Any] | None:
        """What is being published, or was, but for the clearing up; None before that."""
        found: dict[str, Any] | None = (self.read(_JOB) or {}).get("publish")
        return found

    def publish(self, entry: Mapping[str, Any]) -> None:
        """Note what is being published, in the entry of the job: the two live and go together."""
        self.write(_JOB, {**(self.read(_JOB) or {}), "publish": entry})

    def start(self, job: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
        """Begin, or go on with what is there.

        Args:
            job: What names the job; JSON.
            keep: Whether to go on with an unfinished one (else it is dropped).

        Returns:
            The entry of the job, which may hold more than what was given.

        Raises:
            WriteError: If the journal is of another job, or another process works on it.
        """
        there = self.read(_JOB)
        if there is not None and keep:
            if not self.matches(job):
                differing = [key for key, value in job.items() if there.get(key) != value]
                what = ", ".join(differing) or "version of the journal"
                raise WriteError(
                    f"{self.shown} is the journal of an unfinished job that differs in: {what}; "
                    "run that job to its end, or pass restart=True to drop what it has done"
                )
            return there
        self.clear()
        entry = {**job, "format": _VERSION, "run": uuid.uuid4().hex}
        self.write(_JOB, entry)
        return entry

    def matches(self, job: Mapping[str, Any]) -> bool:
        """Whether the journal is of this job."""
        there = self.read(_JOB) or {}
        return there.get("format") == _VERSION and all(
            there.get(key) == value for key, value in job.items()
        )

    def done(self) -> dict[int, dict[str, Any]]:
        """The finished shards."""
        found = {}
        for file in self.store.files("done"):
            entry = self.read(file.path)
            if entry is not None and file.path.endswith(".json"):
                found[int(entry["index"])] = entry
        return found

    def finish(self, entry: Mapping[str, Any]) -> None:
        """Note that a shard is finished."""
        self.write(f"done/{entry['index']:08d}.json", entry)

    def clear(self) -> None:
        """Drop all that was written here.

        The entry of the job goes last: as long as anything is left, the next call knows whether
        the job was published.
        """
        for folder in self.store.folders():
            self.store.remove(folder)
        for file in self.store.files(recursive=False):
            if file.path != _JOB:
                self.store.remove(file.path)
        self.store.remove(_JOB)
        self.store.remove()

    @contextlib.contextmanager
    def held(self) -> Iterator[Journal]:
        """Keep other processes of this machine out.

        Raises:
            WriteError: If one is writing there, or something else than a journal is there.
        """
        self._take_lock()
        try:
            self._check_ours()
            yield self
        finally:
            self._unlock()

    def _check_ours(self) -> None:
        if self.store.stat(_JOB) is not None:
            return
        names = [file.path for file in self.store.files()]
        if self.store.stat() is not None or not all(name.startswith(_JOB) for name in names):
            raise WriteError(
                f"there is something at {self.shown}, where unfinished work would be kept: move it "
                "away, or choose another place"
            )

    def _take_lock(self) -> None:
        if not self.store.local:
            return
        import fcntl

        path = self.store.uri + ".lock"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise WriteError(f"cannot write {path}: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # whoever had it may have removed the file since it was opened
            alive = os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(lock))
        except OSError:
            alive = False
        if not alive:
            os.close(lock)
            raise WriteError(f"another process is writing there: it holds {path}")
        self._lock = lock

    def _unlock(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):  # which a kill in the clearing up can leave
                os.rmdir(self.store.uri)
            with contextlib.suppress(OSError):
                os.unlink(self.store.uri + ".lock")
            os.close(self._lock)
            self._lock = None
