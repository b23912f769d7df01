"""Packed: the documents of a table as blocks of tokens, which go where a table goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from destrier.lancecalls import redact
from destrier.packing.packing import How, Packing

if TYPE_CHECKING:
    from destrier.packing.documents import PackingReport
    from destrier.table import TableLike
    from destrier.view import View

__all__ = ["Packed"]


class Packed:
    """The documents of a table as blocks of tokens: samples like rows.

    It goes where a table goes: `StreamingDataset` and `StreamingDataLoader` shuffle, share and
    resume blocks as they do rows. Filter, permutation and version are given there; what they
    select is packed, in table order, before the order. A sample has these columns:

    - ``input_ids``: ``block_size`` tokens
    - ``labels``, with ``labels=True``: for each token the one that follows it in its document
    - ``position_ids``, ``document_ids``, ``cu_seqlens``, with ``documents=True``: for each token
      its place in its piece of a document and the number of that piece in the block (-1 for
      pads), both counted from 0; and where pieces begin, with the end of the last one, for
      attention within documents
    - the ``parallel`` columns, under their own names

    ``how="concatenate"`` takes all documents as one line of tokens and cuts it: every block is
    full. Without overlap the line is a circle, and the cuts move every epoch. What fills no block,
    fewer tokens than one takes, is another part of the line in each epoch. ``how="best_fit"`` keeps
    documents whole where it can: those of a window are packed into as few blocks as hold their
    tokens, and what remains of a block is filled with ``pad_id``.

    Args:
        table: What `StreamingDataset` takes.
        column: Lists of integers: the tokens of a document. Lists that are empty are documents of
            no tokens.
        block_size: Tokens of a block.
        how: ``"concatenate"`` or ``"best_fit"``.
        overlap: Tokens that a block shares with the next, for those who shift targets themselves.
            Blocks are then the same in every epoch.
        window: Consecutive selected documents that are packed together, with best fit.
        eos_id: A token to end each document with; None adds none.
        pad_id: The token after the last document of a block, with best fit. No document has it.
        labels: Whether blocks have ``labels``.
        ignore_index: The label of a token that none follows, and of pads.
        mask_borders: Whether the last token of a document has that label too; else its label is the
            first token of what follows in the block.
        documents: Whether blocks have ``position_ids``, ``document_ids`` and ``cu_seqlens``.
        parallel: Lists of numbers, as long as those of tokens, to be cut alike; 0 stands at
            ``eos_id`` and in pads.
        dtype: Of ``input_ids``, ``labels`` and ``position_ids``: ``"int64"`` or ``"int32"``.

    Raises:
        ArgumentError: If an argument cannot be used.

    Example:
        >>> packed = Packed("corpus.lance", block_size=2048, labels=True)
        >>> loader = StreamingDataLoader(packed, batch_size=8)  # doctest: +SKIP
    """

    def __init__(
        self,
        table: TableLike | View,
        *,
        block_size: int,
        column: str = "tokens",
        how: How = "concatenate",
        overlap: int = 0,
        window: int = 4096,
        eos_id: int | None = None,
        pad_id: int | None = None,
        labels: bool = False,
        ignore_index: int = -100,
        mask_borders: bool = False,
        documents: bool = False,
        parallel: Sequence[str] = (),
        dtype: Literal["int32", "int64"] = "int64",
    ) -> None:
        self.table = table
        self.packing = Packing(
            column=column,
            block_size=block_size,
            how=how,
            overlap=overlap,
            window=window,
            eos_id=eos_id,
            pad_id=pad_id,
            labels=labels,
            ignore_index=ignore_index,
            mask_borders=mask_borders,
            documents=documents,
            parallel=parallel,
            dtype=dtype,
        )

    def __repr__(self) -> str:
        return f"Packed({redact(str(self.table))}, {self.packing.text})"

    def report(self, *, filter: str | None = None) -> PackingReport:
        """Describe the blocks: how many there are, pads, and what is cut.

        Args:
            filter: SQL expression that chooses documents, as of `StreamingDataset`.

        Raises:
            DestrierError: If a stream of it could not be made.

        Example:
            >>> packed.report().waste  # doctest: +SKIP
            0.0004
        """
        from destrier.dataset import StreamingDataset

        packed = StreamingDataset(self, filter=filter).stream().packed
        assert packed is not None
        return packed.report()
