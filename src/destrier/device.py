"""Putting the tensors of a batch into pinned memory or on a device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from destrier.batch import Finished, Finisher, RawBatch

__all__ = ["moved", "pinned"]


def pinned(finisher: Finisher) -> Callable[[RawBatch], Finished]:
    """Let a finisher put its batches into page-locked memory, from which copies overlap work."""

    def finish(raw: RawBatch) -> Finished:
        finished = finisher(raw)
        finished.batch = _mapped(finished.batch, lambda tensor: tensor.pin_memory())
        return finished

    return finish


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device; copies from pinned memory do not wait."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Apply a function to every tensor of a batch, whose containers keep their types."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: _mapped(item, function) for key, item in value.items()}
        if isinstance(value, MutableMapping):
            clone = copy.copy(value)
            clone.update(mapped)
            return clone
        return mapped
    if isinstance(value, list):
        return [_mapped(item, function) for item in value]
    if isinstance(value, tuple):
        items = [_mapped(item, function) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
