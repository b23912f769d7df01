"""JPEGs from a seed that cost about what photographs do, and tables of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from common import DATA

DISTINCT = 2_000
_COARSE = (4, 16, 64)


def jpegs(side: int, quality: int, distinct: int = DISTINCT) -> list[bytes]:
    """Different JPEGs of one size: 256 and quality 85 are about 25 kB, 768 and 83 about 200 kB."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    bases = []
    for _ in range(20):
        pixels = np.full((2 * side, 2 * side, 3), 128, np.float32)
        for coarse in (*_COARSE, 2 * side):
            weight = 40 if coarse <= 16 else 16
            noise = rng.standard_normal((coarse, coarse, 3)).astype(np.float32) * weight
            for c in range(3):
                plane = Image.fromarray(noise[:, :, c])
                pixels[:, :, c] += np.asarray(
                    plane.resize((2 * side,) * 2, Image.Resampling.BICUBIC)
                )
        bases.append(Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    files = []
    for i in range(distinct):
        left, top = rng.integers(0, side, 2).tolist()
        file = io.BytesIO()
        bases[i % len(bases)].crop((left, top, left + side, top + side)).save(
            file, "JPEG", quality=quality
        )
        files.append(file.getvalue())
    return files


def batches(files: list[bytes], rows: int, field: Any = None) -> Iterator[Any]:
    """Record batches of id and image, the files used over and over."""
    import lance
    import pyarrow as pa

    image = field or pa.field("image", pa.large_binary(), metadata={"content_type": "image/jpeg"})
    schema = pa.schema([pa.field("id", pa.int64()), image])
    for start in range(0, rows, 500):
        ids = range(start, min(start + 500, rows))
        values = [files[i * 7919 % len(files)] for i in ids]
        is_blob = getattr(image.type, "extension_name", "").startswith("lance.blob")
        array = lance.blob_array(values) if is_blob else pa.array(values, image.type)
        yield pa.record_batch([pa.array(ids, pa.int64()), array], schema=schema)


def picture_table(rows: int) -> Any:
    """A table of an id and a JPEG of 256 by 256 pixels."""
    path = DATA / f"pictures-{rows}.lance"
    if not path.exists():
        import lance

        reader = batches(jpegs(256, 85), rows)
        first = next(reader)

        def every() -> Iterator[Any]:
            yield first
            yield from reader

        lance.write_dataset(every(), str(path), schema=first.schema)
    return path
