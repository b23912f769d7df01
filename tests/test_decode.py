"""Images from bytes, and what is said of bytes that are none."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from destrier import Image as Wanted
from destrier import StreamingDataLoader, StreamingDataset, images, jpeg
from destrier.columns import from_arrow
from destrier.errors import ArgumentError, DecodeError
from destrier.images import decode_image, decode_images
from destrier.memory import fresh

if TYPE_CHECKING:
    from pathlib import Path


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, so that every way to decode shows in the pixels."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 4, 3), np.uint8)).resize((width, height))
    return Image.fromarray(
        np.asarray(coarse) // 2 + rng.integers(0, 99, (height, width, 3), np.uint8)
    )


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def png() -> bytes:
    return encoded(Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)), "PNG")


def with_pillow(data: bytes, mode: str) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jpeg, "_library", lambda: None)


def outcome(data: bytes, wanted: Wanted) -> tuple[object, ...]:
    """Shape and pixels, or the text of the error."""
    try:
        pixels = decode_image(data, wanted)
    except ValueError as error:
        return (str(error),)
    return pixels.shape, pixels.tobytes()


@pytest.mark.parametrize(("mode", "channels"), [("rgb", 3), ("rgba", 4), ("gray", 1)])
def test_shape_is_height_width_channels(mode, channels):
    image = decode_image(png(), Wanted(mode))
    assert (image.shape, image.dtype) == ((3, 4, channels), np.uint8)
    assert image[:, :, 0].ravel().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"<html>no such picture", "(21 bytes that begin with 3c 68 74 6d 6c 3e 6e 6f)"),
        (b"\xff", "(1 bytes that begin with ff)"),
        (b"", "(0 bytes)"),
        (png()[:40], "bytes that begin with 89 50 4e 47 0d 0a 1a 0a)"),
        (encoded(picture(40, 40))[:600], "bytes that begin with ff d8 ff e0 00 10 4a 46)"),
    ],
)
def test_an_error_describes_the_bytes(data, shown):
    with pytest.raises(ValueError, match=r"\w \(") as caught:
        decode_image(data, Wanted())
    assert str(caught.value).endswith(shown)
    assert "BytesIO" not in str(caught.value)
    assert "0x" not in str(caught.value)


# ---- simplejpeg gives Pillow's pixels ----------------------------------------------------------


def exif() -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = 6  # turned, which Pillow leaves to its user
    return tags


KINDS = {
    "4:4:4": encoded(picture(40, 56), subsampling=0),
    "4:2:2": encoded(picture(41, 57), subsampling=1),
    "4:2:0": encoded(picture(41, 57), subsampling=2),
    "progressive": encoded(picture(40, 56), progressive=True),
    "restarts": encoded(picture(40, 56), restart_marker_blocks=3),
    "comment": encoded(picture(40, 56), comment=b"\xff\xda"),
    "exif": encoded(picture(40, 56), exif=exif()),
    "exif alone": b"\xff\xd8" + encoded(picture(40, 56), exif=exif())[20:],  # as cameras write
    "profile": encoded(picture(40, 56), icc_profile=b"profile" * 50),
    "rgb": encoded(picture(40, 56), keep_rgb=True),
    "gray": encoded(picture(40, 56).convert("L")),
    "cmyk": encoded(picture(40, 56).convert("CMYK")),
    "tiny": encoded(picture(3, 1)),
}
WANTED = [Wanted(), Wanted("gray"), Wanted("rgba"), Wanted(at_least=(20, 20))]


@pytest.fixture
def _simplejpeg() -> None:
    pytest.importorskip("simplejpeg")
    assert jpeg._library() is not None, "its pixels are not those of this Pillow"


@pytest.mark.usefixtures("_simplejpeg")
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_do_not_depend_on_the_decoder(kind, monkeypatch):
    mine = [outcome(KINDS[kind], wanted) for wanted in WANTED]
    taken = jpeg.decode_jpeg(KINDS[kind], jpeg.read_header(KINDS[kind]), "RGB", None, None)
    assert (taken is None) == (kind in ("cmyk",))
    without_simplejpeg(monkeypatch)
    assert mine == [outcome(KINDS[kind], wanted) for wanted in WANTED]
    assert mine[0][1] == with_pillow(KINDS[kind], "RGB").tobytes()


@pytest.mark.usefixtures("_simplejpeg")
@pytest.mark.filterwarnings("ignore")  # Pillow's, of what is odd in a file
def test_damaged_files_do_not_depend_on_the_decoder(monkeypatch):
    rng = np.random.default_rng(0)
    files = []
    for number in range(600):
        data = bytearray(list(KINDS.values())[number % len(KINDS)])
        for _ in range(rng.integers(1, 4)):
            place = int(rng.integers(len(data) if number % 2 else min(len(data), 600)))
            data[place] ^= 1 << int(rng.integers(8))
        if number % 5 == 0:
            del data[int(rng.integers(len(data))) :]
        files.append(bytes(data))
    mine = [outcome(data, WANTED[i % 4]) for i, data in enumerate(files)]
    without_simplejpeg(monkeypatch)
    assert mine == [outcome(data, WANTED[i % 4]) for i, data in enumerate(files)]
    assert 100 < sum(len(found) == 1 for found in mine) < 500


@pytest.mark.usefixtures("_simplejpeg")
def test_what_pillow_refuses_for_its_size_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="exceeds limit of 200 pixels"):
        decode_image(KINDS["4:2:0"], Wanted())


# ---- scaled while decoding ---------------------------------------------------------------------


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize(
    ("least", "size"),
    [
        ((301, 413), (301, 413)),
        ((152, 1), (301, 413)),
        ((151, 207), (151, 207)),
        ((76, 104), (76, 104)),
        ((1, 1), (38, 52)),
        ((999, 1), (301, 413)),
    ],
)
def test_jpegs_are_scaled_to_the_least_that_is_enough(library, least, size, monkeypatch):
    if library == "pillow":
        without_simplejpeg(monkeypatch)
    data = encoded(picture(301, 413))
    assert decode_image(data, Wanted(at_least=least)).shape == (*size, 3)
    lossless = encoded(picture(30, 40), "PNG")
    assert decode_image(lossless, Wanted(at_least=(8, 8))).shape == (30, 40, 3)


@pytest.mark.parametrize("least", [(0, 5), (5,), 224, ("a", 1), (True, 2)])
def test_a_size_that_is_none_is_refused(least):
    with pytest.raises(ArgumentError, match="at_least must be"):
        Wanted(at_least=least)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ArgumentError, match="'cmyk' is not one of rgb, rgba, gray"):
        Wanted("cmyk")


# ---- batches -----------------------------------------------------------------------------------


def test_images_of_one_size_are_decoded_into_one_array():
    files = [encoded(picture(24, 32, seed), kind) for seed in range(3) for kind in ("JPEG", "PNG")]
    pixels, errors = decode_images(np.array(files, np.object_), Wanted())
    assert (pixels.shape, pixels.dtype, errors) == ((6, 24, 32, 3), np.uint8, {})
    assert [image.tobytes() for image in pixels] == [with_pillow(f, "RGB").tobytes() for f in files]


def test_images_of_several_sizes_stay_apart():
    files = [encoded(picture(24 + place % 2, 32)) for place in range(5)]
    pixels, _ = decode_images(np.array([*files, None], np.object_), Wanted())
    assert pixels.dtype == np.object_
    assert [image.tobytes() for image in pixels[:5]] == [
        with_pillow(file, "RGB").tobytes() for file in files
    ]
    assert pixels[5] is None


def stacks_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the stacks that are asked for."""
    asked: list[tuple[int, ...]] = []

    def noted(shape: tuple[int, ...], dtype: object) -> np.ndarray:
        asked.append(shape)
        return fresh(shape, dtype)

    monkeypatch.setattr(images, "fresh", noted)
    return asked


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_no_memory_is_taken_for_as_many_as_the_first(kind, monkeypatch):
    asked = stacks_of(monkeypatch)
    files = [encoded(picture(240, 320), kind), *[encoded(picture(24, 32), kind)] * 9]
    pixels, _ = decode_images(np.array(files, np.object_), Wanted())
    assert [image.shape for image in pixels] == [(240, 320, 3), *[(24, 32, 3)] * 9]
    assert asked == []


