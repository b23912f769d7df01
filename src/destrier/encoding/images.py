"""PIL images as the bytes of image files, without loss."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from destrier.encoding.misfit import Misfit

__all__ = ["IMAGE_TYPE", "Picture", "picture"]

IMAGE_TYPE = b"image/*"
"""The content type of a column of PIL images: each is kept as it came, PNG where it was made."""

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class Picture(bytes):
    """The bytes of an image file that was a PIL image."""

    __slots__ = ()


def picture(image: Any) -> Picture:
    """The bytes of an image: of its file if it is still as that file has it, else of a PNG.

    Args:
        image: A ``PIL.Image.Image``.

    Raises:
        Misfit: If no PNG can hold its mode.
    """
    data = _file_bytes(image)
    return Picture(_png(image) if data is None else data)


def _file_bytes(image: Any) -> bytes | None:
    """The bytes of the file that the image was opened from, or None if it is not as they say."""
    if not getattr(image, "format", None) or not hasattr(image, "tile"):
        return None  # not opened from a file
    pending = list(image.tile)  # of an image whose pixels have not been asked for
    data = _read(image)
    if data is None:
        return None
    from PIL import Image

    same = False
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as again:
        same = _head(again) == _head(image)
        if same and not (pending and list(again.tile) == pending):
            same = again.tobytes() == image.tobytes() and again.getpalette() == image.getpalette()
    return data if same else None


def _head(image: Any) -> tuple[Any, ...]:
    return image.format, image.size, image.mode, image.tell()


def _read(image: Any) -> bytes | None:
    file = getattr(image, "fp", None)
    with contextlib.suppress(Exception):
        if file is not None and not file.closed:
            place = file.tell()
            file.seek(0)
            data = file.read()
            file.seek(place)
            return data if isinstance(data, bytes) else None
        if image.filename:
            with open(image.filename, "rb") as opened:
                return opened.read()
    return None


def _png(image: Any) -> bytes:
    if image.mode not in _PNG_MODES:
        raise Misfit(
            0,
            f"a PIL image of mode {image.mode} cannot be kept as PNG without loss: pass "
            "numpy.asarray(image), or an image converted to one of the modes "
            f"{', '.join(_PNG_MODES)}",
            refused=True,
        )
    buffer = io.BytesIO()
    try:
        image.save(buffer, "PNG", compress_level=1)
    except Exception as error:
        text = f"a PIL image of mode {image.mode} could not be written as PNG: {error}"
        raise Misfit(0, text, refused=True) from error
    data = buffer.getvalue()
    if image.mode == "P":  # indices beyond a short palette do not fit the bits that Pillow takes
        from PIL import Image

        with Image.open(io.BytesIO(data)) as again:
            if again.tobytes() != image.tobytes():
                raise Misfit(
                    0,
                    "a PIL image of mode P has indices beyond its palette: pass "
                    "numpy.asarray(image)",
                    refused=True,
                )
    return data
