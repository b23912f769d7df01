"""The public surface: names, docstrings, examples, types, version."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest

import destrier

ROOT = Path(__file__).parent.parent
PUBLIC = [getattr(destrier, name) for name in destrier.__all__]
ERRORS = [thing for thing in PUBLIC if inspect.isclass(thing) and issubclass(thing, Exception)]
OTHERS = [thing for thing in PUBLIC if thing not in ERRORS]
MODULES = sorted({thing.__module__ for thing in OTHERS} | {"destrier.foreign"})


def name_of(thing: object) -> str:
    return getattr(thing, "__qualname__", str(thing))


def test_all_is_sorted_and_without_repeats() -> None:
    assert destrier.__all__ == sorted(set(destrier.__all__))


def test_every_name_is_there() -> None:
    for name in destrier.__all__:
        assert getattr(destrier, name).__module__.startswith("destrier."), name
    with pytest.raises(AttributeError, match="no attribute 'nix'"):
        _ = destrier.nix  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(str(destrier.__file__)).read_text())
    seen = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and "destrier." in node.module
        for alias in node.names
    }
    assert seen == set(destrier.__all__)


def test_no_module_hides_a_name() -> None:
    """A module of a public name would become that attribute when it is imported."""
    folder = Path(str(destrier.__file__)).parent
    assert not {path.stem for path in folder.iterdir()} & set(destrier.__all__)


def test_every_error_is_public() -> None:
    from destrier import errors

    assert set(errors.__all__) <= set(destrier.__all__)


@pytest.mark.parametrize("thing", PUBLIC, ids=name_of)
def test_has_a_docstring_of_its_own(thing: object) -> None:
    text = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert text
    assert text.strip().splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("thing", OTHERS, ids=name_of)
def test_has_an_example(thing: object) -> None:
    text = inspect.getdoc(thing) or ""
    assert "Example:" in text
    assert ">>> " in text


@pytest.mark.parametrize("thing", [t for t in OTHERS if inspect.isclass(t)], ids=name_of)
def test_public_methods_have_docstrings(thing: type) -> None:
    missing = [
        name
        for name, value in vars(thing).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, property | staticmethod | classmethod))
        and not inspect.getdoc(value)
    ]
    assert not missing


@pytest.mark.parametrize("thing", [t for t in OTHERS if inspect.isclass(t)], ids=name_of)
def test_every_argument_is_described(thing: type) -> None:
    text = inspect.getdoc(thing) or ""
    described = set(re.findall(r"^\s*(\w+): ", text, re.MULTILINE))
    arguments = set(inspect.signature(thing).parameters) - {"self"}
    assert arguments <= described, sorted(arguments - described)


@pytest.mark.parametrize("module", MODULES)
def test_examples_are_true(module: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_stands_in_for_lancedb_streaming() -> None:
    import lancedb.streaming as theirs

    from destrier import dataset as ours

    for name in ("StreamingDataset", "StreamingDataLoader"):
        assert hasattr(ours, name)
    wanted = set(inspect.signature(theirs.StreamingDataset).parameters)
    assert wanted <= set(inspect.signature(ours.StreamingDataset).parameters)


def test_is_typed() -> None:
    assert (Path(destrier.__file__).parent / "py.typed").exists()


def test_versions_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    declared = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## \[?v?(\d+\.\d+\.\d+\w*)", changes, re.MULTILINE)
    assert declared is not None
    assert declared[1] == destrier.__version__
    if newest is None:  # nothing is released yet
        assert "## [Unreleased]" in changes
    else:
        assert newest[1] == destrier.__version__
    assert importlib.metadata.version("destrier") == destrier.__version__
