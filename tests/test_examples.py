"""The examples run: a pretraining mix, stopped and gone on with on other numbers of processes."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from destrier import View

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "pretraining"


def start(folder: Path, size: int, until: int) -> list[subprocess.Popen[bytes]]:
    """Start the processes that torchrun would, without its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(size),
    }
    command = [sys.executable, FOLDER / "train.py", "--until", str(until)]
    return [
        subprocess.Popen(command, cwd=folder, env={**os.environ, **shared, "RANK": str(rank)})
        for rank in range(size)
    ]


def finish(processes: list[subprocess.Popen[bytes]]) -> None:
    try:
        for process in processes:
            assert process.wait(timeout=120) == 0
    finally:
        for process in processes:
            process.kill()


def steps(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_pretraining_mix_goes_on_with_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    monkeypatch.chdir(one)
    made = runpy.run_path(str(FOLDER / "prepare.py"))
    made["main"]()
    for name in ("manual", "code"):
        view = View(one / f"{name}.lance")
        texts = made[name]()
        assert len(view) == len(texts) >= 50
        assert bytes(view[-1]["tokens"][:-1]).decode() == texts[-1]
    shutil.copytree(one, other)
    whole, first = start(one, 1, 6), start(other, 2, 3)
    finish(whole + first)
    assert [step["step"] for step in steps(other)] == [1, 2, 3]
    finish(start(other, 1, 6))
    found, wanted = steps(other), steps(one)
    assert [step["step"] for step in found] == [1, 2, 3, 4, 5, 6]
    assert [step["digest"] for step in found] == [step["digest"] for step in wanted]
    assert len({step["digest"] for step in found}) == 6
    for a, b in zip(found, wanted, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-9)
    assert wanted[-1]["loss"] < wanted[0]["loss"]


def test_the_notebook_has_the_script_of_the_example() -> None:
    notebook = json.loads((ROOT / "notebooks" / "pretraining.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"]]
    cells = [cell for cell in cells if cell.startswith("%%writefile")]
    assert cells == ["%%writefile train.py\n" + (FOLDER / "train.py").read_text().rstrip("\n")]
