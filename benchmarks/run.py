"""Runs all benchmarks and leaves their results in ``benchmarks/out``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

for name in ("scale", "steady", "peers", "links", "ingest"):
    subprocess.run([sys.executable, str(Path(__file__).parent / f"{name}.py")], check=True)
