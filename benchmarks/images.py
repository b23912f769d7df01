"""Images: made from a seed, decoded, and cropped, by the same code for every loader."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from workloads import CROP, MEAN, SIDE, STD

DISTINCT = 2_000
_OCTAVES = ((4, 60.0), (16, 35.0), (64, 16.0))
_NOISE = (6.0, 14.0)
_QUALITY = 88


def encodings(count: int = DISTINCT) -> Iterator[bytes]:
    """JPEGs of smooth random fields with noise, about 25 kB each."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for _ in range(count):
        noise = rng.uniform(*_NOISE)
        pixels = rng.normal(128.0, noise, (SIDE, SIDE, 3)).astype(np.float32)
        for size, strength in _OCTAVES:
            for channel in range(3):
                coarse = Image.fromarray(rng.normal(0, strength, (size, size)).astype(np.float32))
                fine = coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
                pixels[:, :, channel] += np.asarray(fine)
        buffer = io.BytesIO()
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.save(buffer, "JPEG", quality=_QUALITY)
        yield buffer.getvalue()


def numbered(encoding: bytes, number: int) -> bytes:
    """The same image with a comment, so that no two rows hold the same bytes."""
    comment = b"row %020d" % number
    return encoding[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + encoding[2:]


def own_decoder() -> str:
    """The decoder that is used where all loaders are given the same one."""
    try:
        import simplejpeg  # noqa: F401
    except ImportError:
        return "pillow"
    return "simplejpeg"


def decode(data: Any, decoder: str) -> np.ndarray:
    """Decode to uint8 of shape (height, width, 3)."""
    if decoder == "simplejpeg":
        import simplejpeg

        pixels: np.ndarray = simplejpeg.decode_jpeg(data, "RGB")
        return pixels
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def planes(pixels: np.ndarray) -> np.ndarray:
    """Channels first, as networks want them."""
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def crop(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A random resized crop to float32 of shape (3, 224, 224), normalised.

    Args:
        pixels: uint8 of shape (height, width, 3).
        rng: Chooses 8 to 100 % of the area, at ratios of 3:4 to 4:3.
    """
    from PIL import Image

    height, width = pixels.shape[:2]
    area = height * width * rng.uniform(0.08, 1.0)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
    w, h = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
    x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
    image = Image.fromarray(pixels).resize(
        (CROP, CROP), Image.Resampling.BILINEAR, box=(x, y, x + w, y + h)
    )
    values = np.asarray(image).transpose(2, 0, 1).astype(np.float32)
    values *= _SCALE
    values -= _SHIFT
    return values


_SCALE = (1 / (255 * np.array(STD, np.float32)))[:, None, None]
_SHIFT = (np.array(MEAN, np.float32) / np.array(STD, np.float32))[:, None, None]


def finished(data: Any, images: str, decoder: str, rng: np.random.Generator) -> Any:
    """What a loader that works row by row makes of a file: bytes, pixels or a crop."""
    if images == "bytes":
        return data
    pixels = decode(data, decoder)
    return planes(pixels) if images == "decode" else crop(pixels, rng)
