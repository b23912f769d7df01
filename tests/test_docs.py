"""The code in README.md and docs/ is run, file by file, in the order of reading.

Each file gets a folder of its own, with the table that ``docs/README.md`` makes.

- A block of Python is run; the names it defines stay for the blocks after it. Where a line ends
  in a comment after a ``print`` at the left margin, what it printed must be that comment.
- A block of Python whose first line is a comment with a file's name is saved as that file.
- In a block of shell, lines that begin with ``destrier`` are run, and the first with ``torchrun``.
- A block after ``<!-- not run: reason -->`` is left alone.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from destrier import DestrierWarning

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "README.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_NOT_RUN = 12  # in all pages together

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")
FILE_NAME = re.compile(r"# (\w+\.py)\n")
PRINTED = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


class Block(NamedTuple):
    """A block of code in a page."""

    language: str
    text: str
    line: int
    not_run: str | None


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = []
    for match in FENCE.finditer(text):
        reason = NOT_RUN.search(text, 0, match.start())
        line = text.count("\n", 0, match.start()) + 2
        found.append(Block(match[1], match[2], line, reason and reason[1]))
    return found


def execute(code: str, page: Path, line: int, names: dict[str, object]) -> str:
    """Run a block as if it stood in its page, so that errors name the page's lines."""
    padded = "\n" * (line - 1) + code
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(padded, str(page), "exec"), names)
    return output.getvalue()


def run_shell(text: str) -> None:
    started = False
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["destrier"]:
            from destrier.cli import main

            with contextlib.redirect_stdout(io.StringIO()):
                assert main(words[1:]) in (0, None), line
        elif words[:1] == ["torchrun"] and not started:
            started = True
            command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the table of the examples, with the code that the index shows."""
    folder = tmp_path_factory.mktemp("examples")
    code = next(block for block in blocks(INDEX) if block.language == "python")
    with _in_folder(folder):
        execute(code.text, INDEX, code.line, {"__name__": "__main__"})
    return folder


@contextlib.contextmanager
def _in_folder(folder: Path):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Go to an empty folder, as the only process of a torchrun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page: Path, folder: Path, example_folder: Path) -> None:
    if page != INDEX:
        shutil.copytree(example_folder, folder, dirs_exist_ok=True)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.not_run:
            continue
        if block.language == "sh":
            run_shell(block.text)
        if block.language != "python":
            continue
        if saved := FILE_NAME.match(block.text):
            (folder / saved[1]).write_text(block.text, "utf-8")
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", DestrierWarning)
            printed = execute(block.text, page, block.line, names)
        if shown := PRINTED.findall(block.text):
            assert printed.splitlines() == shown, f"{page.name}, line {block.line}"
    names.clear()  # functions of a page hold its names, and so its loaders, in a cycle
    gc.collect()


def test_few_blocks_are_not_run() -> None:
    left = [f"{page.name}: {b.not_run}" for page in PAGES for b in blocks(page) if b.not_run]
    assert len(left) <= MOST_NOT_RUN, left


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to the headings of a page."""
    text = FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {name.replace(" ", "-") for name in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_in_the_index() -> None:
    listed = {target for target, _ in LINK.findall(INDEX.read_text("utf-8"))}
    missing = {page.name for page in PAGES if page.parent == INDEX.parent} - listed - {INDEX.name}
    assert not missing
