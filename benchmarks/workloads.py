"""What is measured: tables, what is asked of them, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

CLASSES = 100
BLOCK = 2_049
TOKENS = 50_257
SMALL_COLUMNS = 8
WIDE_COLUMNS = 50
SIDE = 256
CROP = 224
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Table:
    """Rows made from a seed, sorted by class: 100 classes, one block of rows each.

    Attributes:
        name: Of the data set, in every format.
        rows: Of the full table; the quick one has `quick`.
        quick: See above.
        title: What a row is.
    """

    name: str
    rows: int
    quick: int
    title: str


TABLES = {
    table.name: table
    for table in (
        Table("small", 2_000_000, 200_000, "8 float32 and a label"),
        Table("wide", 1_000_000, 100_000, "50 float32"),
        Table("tokens", 100_000, 10_000, "2,049 int32"),
        Table("jpeg", 50_000, 4_000, "a JPEG of 256 x 256 of about 25 kB and a label"),
    )
}


@dataclass(frozen=True)
class Workload:
    """What is asked of a table.

    Attributes:
        name: On the command line.
        title: In the docs.
        table: Key of `TABLES`.
        batch: Rows of a batch.
        columns: What is asked for; None is all.
        filter: SQL over the columns, or None.
        images: What becomes of images: ``"bytes"``, ``"decode"`` or ``"crop"``; None has none.
    """

    name: str
    title: str
    table: str
    batch: int
    columns: tuple[str, ...] | None = None
    filter: str | None = None
    images: str | None = None

    @property
    def decodes(self) -> bool:
        """Whether images are decoded."""
        return self.images in ("decode", "crop")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("small", "small rows", "small", 1024),
        Workload("wide", "3 of 50 columns", "wide", 1024, ("c0", "c20", "c40")),
        Workload("tokens", "token blocks", "tokens", 128),
        Workload("jpeg-bytes", "JPEG bytes", "jpeg", 256, images="bytes"),
        Workload("jpeg-decode", "JPEG decoded to uint8", "jpeg", 128, images="decode"),
        Workload("jpeg-crop", "JPEG, random crop to 224 float32", "jpeg", 64, images="crop"),
        Workload("filter", "a filter that keeps 10 %", "small", 1024, filter="f0 < 0.1"),
    )
}
KEPT_BELOW = 0.1  # the filter of the workload above, for those who have no filters
