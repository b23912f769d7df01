"""How even a shuffle is, from the labels that were delivered.

deff, the design effect, is the variance of the mean of a batch over that of a uniform order of the
same rows: 1 is uniform, and a batch of n rows that are all alike has n.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from workloads import CLASSES

RUN = 16
CLASS_BATCH = 64


def counts(labels: np.ndarray, batch: int, rows: int) -> dict[str, float]:
    """What `quality` needs of one run, in numbers that add up over runs.

    Args:
        labels: As delivered.
        batch: Rows of a batch.
        rows: Rows of the table, whose labels are `CLASSES` classes of one size.
    """
    out: dict[str, float] = {}
    for name, size in (("deff_1", batch), (f"deff_{RUN}", batch * RUN)):
        whole = len(labels) // size
        means = labels[: whole * size].reshape(-1, size).mean(axis=1, dtype=np.float64)
        uniform = (CLASSES**2 - 1) / 12 / size * max(0, rows - size) / (rows - 1)
        out[f"{name}_sum"] = float(((means - (CLASSES - 1) / 2) ** 2).sum() / max(uniform, 1e-12))
        out[f"{name}_count"] = whole
    # The order inside a batch is nobody's concern, and some loaders sort there.
    rng = np.random.default_rng(0)
    batches = labels[: len(labels) // batch * batch].reshape(-1, batch)
    mixed = rng.permuted(batches, axis=1).reshape(-1)
    whole = len(mixed) // CLASS_BATCH
    sets = np.sort(mixed[: whole * CLASS_BATCH].reshape(-1, CLASS_BATCH), axis=1)
    out["classes_sum"] = float((1 + (np.diff(sets, axis=1) > 0).sum(axis=1)).sum())
    out["classes_count"] = whole
    return out


def quality(runs: list[dict[str, float]], least: int = 8) -> dict[str, Any]:
    """Deff of one batch and of the mean of 16 successive ones, and classes in 64 rows.

    Args:
        runs: Of `counts`, of one loader.
        least: With fewer values than so many a figure is None: it would say nothing.
    """
    out: dict[str, Any] = {}
    for name in ("deff_1", f"deff_{RUN}", "classes"):
        count = sum(run[f"{name}_count"] for run in runs)
        total = sum(run[f"{name}_sum"] for run in runs)
        out[name] = total / count if count >= least else None
        out[f"{name}_count"] = count
    return out
