"""Images: how they are wanted, and from the files of a column to pixels."""

from __future__ import annotations

import io
import re
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from destrier.check import integer
from destrier.errors import ArgumentError
from destrier.jpeg import Header, decode_jpeg, decoded_size, read_header, scale_of
from destrier.memory import fresh

__all__ = ["Image", "decode_image", "decode_images"]

_BUFFER = re.compile(r" ?<_io\.BytesIO[^>]*>")  # Pillow names what it reads from
_SHOWN_BYTES = 8
_MODES = {"rgb": "RGB", "rgba": "RGBA", "gray": "L"}


@dataclass(frozen=True)
class Image:
    """How the image files of a column are decoded: a value of ``decode=``.

    The mode alone may be given as a string.

    Args:
        mode: ``"rgb"``, ``"rgba"`` or ``"gray"``.
        at_least: Height and width that are enough, in pixels. JPEGs are then decoded at the
            smallest of 1, 1/2, 1/4 and 1/8 of their size that has at least these, which takes less
            time and memory. The pixels are not those of the whole image resized. Other formats are
            decoded whole. None decodes all of them whole.

    Raises:
        ArgumentError: If the mode is unknown, or the size is not two positive integers.

    Example:
        >>> decode = {"photo": Image("rgb", at_least=(224, 224)), "mask": Image("gray")}
    """

    mode: str = "rgb"
    _: KW_ONLY
    at_least: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ArgumentError(f"decode mode {self.mode!r} is not one of {', '.join(_MODES)}")
        if self.at_least is None:
            return
        if not isinstance(self.at_least, tuple | list) or len(self.at_least) != 2:
            raise ArgumentError(f"at_least must be (height, width), got {self.at_least!r}")
        height, width = (integer("at_least", side, 1) for side in self.at_least)
        object.__setattr__(self, "at_least", (height, width))


def decode_images(values: NDArray[Any], wanted: Image) -> tuple[NDArray[Any], dict[int, str]]:
    """Decode the files of a column.

    Args:
        values: Bytes, or Arrow's buffers of them, or None for null.
        wanted: How they are decoded.

    Returns:
        Where two or more were decoded, all have one size by their headers, too, and none is null,
        an array of shape (rows, height, width, channels). Else one of objects: arrays of shape
        (height, width, channels) with memory of their own, and None. And by place what is wrong
        with those that could not be decoded, whose pixels are of no use.
    """
    images = np.empty(len(values), np.object_)
    errors: dict[int, str] = {}
    stack: NDArray[np.uint8] | None = None
    first: NDArray[np.uint8] | None = None
    # The items of a buffer are signed without the cast.
    files = [None if data is None else memoryview(data).cast("B") for data in values]
    headers = [None if data is None else read_header(data) for data in files]
    stackable = None not in files and _may_have_one_size(headers, wanted.at_least)
    for i, data in enumerate(files):
        if data is None:
            continue
        try:
            image = _decode(data, headers[i], wanted, None if stack is None else stack[i])
        except ValueError as error:
            errors[i] = str(error)
            continue
        images[i] = image
        if first is None:
            first = image
        elif image.shape != first.shape:
            stackable = False
            if stack is not None:
                stack = None
                _part(images[:i])
        elif stackable and stack is None:
            stack = fresh((len(values), *image.shape), np.uint8)
            _move(images[: i + 1], stack)
    return (images if stack is None else stack), errors


def _move(images: NDArray[Any], stack: NDArray[np.uint8]) -> None:
    for i, image in enumerate(images):
        if image is not None:
            stack[i] = image
            images[i] = stack[i]


def _part(images: NDArray[Any]) -> None:
    """Copy images out of their stack, of which a view would keep the whole."""
    for i, image in enumerate(images):
        if image is not None:
            images[i] = image.copy()


def _may_have_one_size(headers: list[Header | None], at_least: tuple[int, int] | None) -> bool:
    """Whether no two say that they differ."""
    return len({decoded_size(header, at_least) for header in headers if header is not None}) <= 1


def decode_image(data: bytes | memoryview, wanted: Image) -> NDArray[np.uint8]:
    """Decode an image file to uint8 of shape (height, width, channels).

    Args:
        data: The file.
        wanted: How it is decoded.

    Raises:
        ValueError: If the bytes are not an image that Pillow can read.
    """
    return _decode(data, read_header(data), wanted, None)


def _decode(
    data: bytes | memoryview,
    header: Header | None,
    wanted: Image,
    out: NDArray[np.uint8] | None,
) -> NDArray[np.uint8]:
    """Decode a file, into memory that is there where it has the image's shape."""
    mode = _MODES[wanted.mode]
    try:
        pixels = decode_jpeg(data, header, mode, wanted.at_least, out)
        if pixels is not None:
            return pixels
        pixels = _decode_with_pillow(data, mode, wanted.at_least)
    except Exception as error:
        text = _BUFFER.sub("", str(error)) or type(error).__name__
        begins = f" that begin with {data[:_SHOWN_BYTES].hex(' ')}" if data else ""
        raise ValueError(f"{text} ({len(data):,} bytes{begins})") from error
    if out is None or out.shape != pixels.shape:
        return pixels if pixels.flags.writeable else pixels.copy()
    out[:] = pixels
    return out


def _decode_with_pillow(
    data: bytes | memoryview, mode: str, at_least: tuple[int, int] | None
) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        scale = scale_of(image.height, image.width, at_least)
        if scale > 1:  # formats other than JPEG ignore it
            image.draft(None, (image.width // scale, image.height // scale))
        pixels = np.asarray(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]
