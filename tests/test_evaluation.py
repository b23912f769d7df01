"""gather: the results of all ranks, each row once, in the order of the rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tables
from destrier import (
    ArgumentError,
    StreamingDataLoader,
    StreamingDataset,
    View,
    gather,
    subsample,
    subset,
)


def evaluate(source: Any, rank: int, size: int, **options: Any) -> tuple[list[Any], list[Any], int]:
    """Return a rank's results and their index, and the steps it made."""
    settings = {"columns": ["id"], "shuffle": False, "rank": rank, "world_size": size}
    own = {k: options.pop(k) for k in ("global_batch_size", "remainder", "uneven") if k in options}
    dataset = StreamingDataset(source, **{**settings, **options})
    results, index, steps = [], [], 0
    with StreamingDataLoader(dataset, with_index=True, **own) as loader:
        for batch in loader:
            results += batch["id"].tolist()
            index += batch["sample_index"].tolist()
            steps += 1
        assert steps == len(loader)
    return results, index, steps


@given(
    rows=st.integers(1, 80),
    size=st.integers(1, 6),
    batch=st.integers(1, 30),
    remainder=st.sampled_from(["keep", "pad"]),
)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_every_row_comes_once_on_any_number_of_ranks(
    table_path: str, table_ids: Any, rows: int, size: int, batch: int, remainder: Any
) -> None:
    view = View(table_path)[:rows]
    results, index, steps = [], [], set()
    for rank in range(size):
        options = {"global_batch_size": batch, "remainder": remainder, "uneven": True}
        mine = evaluate(view, rank, size, **options)
        results += mine[0]
        index += mine[1]
        steps.add(mine[2])
    assert len(steps) == 1, "equal step counts"
    assert gather(results, index, rows) == table_ids[:rows].tolist()
    assert len(results) == rows or remainder == "pad"


@pytest.mark.parametrize("form", ["tensor", "array", "list", "dict"])
def test_results_keep_their_form(form: str) -> None:
    values = np.array([[30, 31], [10, 11], [20, 21], [0, 1], [30, 31]], np.int16)
    index = [3, 1, 2, 0, 4]
    expected = [[0, 1], [10, 11], [20, 21], [30, 31]]
    if form == "tensor":
        got = gather(torch.from_numpy(values).to(torch.bfloat16), torch.tensor(index), 4)
        assert got.dtype == torch.bfloat16
        assert got.tolist() == expected
    elif form == "array":
        got = gather(values, np.array(index, np.int32), 4)
        assert got.dtype == np.int16
        assert got.tolist() == expected
    elif form == "list":
        assert gather(values.tolist(), index, 4) == expected
    else:
        given = {"a": values, "b": [str(i) for i in index], 3: torch.tensor(index)}
        got = gather(given, index, 4)
        assert list(got) == ["a", "b", 3]
        assert got["b"] == ["0", "1", "2", "3"]
        assert got[3].tolist() == [0, 1, 2, 3]


def test_gradients_are_left_behind() -> None:
    got = gather(torch.ones(2, requires_grad=True) * 2, [1, 0], 2)
    assert not got.requires_grad


@pytest.mark.parametrize("kind", ["table", "filter", "view", "repeats", "lanes"])
def test_the_order_is_that_of_the_rows(table_path: str, table_ids: Any, kind: str) -> None:
    options: dict[str, Any] = {"columns": ["id"], "shuffle": False}
    source: Any = table_path
    expected = table_ids
    if kind == "filter":
        options["filter"] = "label = 4"
        expected = table_ids[table_ids % 10 == 4]
    elif kind == "view":
        source = subset(table_path, [7, 3, 900])
        expected = table_ids[[7, 3, 900]]
    elif kind == "repeats":
        source = subsample(View(table_path)[:50], 3)
        expected = np.tile(table_ids[:50], 3)
    elif kind == "lanes":
        options["num_splits"] = 8
    dataset = StreamingDataset(source, **options)
    loader = StreamingDataLoader(dataset, batch_size=64, remainder="pad", with_index=True)
    batches = list(loader)
    results = torch.cat([batch["id"] for batch in batches])
    index = torch.cat([batch["sample_index"] for batch in batches])
    assert gather(results, index, loader).tolist() == expected.tolist()
    assert gather({"id": results}, index, loader)["id"].tolist() == expected.tolist()
    loader.close()


