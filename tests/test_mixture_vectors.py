"""The vectors of mixtures in docs/order.md: what the library computes, and what the page says."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from destrier.keyed import MIXTURE_KEY, epoch_key, permute, subkey
from destrier.mixing.course import Course, Segment
from destrier.mixing.quotas import Quotas
from slow_mixture import route

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Path(__file__).parent.parent / "docs" / "order.md"
NAMES, SIZES, Q, SEED = ("a", "b"), (20, 7), 8, 7


def section() -> str:
    """Return the vectors of mixtures, as the page has them."""
    return PAGE.read_text("utf-8").split("Mixtures of two sources, n = 20 and 7")[1]


def numbers(text: str) -> list[int]:
    return [int(word, 0) for word in re.findall(r"0x[0-9a-f]+|\d+", text)]


def line(after: str, name: str) -> list[int]:
    """Return the numbers behind a name, in the first line that has it after some text."""
    rest = section()
    rest = rest[rest.index(after) :]
    found = re.search(rf"{re.escape(name)}\s+= (.+)", rest)
    assert found, (after, name)
    return numbers(found[1])


def course(stop: Any, *segments: Segment, length: int | None = None) -> Course:
    return Course(NAMES, SIZES, segments, Q, 1, stop, SEED, length)


def by_definition(weights: Sequence[int], window: int) -> tuple[list[int], list[int]]:
    """Return source and number of each slot of a window of epoch 3, as the page says it."""
    shares = [Fraction(weight, sum(weights)) for weight in weights]

    def counts(x: int) -> list[int]:
        floors = [int(x * sum(shares[:i])) for i in range(len(shares) + 1)]
        return [after - before for before, after in pairwise(floors)]

    before, after = counts(window * Q), counts(window * Q + Q)
    m = [b - a for a, b in zip(before, after, strict=True)]
    km = subkey(subkey(epoch_key(SEED, 3), MIXTURE_KEY), window)
    places = permute(np.arange(Q), Q, km).tolist()
    sources = [next(i for i in range(len(m)) if p < sum(m[: i + 1])) for p in places]
    index = [before[s] + sources[:t].count(s) for t, s in enumerate(sources)]
    return sources, index


def test_keys() -> None:
    key = subkey(epoch_key(SEED, 3), MIXTURE_KEY)
    assert MIXTURE_KEY == 6
    assert line("", "of epoch 3") == [key]
    windows = [subkey(key, v) for v in (0, 1)]
    assert line("", "km of windows 0, 1") == windows
    assert line("", "P(0 ... 7; 8, km)") == [
        place for km in windows for place in permute(np.arange(Q), Q, km).tolist()
    ]


@pytest.mark.parametrize(
    ("heading", "first", "lines"),
    [
        ("epoch 3, first_exhausted", 0, ("g = 0 ... 15: source", None, "index")),
        ("epoch 3, all_exhausted", 24, ("g = 24 ... 31: source", "epoch", "index")),
        ("length = 40", 12, ("g = 12 ... 23: source", "epoch", "index")),
    ],
)
def test_samples(heading: str, first: int, lines: tuple[str | None, ...]) -> None:
    if heading.startswith("length"):
        segments = (Segment(0, (3, 1)), Segment(12, (1, 1)))
        made, epoch = course("length", *segments, length=40), 0
    else:
        made, epoch = course(heading.split(", ")[1], Segment(0, (3, 1))), 3
        said = numbers(heading_line(heading))
        assert said[1:4] == [made.samples(3), *made.counts(3)]
    wanted = [None if name is None else line(heading, name) for name in lines]
    count = len(wanted[0] or ())
    got = route(made, epoch, np.arange(first, first + count))
    for values, expected in zip(got, wanted, strict=True):
        if expected is not None:
            assert values.tolist() == expected


def heading_line(heading: str) -> str:
    return next(text for text in section().splitlines() if text.startswith(heading))


def test_the_definition_gives_them() -> None:
    windows = [by_definition((3, 1), v) for v in (0, 1)]
    sources, indices = ([x for each in part for x in each] for part in zip(*windows, strict=True))
    assert line("epoch 3, first_exhausted", "g = 0 ... 15: source") == sources
    assert line("epoch 3, first_exhausted", "index") == indices


def test_counts() -> None:
    quotas = Quotas(("a", "b", "c"), (0.5, 0.3, 0.2), Q, 0)
    (said,) = re.findall(r"before slots 8, 16, 24, 32: (.+)\.", section())
    assert numbers(said) == [n for v in range(1, 5) for n in quotas.counts(v * Q)]
