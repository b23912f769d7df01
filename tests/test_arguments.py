"""The page of all arguments says what the signatures say."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from destrier import StreamingDataLoader, StreamingDataset

PAGE = Path(__file__).parent.parent / "docs" / "arguments.md"
ROW = re.compile(r"^\| `(\w+)` \| (?:`(.+?)`|required) \| (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize("kind", [StreamingDataset, StreamingDataLoader])
def test_names_and_defaults(kind: type) -> None:
    (section,) = re.findall(
        rf"^## {kind.__name__}$\n(.*?)(?=^## |\Z)",
        PAGE.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    listed = [
        (name, ast.literal_eval(default) if default else inspect.Parameter.empty)
        for name, default, _ in ROW.findall(section)
    ]
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert listed == [(parameter.name, parameter.default) for parameter in parameters]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[1:])
