"""The streams that another stream is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from destrier.dataset import StreamingDataset
from destrier.errors import ArgumentError, EmptyError, FilterError, StateError, VersionError
from destrier.mixing.stream import Source
from destrier.resolving import OneOf
from destrier.streaming import Streaming

__all__ = ["adopt_parts", "check_sources", "keep_chosen", "part_of", "resolve_parts"]


def check_sources(sources: Any, what: str) -> None:
    """Raise unless it is a dict from name to source.

    Args:
        sources: What was given.
        what: Is made of them.
    """
    if not isinstance(sources, Mapping) or not sources:
        raise ArgumentError(
            f"{what} is made of a dict from name to source, with one at least, got {sources!r}"
        )
    for name in sources:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"the names of sources are texts, got {name!r}")


def part_of(name: str, source: Any, columns: list[str] | None) -> Streaming:
    """Return a source as a part of another stream; a table is made a stream of.

    Args:
        name: Of the source.
        source: What was given.
        columns: Names of the columns to read; None leaves the source's.

    Raises:
        ArgumentError: If the source says what only the whole can.
    """
    if not isinstance(source, Streaming):
        return StreamingDataset(source, columns=columns)._part()
    if isinstance(source, StreamingDataset) and source.packs:
        raise ArgumentError(
            f"source {name!r} has pack_sequences, which is for rows; give Packed(table, "
            "block_size=...) instead"
        )
    at = source._position
    if at.epoch and not at.begun:
        raise ArgumentError(
            f"source {name!r} was made with epoch={at.epoch}, but all sources begin at their first "
            "epoch; give epoch= to the whole"
        )
    if source._cache is not None:
        raise ArgumentError(f"source {name!r} has cache_dir=; give it to the whole")
    if source.transform is not None:
        raise ArgumentError(
            f"source {name!r} has a transform; give it to the whole or to the loader: it is called "
            "with batches"
        )
    part = source._part()
    if columns is not None:
        part.columns = columns
    return part


def resolve_parts(parts: Mapping[str, Streaming], one_of: OneOf) -> dict[str, Source]:
    """Return the sources by name, with what was left open chosen.

    Args:
        parts: The streams.
        one_of: Of how many each is one.

    Raises:
        EmptyError: If one has no rows; names the source.
        FilterError: If a filter cannot be run; likewise.
    """
    sources: dict[str, Source] = {}
    for name, part in parts.items():
        try:
            sources[name] = part._as_source(one_of)
        except EmptyError as error:
            raise EmptyError(f"source {name!r} is empty: {error}") from error
        except FilterError as error:
            raise FilterError(f"source {name!r}: {error}") from error
    return sources


def adopt_parts(
    parts: Mapping[str, Streaming], briefs: Mapping[str, Any], batch: int | None
) -> tuple[list[Source], Callable[[], None]]:
    """Return the sources of a state, and what takes them up, which cannot fail.

    Args:
        parts: The streams.
        briefs: What the state says of each.
        batch: Samples in a step, where it is known.

    Raises:
        StateError: If one is of another stream; names the source.
        VersionError: If the version of one is gone; likewise.
    """
    found: list[Source] = []
    commits: list[Callable[[], None]] = []
    for name, part in parts.items():
        try:
            source, commit = part._adopt_brief(briefs[name], batch)
        except (StateError, VersionError) as error:
            raise type(error)(f"source {name!r}: {error}") from error
        found.append(source)
        commits.append(commit)

    def take_up() -> None:
        for commit in commits:
            commit()

    return found, take_up


def keep_chosen(parts: Mapping[str, Streaming], sources: Sequence[Source]) -> Callable[[], None]:
    """Return what settles the sizes that were chosen for streams, which cannot fail.

    With other weights, and in other processes, others would be chosen.

    Args:
        parts: The streams.
        sources: What each of them was resolved to.
    """
    briefs = {name: source.brief() for name, source in zip(parts, sources, strict=True)}
    return adopt_parts(parts, briefs, None)[1]