def test_a_dataset_by_itself(table_path: str, table_ids: Any) -> None:
    dataset = StreamingDataset(
        table_path, columns=["id"], shuffle=False, batch_size=100, with_index=True, remainder="keep"
    )
    batches = list(dataset)
    index = [batch["sample_index"] for batch in batches]
    got = gather(torch.cat([batch["id"] for batch in batches]), torch.cat(index), dataset)
    assert got.tolist() == table_ids.tolist()
    dataset.close()


def test_results_that_do_not_fit(table_path: str) -> None:
    two = torch.zeros(2)
    cases: list[tuple[Any, Any, Any, str]] = [
        (two, [0, 1, 2], 3, "results has 2 rows, but the index has 3"),
        ({"a": two, "b": [1]}, [0, 1], 2, r"results\['b'\] has 1 rows, but the index has 2"),
        (torch.tensor(1.0), [0], 1, "results has no rows"),
        (3.0, [0], 1, "results must be a tensor"),
        ("ab", [0, 1], 2, "got str"),
        (two, [0, 0], 2, "row 0 came 2 times, from rank 0"),
        (two, [0, 1], 4, "2 of 4 rows never came, first: 2, 3"),
        (two, [0, -1], 2, "never negative, got -1"),
        (two, [0.0, 1.0], 2, "index must be integers"),
        (two, [[0, 1]], 2, r"shape \(1, 2\)"),
        (two, [0, 1], 2.5, "of must be an integer"),
        (two, [0, 1], table_path, "of must be an integer"),
        ([], [], 1, "1 of 1 rows never came"),
    ]
    for results, index, of, message in cases:
        with pytest.raises(ArgumentError, match=message):
            gather(results, index, of)
    assert gather([], [], 0) == []
    shuffled = StreamingDataset(table_path, columns=["id"])
    with pytest.raises(ArgumentError, match="shuffle=False"):
        gather(two, [0, 1], shuffled)


SCRIPT = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from destrier import ArgumentError, StreamingDataLoader, StreamingDataset, gather

def main(path, out):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    said = {}
    for remainder in ("keep", "pad"):
        dataset = StreamingDataset(path, columns=["id"], shuffle=False, filter="label < 4")
        loader = StreamingDataLoader(
            dataset, global_batch_size=96, remainder=remainder, with_index=True
        )
        ids, index = [], []
        for batch in loader:
            ids.append(batch["id"])
            index.append(batch["sample_index"])
        given = {"id": torch.cat(ids), "text": [str(i) for i in torch.cat(ids).tolist()]}
        index = torch.cat(index)
        everywhere = gather(given, index, loader)
        said[remainder] = [everywhere["id"].tolist(), everywhere["text"]]
        only = gather(given["id"].numpy(), index, loader, to=1)
        said[remainder + " to"] = None if only is None else only.tolist()
    # A rank without rows does not know what its results would be.
    none = gather(torch.empty(0) if rank else torch.arange(3.0), [] if rank else [2, 0, 1], 3)
    said["none"] = none.tolist()
    wrong = {
        "alike": lambda: gather(given, index, loader, group=alone),
        "twice": lambda: gather([1], [0], 1),
        "short": lambda: gather([1] if rank else [1, 2], [1 - rank], 2),
        "kinds": lambda: gather([1] if rank else torch.ones(1), [rank], 2),
        "keys": lambda: gather({"a" if rank else "b": [1]}, [rank], 2),
        "never": lambda: gather([1], [rank], 3),
    }
    alone = dist.new_group([rank], use_local_synchronization=True)
    for name, call in wrong.items():
        try:
            call()
        except ArgumentError as error:
            said[name] = str(error)
    dist.barrier()
    Path(out, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
"""


def test_two_ranks_of_gloo(table_path: str, table_ids: Any, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)]
    done = subprocess.run(
        [*command, table_path, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    expected = table_ids[table_ids % 10 < 4].tolist()
    for said in (first, second):
        for remainder in ("keep", "pad"):
            assert said[remainder] == [expected, [str(i) for i in expected]]
        assert said["none"] == [1, 2, 0]
        assert "rows never came" in said["alike"], "of one rank's share alone"
        assert "row 0 came 2 times, from rank 0, 1" in said["twice"]
        assert "has 2 rows, but the index has 1" in said["short"]
        assert "different results" in said["kinds"]
        assert "different results" in said["keys"]
        assert "1 of 3 rows never came, first: 2" in said["never"]
    assert first["keep to"] is first["pad to"] is None
    assert second["keep to"] == second["pad to"] == expected
    assert len(expected) > tables.ROWS // 3
