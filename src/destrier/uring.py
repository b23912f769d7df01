"""Local files through io_uring, where the kernel offers it.

Lance reads a local file with one call and one thread switch for each range; under the scheme
``file+uring`` it hands many ranges to the kernel at once, for about half of the processor time
where ranges are small. Some kernels and containers forbid that, and Lance would panic there, so the
kernel is asked first. While the disk is awaited, Lance's two threads poll; on file systems of a
network, where that can be long, files are therefore read the ordinary way.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache

__all__ = ["uring_uri"]

_SYS_IO_URING_SETUP = 425  # the same on every architecture
_QUEUE_DEPTH = 1 << 14  # what Lance asks for
_PARAMS_BYTES = 120
_SPECIAL = re.compile(r"[%?#]")
_OFF = ("0", "false", "no", "off")
_MOUNTS = "/proc/self/mounts"
_ESCAPED = re.compile(r"\\([0-7]{3})")  # white space and backslashes in it
_OWN_DISKS = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}


def uring_uri(uri: str) -> str | None:
    """Return the address under which Lance reads a local table through io_uring.

    Args:
        uri: Of the table: an absolute path, or one with the scheme ``file``.

    Returns:
        None where the table is not on this machine's disks, the kernel does not allow it, or the
        environment variable ``DESTRIER_IO_URING`` is 0.
    """
    path = uri.removeprefix("file://")
    if not path.startswith("/") or _SPECIAL.search(path):
        return None
    if os.environ.get("DESTRIER_IO_URING", "").strip().lower() in _OFF:
        return None
    if not _allowed() or _file_system(os.path.realpath(path)) not in _OWN_DISKS:
        return None
    return f"file+uring://{path}"


def _file_system(path: str) -> str | None:
    """The kind of the file system that a path is on."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return None
    longest, found = 0, None
    for escaped, kind in mounts:
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), escaped)
        # Of two mounts at one point the later hides the other.
        if len(point) >= longest and (point in ("/", path) or path.startswith(f"{point}/")):
            longest, found = len(point), kind
    return found


@cache
def _allowed() -> bool:
    """Whether this process may have a ring as large as Lance's."""
    if sys.platform != "linux":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    parameters = ctypes.create_string_buffer(_PARAMS_BYTES)
    ring = syscall(
        ctypes.c_long(_SYS_IO_URING_SETUP), ctypes.c_uint(_QUEUE_DEPTH), ctypes.byref(parameters)
    )
    if ring < 0:
        return False
    os.close(ring)
    return True
