"""JPEG files to pixels with simplejpeg, where these are the pixels that Pillow gives.

simplejpeg is faster than Pillow and takes no copies, but what is delivered must not depend on what
is installed. Both use libjpeg-turbo with the same settings; that is checked once in each process.
What Pillow might see otherwise, or refuse, is left to Pillow.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

__all__ = ["Header", "decode_jpeg", "decoded_size", "read_header", "scale_of"]

_SPACES = {("RGB", 3): "RGB", ("RGB", 1): "RGB", ("RGBA", 3): "RGBA", ("RGBA", 1): "RGBA"}
_SPACES["L", 1] = "GRAY"  # Pillow has a formula of its own for the gray of colours
_CHANNELS = {"RGB": 3, "RGBA": 4, "GRAY": 1}
_SCALES = (8, 4, 2)
_LEAST_SIDE = 8  # below, several scales of libjpeg give one size
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_SKIPPED = (0xC4, 0xDB, 0xDD, 0xFE)  # tables, restart interval, comment
_JFIF_BYTES = 9
_SEGMENT = struct.Struct(">BBH")  # 255, what it is, and its bytes without the first two


@dataclass(frozen=True)
class Header:
    """What an ordinary JPEG says of itself.

    Attributes:
        height: In pixels.
        width: In pixels.
        components: 3 of colours, 1 of gray.
        plain: Whether Pillow finds nothing in it that it might refuse.
    """

    height: int
    width: int
    components: int
    plain: bool


def decode_jpeg(
    data: bytes | memoryview,
    header: Header | None,
    mode: str,
    at_least: tuple[int, int] | None,
    out: NDArray[np.uint8] | None,
) -> NDArray[np.uint8] | None:
    """Decode an image to (height, width, channels), or return None to leave it to Pillow.

    Args:
        data: The file.
        header: Its header, as `read_header` finds it.
        mode: Pillow's name of the mode.
        at_least: Height and width down to which it may be scaled.
        out: Memory to decode into, where it has the image's shape.
    """
    library = _library()
    if library is None or header is None:
        return None
    space = _SPACES.get((mode, header.components))
    if space is None or not _acceptable(data, header):
        return None
    height, width = decoded_size(header, at_least)
    shape = (height, width, _CHANNELS[space])
    if out is None or out.shape != shape:
        out = np.empty(shape, np.uint8)
    least = (0, 0) if (height, width) == (header.height, header.width) else (height, width)
    try:
        decoded = library.decode_jpeg(
            data, space, min_height=least[0], min_width=least[1], buffer=out
        )
    except ValueError:
        return None  # Pillow decodes some that libjpeg warns of, and says what is wrong with others
    return out if decoded.shape == shape else None


def decoded_size(header: Header, at_least: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width of the decoded image."""
    scale = scale_of(header.height, header.width, at_least)
    return -(-header.height // scale), -(-header.width // scale)


def scale_of(height: int, width: int, at_least: tuple[int, int] | None) -> int:
    """The part to which an image is scaled while it is decoded: 1, 2, 4 or 8 is whole to eighth.

    The largest that leaves both sides as long as wanted; those that both decoders have.
    """
    if at_least is None or min(height, width) < _LEAST_SIDE:
        return 1
    for scale in _SCALES:
        if -(-height // scale) >= at_least[0] and -(-width // scale) >= at_least[1]:
            return scale
    return 1


@lru_cache(maxsize=1)
def _library() -> ModuleType | None:
    """The module simplejpeg, if it is there and its pixels are Pillow's."""
    try:
        simplejpeg = import_module("simplejpeg")
    except ImportError:
        return None
    from PIL import Image

    pixels = (np.arange(48 * 40 * 3, dtype=np.uint32) ** 2 >> 7).astype(np.uint8)
    image = Image.fromarray(pixels.reshape(48, 40, 3))
    for subsampling in range(3):
        file = io.BytesIO()
        image.save(file, "JPEG", subsampling=subsampling)
        for scale in (1, *_SCALES):
            size = (48 // scale, 40 // scale)
            with Image.open(file) as opened:
                opened.draft(None, size[::-1])
                theirs = np.asarray(opened)
            ours = simplejpeg.decode_jpeg(
                file.getvalue(), "RGB", min_height=size[0], min_width=size[1]
            )
            if not np.array_equal(ours, theirs):  # a Pillow that was built with another libjpeg
                return None
    return simplejpeg


def read_header(data: bytes | memoryview) -> Header | None:
    """Size and components of an ordinary JPEG; None for all others, and what is none."""
    if data[:3] != b"\xff\xd8\xff":
        return None
    frame: bytes | memoryview = b""
    place, plain, last = 2, True, len(data) - _SEGMENT.size
    while place <= last:
        begin, marker, size = _SEGMENT.unpack_from(data, place)
        if begin != 0xFF or size < 2:
            return None
        if marker == 0xDA:
            return _frame_header(frame, plain)
        if marker in _FRAMES and not frame:
            frame = data[place + 4 : place + 2 + size]
        elif 0xE0 <= marker <= 0xEF:
            plain = plain and marker == 0xE0 and size >= _JFIF_BYTES
        elif marker not in _SKIPPED:
            return None
        place += 2 + size
    return None


def _frame_header(frame: bytes | memoryview, plain: bool) -> Header | None:
    if len(frame) < 6 or len(frame) != 6 + 3 * frame[5] or frame[0] != 8:
        return None
    height, width = frame[1] << 8 | frame[2], frame[3] << 8 | frame[4]
    return Header(height, width, frame[5], plain) if height and width else None


def _acceptable(data: bytes | memoryview, header: Header) -> bool:
    """Whether Pillow opens the file as a JPEG of one picture."""
    from PIL import Image

    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and header.height * header.width > limit:
        return False
    if header.plain:
        return True
    with Image.open(io.BytesIO(data)) as image:
        return bool(image.format == "JPEG")
