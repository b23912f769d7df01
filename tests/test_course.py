"""The course of a mixture, against a second implementation that writes down every sample."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from destrier.errors import ArgumentError, EmptyError
from destrier.mixing.course import ENDLESS, Course, Segment
from destrier.mixing.quotas import Quotas
from slow_mixture import SlowCourse, route, slow_shares

many = settings(max_examples=40, deadline=None, derandomize=True)
STOPS = ("first_exhausted", "all_exhausted", "length", "never", "every_row_once")
MOST = 600  # samples of an epoch that is looked at


def made(slow: SlowCourse) -> Course:
    """The same course, before it was reweighted."""
    return Course(
        names=tuple(f"s{i}" for i in range(len(slow.sizes))),
        sizes=tuple(slow.sizes),
        segments=(Segment(0, tuple(slow.weights)),),
        window=slow.window,
        unit=slow.unit,
        stop=slow.stop,  # type: ignore[arg-type]
        seed=slow.seed,
        length=slow.length,
    )


def least_window(weights: Any) -> int:
    return math.ceil(1 / min(share for share in slow_shares(weights) if share))


@st.composite
def weightings(draw: st.DrawFn, count: int) -> list[float]:
    """Weights for so many sources, some of them 0."""
    one = st.one_of(st.integers(1, 8), st.sampled_from([0.1, 0.2, 0.7]), st.just(0))
    weights: list[float] = draw(st.lists(one, min_size=count, max_size=count))
    return weights if any(weights) else [*weights[1:], 1]


@st.composite
def courses(draw: st.DrawFn, stops: tuple[str, ...] = STOPS) -> SlowCourse:
    """Courses of a few sources, whose first epoch is neither empty nor long."""
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=1, max_size=4))
    stop = draw(st.sampled_from(stops))
    weights = sizes if stop == "every_row_once" else draw(weightings(len(sizes)))
    unit = 1 if stop == "every_row_once" else draw(st.sampled_from([1, 1, 2, 3, 5]))
    slow = SlowCourse(
        sizes,
        weights,
        window=least_window(weights) + draw(st.integers(0, 12)),
        stop=stop,
        seed=draw(st.integers(0, 2**32 - 1)),
        unit=unit,
        length=unit * draw(st.integers(1, 60)) if stop == "length" else None,
    )
    samples = slow.samples(0)
    assume(samples is None or 0 < samples <= MOST)
    return slow


def routes(course: Course, epoch: int, g: Any) -> list[tuple[int, int, int]]:
    source, passes, index = route(course, epoch, np.asarray(g, np.int64))
    return list(zip(source.tolist(), passes.tolist(), index.tolist(), strict=True))


def check_epoch(course: Course, slow: SlowCourse, epoch: int) -> None:
    """Compare lengths, counts and every sample of an epoch."""
    samples = slow.samples(epoch)
    if samples is None:
        assert course.samples(epoch) == ENDLESS
        samples = 200 * slow.unit
        whole = slow.epoch(epoch, samples)
    else:
        assert course.samples(epoch) == samples
        whole = slow.epoch(epoch)
        drawn = Counter(source for source, *_ in whole)
        assert course.counts(epoch) == [drawn[i] for i in range(len(slow.sizes))]
    assert routes(course, epoch, np.arange(samples)) == whole
    some = np.arange(samples)[::-1][:: max(1, samples // 7)]
    assert routes(course, epoch, some) == [whole[g] for g in some.tolist()]
    half = samples // 2 // slow.unit * slow.unit
    drawn = Counter(source for source, *_ in whole[:half])
    assert course.counts(epoch, half) == [drawn[i] for i in range(len(slow.sizes))]


# ---- against the second implementation ------------------------------------------------------


@given(courses())
@many
def test_epochs_are_their_definition(slow: SlowCourse) -> None:
    course = made(slow)
    for epoch in (0, 1, 2):
        check_epoch(course, slow, epoch)


@given(courses(("first_exhausted", "all_exhausted", "length")), st.data())
@many
def test_reweighted_courses_are_their_definition(slow: SlowCourse, data: st.DataObject) -> None:
    course = made(slow)
    epoch = at = 0
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            epoch, at = epoch + data.draw(st.integers(1, 2)), 0
        samples = course.samples(epoch)
        at += slow.unit * data.draw(st.integers(0, (samples - at) // slow.unit))
        weights = data.draw(weightings(len(slow.sizes)))
        later = SlowCourse(slow.sizes, weights, slow.window, slow.stop, slow.seed, slow.unit)
        if least_window(weights) > slow.window or (later.samples(0) == 0 and not slow.goes_on):
            before = replace(course)
            with pytest.raises((ArgumentError, EmptyError)):
                course.reweighted(epoch, at, tuple(weights))
            assert course == before
            continue
        course = course.reweighted(epoch, at, tuple(weights))
        slow.reweight(epoch, at, weights)
        assume((slow.samples(epoch) or 0) <= MOST)
    for number in range(epoch, epoch + 3):
        check_epoch(course, slow, number)


@given(courses(("never",)), st.data())
@many
def test_a_reweighted_course_without_end(slow: SlowCourse, data: st.DataObject) -> None:
    course, at = made(slow), 0
    epoch = data.draw(st.integers(0, 2))
    for _ in range(2):
        at += slow.unit * data.draw(st.integers(0, 60))
        weights = data.draw(weightings(len(slow.sizes)))
        assume(least_window(weights) <= slow.window)
        course = course.reweighted(epoch, at, tuple(weights))
        slow.reweight(epoch, at, weights)
    check_epoch(course, slow, epoch)
    check_epoch(course, slow, epoch + 1)


def test_epochs_without_end_have_other_orders() -> None:
    course = Course(("a", "b"), (37, 5), (Segment(0, (3, 1)),), 16, 1, "never", 3)
    first, second = (routes(course, epoch, np.arange(200)) for epoch in (0, 1))
    assert first != second
    assert not {(s, number) for s, number, _ in first} & {(s, number) for s, number, _ in second}


# ---- what a mixture promises ----------------------------------------------------------------


@given(courses(("first_exhausted", "all_exhausted", "length", "every_row_once")), st.data())
@many
def test_sources_are_read_without_gaps(slow: SlowCourse, data: st.DataObject) -> None:
    course = made(slow)
    if slow.stop != "every_row_once" and data.draw(st.booleans()):
        at = slow.unit * data.draw(st.integers(0, course.samples(0) // slow.unit))
        weights = data.draw(weightings(len(slow.sizes)))
        assume(least_window(weights) <= slow.window)
        course = course.reweighted(0, at, tuple(weights))
        assume(course.samples(0) <= MOST)
    seen: set[Any] = set()
    last: dict[int, int] = {}
    for epoch in range(3):
        for source, number, index in routes(course, epoch, np.arange(course.samples(epoch))):
            assert (source, number, index) not in seen, "a source's epochs are never repeated"
            seen.add((source, number, index))
            position = number * slow.sizes[source] + index
            following = last.get(source, -1) + 1
            if not slow.goes_on and position != following:
                # The rest of a source's epoch is left out at the end of an epoch of the mixture.
                assert index == 0
                assert number == (following - 1) // slow.sizes[source] + 1
            else:
                assert position == following
            last[source] = position


@given(courses(("first_exhausted", "all_exhausted")))
@many
def test_lengths_are_the_least_and_the_most(slow: SlowCourse) -> None:
    course = made(slow)
    window = slow.window * slow.unit
    assert course.samples(0) % window == 0
    counts = course.counts(0)
    drawn = [i for i, weight in enumerate(slow.weights) if weight]
    if slow.stop == "first_exhausted":
        assert all(counts[i] <= slow.sizes[i] for i in drawn)
        more = replace(course, stop="length", length=course.samples(0) + window).counts(0)
        assert any(more[i] > slow.sizes[i] for i in drawn)
    else:
        assert all(counts[i] >= slow.sizes[i] for i in drawn)
        less = replace(course, stop="length", length=course.samples(0) - window)
        assert not less.length or any(less.counts(0)[i] < slow.sizes[i] for i in drawn)
    assert not any(count for i, count in enumerate(counts) if i not in drawn)


def test_every_row_once_is_concatenation() -> None:
    sizes = (1, 700, 33, 260)
    course = Course(tuple("abcd"), sizes, (Segment(0, sizes),), 1024, 1, "every_row_once", 3)
    assert course.samples(0) == sum(sizes)
    for epoch in range(3):
        found = routes(course, epoch, np.arange(sum(sizes)))
        assert sorted(found) == [(i, epoch, j) for i, size in enumerate(sizes) for j in range(size)]


def test_epochs_of_a_length_are_one_line() -> None:
    one = Course(("a", "b"), (37, 5), (Segment(0, (3, 1)),), 16, 1, "length", 3, length=50)
    other = replace(one, length=2 * 50)
    lines = [
        [sample for epoch in range(4) for sample in routes(one, epoch, np.arange(50))],
        [sample for epoch in range(2) for sample in routes(other, epoch, np.arange(100))],
    ]
    endless = replace(one, stop="never", length=None)
    assert lines[0] == lines[1] == routes(endless, 0, np.arange(200))
    counts = [
        [sum(of) for of in zip(*(c.counts(e) for e in range(n)), strict=True)]
        for c, n in ((one, 4), (other, 2))
    ]
    assert counts[0] == counts[1] == endless.counts(0, 200)


def test_far_along_nothing_is_lost() -> None:
    course = Course(("a", "b"), (10**9, 7), (Segment(0, (2, 1)),), 3000, 1, "never", 1)
    g = 10**17 // 3000 * 3000
    source, number, index = route(course, 0, np.arange(g, g + 3000))
    assert np.bincount(source).tolist() == [2000, 1000]
    for i, size in enumerate(course.sizes):
        mine = (number * size + index)[source == i]
        assert (np.diff(mine) == 1).all()
        assert mine[0] == course.counts(0, g)[i]


# ---- what cannot be -------------------------------------------------------------------------


def course_of(**changes: Any) -> Course:
    values: dict[str, Any] = {
        "names": ("a", "b"),
        "sizes": (100, 50),
        "segments": (Segment(0, (3, 1)),),
        "window": 8,
        "unit": 1,
        "stop": "first_exhausted",
        "seed": 0,
    }
    return Course(**{**values, **changes})


def test_an_epoch_of_no_samples_is_an_error() -> None:
    with pytest.raises(EmptyError, match=r"window of 1024 .*a 100, b 50.*window=.*all_exhausted"):
        course_of(window=1024).samples(0)
    with pytest.raises(EmptyError, match="window of 8 slots of 64"):
        course_of(unit=64).samples(0)
    assert course_of(window=1024, stop="all_exhausted").samples(0) == 1024


@pytest.mark.parametrize("at", [-1, 129, 10**9])
def test_a_mixture_is_reweighted_at_its_samples(at: int) -> None:
    with pytest.raises(ArgumentError, match=rf"from 0 to 128 .* got {at}"):
        course_of().reweighted(0, at, (1, 1))


def test_a_mixture_is_reweighted_between_units() -> None:
    course = course_of(unit=4)
    course.reweighted(0, 12, (1, 1))
    with pytest.raises(ArgumentError, match="multiple of 4, got 13"):
        course.reweighted(0, 13, (1, 1))


def test_a_mixture_is_not_reweighted_in_its_past() -> None:
    course = course_of().reweighted(0, 40, (1, 1))
    assert course.reweighted(0, 40, (2, 1)).segments[-1] == Segment(40, (2, 1))
    with pytest.raises(ArgumentError, match=r"at sample 40 already; got .* 39"):
        course.reweighted(0, 39, (2, 1))
    later = course.reweighted(5, 8, (3, 1))
    with pytest.raises(ArgumentError, match="reweighted in epoch 5: the weights of epoch 4"):
        route(later, 4, np.arange(3))


def test_new_weights_must_fit_the_window() -> None:
    with pytest.raises(ArgumentError, match=r"'b' has 0\.0909 .* window of 8.* at least 11"):
        course_of().reweighted(0, 8, (10, 1))


def test_what_reads_every_row_once_has_no_weights() -> None:
    course = course_of(segments=(Segment(0, (100, 50)),), stop="every_row_once")
    with pytest.raises(ArgumentError, match="without weights"):
        course.reweighted(0, 8, (1, 1))


def test_weights_that_leave_later_epochs_empty_are_refused() -> None:
    course = course_of(sizes=(1000, 10), window=32)
    assert course.samples(0) == 32
    with pytest.raises(EmptyError, match="window of 32"):
        course.reweighted(0, 0, (1, 1))


def test_a_length_is_whole_units() -> None:
    with pytest.raises(ArgumentError, match=r"length=30 .* 4"):
        course_of(unit=4, stop="length", length=30)


def test_vectors() -> None:
    """The order of a mixture is part of the format: a change of it is a new order version."""
    course = course_of(
        names=tuple("abc"),
        sizes=(40, 10, 7),
        segments=(Segment(0, (5, 2, 1)),),
        stop="all_exhausted",
        seed=7,
    )
    assert course.samples(3) == 64
    assert routes(course, 3, np.arange(12)) == [
        (0, 3, 0),
        (0, 3, 1),
        (2, 6, 0),
        (0, 3, 2),
        (0, 3, 3),
        (1, 6, 0),
        (0, 3, 4),
        (1, 6, 1),
        (1, 6, 2),
        (0, 3, 5),
        (1, 6, 3),
        (0, 3, 6),
    ]


def test_many_changes_cost_a_step_no_more_than_few():
    course = Course(("a", "b"), (1 << 30, 1 << 30), (Segment(0, (1, 1)),), 64, 1, "never", 0)
    for i in range(1, 300):
        course = course.reweighted(0, 64 * i, (1 + i % 3, 1))
    g = np.arange(64 * 299, 64 * 300)
    route(course, 0, g)
    looked_at: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        counted = Quotas.counts
        patch.setattr(Quotas, "counts", lambda q, slot: looked_at.append(slot) or counted(q, slot))
        route(course, 0, g)
    assert len(looked_at) < 10


def test_an_endless_epoch_takes_one_of_a_source_without_end() -> None:
    course = Course(("a", "b"), (ENDLESS, 5), (Segment(0, (1, 1)),), 2, 1, "never", 1)
    source, epochs, _ = route(course, 70_000, np.arange(4))
    assert sorted(zip(source.tolist(), epochs.tolist(), strict=True)) == [
        (0, 70_000),
        (0, 70_000),
        (1, 70_000 << 16),
        (1, 70_000 << 16),
    ]


@pytest.mark.parametrize("stop", ["never", "length"])
def test_a_course_that_was_changed_often_is_no_longer(stop: Any) -> None:
    length = 100 if stop == "length" else None
    course = Course(("a", "b"), (37, 90), (Segment(0, (1, 1)),), 16, 2, stop, 3, length=length)
    segments = list(course.segments)
    for i in range(1, 101):
        epoch, at = (i // 2, i % 2 * 50) if length else (0, i * 50)
        weights = (1 + i % 3, 1 + i % 2)
        course = course.reweighted(epoch, at, weights, passed=at)
        segments.append(Segment(i * 25, weights))
        assert len(course.segments) <= 4
        assert sum(course.before) == course.segments[0].start
        unfolded = replace(course, segments=tuple(segments), before=())
        g = np.arange(at, at + 120)
        assert routes(course, epoch, g) == routes(unfolded, epoch, g)
        assert course.counts(epoch, at + 20) == unfolded.counts(epoch, at + 20)
    for look in (lambda: route(course, 0, np.arange(9)), lambda: course.counts(0, 9)):
        with pytest.raises(ArgumentError, match=r"weights before sample [0-9]+ of epoch 0 are"):
            look()
