"""From a table and what the user said to a stream: what was left open is chosen here."""

from __future__ import annotations

from dataclasses import dataclass

from destrier.bucketing.bucketing import Bucketing, choose_buckets
from destrier.bucketing.buckets import Batch, TokenBudget, check_batch_of
from destrier.errors import ArgumentError, StateError
from destrier.packing.documents import PackedRows
from destrier.packing.lengths import find_lengths
from destrier.rowlists import locality, streamed_rows
from destrier.selection import RowList, select_rows
from destrier.settings import Settings
from destrier.sizing import (
    OPEN_BYTES,
    default_clump,
    default_num_splits,
    default_source_splits,
)
from destrier.state import Identity, State, next_epoch
from destrier.stream import TableStream
from destrier.table import Table

__all__ = ["OneOf", "check_table", "resolve_stream"]


def check_table(table: Table, state: State, *, version_given: bool) -> None:
    """Raise unless a state was saved over the rows of a table.

    Args:
        table: The table to be read.
        state: The state.
        version_given: Whether the version was chosen explicitly: it may then have more columns.

    Raises:
        StateError: Naming both tables.
    """
    if table.identity == state["table_identity"]:
        return
    if version_given:
        before = table.at(int(state["table_version"] or 0))
        if before.identity == state["table_identity"] and table.same_rows(before):
            return
    raise StateError(
        f"table mismatch: the state was saved on version {state['table_version']} of a table with "
        f"identity {state['table_identity']}, this stream reads {table.name} with identity "
        f"{table.identity}; open the table of the run, or start the next epoch on this one: "
        f"epoch={next_epoch(state)}"
    )


@dataclass(frozen=True)
class OneOf:
    """That a table is one of several sources.

    Attributes:
        sources: How many there are.
        global_batch: Samples in a step of the whole; None where that is not known.
        zipped: Whether each sample has one of each source. A source then has as many lanes as a
            table alone, which are those of the whole.
    """

    sources: int
    global_batch: int | None
    zipped: bool = False


def resolve_stream(
    table: Table,
    settings: Settings,
    *,
    global_batch: Batch | None = None,
    multiple: int = 1,
    one_of: OneOf | None = None,
) -> TableStream:
    """Choose what was left open, from the pinned table and the global batch alone.

    Args:
        table: The pinned table.
        settings: What was given.
        global_batch: What a step is, where it is known.
        multiple: Row mode: what num_splits must be a multiple of, the world size.
        one_of: Of how many sources the table is one, where it is not read alone.
    """
    lanes = None
    if settings.permutation is not None:
        settings.permutation.check_table(table)
        rows: RowList = settings.permutation.rows
        lanes = settings.permutation.num_splits
    elif settings.view is not None:
        rows = streamed_rows(table, settings.view, settings.filter)
    else:
        rows = select_rows(table, settings.filter)
    shuffle = settings.shuffled
    packed, packing = None, settings.packing
    if packing is not None:
        packed = PackedRows(packing, rows, packing.blocks(table, rows), shuffle)
        rows, lanes = packed.addresses, None
    count = len(rows)
    listed = settings.permutation is not None and not shuffle
    num_splits = settings.num_splits
    if num_splits is None:
        if shuffle and one_of is not None and not one_of.zipped:
            num_splits = default_source_splits(count, global_batch=one_of.global_batch)
        elif shuffle:
            unit = global_batch.unit if isinstance(global_batch, TokenBudget) else global_batch
            num_splits = default_num_splits(count, global_batch=unit, multiple=multiple)
        else:
            num_splits = max(lanes or 1, multiple)
    clump_size, window = 1, 1
    if shuffle:
        open_bytes = OPEN_BYTES // (1 if one_of is None else one_of.sources)
        clump_size, window = _shuffle_sizes(table, settings, rows, num_splits, open_bytes)
    bucketing = _bucketing(table, rows, settings, global_batch, one_of)
    identity = Identity(
        shuffle_seed=settings.shuffle_seed or 0,
        num_splits=num_splits,
        clump_size=clump_size,
        window=window,
        shuffle=shuffle,
        filter=settings.filter,
        table_identity=table.identity,
        table_version=table.version,
        rows=rows.digest if packed is None else packed.digest,
        count=count,
        packing=None if packing is None else packing.text,
        buckets=None if bucketing is None else bucketing.buckets.text,
        lengths=None if bucketing is None else bucketing.lengths.digest,
    )
    stream = TableStream(table, rows, identity, listed, packed, bucketing)
    _ = stream.order(0)  # refuses sizes that no order can have
    return stream


def _bucketing(
    table: Table,
    rows: RowList,
    settings: Settings,
    global_batch: Batch | None,
    one_of: OneOf | None,
) -> Bucketing | None:
    """How batches of like length are formed, if they are."""
    by = settings.bucket_by
    if by is None:
        check_batch_of(None, global_batch)
        return None
    if one_of is not None:
        raise ArgumentError(
            f"bucket_by={by!r} cannot be given to a source of a mixture or zip, whose batches are "
            "of several sources; leave it out there"
        )
    buckets = settings.buckets
    if buckets is not None:
        check_batch_of(buckets, global_batch)
        return Bucketing(buckets, find_lengths(table, rows, by))
    if global_batch is None:
        raise ArgumentError(
            f"bucket_by={by!r} forms batches: give batch_size, global_batch_size or "
            "global_batch_tokens, here or to a StreamingDataLoader"
        )
    lengths = find_lengths(table, rows, by)
    buckets = choose_buckets(by, settings.bucket_window, global_batch, rows, lengths)
    return Bucketing(buckets, lengths)


def _shuffle_sizes(
    table: Table, settings: Settings, rows: RowList, num_splits: int, open_bytes: int
) -> tuple[int, int]:
    clump_size = settings.shuffle_clump_size
    if settings.packing is not None:
        return default_clump(
            len(rows),
            num_splits=num_splits,
            row_bytes=settings.packing.row_bytes,
            remote=table.remote,
            clump_size=clump_size,
            window=settings.shuffle_window,
            open_bytes=open_bytes,
            read_bytes=settings.packing.read_bytes,
        )
    density = None if settings.permutation is not None else locality(rows, table.num_rows)
    if density is None and clump_size is None:
        clump_size = 1  # nothing is known of where successive entries of a listing lie
    return default_clump(
        len(rows),
        num_splits=num_splits,
        row_bytes=table.row_bytes / (density or 1.0),
        remote=table.remote,
        clump_size=clump_size,
        window=settings.shuffle_window,
        open_bytes=open_bytes,
    )
