"""Memory for batches: used again, but never while anybody looks at it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from destrier import memory
from destrier.memory import fresh, gather

LARGE = 3 << 20


@pytest.fixture(autouse=True)
def no_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_spares", memory._Spares())


def test_memory_is_used_again_when_its_last_view_is_gone() -> None:
    first = fresh((LARGE,), np.uint8)
    where = first.ctypes.data
    view = torch.from_numpy(first.reshape(3, -1)).transpose(0, 1)[5:]
    del first
    view[:] = 7
    other = fresh((LARGE,), np.uint8)
    other[:] = 9
    assert other.ctypes.data != where
    assert (view == 7).all()
    del view
    assert fresh((LARGE // 4,), np.float32).ctypes.data == where


def test_memory_of_another_size_is_not_used_again() -> None:
    where = fresh((LARGE,), np.uint8).ctypes.data
    for size in (LARGE + 1, LARGE // 2):
        kept = fresh((size,), np.uint8)
        assert kept.ctypes.data != where
        assert kept.shape == (size,)


def test_spares_take_so_much_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_SPARE_BYTES", 2 * LARGE)
    arrays = [fresh((LARGE,), np.uint8) for _ in range(4)]
    places = [array.ctypes.data for array in arrays]
    while arrays:
        del arrays[0]
    assert [each.address for each in memory._spares._buffers] == places[2:]


def test_what_is_larger_than_all_spares_does_not_take_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_SPARE_BYTES", 2 * LARGE)
    where = fresh((LARGE,), np.uint8).ctypes.data
    fresh((3 * LARGE,), np.uint8)
    assert fresh((LARGE,), np.uint8).ctypes.data == where


@pytest.mark.parametrize("rows", [10, 4_000])
def test_rows_are_gathered_into_memory_that_may_be_written_to(rows: int) -> None:
    values = np.arange(rows * 256).reshape(rows, 256)
    index = np.arange(rows)[::-1]
    found = gather(values, index)
    assert (found == values[::-1]).all()
    found[:] = 0
    assert values[1, 1] == 257


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_memory_is_taken_does_not_hang_the_child() -> None:
    code = (
        "import os, sys, threading, numpy as np\n"
        "from destrier import memory\n"
        "held, forked = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with memory._spares._lock:\n"
        "        held.set()\n"
        "        forked.wait()\n"
        "thread = threading.Thread(target=hold)\n"
        "thread.start()\n"
        "held.wait()\n"
        "child = os.fork()\n"
        "if not child:\n"
        f"    memory.fresh(({LARGE},), np.uint8)\n"
        "    os._exit(0)\n"
        "forked.set()\n"
        "thread.join()\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
