"""Worker processes for transforms that hold the GIL.

Only the transform runs there; reading stays in the parent. Arrays and tensors cross in shared
memory that has no name, so that nothing can be left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import mmap
import multiprocessing
import os
import pickle
import queue
import socket
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from destrier.errors import ArgumentError, WorkerError
from destrier.raised import RemoteTraceback, portable

__all__ = ["TransformWorkers", "check_context"]

_START_SECONDS = 120
_STOP_SECONDS = 5
_ALIGNED = 64


def check_context(name: str | None) -> str:
    """Return the start method for workers.

    Raises:
        ArgumentError: If it is ``"fork"``, under which Lance's threads are lost, or unknown.
    """
    if name is None:
        return "spawn"
    if name == "fork":
        raise ArgumentError(
            "multiprocessing_context='fork' is not safe, because Lance runs threads that a forked "
            "process loses; pass 'spawn' or 'forkserver'"
        )
    if name not in multiprocessing.get_all_start_methods():
        raise ArgumentError(f"multiprocessing_context {name!r} is not a start method here")
    return name


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays, so that their bytes can travel out of band."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce CPU tensors to numpy arrays, and arrays to such as need no copy."""
        if type(value) is np.ndarray:
            return _turned(value)
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        try:
            if value.dtype in _FOREIGN:
                plain = _dense(value).view(_FOREIGN[value.dtype]).numpy()
                return _from_foreign, (plain, value.dtype)
            return torch.from_numpy, (_dense(value).resolve_conj().resolve_neg().numpy(),)
        except (TypeError, RuntimeError):  # no dense tensor
            return NotImplemented


