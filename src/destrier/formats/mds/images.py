"""Raw images, and lists of images in one value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from destrier.errors import SourceError
from destrier.formats.gather import bounds_of, even, joined, list_offsets, uneven
from destrier.formats.mds.arrays import refuse_nulls
from destrier.formats.mds.cells import Cells
from destrier.formats.mds.encodings import Encoding, Fail
from destrier.formats.pixels import wrong_pixels

__all__ = ["Items", "Pil"]

_HEAD = 12


@dataclass(frozen=True)
class Pil(Encoding):
    """An image as Pillow holds it: size, mode and the bytes of the pixels."""

    name: str = "pil"

    @property
    def type(self) -> pa.DataType:
        """A struct of the four."""
        return pa.struct(
            [
                ("width", pa.uint32()),
                ("height", pa.uint32()),
                ("mode", pa.string()),
                ("data", pa.large_binary()),
            ]
        )

    def decode(self, cells: Cells) -> pa.Array:
        """Gather the four parts."""
        cells.at_least(_HEAD, "the head of an image")
        widths, heights = cells.fixed("<u4", 0), cells.fixed("<u4", 4)
        mode_sizes = cells.fixed("<u4", 8).astype(np.int64)
        cells.at_least(_HEAD + mode_sizes, "the mode of an image")
        modes = cells.within(cells.starts + _HEAD, mode_sizes).text()
        sizes = cells.lengths - _HEAD - mode_sizes
        wrong = wrong_pixels(widths, heights, modes, sizes)
        if wrong is not None:
            raise cells.fail(*wrong)
        data = cells.within(cells.starts + _HEAD + mode_sizes, sizes).bytes()
        parts = [pa.array(widths), pa.array(heights), modes, data]
        return pa.StructArray.from_arrays(parts, fields=list(self.type))

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        """Put the four parts together."""
        for part in self.type:
            if array.field(part.name).null_count:
                nulls = array.field(part.name).is_null().to_numpy(zero_copy_only=False)
                raise fail(int(np.argmax(nulls)), f"has a null {part.name}; MDS has none")
        modes = array.field("mode").cast(pa.large_binary())
        head = np.empty((len(array), 3), "<u4")
        head[:, 0] = array.field("width").to_numpy()
        head[:, 1] = array.field("height").to_numpy()
        head[:, 2] = np.diff(bounds_of(modes))
        return joined(even(head, len(array), _HEAD), modes, array.field("data"))


@dataclass(frozen=True)
class Items(Encoding):
    """A list of values of one encoding in a value.

    Attributes:
        name: As MDS writes it.
        inner: Of the items.
        reserved: Whether four bytes, all zero, stand before the number of items.
        may_be_empty: Whether MosaicML Streaming can read a list of no items.
    """

    name: str
    inner: Encoding
    content_type: bytes | None = None
    reserved: bool = True
    may_be_empty: bool = True

    @property
    def type(self) -> pa.DataType:
        """A list of the items' type."""
        return pa.list_(self.inner.type)

    def decode(self, cells: Cells) -> pa.Array:
        """Gather the items of all rows at once."""
        head = 8 if self.reserved else 4
        cells.at_least(head, "the head of a list")
        if self.reserved and (words := cells.fixed("<u4")).any():
            index = int(np.argmax(words != 0))
            raise cells.fail(index, f"begins with {words[index]}, which is reserved and must be 0")
        counts = cells.fixed("<u4", head - 4).astype(np.int64)
        table = head + 4 * counts
        cells.at_least(table, "the sizes of its items")
        sizes = np.frombuffer(
            cells.within(cells.starts + head, 4 * counts).bytes().buffers()[2] or b"", "<u4"
        ).astype(np.int64)
        bounds = list_offsets(counts)
        ends = list_offsets(sizes)
        totals = ends[bounds[1:]] - ends[bounds[:-1]]
        wrong = table + totals != cells.lengths
        if wrong.any():
            index = int(np.argmax(wrong))
            raise cells.fail(
                index,
                f"holds {cells.lengths[index]:,} bytes, but its {counts[index]:,} items take "
                f"{table[index] + totals[index]:,}",
            )
        # where the items of a row begin, less what the items of rows before take
        shift = np.repeat(cells.starts + table - ends[bounds[:-1]], counts)
        items = Cells(
            cells.buffer,
            ends[:-1] + shift,
            sizes,
            np.repeat(cells.rows, counts),
            cells.file,
            cells.column,
        )
        offsets = pa.array(bounds.astype(np.int32))
        return pa.ListArray.from_arrays(offsets, self.inner.decode(items))

    def encode(self, array: pa.Array, fail: Fail) -> pa.LargeBinaryArray:
        """Number, sizes and items."""
        bounds = bounds_of(array)
        bounds -= bounds[0]
        counts = np.diff(bounds)
        if not self.may_be_empty and not counts.all():
            index = int(np.argmin(counts))
            raise fail(index, f"is an empty list, which MosaicML Streaming cannot read {self.name}")
        values = array.flatten()
        refuse_nulls(values, fail, bounds)

        def owner(index: int, problem: str) -> SourceError:
            return fail(int(np.searchsorted(bounds, index, "right")) - 1, problem)

        items = self.inner.encode(values, owner)
        ends = bounds_of(items)
        sizes = np.diff(ends).astype("<u4")
        head = np.zeros((len(array), 2), "<u4")
        head[:, 1] = counts
        first = head if self.reserved else head[:, 1:]
        return joined(
            even(first, len(array), first.itemsize * first.shape[1]),
            uneven(sizes, list_offsets(4 * counts)),
            uneven(items.buffers()[2], ends[bounds]),
        )