def test_jpegs_that_differ_late_are_known_by_their_headers(monkeypatch):
    asked = stacks_of(monkeypatch)
    files = [encoded(picture(240, 320))] * 5 + [encoded(picture(24, 32))]
    decode_images(np.array(files, np.object_), Wanted())
    assert asked == []
    decode_images(np.array(files[:5], np.object_), Wanted())
    assert asked == [(5, 240, 320, 3)]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_of_several_sizes_keep_no_others(kind):
    sizes = [24, 24, 24, 25, 24]
    files = [encoded(picture(height, 32, seed), kind) for seed, height in enumerate(sizes)]
    files.insert(1, b"no image")
    pixels, errors = decode_images(np.array(files, np.object_), Wanted())
    assert list(errors) == [1]
    assert pixels[1] is None
    for image, file in zip(np.delete(pixels, 1), np.delete(files, 1), strict=True):
        assert image.base is None or memoryview(image.base).nbytes == image.nbytes
        assert image.tobytes() == with_pillow(file, "RGB").tobytes()


def jpeg_table(path: Path, files: list[bytes]) -> Path:
    field = pa.field("image", pa.binary(), metadata={"content_type": "image/jpeg"})
    lance.write_dataset(pa.table([files], schema=pa.schema([field])), path)
    return path


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_channels_come_first_and_lie_last(tmp_path, format):
    files = [encoded(picture(24, 32, seed)) for seed in range(4)]
    with StreamingDataLoader(
        jpeg_table(tmp_path / "t.lance", files), batch_size=4, format=format, with_index=True
    ) as loader:
        batch = next(iter(loader))
    images = torch.as_tensor(batch["image"])
    assert images.shape == (4, 3, 24, 32)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for image, offset in zip(images, batch["row_offset"].tolist(), strict=True):
        expected = with_pillow(files[offset], "RGB").transpose(2, 0, 1)
        assert np.array_equal(image.numpy(), expected)


