"""What the user said about the rows and their order, and what a state says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from destrier.bucketing.buckets import AnyBuckets, parse_buckets
from destrier.check import MOST_SIZE, integer
from destrier.errors import ArgumentError, StateError
from destrier.packing.packing import Packing
from destrier.permutation import Permutation
from destrier.selection import RowList
from destrier.state import State, next_epoch

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What the user said about the order; None is to be chosen, or taken from a state.

    Attributes:
        buckets: Those of a state.
    """

    filter: str | None = None
    permutation: Permutation | None = None
    view: RowList | None = None
    num_splits: int | None = None
    shuffle: bool | None = None
    shuffle_seed: int | None = None
    shuffle_clump_size: int | None = None
    shuffle_window: int | None = None
    packing: Packing | None = None
    bucket_by: str | None = None
    bucket_window: int | None = None
    buckets: AnyBuckets | None = None

    def __post_init__(self) -> None:
        for name, least, below in (
            ("num_splits", 1, None),
            ("shuffle_clump_size", 1, None),
            ("shuffle_window", 1, None),
            ("bucket_window", 1, MOST_SIZE),
            ("shuffle_seed", 0, 1 << 32),
        ):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, integer(name, value, least, below))
        if self.shuffle is not None and not isinstance(self.shuffle, bool | np.bool_ | int):
            raise ArgumentError(f"shuffle must be True or False, got {self.shuffle!r}")
        object.__setattr__(self, "shuffle", None if self.shuffle is None else bool(self.shuffle))
        if self.filter is not None and not isinstance(self.filter, str):
            raise ArgumentError(f"filter must be an SQL expression, got {self.filter!r}")
        if self.filter is not None and self.permutation is not None:
            raise ArgumentError(
                "filter and permutation cannot be combined, because a permutation lists its rows; "
                "filter when it is built: PermutationBuilder(table).filter(...)"
            )

        if self.bucket_window is not None and self.bucket_by is None:
            raise ArgumentError(
                f"bucket_window={self.bucket_window} has no meaning without bucket_by, the column "
                "whose lengths count"
            )
        if self.bucket_by is not None and self.packing is not None:
            raise ArgumentError(
                f"bucket_by={self.bucket_by!r} has no meaning for packed blocks, which all have "
                "one length"
            )

    @property
    def shuffled(self) -> bool:
        """Whether rows are shuffled: unless a permutation lists them, where nobody said."""
        return self.permutation is None if self.shuffle is None else self.shuffle

    def adopt(self, state: State) -> Settings:
        """Take from a state what was left at None, and refuse what differs.

        Raises:
            StateError: Naming the setting and both values.
        """
        self._check_packing(state)
        taken: dict[str, Any] = {
            "permutation": self.permutation,
            "view": self.view,
            "packing": self.packing,
        }
        for name, key in (
            ("num_splits", "num_splits"),
            ("shuffle_seed", "shuffle_seed"),
            ("shuffle_clump_size", "clump_size"),
            ("shuffle_window", "window"),
            ("shuffle", "shuffle"),
            ("filter", "filter"),
        ):
            given, stored = getattr(self, name), state[key]
            if self.permutation is not None and name == "filter":
                continue
            if given is not None and given != stored and not self._without_meaning(name, state):
                raise StateError(
                    f"{name} mismatch: the state has {stored!r}, this stream was made with "
                    f"{given!r}; leave {name} out to take the state's, or start the next epoch "
                    f"instead of loading: epoch={int(state['epoch'] or 0) + 1}"
                )
            taken[name] = stored
        return Settings(**taken, **self._adopt_buckets(state))

    def _adopt_buckets(self, state: State) -> dict[str, Any]:
        stored = None if "buckets" not in state else parse_buckets(state["buckets"])
        for name, given, value in (
            ("bucket_by", self.bucket_by, stored and stored.by),
            ("bucket_window", self.bucket_window, stored and stored.window),
        ):
            if given is not None and given != value:
                raise StateError(
                    f"{name} mismatch: the state has {value!r}, this stream was made with "
                    f"{given!r}; leave {name} out to take the state's, or start the next epoch "
                    f"instead of loading: epoch={next_epoch(state)}"
                )
        if stored is None:
            return {}
        return {
            "bucket_by": stored.by,
            "bucket_window": stored.window,
            "buckets": stored,
        }

    def _check_packing(self, state: State) -> None:
        stored = state.get("packing")
        given = None if self.packing is None else self.packing.text
        if given != stored:
            raise StateError(
                f"packing mismatch: the state has {stored or 'rows that are not packed'}, this "
                f"stream {given or 'rows that are not packed'}; make the stream as it was, or "
                f"start the next epoch instead of loading: epoch={next_epoch(state)}"
            )

    @staticmethod
    def _without_meaning(name: str, state: State) -> bool:
        """A window has no meaning where rows are permuted one by one or not at all."""
        if name == "shuffle_window":
            return state["clump_size"] == 1
        return name == "shuffle_clump_size" and not state["shuffle"]
