"""Runs the original libraries, which live in an environment of their own."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
REASON = ROOT / ".venv-peers" / "failed"  # why it could not be installed, left by the Makefile

needs_peers = pytest.mark.skipif(
    not PYTHON.exists() or REASON.exists(),
    reason="the original libraries are not installed in .venv-peers: run make peers",
)


def run_peer(script: str, *arguments: object, timeout: float = 150) -> Any:
    """Run a script in the peers' environment.

    Args:
        script: Python source, dedented here; it finds its arguments in ``sys.argv[1:]`` and may
            print one JSON value as its last line.
        arguments: Passed as text.
        timeout: Seconds.

    Returns:
        The JSON value of the last line, or None if it printed nothing.
    """
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("DESTRIER", "PYTHON"))},
        "PYTHONPATH": str(ROOT / "tests" / "peers"),
        "LITDATA_DISABLE_VERSION_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [str(PYTHON), "-W", "ignore", "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = done.stdout.strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return None
