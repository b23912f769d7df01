"""Blocks of tokens as LanceDB's arguments ask for them: in a given number, and in its layout.

Blocks are cut as `Concatenated` cuts them. An epoch has a given number of them. Where there are
more, it takes the first ones in table order; shuffled, it takes as many at even distances, and the
cuts move, so that each token is as likely to be in an epoch as any other. Where there are fewer,
what remains of the line and blocks of pads alone make up the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch

from destrier.check import integer
from destrier.errors import ArgumentError
from destrier.keyed import Ints
from destrier.packing.concatenate import Concatenated
from destrier.packing.lengths import Lengths, find_lengths
from destrier.packing.packing import Packing
from destrier.packing.pieces import BlockRows, Pieces
from destrier.selection import RowList
from destrier.sizing import default_num_splits
from destrier.table import Table

__all__ = ["Budget", "BudgetPacking", "BudgetRows", "PerEpoch", "block_rows", "budget_packing"]

PerEpoch: TypeAlias = "int | Literal['auto']"


class BudgetRows(BlockRows):
    """The addresses of a given number of blocks.

    Args:
        count: Blocks of an epoch.
        digest: Of what is in them.
        whole: Full blocks that there are to choose from.
        stride: Tokens of a block.
        first: The first token of the first one.
        circle: Tokens in all.
    """

    def __init__(
        self, count: int, digest: str, *, whole: int, stride: int, first: int, circle: int
    ) -> None:
        super().__init__(count, digest, stride=stride, first=first, circle=circle)
        self._whole = whole

    def offsets(self, positions: Ints) -> Ints:
        """The first token of each block; see `Budget` for what lies beyond the tokens."""
        if self.count <= self._whole:
            return super().offsets(positions * self._whole // self.count)
        tokens = super().offsets(positions)
        beyond = positions - self._whole
        made_up = np.where(beyond, 2 * self.circle + beyond, self.circle + tokens)
        return np.where(beyond < 0, tokens, made_up)


class Budget:
    """So many blocks of one line of tokens.

    The address of a full block is its first token, as for `Concatenated`. With C tokens in all,
    C and more stand for what remains of the line after its full blocks, 2·C and more for pads.

    Args:
        lengths: Of the documents.
        block_size: Tokens of a block.
        count: Blocks of an epoch; None takes all that are full.

    Raises:
        EmptyError: If there are fewer tokens than one block takes.
    """

    def __init__(self, lengths: Lengths, block_size: int, count: int | None) -> None:
        self._line = Concatenated(lengths, block_size)
        self.lengths = lengths
        self.count = self._line.count if count is None else count
        self.moves = self._line.moves

    @property
    def digest(self) -> str:
        """Of the lengths, the cut and the number."""
        return f"budget|{self.count}|{self._line.digest}"

    @property
    def tokens(self) -> int:
        """Those of full blocks, and of what remains if there is room for it."""
        if self.count > self._line.count:
            return self.lengths.tokens
        return self.count * self._line.block_size

    @property
    def unreached(self) -> int:
        """What there is no room for, other tokens in each epoch where cuts move."""
        return self.lengths.tokens - self.tokens

    def rows(self, seed: int, epoch: int, *, shuffle: bool) -> BudgetRows:
        """From position to address in an epoch."""
        line = self._line
        return BudgetRows(
            self.count,
            self.digest,
            whole=line.count if shuffle else min(line.count, self.count),
            stride=line.stride,
            first=line.rows(seed, epoch, shuffle=shuffle).first,
            circle=self.lengths.tokens,
        )

    def pieces(self, addresses: Ints, ahead: int = 0) -> Pieces:
        """What is in some blocks; there is nothing in those of pads."""
        total = self.lengths.tokens
        some = np.flatnonzero(addresses < 2 * total)
        rest = addresses[some] >= total
        pieces = self._line.pieces(addresses[some] % total, ahead)
        room = np.where(rest, self._line.unreached, self._line.block_size + ahead)[pieces.block]
        length = np.minimum(pieces.length, room - pieces.at)
        kept = length > 0
        return Pieces(
            some[pieces.block[kept]],
            pieces.document[kept],
            pieces.begin[kept],
            length[kept],
            pieces.at[kept],
        )


@dataclass(frozen=True, kw_only=True)
class BudgetPacking(Packing):
    """How documents become blocks in a given number.

    Attributes:
        reserved_id: The token of pads, which no document has.
        blocks_per_epoch: Their number, or ``"auto"`` for all that are full.
    """

    reserved_id: int
    blocks_per_epoch: PerEpoch

    def __post_init__(self) -> None:
        super().__post_init__()
        # Blocks that are cut from a line need no pads, so the arguments of `Packed` refuse it.
        object.__setattr__(self, "pad_id", integer("pad_id", self.reserved_id, 0, 1 << 63))

    @property
    def text(self) -> str:
        """What decides which tokens are in which block, for states."""
        return f"{super().text} blocks_per_epoch={self.blocks_per_epoch}"

    def blocks(self, table: Table, rows: RowList) -> Budget:
        """The blocks of some documents."""
        lengths = find_lengths(table, rows, self.column, extra=self.extra)
        count = None if self.blocks_per_epoch == "auto" else self.blocks_per_epoch
        return Budget(lengths, self.block_size, count)

    def schema(self, table: Table) -> pa.Schema:
        """The columns of blocks."""
        schema = super().schema(table)
        return pa.schema([schema.field("input_ids"), schema.field("document_ids")])

    def num_splits(self, topology_size: int, *, shuffle: bool) -> int | None:
        """Choose the lanes of row mode, so that they divide the blocks; None leaves it open.

        Raises:
            ArgumentError: If the ranks do not divide them.
        """
        count = self.blocks_per_epoch
        if count == "auto":
            return None
        if count % topology_size:
            raise ArgumentError(
                f"blocks_per_epoch ({count}) must be divisible by world_size ({topology_size})"
            )
        if not shuffle:
            return topology_size
        most = default_num_splits(count, multiple=topology_size)
        return next(n for n in range(most, 0, -topology_size) if count % n == 0)


def budget_packing(
    block_size: Any,
    *,
    eos_id: Any,
    pad_id: Any,
    blocks_per_epoch: Any,
    columns: list[str] | None,
    num_splits: int | None,
) -> BudgetPacking:
    """Check LanceDB's arguments.

    Args:
        block_size: ``pack_sequences``.
        eos_id: The token to end each document with.
        pad_id: The token of pads.
        blocks_per_epoch: Blocks of an epoch over all ranks, or ``"auto"``.
        columns: The one column of tokens.
        num_splits: Lanes, if they are given.

    Raises:
        ArgumentError: If one is missing or cannot be used.
    """
    for name, value in (
        ("eos_id", eos_id),
        ("pad_id", pad_id),
        ("blocks_per_epoch", blocks_per_epoch),
    ):
        if value is None:
            raise ArgumentError(f"{name} is required when pack_sequences is set")
    if columns is None or len(columns) != 1:
        raise ArgumentError(
            "pack_sequences requires columns to name exactly one column, with lists of tokens, got "
            f"{columns!r}"
        )
    if blocks_per_epoch != "auto":
        if isinstance(blocks_per_epoch, str):
            raise ArgumentError(
                f"blocks_per_epoch must be a number or 'auto', got {blocks_per_epoch!r}"
            )
        blocks_per_epoch = integer("blocks_per_epoch", blocks_per_epoch, 1, 1 << 40)
        if num_splits is not None and blocks_per_epoch % num_splits:
            raise ArgumentError(
                f"blocks_per_epoch ({blocks_per_epoch}) must be divisible by num_splits "
                f"({num_splits})"
            )
    return BudgetPacking(
        column=columns[0],
        block_size=integer("pack_sequences", block_size, 1),
        how="concatenate",
        overlap=0,
        window=1,
        eos_id=integer("eos_id", eos_id, 0),
        pad_id=None,
        labels=False,
        ignore_index=-100,
        mask_borders=False,
        documents=True,
        parallel=(),
        dtype="int64",
        reserved_id=pad_id,
        blocks_per_epoch=blocks_per_epoch,
    )


def block_rows(batch: pa.RecordBatch) -> list[dict[str, torch.Tensor]]:
    """Blocks as LanceDB gives them: tokens, and for each the number of its document.

    Pads have the number of the document before them, 0 where there is none.
    """
    tokens, numbers = (
        batch.column(name).flatten().to_numpy().reshape(batch.num_rows, -1)
        for name in ("input_ids", "document_ids")
    )
    documents = np.maximum(np.maximum.accumulate(numbers, axis=1), 0)
    return [
        {
            "input_ids": torch.tensor(tokens[i]),
            "doc_ids": torch.tensor(documents[i], dtype=torch.int64),
        }
        for i in range(batch.num_rows)
    ]
