"""A proxy before an S3 server: it adds latency, counts requests, and fails chosen ones.

Tests run it on a thread; benchmarks as a process: ``python tests/proxy.py TARGET --delay-ms 15``,
whose first line of output is its port.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import threading
from collections.abc import Callable
from typing import Literal, TypeAlias

from typing_extensions import Self

__all__ = ["Fault", "Proxy"]

Fault: TypeAlias = Literal["503", "403", "reset", "cut", "stall"]
"""An answer of that status, a reset before the answer or inside of it, or never an answer."""

_ANSWERS = {"503": ("Slow Down", "SlowDown"), "403": ("Forbidden", "ExpiredToken")}
_BUFFERED = 1 << 20


class Proxy:
    """Forwards connections to a port of this machine.

    Args:
        target: The port of the server.
        delay: Seconds that each request waits.
        fault: Called with the number of each GET, from 0 on, and its head; what to do to it.

    Attributes:
        port: Where it listens.
        gets: The path, and range, of each GET so far.
        most: How many GETs waited for their answer at once, at most.
    """

    def __init__(
        self,
        target: int,
        *,
        delay: float = 0.0,
        fault: Callable[[int, str], Fault | None] | None = None,
    ) -> None:
        self.target = target
        self.delay = delay
        self.fault = fault
        self.gets: list[tuple[str, str]] = []
        self.most = 0
        self.waiting = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self.transports: set[asyncio.Transport] = set()
        self._ready = threading.Event()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: _Client(self), "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        while self.transports:
            for transport in self.transports:
                transport.abort()
            await asyncio.sleep(0.01)


class _Client(asyncio.Protocol):
    """A client's connection; bytes after an answer are a new request."""

    transport: asyncio.Transport

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.server: asyncio.Transport | None = None
        self.waiting: list[bytes] | None = []  # what is not forwarded yet
        self.answered = True
        self.fault: Fault | None = None
        self.opening: asyncio.Task[None] | None = None
        self.counted = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.proxy.transports.add(transport)
        transport.set_write_buffer_limits(high=_BUFFERED)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self.server, _ = await loop.create_connection(
                lambda: _Server(self), "127.0.0.1", self.proxy.target
            )
            self.proxy.transports.add(self.server)
        except OSError:
            self.transport.abort()
            return
        self._forward()

    def data_received(self, data: bytes) -> None:
        if self.answered and re.match(rb"[A-Z]+ /", data):
            self.answered = False
            self.fault = None
            if data.startswith(b"GET "):
                self.fault = self._count(data.split(b"\r\n\r\n")[0].decode("latin-1"))
            if self.fault == "reset":
                self.transport.abort()
                return
            if self.fault in _ANSWERS:
                self._answer(self.fault)
                return
            if self.proxy.delay and self.fault != "stall":
                self.waiting = [*(self.waiting or []), data]
                asyncio.get_running_loop().call_later(self.proxy.delay, self._forward)
                return
        if self.fault == "stall":
            return
        if self.waiting is not None:
            self.waiting.append(data)
            self._forward()
        elif self.server is not None:
            self.server.write(data)

    def _count(self, head: str) -> Fault | None:
        found = re.search(r"^range: *(.*)$", head, re.IGNORECASE | re.MULTILINE)
        number = len(self.proxy.gets)
        self.counted = True
        self.proxy.waiting += 1
        self.proxy.most = max(self.proxy.most, self.proxy.waiting)
        self.proxy.gets.append((head.split(" ")[1], found[1].strip() if found else ""))
        return None if self.proxy.fault is None else self.proxy.fault(number, head)

    def done(self) -> None:
        """The answer has begun, or there is none."""
        self.answered = True
        if self.counted:
            self.counted = False
            self.proxy.waiting -= 1

    def _answer(self, status: Fault | None) -> None:
        reason, code = _ANSWERS[status or ""]
        body = f"<Error><Code>{code}</Code></Error>"
        head = f"HTTP/1.1 {status} {reason}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write((head + body).encode())
        self.done()

    def _forward(self) -> None:
        if self.server is None:
            if self.opening is None:
                self.opening = asyncio.get_running_loop().create_task(self._open())
            return
        for data in self.waiting or []:
            self.server.write(data)
        self.waiting = None

    def pause_writing(self) -> None:
        if self.server is not None:
            self.server.pause_reading()

    def resume_writing(self) -> None:
        if self.server is not None:
            self.server.resume_reading()

    def connection_lost(self, _: Exception | None) -> None:
        self.done()
        self.proxy.transports.discard(self.transport)
        if self.server is not None:
            self.server.abort()


class _Server(asyncio.Protocol):
    """The connection to the server for one of a client."""

    def __init__(self, client: _Client) -> None:
        self.client = client

    def data_received(self, data: bytes) -> None:
        client = self.client
        client.done()
        if client.fault == "cut":
            client.transport.write(data[: len(data) // 2])
            asyncio.get_running_loop().call_later(0.05, client.transport.abort)
            client.fault = "stall"
            return
        client.transport.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        if self.client.server is not None:
            self.client.proxy.transports.discard(self.client.server)
        self.client.transport.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=int)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    with Proxy(arguments.target, delay=arguments.delay_ms / 1e3) as proxy:
        print(proxy.port, flush=True)
        sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main()
