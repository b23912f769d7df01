"""Images as Pillow holds them: how many bytes their pixels take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

__all__ = ["wrong_pixels"]

_BITS = {
    "1": 1,
    "L": 8,
    "P": 8,
    "LA": 16,
    "PA": 16,
    "I;16": 16,
    "RGB": 24,
    "YCbCr": 24,
    "LAB": 24,
    "HSV": 24,
    "RGBA": 32,
    "RGBX": 32,
    "RGBa": 32,
    "CMYK": 32,
    "I": 32,
    "F": 32,
}
"""Bits of a pixel by Pillow's mode; rows of pixels are padded to whole bytes."""


def wrong_pixels(widths: Any, heights: Any, modes: pa.Array, sizes: Any) -> tuple[int, str] | None:
    """The first image that Pillow could not read, for its bytes are not as many as its size takes.

    Args:
        widths: In pixels.
        heights: Likewise.
        modes: As Pillow names them; others than its own are not checked.
        sizes: Bytes of the pixels.

    Returns:
        Its index and what is wrong, or None.
    """
    encoded = modes.dictionary_encode()
    bits = np.array([_BITS.get(mode, 0) for mode in encoded.dictionary.to_pylist()], np.float64)
    of_pixel = bits[encoded.indices.to_numpy()] if len(modes) else np.zeros(0)
    needed = np.ceil(widths * of_pixel / 8) * heights
    wrong = (of_pixel > 0) & (needed != sizes)
    if not wrong.any():
        return None
    index = int(np.argmax(wrong))
    return index, (
        f"has {sizes[index]:,} bytes of pixels, but {widths[index]} x {heights[index]} of mode "
        f"{modes[index]} take {needed[index]:,.0f}"
    )
