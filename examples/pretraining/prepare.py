"""Make two tables of tokens from texts that come with Python: its manual, and its own code.

One document a row, tokenized to bytes: no package and no file is needed. Run it in the folder that
the tables shall be in, before train.py::

    python prepare.py
"""

from __future__ import annotations

import os
from pathlib import Path
from pydoc_data import topics

import pyarrow as pa

from destrier import optimize

EOS = 256  # beyond the bytes


def manual() -> list[str]:
    """Return the topics of Python's reference, as `help()` shows them."""
    return [text for _, text in sorted(topics.topics.items())]


def code() -> list[str]:
    """Return some modules of the standard library."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return [path.read_text("utf-8") for path in paths[:60]]


def tokenized(texts: list[str]) -> list[dict[str, list[int]]]:
    """Return the bytes of each text, and the end of a document."""
    return [{"tokens": [*text.encode(), EOS]} for text in texts]


def main() -> None:
    """Write both tables."""
    token = pa.field("item", pa.uint16(), nullable=False)
    schema = pa.schema([pa.field("tokens", pa.list_(token))])
    for name, texts in (("manual", manual()), ("code", code())):
        written = optimize(
            tokenized, texts, f"{name}.lance", batch_size=20, schema=schema, num_workers=0
        )
        print(f"{name}: {written.rows} documents")


if __name__ == "__main__":
    main()
