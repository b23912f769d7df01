"""How documents become blocks: the parameters, checked, and what a block consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from destrier.check import integer
from destrier.columns import dense_bytes, dense_type
from destrier.errors import ArgumentError, ColumnError
from destrier.packing.best_fit import BestFit
from destrier.packing.concatenate import Concatenated
from destrier.packing.lengths import find_lengths, list_kind
from destrier.packing.pieces import Blocks
from destrier.selection import RowList
from destrier.table import Table

__all__ = ["PACKING_VERSION", "How", "Packing"]

PACKING_VERSION = "destrier-pack-1"
How: TypeAlias = Literal["concatenate", "best_fit"]

_IDS = {"int32": pa.int32(), "int64": pa.int64()}
_BEST_FIT_BYTES = 512 << 10
_LARGEST_BLOCK = 1 << 31
_TOKEN_BYTES = 4  # of a block in memory, whatever the type that is asked for: sizes follow from it


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How documents become blocks. The arguments are those of `Packed`."""

    column: str
    block_size: int
    how: How
    overlap: int
    window: int
    eos_id: int | None
    pad_id: int | None
    labels: bool
    ignore_index: int
    mask_borders: bool
    documents: bool
    parallel: Sequence[str]
    dtype: Literal["int32", "int64"]

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise ArgumentError(f"how must be one of {', '.join(get_args(How))}, got {self.how!r}")
        if self.dtype not in _IDS:
            raise ArgumentError(f"dtype must be one of {', '.join(_IDS)}, got {self.dtype!r}")
        most = int(np.iinfo(self.dtype).max) + 1
        for name, least, below in (
            ("block_size", 1, _LARGEST_BLOCK),
            ("window", 1, _LARGEST_BLOCK),
            ("overlap", 0, None),
            ("eos_id", 0, most),
            ("pad_id", 0, most),
            ("ignore_index", -most, most),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(name, value, least, below))
        if self.overlap >= self.block_size:
            raise ArgumentError(
                f"overlap is {self.overlap}, which must be less than block_size "
                f"({self.block_size}): blocks would not get on"
            )
        if self.how == "best_fit":
            self._check_best_fit()
        elif self.pad_id is not None:
            raise ArgumentError(
                f"pad_id is {self.pad_id}, but with how='concatenate' every block is full; leave "
                "it out"
            )
        if isinstance(self.parallel, str):
            raise ArgumentError(f"parallel must be a list of names, got {self.parallel!r}")

    def _check_best_fit(self) -> None:
        if self.pad_id is None:
            raise ArgumentError(
                "how='best_fit' fills the ends of blocks: pass pad_id, a token that no document has"
            )
        if self.overlap:
            raise ArgumentError(
                f"overlap is {self.overlap}, but with how='best_fit' no block goes on where "
                "another ends; pass labels=True for next-token targets"
            )

    @property
    def text(self) -> str:
        """What decides which tokens are in which block, for states."""
        words = [
            PACKING_VERSION,
            self.how,
            f"column={self.column}",
            f"block_size={self.block_size}",
        ]
        if self.how == "best_fit":
            words.append(f"window={self.window}")
        elif self.overlap:
            words.append(f"overlap={self.overlap}")
        if self.eos_id is not None:
            words.append(f"eos_id={self.eos_id}")
        return " ".join(words)

    @property
    def extra(self) -> int:
        """Tokens that are added to each document that has any."""
        return 0 if self.eos_id is None else 1

    @property
    def row_bytes(self) -> float:
        """Bytes of a block, about: what sizes of clumps follow from."""
        return float(self.block_size * _TOKEN_BYTES)

    @property
    def read_bytes(self) -> int | None:
        """What a clump should have; with best fit more, since it packs a window of documents."""
        return _BEST_FIT_BYTES if self.how == "best_fit" else None

    def blocks(self, table: Table, rows: RowList) -> Blocks:
        """The blocks of some documents.

        Args:
            table: The pinned table.
            rows: The documents: rows of the table.

        Raises:
            ColumnError: If the column holds no lists of integers.
            EmptyError: If there are fewer tokens than a block takes.
            ReadError: If a list is missing; names the row.
        """
        list_kind(table, self.column)
        lengths = find_lengths(table, rows, self.column, extra=self.extra)
        if self.how == "best_fit":
            return BestFit(lengths, self.block_size, self.window)
        return Concatenated(lengths, self.block_size, self.overlap)

    def schema(self, table: Table) -> pa.Schema:
        """The columns of blocks.

        Raises:
            ColumnError: If a column of the table cannot be cut into blocks.
        """
        list_kind(table, self.column)
        ids = pa.field("input_ids", pa.list_(_IDS[self.dtype], self.block_size))
        fields = [ids]
        if self.labels:
            fields.append(ids.with_name("labels"))
        if self.documents:
            fields.append(ids.with_name("position_ids"))
            fields.append(pa.field("document_ids", pa.list_(pa.int32(), self.block_size)))
            fields.append(pa.field("cu_seqlens", pa.list_(pa.int32())))
        table.check_columns(list(self.parallel))
        for name in self.parallel:
            if name in [field.name for field in fields]:
                raise ColumnError(f"a block gets a column {name!r}, which parallel names too")
            kind = self._item(table, name)
            fields.append(pa.field(name, pa.list_(kind, self.block_size)))
        return pa.schema(fields)

    def read_columns(self, columns: list[str]) -> list[str]:
        """The columns of the table that columns of blocks are made of."""
        return [self.column, *(name for name in columns if name in self.parallel)]

    def token_bytes(self, table: Table, columns: list[str]) -> int:
        """Bytes of a token in memory in some columns of the table."""
        items = (table.schema.field(name).type.value_type for name in columns)
        return sum(dense_bytes(item) for item in items)

    def _item(self, table: Table, name: str) -> pa.DataType:
        kind = table.schema.field(name).type
        lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        item: Any = kind.value_type if any(test(kind) for test in lists) else None
        dense = None if item is None else dense_type(item)
        if dense is None or dense[1] or pa.types.is_temporal(item):
            raise ColumnError(
                f"column {name!r} of {table.name} is of type {kind}; parallel columns are lists "
                "of numbers, as long as those of tokens"
            )
        return item
