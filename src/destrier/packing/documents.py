"""A stream of blocks: from documents and their packing to what an order and a feed need."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from destrier.block import Line
from destrier.caching.location import CacheFolder
from destrier.counters import Counts
from destrier.errors import ColumnError
from destrier.keyed import Ints
from destrier.order import Order
from destrier.packing.packing import Packing
from destrier.packing.pieces import BlockRows, Blocks
from destrier.packing.reader import PackedReader
from destrier.read import Reader
from destrier.selection import RowList
from destrier.table import Table

__all__ = ["PackedRows", "PackingReport"]

_LOOKED_AT_BLOCKS = 4096
_LOOKED_AT_RUNS = 8


@dataclass(frozen=True)
class PackingReport:
    """What packing makes of documents.

    Attributes:
        how: ``"concatenate"`` or ``"best_fit"``.
        block_size: Tokens of a block.
        documents: Selected rows.
        empty: Of them without a token.
        tokens: Of all documents, with those that end them.
        blocks: The samples of an epoch.
        waste: The share of pads in all blocks.
        unreached: Tokens that an epoch leaves out, other ones in each where cuts move.
        cut: The share of pieces that end inside their document, in some blocks.
    """

    how: str
    block_size: int
    documents: int
    empty: int
    tokens: int
    blocks: int
    waste: float
    unreached: int
    cut: float

    @property
    def documents_a_block(self) -> float:
        """How many documents the tokens of a block are of, at least 1."""
        return max(1.0, self.block_size * (self.documents - self.empty) / self.tokens)


@dataclass(frozen=True)
class PackedRows:
    """Documents as blocks.

    Attributes:
        packing: How.
        rows: The documents: rows of a table.
        blocks: The blocks.
        shuffle: Whether the order permutes them.
    """

    packing: Packing
    rows: RowList
    blocks: Blocks
    shuffle: bool

    @property
    def moves(self) -> bool:
        """Whether each epoch cuts other blocks: what was read in one is of no use in the next."""
        return self.shuffle and self.blocks.moves

    @cached_property
    def digest(self) -> str:
        """Of all that decides what is in the blocks."""
        return hashlib.blake2b(self.blocks.digest.encode(), digest_size=16).hexdigest()

    @property
    def addresses(self) -> RowList:
        """From the positions of `line` to addresses of blocks."""
        if self.moves:
            return _Addresses(self.blocks.count, self.digest)
        return self.blocks.rows(0, 0, shuffle=False)

    def line(self, order: Order) -> Line:
        """The order as it is read: where cuts move, its positions are addresses."""
        if not self.moves:
            return order
        return _Moved(order, self.blocks.rows(order.seed, order.epoch, shuffle=True))

    def reader(
        self,
        table: Table,
        columns: list[str] | None,
        *,
        tolerant: bool = False,
        counts: Counts | None = None,
        cache: CacheFolder | None = None,
    ) -> PackedReader:
        """What reads blocks by their addresses."""
        names = self.columns(table, columns)
        reader = Reader(
            table,
            self.packing.read_columns(names),
            tolerant=tolerant,
            counts=counts,
            cache=cache,
            rows=self.rows,
        )
        return PackedReader(reader, self.packing, self.blocks, self.rows, names)

    def kept_bytes(self, table: Table, columns: list[str]) -> int:
        """Bytes of all documents in memory, for some columns of blocks."""
        read = self.packing.read_columns(columns)
        return self.blocks.lengths.tokens * self.packing.token_bytes(table, read)

    def columns(self, table: Table, columns: list[str] | None) -> list[str]:
        """The columns of blocks that are asked for; None is all.

        Raises:
            ColumnError: If blocks have no such column, or none is left.
        """
        schema = self.packing.schema(table)
        if columns is None:
            return list(schema.names)
        for i, name in enumerate(columns):
            if name not in schema.names:
                raise ColumnError(
                    f"no column {name!r} in blocks of {table.name}; they have: "
                    f"{', '.join(schema.names)} (labels=, documents= and parallel= of Packed add "
                    "more)"
                )
            if name in columns[:i]:
                raise ColumnError(f"column {name!r} is named twice")
        if not columns:
            raise ColumnError(
                f"columns is empty; blocks of {table.name} have: {', '.join(schema.names)}"
            )
        return list(columns)

    def read_rows(self, addresses: Ints) -> Ints:
        """The rows of the table that some blocks are made of, each once, ascending."""
        documents = np.unique(self.blocks.pieces(addresses).document)
        return np.unique(self.rows.offsets(documents))

    def report(self) -> PackingReport:
        """Describe the blocks."""
        blocks, lengths, size = self.blocks, self.blocks.lengths, self.packing.block_size
        content = blocks.count * size
        return PackingReport(
            how=self.packing.how,
            block_size=size,
            documents=lengths.count,
            empty=lengths.count - lengths.documents,
            tokens=lengths.tokens,
            blocks=blocks.count,
            waste=(content - blocks.tokens) / content,
            unreached=blocks.unreached,
            cut=self._cut(),
        )

    def _cut(self) -> float:
        """The share of pieces that end inside their document, in runs of successive blocks."""
        count = self.blocks.count
        run = min(_LOOKED_AT_BLOCKS // _LOOKED_AT_RUNS, count)
        starts = np.linspace(0, count - run, _LOOKED_AT_RUNS).astype(np.int64)
        chosen = np.unique(starts[:, None] + np.arange(run))
        pieces = self.blocks.pieces(self.blocks.rows(0, 0, shuffle=False).offsets(chosen))
        ends = pieces.begin + pieces.length
        return float(np.mean(ends < self.blocks.lengths.at(pieces.document)))


class _Addresses:
    """Positions that are addresses already."""

    def __init__(self, count: int, digest: str) -> None:
        self._count = count
        self.digest = digest

    def __len__(self) -> int:
        return self._count

    def offsets(self, positions: Ints) -> Ints:
        """As they are."""
        return positions


class _Moved:
    """An order whose positions are the addresses of its epoch.

    Args:
        order: An order of block numbers.
        rows: From number to address.
    """

    def __init__(self, order: Order, rows: BlockRows) -> None:
        self._order = order
        self._rows = rows
        self.n = order.n
        self.num_splits = order.num_splits
        self.windowed = order.windowed
        self.window_rows = order.window_rows
        self.locate = order.locate
        self.cycles = order.cycles

    def rows(self, g: Ints) -> Ints:
        """The address of each sample."""
        return self._rows.offsets(self._order.rows(g))

    def window_reads(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
        """What whole windows consist of."""
        positions, window, place = self._order.window_reads(lo, hi)
        return self._rows.offsets(positions), window, place
