"""The members of a tar, header by header, without a look at what they hold.

The standard library's `tarfile` makes an object of each member and reads 15,000 of them a second;
what links and columns need of a member is a name and two numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from destrier.errors import SourceError
from destrier.files import File, Store
from destrier.formats.webdataset.reader import Reader, open_reader

__all__ = ["BLOCK", "Member", "Tar"]

BLOCK = 512
"""A tar consists of blocks of so many bytes."""

_ZEROS = bytes(BLOCK)
_MAX_EXTENDED = 1 << 20  # an extended header holds names: more is damage
_MOST_KNOWN = 1 << 18  # members remembered: 50 MB
_TAIL = 1 << 20  # read at once while looking for data after the end

_FILE = b"0"[0]
_REGULAR = (_FILE, 0, b"7"[0])
_DIRECTORY = b"5"[0]
_SPARSE = b"S"[0]
_EXTENDED = {b"x"[0]: "pax", b"X"[0]: "pax", b"g"[0]: "global", b"L"[0]: "name", b"K"[0]: "link"}
_SPECIAL = {
    b"1"[0]: "a hard link",
    b"2"[0]: "a symbolic link",
    b"3"[0]: "a character device",
    b"4"[0]: "a block device",
    b"6"[0]: "a named pipe",
    _SPARSE: "a sparse file",
    b"M"[0]: "the rest of a file that begins in another tar",
    b"D"[0]: "a GNU directory listing",
    b"V"[0]: "a volume label",
    b"N"[0]: "an old GNU long name",
}
_RECORD = re.compile(rb"(\d{1,7}) ([^=\n]+)=")


class Member(NamedTuple):
    """A file in a tar.

    Attributes:
        name: As it stands in the tar; never a path to write to.
        position: Of its first byte in the tar, after decompression.
        size: In bytes.
    """

    name: str
    position: int
    size: int


@dataclass
class Tar:
    """A tar in a store.

    Attributes:
        store: That it lies in.
        file: The tar, as it was listed.
        skipped: Which names are left out on purpose, whatever they are.
        require_end: Whether a tar without the block of zeros that ends it is an error.
    """

    store: Store
    file: File
    skipped: Callable[[str], bool]
    require_end: bool
    _known: list[Member] | None = None

    @property
    def shown(self) -> str:
        """Its address without credentials, for messages."""
        return self.store.show(self.file.path)

    def open(self, *, headers_only: bool) -> AbstractContextManager[Reader]:
        """Open it for one pass; see `open_reader`."""
        return open_reader(self.store, self.file, headers_only=headers_only)

    def members(self, reader: Reader) -> Iterator[Member]:
        """Iterate over its files; directories hold nothing and are passed over.

        What was found is remembered for the next pass, if it is not too much.

        Args:
            reader: Of the tar, from its beginning.

        Raises:
            SourceError: If the tar is damaged, or has a member that is not a file.
        """
        if self._known is not None:
            yield from self._known
            return
        found: list[Member] = []
        for member in _members(reader, self.skipped, require_end=self.require_end):
            if len(found) < _MOST_KNOWN:
                found.append(member)
            yield member
        if len(found) < _MOST_KNOWN:
            self._known = found


def _members(
    reader: Reader, skipped: Callable[[str], bool], *, require_end: bool
) -> Iterator[Member]:
    view, limit = reader.view, reader.size
    position = 0
    extended: dict[str, str] = {}
    while True:
        header = bytes(view(position, BLOCK))
        entry = None if extended else _plain(header)
        if entry is None:
            entry = _entry(header, position, reader, extended, require_end=require_end)
            if entry is None:
                return
        name, size, kind = entry
        start = position + BLOCK
        position = start + (size + 511 & ~511)
        if not name:
            continue
        if limit is not None and start + size > limit:
            raise SourceError(
                f"{reader.shown}: member {name!r} takes {size:,} bytes from byte {start:,}, but "
                f"the file has {limit:,} bytes: it is cut or damaged",
                file=reader.shown,
            )
        if not skipped(name) and (kind == _FILE or _is_file(kind, name, reader.shown)):
            yield Member(name, start, size)


def _plain(header: bytes) -> tuple[str, int, int] | None:
    """Name, size and type from the usual header of a file; None if it takes a closer look."""
    if len(header) < BLOCK or header[156] != _FILE or header[345] or not header[0]:
        return None
    try:
        if int(header[148:154], 8) != _sum(header) or header[154] or header[135] not in b"\0 ":
            return None
        return header[: min(header.find(0), 100)].decode(), int(header[124:135], 8), _FILE
    except ValueError:
        return None


def _entry(
    header: bytes, position: int, reader: Reader, extended: dict[str, str], *, require_end: bool
) -> tuple[str, int, int] | None:
    """Name, size and type from any header.

    Args:
        header: The block.
        position: Of it.
        reader: Of the tar.
        extended: What extended headers before it say; it is taken from here.
        require_end: Whether a tar must have an end.

    Returns:
        The name is empty for a header that is no member; None at the end of the tar.
    """
    shown = reader.shown
    if len(header) < BLOCK:
        end = position + len(header) if reader.size is None else reader.size
        if require_end or header or extended or not end:
            raise _no_end(shown, end)
        return None
    if not _is_header(header, shown, position):
        if extended:
            raise _damaged(shown, position, "an extended header that no member follows")
        _only_zeros(reader, position)
        return None
    kind = header[156]
    size = _size(header[124:136], shown, position)
    if kind in _EXTENDED:
        data = reader.view(position + BLOCK, min(size, _MAX_EXTENDED))
        _extend(extended, _EXTENDED[kind], data, size, reader)
        return "", size, kind
    name = _name(header, shown, position)
    if extended:
        name, size, kind = _override(extended, name, size, kind, shown, position)
        extended.clear()
    if not name or "\0" in name:
        raise _damaged(shown, position, f"the name of the member is {name!r}")
    return name, size, kind


def _sum(header: bytes) -> int:
    """The checksum that a header should have."""
    # Adler's low half is 1 plus the sum of the bytes, exact while that is below 65,521
    return (
        (zlib.adler32(header[:148]) & 0xFFFF)
        + (zlib.adler32(header[156:345]) & 0xFFFF)
        + (zlib.adler32(header[345:]) & 0xFFFF)
        + 253  # eight blanks stand for the checksum itself; three ones too many
    )


def _is_header(header: bytes, shown: str, position: int) -> bool:
    """Whether a block is a header: it has the right checksum; one of zeros is the end."""
    total = _sum(header)
    try:
        declared = int(header[148:156].replace(b"\0", b" ").strip() or b"-1", 8)
    except ValueError:
        declared = -1
    if declared == total or declared == _signed(header):
        return True
    if header == _ZEROS:
        return False
    raise _damaged(
        shown, position, f"the checksum of the header is {total:o}, not {header[148:156]!r}"
    )


def _override(
    extended: dict[str, str], name: str, size: int, kind: int, shown: str, position: int
) -> tuple[str, int, int]:
    """Name, size and type of a member, after the extended headers before it."""
    if any(key.startswith("GNU.sparse") for key in extended):
        kind = _SPARSE
    return extended.get("path", name), _pax_size(extended, size, shown, position), kind


def _is_file(kind: int, name: str, shown: str) -> bool:
    """Whether a member is a file, not a directory; others are errors."""
    if kind in _REGULAR:
        return kind != 0 or not name.endswith("/")  # so old tars wrote a directory
    if kind == _DIRECTORY:
        return False
    what = _SPECIAL.get(kind, f"of the unknown type {bytes([kind])!r}")
    raise SourceError(
        f"{shown}: member {name!r} is {what}, which has no bytes of its own to keep; write the tar "
        "with files only (GNU tar: --dereference --hard-dereference, without --sparse), or leave "
        f"it out with skip=[{name!r}]",
        file=shown,
    )


def _signed(header: bytes) -> int:
    """The checksum over signed bytes, which some old tars have."""
    fields = header[:148] + header[156:]
    return sum(fields) - 256 * sum(byte > 127 for byte in fields) + 256


def _size(field: bytes, shown: str, position: int) -> int:
    try:
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        size = int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        size = -1
    if size < 0:
        raise _damaged(shown, position, f"the size of the member is {field!r}")
    return size


def _pax_size(extended: dict[str, str], size: int, shown: str, position: int) -> int:
    text = extended.get("size")
    if text is None:
        return size
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise _damaged(shown, position, f"the size of the member is {text!r}")
    return int(text)


def _name(header: bytes, shown: str, position: int) -> str:
    raw = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        raw = header[345:500].partition(b"\0")[0] + b"/" + raw
    return _text(raw, shown, position)


def _text(raw: bytes, shown: str, position: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _damaged(shown, position, f"the name {raw[:80]!r} is not UTF-8") from None


def _extend(
    extended: dict[str, str], kind: str, payload: memoryview, size: int, reader: Reader
) -> None:
    """Take in an extended header, which says something of the member after it."""
    shown, data = reader.shown, bytes(payload)
    if len(data) < size:
        if size > _MAX_EXTENDED:
            raise SourceError(
                f"{shown}: an extended header of {size:,} bytes, which holds names only: the tar "
                "is damaged",
                file=shown,
            )
        raise SourceError(
            f"{shown} ends in an extended header: the file is cut; fetch or write it again",
            file=shown,
        )
    if kind == "name":
        extended["path"] = _text(data.partition(b"\0")[0], shown, 0)
    elif kind in ("pax", "global"):
        records = _records(data, shown)
        if kind == "pax":
            extended.update(records)
        elif told := {"path", "size"}.intersection(records):
            raise SourceError(
                f"{shown} has a global header that sets {' and '.join(sorted(told))} for all "
                "members, which is not supported; write the tar again",
                file=shown,
            )


def _records(data: bytes, shown: str) -> dict[str, str]:
    """The records of a pax header: length, blank, key, equals sign, value, newline."""
    records: dict[str, str] = {}
    start = 0
    while start < len(data) and data[start]:
        found = _RECORD.match(data, start)
        end = start + int(found[1]) if found else 0
        if found is None or not found.end() < end <= len(data) or data[end - 1] != 0x0A:
            raise SourceError(f"{shown}: a pax header is damaged", file=shown)
        key = found[2].decode("utf-8", "replace")
        value = data[found.end() : end - 1]
        if key in ("path", "size"):
            records[key] = _text(value, shown, 0)
        else:
            records[key] = ""
        start = end
    return records


def _only_zeros(reader: Reader, position: int) -> None:
    """Nothing but zeros may follow the end; reading up to it also checks a compressed stream."""
    while len(tail := reader.view(position, _TAIL)):
        if bytes(tail).count(0) < len(tail):
            raise SourceError(
                f"{reader.shown}: there is data after the end of the archive, as when tars are "
                "joined by cat; join them with tar --concatenate, or give them one by one",
                file=reader.shown,
            )
        position += len(tail)


def _no_end(shown: str, end: int) -> SourceError:
    what = f"ends at byte {end:,}" if end else "is empty"
    return SourceError(
        f"{shown} {what} without the blocks of zeros that "
        "end a tar, as one does that was cut; fetch or write it again, or, if it is complete up "
        "to there, pass require_end=False",
        file=shown,
    )


def _damaged(shown: str, position: int, what: str) -> SourceError:
    return SourceError(f"{shown}: damaged, or not a tar, at byte {position:,}: {what}", file=shown)
