"""Images from bytes, and what is said of bytes that are none."""

from __future__ import annotations

import io

import lance
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from destrier import StreamingDataLoader
from destrier.decode import decode_image
from destrier.errors import DecodeError


def png() -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(("mode", "channels"), [("rgb", 3), ("rgba", 4), ("gray", 1)])
def test_shape_is_channels_height_width(mode, channels):
    image = decode_image(png(), mode)
    assert (image.shape, image.dtype) == ((channels, 3, 4), np.uint8)
    assert image[0].ravel().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"<html>no such picture", "(21 bytes that begin with 3c 68 74 6d 6c 3e 6e 6f)"),
        (b"\xff", "(1 bytes that begin with ff)"),
        (b"", "(0 bytes)"),
        (png()[:40], "bytes that begin with 89 50 4e 47 0d 0a 1a 0a)"),
    ],
)
def test_an_error_describes_the_bytes(data, shown):
    with pytest.raises(ValueError, match=r"\w \(") as caught:
        decode_image(data, "rgb")
    assert str(caught.value).endswith(shown)
    assert "BytesIO" not in str(caught.value)
    assert "0x" not in str(caught.value)


PAIR = pa.list_(pa.int64(), 2)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array([1, None]), 'row 1 of .* is null, .*filter="x IS NOT NULL", or pass format='),
        (pa.array([[1], [2, None]]), "row 1 of .* has a null in its list, .* without such nulls"),
        (pa.array([[1, 2], [3, None]], PAIR), 'a null in its list, .*"x IS NOT NULL", if it is'),
    ],
    ids=["integer", "list", "fixed-size list"],
)
def test_a_null_without_a_tensor_value_names_what_helps(tmp_path, values, shown):
    lance.write_dataset(pa.table({"x": values}), tmp_path / "nulls.lance")
    with (
        StreamingDataLoader(tmp_path / "nulls.lance", batch_size=2) as loader,
        pytest.raises(DecodeError, match=shown),
    ):
        next(iter(loader))
