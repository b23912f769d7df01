"""The position of a stream, and its state: identity and one counter, as flat JSON scalars."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from destrier.errors import StateError
from destrier.order import ORDER_VERSION

__all__ = [
    "STATE_VERSION",
    "Identity",
    "Position",
    "State",
    "check_state",
    "compact",
    "expanded",
    "merge_states",
    "next_epoch",
    "parsed",
]

STATE_VERSION = 1
State: TypeAlias = "dict[str, int | str | bool | None]"
Kind: TypeAlias = Literal["StreamingDataset", "Mixture", "Zip"]

_Kinds: TypeAlias = "dict[str, tuple[type, ...]]"

_COMMON: _Kinds = {
    "version": (int,),
    "order_version": (str,),
    "counter": (int,),
    "epoch": (int,),
    "shuffle_seed": (int,),
    "num_splits": (int,),
    "plan_hash": (str,),
    "samples_consumed_per_split": (int,),
    "positions_consumed_per_split": (int,),
}
_KINDS: _Kinds = {
    **_COMMON,
    "clump_size": (int,),
    "window": (int,),
    "shuffle": (bool,),
    "filter": (str, type(None)),
    "table_identity": (str,),
    "table_version": (int,),
}
_MIXTURE_KINDS: _Kinds = {
    **_COMMON,
    "batching": (str,),
    "slots": (int,),
    "unit": (int,),
    "stop": (str,),
    "length": (int, type(None)),
    "schedule": (str,),
    "sources": (str,),
}
_ZIP_KINDS: _Kinds = {**_COMMON, "stop": (str,), "sources": (str,)}
_ALL_KINDS: dict[Kind, _Kinds] = {
    "StreamingDataset": _KINDS,
    "Mixture": _MIXTURE_KINDS,
    "Zip": _ZIP_KINDS,
}
_BRIEF = (
    "shuffle_seed",
    "num_splits",
    "clump_size",
    "window",
    "shuffle",
    "filter",
    "table_identity",
    "table_version",
    "plan_hash",
)

_FOREIGN = {
    "lancedb.streaming": ("samples_consumed_per_split", "shuffle_seed"),
    "LitData": ("num_samples_yielded", "current_epoch"),
    "MosaicML Streaming": ("sample_in_epoch", "num_canonical_nodes"),
    "torchdata's StatefulDataLoader": ("_snapshot",),
}


@dataclass(frozen=True)
class Identity:
    """What decides which samples come in which order, apart from the epoch.

    Attributes:
        rows: Digest of the row list.
        count: Its length.
        packing: How documents are packed into the blocks that are listed; None for rows.
        buckets: How batches of like length are formed; None where they are not.
        lengths: Digest of those lengths.
    """

    shuffle_seed: int
    num_splits: int
    clump_size: int
    window: int
    shuffle: bool
    filter: str | None
    table_identity: str
    table_version: int
    rows: str
    count: int
    packing: str | None = None
    buckets: str | None = None
    lengths: str | None = None

    @property
    def plan_hash(self) -> str:
        """A digest of the order's parameters and of the selection's content, not its text."""
        parts: tuple[object, ...] = (
            ORDER_VERSION,
            self.shuffle_seed,
            self.num_splits,
            self.clump_size,
            self.window,
            self.shuffle,
            self.rows,
            self.count,
        )
        if self.packing is not None:
            parts = (*parts, self.packing)
        if self.buckets is not None:
            parts = (*parts, self.buckets, self.lengths)
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def brief(self) -> list[int | str | bool | None]:
        """The state without a position, as short as it can be: see `expanded`."""
        whole = self.state(0, 0)
        packing = () if self.packing is None else (self.packing,)
        return [*(whole[key] for key in _BRIEF), *packing]

    def state(self, epoch: int, counter: int) -> State:
        """The state at a position."""
        per_split = counter // self.num_splits
        more = {"packing": self.packing, "buckets": self.buckets}
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "counter": counter,
            "epoch": epoch,
            "shuffle_seed": self.shuffle_seed,
            "num_splits": self.num_splits,
            "clump_size": self.clump_size,
            "window": self.window,
            "shuffle": self.shuffle,
            "filter": self.filter,
            "table_identity": self.table_identity,
            "table_version": self.table_version,
            "plan_hash": self.plan_hash,
            "samples_consumed_per_split": per_split,
            "positions_consumed_per_split": per_split,
            **{key: value for key, value in more.items() if value is not None},
        }


@dataclass(frozen=True)
class Position:
    """Where a stream is. Immutable, so that any thread reads a whole one.

    Attributes:
        epoch: The current epoch.
        counter: Samples consumed in it, over all ranks.
        begun: Whether an iterator took it up; the next one then starts the epoch after.
        then: The epoch that `set_epoch` asked for, until the next iterator.
    """

    epoch: int = 0
    counter: int = 0
    begun: bool = False
    then: int | None = None

    def begin(self) -> Position:
        """The position at which the next iterator starts."""
        if self.then is not None:
            return Position(self.then, 0, begun=True)
        if self.begun:
            return Position(self.epoch + 1, 0, begun=True)
        return replace(self, begun=True)

    def ended(self) -> Position:
        """The position after an epoch is over: the start of the next one."""
        return Position(self.epoch + 1 if self.then is None else self.then)

    def failed(self) -> Position:
        """The position after an error: the next iterator goes on there."""
        return replace(self, begun=False)

    def with_epoch(self, epoch: int) -> Position:
        """The position after `set_epoch`."""
        if self.begun:
            return replace(self, then=epoch)
        return self if epoch == self.epoch else Position(epoch, 0)


def expanded(brief: Any) -> State:
    """Return the state, at the start, that `Identity.brief` made short.

    Raises:
        StateError: If it is not one.
    """
    if isinstance(brief, Mapping):
        raise StateError("the state has a mixture here, this is a table")
    if not isinstance(brief, list) or len(brief) not in (len(_BRIEF), len(_BRIEF) + 1):
        raise StateError(f"the state of a source is cut: {brief!r}")
    names = (*_BRIEF, "packing")
    start = dict.fromkeys(_COMMON, 0)
    state = {
        **start,
        "version": STATE_VERSION,
        "order_version": ORDER_VERSION,
        **dict(zip(names, brief, strict=False)),
    }
    return check_state(state)


def compact(value: Any) -> str:
    """Return JSON as one text: a state is flat."""
    return json.dumps(value, separators=(",", ":"))


def parsed(state: Mapping[str, Any], key: str) -> Any:
    """Return what `compact` made of a dict.

    Raises:
        StateError: If it is none.
    """
    try:
        value = json.loads(state[key])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise StateError(f"{key} of the state is damaged: {state[key]!r}")
    return value


def _kind_of(state: Mapping[str, Any]) -> Kind:
    if "schedule" in state:
        return "Mixture"
    return "Zip" if "sources" in state else "StreamingDataset"


def check_state(state: Any, kind: Kind = "StreamingDataset") -> State:
    """Return the state if it is one of this library's, complete and of the right types.

    Args:
        state: What was given.
        kind: Of what it must be.

    Raises:
        StateError: Naming what is wrong.
    """
    if not isinstance(state, Mapping):
        raise StateError(
            f"a state is a dict, got {type(state).__name__}; an empty one does nothing"
        )
    if "order_version" not in state and "plan_hash" not in state:
        for library, keys in _FOREIGN.items():
            if all(key in state for key in keys):
                raise StateError(
                    f"this is a state of {library}, whose order cannot be reproduced; start the "
                    f"next epoch instead: make the stream with epoch={next_epoch(state)}"
                )
    version = state.get("version")
    if isinstance(version, int) and version > STATE_VERSION:
        raise StateError(
            f"the state has format version {version}, this library reads up to {STATE_VERSION}; "
            "it was saved by a newer destrier: upgrade"
        )
    if "order_version" in state and (was := _kind_of(state)) != kind:
        raise StateError(f"the state is of a {was}, and cannot be loaded into a {kind}")
    _check_values(state, _ALL_KINDS[kind])
    if state["order_version"] != ORDER_VERSION:
        raise StateError(
            f"order_version mismatch: the state has {state['order_version']!r}, this library has "
            f"{ORDER_VERSION!r}; start the next epoch: epoch={state['epoch'] + 1}"
        )
    return dict(state)


def _check_values(state: Mapping[str, Any], all_kinds: _Kinds) -> None:
    missing = [key for key in all_kinds if key not in state]
    if missing:
        raise StateError(f"the state lacks {', '.join(missing)}; it is cut or not of destrier")
    known = {**all_kinds, **{key: (str,) for key in ("packing", "buckets") if key in state}}
    for key, kinds in known.items():
        value = state[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise StateError(f"{key} of the state must be {wanted}, got {value!r}")
    if state["counter"] < 0 or not 0 <= state["epoch"] < 1 << 32:
        raise StateError(
            f"counter {state['counter']} of the state must not be negative, and epoch "
            f"{state['epoch']} must be from 0 to 2**32 - 1"
        )
    if state["version"] < 1:
        raise StateError(f"the state has format version {state['version']}, which never was")


def next_epoch(state: Mapping[str, Any]) -> str:
    """The number of the epoch after a state's, for messages."""
    for key in ("epoch", "current_epoch"):
        if isinstance(state.get(key), int):
            return str(state[key] + 1)
    return "<its epoch + 1>"


def merge_states(states: list[State]) -> State:
    """Return the one state that all ranks saved.

    Every rank's state is the whole state here, so merging is a check that all agree.

    Raises:
        StateError: If there are none, or two differ; names the key and both values.
    """
    if not states:
        raise StateError("merge_state_dicts requires at least one state dict")
    kind = _kind_of(states[0])
    first = check_state(states[0], kind)
    for rank, other in enumerate(states[1:], 1):
        checked = check_state(other, kind)
        for key, value in first.items():
            if checked.get(key) != value:
                raise StateError(
                    f"{key} mismatch across state dicts: {value!r} in the first, "
                    f"{checked.get(key)!r} in number {rank}; all ranks save the same state after "
                    "the same step"
                )
    return first
