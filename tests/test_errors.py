from __future__ import annotations

import inspect
import pickle
import re

import pytest

from destrier import errors

TREE = {
    "ArgumentError": (errors.DestrierError, ValueError),
    "ColumnError": (errors.ArgumentError, ValueError),
    "DecodeError": (errors.RowError, ValueError),
    "EmptyError": (errors.ArgumentError, ValueError),
    "FilterError": (errors.ArgumentError, ValueError),
    "IterationError": (errors.DestrierError, RuntimeError),
    "LengthError": (errors.TransformError, ValueError),
    "LinkError": (errors.ReadError, OSError),
    "MissingDependencyError": (errors.DestrierError, ImportError),
    "MissingKeyError": (errors.ArgumentError, KeyError),
    "MissingRowError": (errors.ArgumentError, IndexError),
    "ReadError": (errors.RowError, OSError),
    "RowError": (errors.DestrierError, RuntimeError),
    "SchemaError": (errors.SourceError, TypeError),
    "SourceError": (errors.DestrierError, ValueError),
    "StateError": (errors.DestrierError, ValueError),
    "StorageError": (errors.DestrierError, OSError),
    "TableError": (errors.DestrierError, OSError),
    "TransformError": (errors.RowError, RuntimeError),
    "VersionError": (errors.TableError, LookupError),
    "WorkerError": (errors.DestrierError, RuntimeError),
    "WriteError": (errors.DestrierError, OSError),
}
ROW_ERRORS = [
    errors.RowError,
    errors.ReadError,
    errors.LinkError,
    errors.DecodeError,
    errors.TransformError,
    errors.LengthError,
]


def test_public_list_is_complete_and_sorted():
    defined = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert errors.__all__ == sorted(defined)
    assert set(errors.__all__) == {*TREE, "DestrierError", "DestrierWarning"}


@pytest.mark.parametrize("name", TREE)
def test_tree(name):
    kind = getattr(errors, name)
    for parent in (errors.DestrierError, *TREE[name]):
        assert issubclass(kind, parent)
    error = kind("what, and the way out")
    assert str(error) == "what, and the way out"
    assert error.args == ("what, and the way out",)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, str(error))


def test_drawn_tree_is_the_tree():
    drawn = re.findall(r"[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__)
    assert sorted(name for name, _ in drawn) == sorted(TREE)
    for name, builtin in drawn:
        if builtin:
            assert issubclass(getattr(errors, name), __builtins__[builtin])


def test_warning_category():
    assert issubclass(errors.DestrierWarning, UserWarning)


@pytest.mark.parametrize("kind", ROW_ERRORS)
def test_row_errors_keep_their_attributes_in_a_pickle(kind):
    error = kind("row 7 of x is bad", offset=7, column="image")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, "row 7 of x is bad")
    assert (again.offset, again.column) == (7, "image")
    plain = kind("bad")
    assert (plain.offset, plain.column) == (None, None)


@pytest.mark.parametrize("kind", [errors.SourceError, errors.SchemaError])
def test_source_errors_keep_their_attributes_in_a_pickle(kind):
    error = kind("row 7 of x is bad", file="x", row=7, column="image")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (kind, "row 7 of x is bad")
    assert (again.file, again.row, again.column) == ("x", 7, "image")
    plain = kind("bad")
    assert (plain.file, plain.row, plain.column) == (None, None, None)
