"""The tree of a sample: which leaf is which column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from destrier.errors import SourceError

__all__ = ["Node", "dump_spec", "load_spec"]

_DICTS = ("builtins.dict", "collections.OrderedDict")
_LISTS = ("builtins.list", "builtins.tuple", "collections.deque", "collections.namedtuple")
_MOST_DEPTH = 100
_SINGLE = "value"


@dataclass(frozen=True)
class Node:
    """A container or a leaf.

    Attributes:
        kind: The container's name in the specification, or None for a leaf.
        context: What the specification says of it, verbatim.
        names: Of the children as columns or fields.
        children: In the order of the leaves.
        leaf: Number of the leaf, or None for a container.
    """

    kind: str | None
    context: Any
    names: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()
    leaf: int | None = None

    def leaves(self) -> Iterator[int]:
        """The numbers of the leaves below, in order."""
        if self.leaf is not None:
            yield self.leaf
        for child in self.children:
            yield from child.leaves()

    @property
    def columns(self) -> dict[str, Node]:
        """The columns of a table of such samples; a sample that is one leaf is one column."""
        if self.leaf is not None:
            return {_SINGLE: self}
        return dict(zip(self.names, self.children, strict=True))


def load_spec(text: str | None, count: int, file: str) -> Node:
    """Read a specification. Nothing that it names is imported.

    Args:
        text: As it stands in the index; None is a leaf, or a tuple of leaves.
        count: Number of leaves that the samples have.
        file: The index, for messages.

    Raises:
        SourceError: If it is damaged, unknown, or of another number of leaves.
    """
    if text is None:
        leaves = tuple(Node(None, None, leaf=number) for number in range(count))
        if count == 1:
            return leaves[0]
        return Node("builtins.tuple", "null", tuple(map(str, range(count))), leaves)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file}: data_spec is not JSON: {error}", file=file) from None
    if not isinstance(found, list) or len(found) != 2 or found[0] != 1:
        raise SourceError(
            f"{file}: data_spec is not of the one known protocol, 1: {text[:80]!r}", file=file
        )
    root = _node(found[1], iter(range(1 << 31)), file, 0)
    number = sum(1 for _ in root.leaves())
    if number != count:
        raise SourceError(
            f"{file}: data_spec has {number} leaves, but data_format names {count}", file=file
        )
    return root


def _node(raw: Any, numbers: Iterator[int], file: str, depth: int) -> Node:
    if depth > _MOST_DEPTH or not isinstance(raw, dict):
        raise SourceError(f"{file}: data_spec is damaged at {str(raw)[:80]!r}", file=file)
    kind, context, children = raw.get("type"), raw.get("context"), raw.get("children_spec")
    if not isinstance(children, list):
        raise SourceError(f"{file}: data_spec is damaged at {str(raw)[:80]!r}", file=file)
    if kind is None:
        if children:
            raise SourceError(f"{file}: data_spec has a leaf with children", file=file)
        return Node(None, None, leaf=next(numbers))
    if kind in _DICTS:
        keys = _keys(context, file)
    elif kind == "collections.defaultdict":
        keys = _keys(context.get("dict_context") if isinstance(context, dict) else None, file)
    elif kind in _LISTS:
        keys = list(range(len(children)))
    else:
        raise SourceError(
            f"{file}: data_spec holds a container of type {kind!r}, which is not known", file=file
        )
    names = tuple(str(key) for key in keys)
    if len(names) != len(children) or len(set(names)) != len(names):
        raise SourceError(
            f"{file}: data_spec has a container of {len(children)} values with the keys {keys}",
            file=file,
        )
    nodes = tuple(_node(child, numbers, file, depth + 1) for child in children)
    return Node(kind, context, names, nodes)


def _keys(context: Any, file: str) -> list[Any]:
    try:
        keys = json.loads(context) if isinstance(context, str) else context
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, list) or any(isinstance(key, list | dict) for key in keys):
        raise SourceError(
            f"{file}: data_spec has a dict with the keys {str(context)[:80]!r}", file=file
        )
    return keys


def dump_spec(root: Node) -> str:
    """Write a specification as it stands in an index."""
    return json.dumps([1, _raw(root)])


def _raw(node: Node) -> dict[str, Any]:
    return {
        "type": node.kind,
        "context": node.context,
        "children_spec": [_raw(child) for child in node.children],
    }