def _dense(value: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it has gaps. Images stay as they lie, with channels last."""
    order = sorted(range(value.ndim), key=value.stride, reverse=True)
    return value if value.permute(order).is_contiguous() else value.contiguous()


def _turned(values: NDArray[Any]) -> Any:
    """Reduce an array that pickle would copy, but whose values have no gaps."""
    order = sorted(range(values.ndim), key=values.strides.__getitem__, reverse=True)
    plain = values.transpose(order)
    if values.flags.c_contiguous or values.dtype.hasobject or not plain.flags.c_contiguous:
        return NotImplemented
    return np.transpose, (plain, np.argsort(order).tolist())


def _foreign_types() -> dict[torch.dtype, torch.dtype]:
    """The types of floats that numpy lacks, and integers as wide."""
    found = {torch.bfloat16: torch.int16}
    for name in vars(torch):
        if name.startswith("float8_"):
            found[getattr(torch, name)] = torch.uint8
    return found


_FOREIGN = _foreign_types()


def _from_foreign(values: Any, kind: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).view(kind)


@dataclass
class _Message:
    """A value ready to be sent; its arrays lie in memory that both map and that has no name."""

    head: bytes
    file: int | None


def _pack(value: Any) -> _Message:
    """Do all that can fail for other reasons than the other process, before anything is sent."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    raw = [buffer.raw() for buffer in buffers]
    places, total = _layout([len(part) for part in raw])
    head = pickle.dumps((stream.getvalue(), [len(part) for part in raw]))
    if not total:
        return _Message(head, None)
    file = _nameless_file()
    try:
        os.truncate(file, total)
        with mmap.mmap(file, total) as memory:
            for part, place in zip(raw, places, strict=True):
                memory[place : place + len(part)] = part
    except BaseException:
        os.close(file)
        raise
    return _Message(head, file)


def _send(connection: Connection, peer: int, message: _Message) -> None:
    try:
        connection.send_bytes(message.head)
        if message.file is not None:
            reduction.send_handle(connection, message.file, peer)
    finally:
        if message.file is not None:
            os.close(message.file)


def _receive(connection: Connection) -> Any:
    pickled, sizes = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
    places, total = _layout(sizes)
    if not total:
        return pickle.loads(pickled, buffers=[bytearray() for _ in sizes])  # noqa: S301
    file = reduction.recv_handle(connection)
    try:
        memory = _mapped(file, total)  # lives as long as an array that lies in it
    finally:
        os.close(file)
    buffers = [memory[place : place + size] for place, size in zip(places, sizes, strict=True)]
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 - from our own process


def _mapped(file: int, total: int) -> memoryview:
    """Map a file; where possible without a descriptor of its own, for batches may be kept."""
    path = f"/proc/self/fd/{file}"
    if not os.path.exists(path):
        return memoryview(mmap.mmap(file, total))
    tensor = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
    return tensor.numpy().data


def _layout(sizes: list[int]) -> tuple[list[int], int]:
    """Where buffers lie, aligned, and how many bytes they take."""
    ends = list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
    return [0, *ends[:-1]], ends[-1] if ends else 0


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("destrier")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _work(connection: Connection, parent: int, transform: Callable[..., Any]) -> None:
    """Run in the worker: transform what arrives until the parent closes its end."""
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        answer: tuple[bool, Any]
        try:
            arguments = _receive(connection)
        except (EOFError, OSError):
            return
        except Exception as error:
            answer = (False, portable(error))
        else:
            try:
                answer = (True, transform(*arguments))
            except Exception as error:
                answer = (False, portable(error))
            del arguments
        try:
            message = _pack(answer)
        except Exception as error:
            refused = TypeError(f"the result cannot be pickled: {type(error).__name__}: {error}")
            message = _pack((False, portable(refused)))
        del answer
        try:
            _send(connection, parent, message)
        except OSError:
            return


class _Process:
    def __init__(self, context: Any, transform: Callable[..., Any]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work,
            args=(theirs, os.getpid(), transform),
            daemon=True,
            name="destrier-transform",
        )
        try:
            self.process.start()
        except Exception as error:
            self.connection.close()
            raise ArgumentError(
                f"the transform cannot be sent to a worker process: {type(error).__name__}: "
                f"{error}; define it at the top of a module, or pass num_workers=0"
            ) from error
        finally:
            theirs.close()

    def hang_up(self) -> None:
        """End the conversation, also under a thread that waits for an answer.

        Closing the descriptor would not wake that thread, which would then read from whatever file
        gets its number next.
        """
        with (
            contextlib.suppress(OSError),
            socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    def died(self) -> WorkerError:
        self.process.join(_STOP_SECONDS)
        code = self.process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        return WorkerError(
            f"worker process {self.process.pid} died {how} while it ran the transform; the batch "
            "was not delivered and the position has not moved, so the stream can be iterated again"
        )

    def wait_ready(self) -> None:
        try:
            if not self.connection.poll(_START_SECONDS):
                raise WorkerError(
                    f"worker process {self.process.pid} did not start in {_START_SECONDS} s"
                )
            self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise WorkerError(
                "a worker process died while it started; if the script has no "
                "`if __name__ == '__main__':` guard, add one, because workers import it again"
            ) from error

    def call(self, message: _Message) -> tuple[bool, Any]:
        pid = self.process.pid
        assert pid is not None
        _send(self.connection, pid, message)
        answer: tuple[bool, Any] = _receive(self.connection)
        return answer


_running: weakref.WeakSet[TransformWorkers] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    """At the interpreter's exit no transform is waited for."""
    for workers in list(_running):
        workers.kill()


class TransformWorkers:
    """A set of processes that run one transform.

    Safe to call from several threads: each call takes an idle process and waits for its answer.

    Args:
        transform: Picklable.
        count: Number of processes.
        method: Start method, ``"spawn"`` or ``"forkserver"``.
    """

    def __init__(self, transform: Callable[..., Any], count: int, method: str) -> None:
        context = multiprocessing.get_context(method)
        self._processes: list[_Process] = []
        self._idle: queue.Queue[_Process] = queue.Queue()
        self._closing = False
        _running.add(self)
        try:
            self._processes.extend(_Process(context, transform) for _ in range(count))
            for process in self._processes:
                process.wait_ready()
                self._idle.put(process)
        except BaseException:
            self.close()
            raise

    def __call__(self, *arguments: Any) -> Any:
        """Run the transform in a process.

        Raises:
            WorkerError: If the process died.
            Exception: Whatever the transform raised.
        """
        message = _pack(arguments)
        process = self._idle.get()
        try:
            good, value = process.call(message)
        except Exception as error:
            if self._closing:
                raise WorkerError("the workers were stopped") from None
            if isinstance(error, EOFError | OSError):
                raise process.died() from error
            raise
        finally:
            self._idle.put(process)
        if good:
            return value
        raised, trace = value
        raise raised from RemoteTraceback(trace)

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return all(process.process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """End the processes at once."""
        self._closing = True
        for process in self._processes:
            process.process.kill()

    def close(self) -> None:
        """Stop the processes, and kill those that do not end within some seconds."""
        self._closing = True
        for process in self._processes:
            process.hang_up()
        until = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            process.process.join(max(0.0, until - time.monotonic()))
            if process.process.is_alive():
                process.process.kill()
                process.process.join()
            process.connection.close()
        self._processes.clear()