@pytest.mark.parametrize(("policy", "rows"), [("skip", 3), ("fill", 4)])
def test_a_bad_image_leaves_the_others(tmp_path, policy, rows):
    files = [encoded(picture(24, 32, seed)) for seed in range(4)]
    files[0] = files[0][:500]
    with StreamingDataLoader(
        jpeg_table(tmp_path / "t.lance", files), batch_size=4, on_error=policy, with_index=True
    ) as loader:
        batch = next(iter(loader))
        (failure,) = loader.failures
    assert (failure.offset, failure.column) == (0, "image")
    assert batch["image"].shape == (rows, 3, 24, 32)
    for image, offset in zip(batch["image"], batch["row_offset"].tolist(), strict=True):
        expected = with_pillow(files[offset], "RGB").transpose(2, 0, 1)
        assert np.array_equal(image.numpy(), expected)


def test_an_image_that_fills_the_place_of_another_is_a_copy(tmp_path):
    files = [encoded(picture(8, 8 + i, i)) for i in range(2)]
    table = jpeg_table(tmp_path / "t.lance", [*files, files[1][:300]])
    dataset = StreamingDataset(table, shuffle=False)
    with StreamingDataLoader(dataset, batch_size=3, on_error="fill") as loader:
        _, image, filled = next(iter(loader))["image"]
    assert torch.equal(image, filled)
    image.zero_()
    assert filled.any()


def test_the_loader_scales_what_it_is_told_to(tmp_path):
    table = jpeg_table(tmp_path / "t.lance", [encoded(picture(64, 96, seed)) for seed in range(4)])
    decode = {"image": Wanted("rgb", at_least=(20, 20))}
    with StreamingDataLoader(table, batch_size=4, decode=decode) as loader:
        assert next(iter(loader))["image"].shape == (4, 3, 32, 48)


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


@pytest.mark.parametrize("mode", ["rgb", "rgba", "gray"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_of_several_sizes_may_be_written_to(mode: str, kind: str) -> None:

    files = []
    for side in (8, 9, 10, 10):
        file = io.BytesIO()
        Image.new("RGB", (side, 12), (10, 200, 30)).save(file, kind)
        files.append(file.getvalue())
    found, errors = decode_images(np.array(files, object), Wanted(mode))
    assert not errors
    assert [image.shape[1] for image in found] == [8, 9, 10, 10]
    assert all(image.flags.writeable for image in found)


def test_views_of_files_give_the_pixels_and_errors_of_their_bytes(monkeypatch):
    large = encoded(picture(600, 400), quality=100)  # so that they are large in the mean
    files = [large, *KINDS.values(), png(), b"", b"<html>", KINDS["4:2:0"][:300], None]
    small = from_arrow(pa.array([b"a", None, b"b"]), views=True)
    assert small.values.tolist() == [b"a", None, b"b"]
    skipped = pa.array([b"no", *files, bytes(1 << 20)]).slice(1, len(files))
    views = from_arrow(skipped, views=True).values
    assert {type(value) for value in views} == {pa.Buffer, type(None)}
    assert [value and bytes(value) for value in views] == [
        value and bytes(value) for value in files
    ]
    for library in (True, False):
        if not library:
            without_simplejpeg(monkeypatch)
        found = decode_images(views, Wanted())
        wanted = decode_images(np.array(files, np.object_), Wanted())
        assert found[1] == wanted[1]
        assert len(wanted[1]) >= 3
        for mine, theirs in zip(found[0], wanted[0], strict=True):
            assert np.array_equal(mine, theirs)


def test_only_columns_that_are_decoded_are_held_as_views(tmp_path):
    files = [encoded(picture(64, 64, seed), quality=95) for seed in range(40)]
    table = pa.table({"image": files, "file": files})
    lance.write_dataset(table, str(tmp_path / "two.lance"))
    for prefetch_bytes in (1 << 20, 1 << 28):  # single shares, all
        with StreamingDataLoader(
            str(tmp_path / "two.lance"),
            batch_size=10,
            decode={"image": "rgb"},
            prefetch_bytes=prefetch_bytes,
            with_index=True,
        ) as loader:
            for batch in loader:
                for pixels, file, row in zip(
                    batch["image"], batch["file"], batch["row_offset"].tolist(), strict=True
                ):
                    assert type(file) is bytes
                    assert file == files[row]
                    assert np.array_equal(pixels.permute(1, 2, 0), with_pillow(file, "RGB"))
