"""Worker processes for transforms that hold the GIL.

Only the transform runs there; reading stays in the parent. Arrays and tensors cross in shared
memory that has no name, so that nothing can be left behind.
"""

from __future__ import annotations

import copyreg
import io
import multiprocessing
import pickle
import queue
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

# Importing it teaches multiprocessing's pickler to pass tensors in shared memory.
import torch.multiprocessing

from destrier.errors import ArgumentError, WorkerError

__all__ = ["TransformWorkers", "check_context"]

_START_SECONDS = 120
_STOP_SECONDS = 5


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

    dispatch_table = copyreg.dispatch_table.copy()

    def reducer_override(self, value: Any) -> Any:
        """Reduce CPU tensors to numpy arrays."""
        if type(value) is torch.Tensor and value.device.type == "cpu" and not value.requires_grad:
            if value.dtype is torch.bfloat16:
                return _from_bfloat16, (value.contiguous().view(torch.int16).numpy(),)
            if not value.is_sparse:
                return torch.from_numpy, (np.ascontiguousarray(value.numpy()),)
        return NotImplemented


def _from_bfloat16(values: Any) -> torch.Tensor:
    return torch.from_numpy(values).view(torch.bfloat16)


def _send(connection: Connection, value: Any) -> None:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    raw = [buffer.raw() for buffer in buffers]
    sizes = [len(part) for part in raw]
    total = sum(-(-size // 64) * 64 for size in sizes)
    shared = torch.empty(total, dtype=torch.uint8)
    if total:
        shared.share_memory_()  # type: ignore[no-untyped-call]
        memory = shared.numpy()
        at = 0
        for part, size in zip(raw, sizes, strict=True):
            memory[at : at + size] = np.frombuffer(part, np.uint8)
            at += -(-size // 64) * 64
    message = io.BytesIO()
    multiprocessing.reduction.ForkingPickler(message, 5).dump((stream.getvalue(), sizes, shared))
    connection.send_bytes(message.getbuffer())


def _receive(connection: Connection) -> Any:
    pickled, sizes, shared = pickle.loads(connection.recv_bytes())  # noqa: S301 - from our own process
    memory = memoryview(shared.numpy()) if len(shared) else memoryview(b"")
    buffers = []
    at = 0
    for size in sizes:
        buffers.append(memory[at : at + size])
        at += -(-size // 64) * 64
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 - from our own process


def _work(connection: Connection, transform: Callable[..., Any]) -> None:
    """Run in the worker: transform what arrives until the parent closes its end."""
    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            arguments = _receive(connection)
        except (EOFError, OSError):
            return
        try:
            answer = (True, transform(*arguments))
        except Exception as error:
            answer = (False, error)
        try:
            _send(connection, answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if answer[0]:
                _send(connection, (False, TypeError(f"the result cannot be pickled: {text}")))
            else:
                _send(connection, (False, RuntimeError(f"{answer[1]!r}")))


class _Process:
    def __init__(self, context: Any, transform: Callable[..., Any]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, transform), daemon=True, name="destrier-transform"
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

    def call(self, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            _send(self.connection, arguments)
            answer: tuple[bool, Any] = _receive(self.connection)
        except (EOFError, ConnectionError) as error:
            raise self.died() from error
        return answer

    def stop(self) -> None:
        self.connection.close()
        self.process.join(_STOP_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


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
        process = self._idle.get()
        try:
            good, value = process.call(arguments)
        finally:
            self._idle.put(process)
        if not good:
            raise value
        return value

    @property
    def alive(self) -> bool:
        """Whether all processes run."""
        return all(process.process.is_alive() for process in self._processes)

    def close(self) -> None:
        """Stop the processes; waits for them, and kills one that does not end."""
        for process in self._processes:
            process.stop()
        self._processes.clear()
