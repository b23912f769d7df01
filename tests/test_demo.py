"""The demo, reduced: real processes under torchrun, killed and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from destrier.cli import main
from destrier.demo import Step, _compare, _Work

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("mlxtend")
pytest.importorskip("matplotlib")

DEMO = [sys.executable, "-m", "destrier.cli", "demo", "--quick", "--out"]


def steps(out: Path, name: str) -> list[dict[str, object]]:
    """Read the steps that a run wrote down."""
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_the_demo_resumes_exactly(tmp_path: Path):
    out = tmp_path / "demo"
    done = subprocess.run([*DEMO, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 36 global batches equal" in done.stdout
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    undisturbed = steps(out, "undisturbed")
    assert [step["step"] for step in undisturbed] == list(range(1, 37))
    assert len({step["digest"] for step in undisturbed}) == 36
    first, second, third = (steps(out, name) for name in ("first", "second", "third"))
    assert first[0]["step"] == 1
    assert second[0]["step"] in {6, 11, 16}  # after the last checkpoint before the kill
    assert second[0]["step"] <= first[-1]["step"] + 1
    assert third[0]["step"] == second[-1]["step"] + 1  # a stop loses nothing
    assert third[-1]["step"] == 36


def test_a_killed_demo_leaves_no_process(tmp_path: Path):
    out = tmp_path / "demo"
    with subprocess.Popen(
        [*DEMO, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as demo:
        try:
            while not list(out.glob("processes/*/*")):
                assert demo.poll() is None
                time.sleep(0.05)
            started = psutil.Process(demo.pid).children(recursive=True)
        finally:
            demo.kill()
    assert len(started) >= 2
    _, alive = psutil.wait_procs(started, timeout=60)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_folder_of_others_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "choose another with --out" in capsys.readouterr().err
    assert main(["demo", "--out", str(kept)]) == 1
    assert "not a folder" in capsys.readouterr().err
    assert kept.read_text() == "years of work"


def test_a_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 1
    assert "pip install '.[demo]' in a clone" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


def test_a_difference_is_seen(tmp_path: Path):
    work = _Work("unused", tmp_path, scale=None)  # type: ignore[arg-type]
    reference = {i: Step(i, 0, 48, f"digest {i}", 0.5) for i in range(1, 5)}

    def compare(**changed: object) -> bool:
        lines = [{**vars(reference[i]), **(changed if i == 3 else {})} for i in (1, 2, 3)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "first.jsonl").write_text(text + '{"step": 4, "cut')
        (run,) = _compare(work, reference)
        assert (run.first, run.last) == (1, 3)
        return run.fine

    assert compare()
    assert compare(loss=0.5 + 1e-12)
    assert not compare(loss=0.5001)
    assert not compare(digest="another")
    assert not compare(rows=47)
    assert not compare(epoch=1)
