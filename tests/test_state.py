"""A state is data: flat, the same keys always, and refused where it does not belong."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import battery
from battery import FACES, opened, read
from destrier import DestrierError, Order, StateError, StreamingDataLoader, StreamingDataset
from destrier.state import Position, check_state

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 100
KEYS = {
    "version",
    "order_version",
    "counter",
    "epoch",
    "shuffle_seed",
    "num_splits",
    "clump_size",
    "window",
    "shuffle",
    "filter",
    "table_identity",
    "table_version",
    "plan_hash",
    "samples_consumed_per_split",
    "positions_consumed_per_split",
}


@pytest.fixture
def kind(shared_table: Any, tmp_path: Path) -> battery.Kind:
    return battery.make_kind("filtered clumps", str(shared_table.path), shared_table.ids, tmp_path)


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def state(kind: battery.Kind) -> dict[str, Any]:
    """A state in the middle of an epoch."""
    with opened("loader", kind, batch=BATCH) as loader:
        read(kind, loader, 3)
        return dict(loader.state_dict())


def test_the_keys_are_the_same_at_any_time(kind: battery.Kind, face: str) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        states = [stream.state_dict()]
        states.extend(stream.state_dict() for _ in stream)
        states.append(stream.state_dict())
    with opened(face, battery.Kind(kind.path, kind.ids, {}, kind.listed), batch=7) as stream:
        states.append(stream.state_dict())
    for one in states:
        assert set(one) == KEYS
        assert all(value is None or isinstance(value, int | str | bool) for value in one.values())
        assert len(json.dumps(one)) <= 1024
        kinds = {key: type(value) for key, value in one.items() if key != "filter"}
        assert kinds == {key: type(value) for key, value in states[0].items() if key != "filter"}


def through_json(state: dict[str, Any], folder: Path) -> Any:
    (folder / "state.json").write_text(json.dumps(state))
    return json.loads((folder / "state.json").read_text())


def through_torch(state: dict[str, Any], folder: Path) -> Any:
    torch.save({"loader": state}, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)["loader"]


def through_pickle(state: dict[str, Any], folder: Path) -> Any:
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("through", [through_json, through_torch, through_pickle])
def test_round_trips(
    kind: battery.Kind, state: dict[str, Any], face: str, through: Any, tmp_path: Path
) -> None:
    back = through(state, tmp_path)
    assert back == state
    assert [type(value) for value in back.values()] == [type(value) for value in state.values()]
    with opened(face, kind, batch=BATCH) as stream:
        stream.load_state_dict(back)
        assert stream.state_dict() == state
        assert read(kind, stream) == battery.expected(kind, state, epoch=0, batch=BATCH)[3:]


def test_a_state_is_a_copy(kind: battery.Kind, face: str) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        state = stream.state_dict()
        state["counter"] = 700
        assert stream.state_dict()["counter"] == 0
        kept = stream.state_dict()
        stream.load_state_dict(kept)
        kept["epoch"] = 9
        read(kind, stream, 1)
        assert stream.state_dict()["epoch"] == 0


def test_an_empty_state_does_nothing(kind: battery.Kind, face: str) -> None:
    with opened(face, kind, batch=BATCH, epoch=2) as stream:
        before = stream.state_dict()
        stream.load_state_dict({})
        assert stream.state_dict() == before
        iterator = iter(stream)
        next(iterator)
        stream.load_state_dict({})
        assert len(list(iterator)) == len(stream) - 1


def test_what_a_state_leaves_out_of_account(kind: battery.Kind, state: dict[str, Any]) -> None:
    # another library or machine may add keys, as a checkpoint does
    with opened("loader", kind, batch=BATCH) as loader:
        loader.load_state_dict({**state, "added_by_someone": 1})
        assert loader.state_dict() == state


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_that_is_missing_is_named(
    kind: battery.Kind, state: dict[str, Any], face: str, key: str
) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        before = stream.state_dict()
        with pytest.raises(StateError, match=rf"lacks .*{key}"):
            stream.load_state_dict({k: v for k, v in state.items() if k != key})
        assert stream.state_dict() == before


WRONG = {int: ("1", 1.5, None, True, [1]), str: (1, None, b"x"), bool: (1, "yes", None)}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_value_of_the_wrong_type_is_named(
    kind: battery.Kind, state: dict[str, Any], key: str
) -> None:
    wrong = (1, ["label < 7"]) if key == "filter" else WRONG[type(state[key])]
    with opened("dataset", kind, batch=BATCH) as stream:
        for value in wrong:
            with pytest.raises(StateError, match=key) as caught:
                stream.load_state_dict({**state, key: value})
            assert repr(value) in str(caught.value)


@pytest.mark.parametrize("bad", [None, [], 3, "state", [("version", 1)]])
def test_what_is_no_state_is_refused(kind: battery.Kind, bad: Any) -> None:
    text = f"dict, got {type(bad).__name__}"
    with opened("dataset", kind, batch=BATCH) as stream, pytest.raises(StateError, match=text):
        stream.load_state_dict(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counter": -1}, "counter -1"),
        ({"epoch": -3}, "epoch -3"),
        ({"epoch": 1 << 32}, str(1 << 32)),
        ({"shuffle_seed": 1 << 32}, str(1 << 32)),
        ({"num_splits": 0}, "num_splits.* 0"),
        ({"window": 0}, "window.* 0"),
        ({"version": 99}, "format version 99.*upgrade"),
        ({"version": 0}, "version 0"),
        ({"order_version": "destrier-9"}, "destrier-9.*destrier-1.*epoch=1"),
        ({"num_splits": 5000}, "5000"),
    ],
)
def test_values_that_cannot_be(
    shared_table: Any, state: dict[str, Any], face: str, change: dict[str, Any], message: str
) -> None:
    open_kind = battery.Kind(str(shared_table.path), shared_table.ids, {}, shared_table.ids)
    with (
        opened(face, open_kind, batch=BATCH) as stream,
        pytest.raises(StateError, match=message),
    ):
        stream.load_state_dict({**state, **change})


@pytest.mark.parametrize(
    ("library", "foreign", "epoch"),
    [
        (
            "lancedb.streaming",
            {
                "shuffle_seed": 0,
                "num_splits": 2,
                "epoch": 4,
                "samples_consumed_per_split": [3, 3],
                "positions_consumed_per_split": [3, 3],
            },
            "epoch=5",
        ),
        ("LitData", {"num_samples_yielded": 10, "current_epoch": 2, "num_workers": 1}, "epoch=3"),
        (
            "MosaicML Streaming",
            {"epoch": 1, "sample_in_epoch": 5, "num_canonical_nodes": 1, "shuffle_seed": 9176},
            "epoch=2",
        ),
        ("StatefulDataLoader", {"_snapshot": {}, "_steps_since_snapshot": 0}, "epoch="),
    ],
)
def test_states_of_other_libraries_are_refused_by_name(
    kind: battery.Kind, face: str, library: str, foreign: dict[str, Any], epoch: str
) -> None:
    with (
        opened(face, kind, batch=BATCH) as stream,
        pytest.raises(StateError, match=rf"{library}.*{epoch}"),
    ):
        stream.load_state_dict(foreign)


def test_an_unknown_dict_is_refused(kind: battery.Kind, face: str) -> None:
    with opened(face, kind, batch=BATCH) as stream, pytest.raises(StateError, match="lacks"):
        stream.load_state_dict({"model": {}, "optimizer": {}})


def test_merging_is_a_check_that_all_agree(state: dict[str, Any]) -> None:
    merge = StreamingDataset.merge_state_dicts
    assert merge([state, dict(state), dict(state)]) == state
    with pytest.raises(StateError, match=r"counter mismatch.*300.*400.*number 2"):
        merge([state, state, {**state, "counter": 400}])
    with pytest.raises(StateError, match="at least one"):
        merge([])
    with pytest.raises(StateError, match="lacks"):
        merge([state, {"epoch": 1}])


def test_a_refused_state_leaves_the_stream_as_it_was(
    kind: battery.Kind, state: dict[str, Any], face: str
) -> None:
    with opened(face, kind, batch=BATCH) as stream:
        iterator = iter(stream)
        head = [battery.check(kind, next(iterator))]
        with pytest.raises(StateError):
            stream.load_state_dict({**state, "plan_hash": "nonsense"})
        rest = [battery.check(kind, batch) for batch in iterator]
        assert head + rest == battery.expected(kind, state, epoch=0, batch=BATCH)


# ---- credentials ------------------------------------------------------------------------------


def test_no_credentials_anywhere(
    kind: battery.Kind, face: str, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "hunter2-very-secret"
    options = {"aws_secret_access_key": secret, "aws_session_token": secret}
    said = []
    with (
        caplog.at_level(logging.DEBUG),
        opened(face, kind, batch=BATCH, storage_options=options) as stream,
    ):
        read(kind, stream, 2)
        said += [json.dumps(stream.state_dict()), repr(stream), str(stream)]
        dataset = stream.dataset if face == "loader" else stream
        said += [repr(dataset), repr(dataset.table), repr(dataset.stream())]
        for wrong in ({**stream.state_dict(), "plan_hash": "x"}, {"epoch": 1}):
            try:
                stream.load_state_dict(wrong)
            except StateError:
                said.append(traceback.format_exc())
        dataset.columns = ["nonsense"]
        stream.close()
        try:
            next(iter(stream))
        except DestrierError:
            said.append(traceback.format_exc())
    assert len(said) == 9
    assert not [text for text in said if secret in text]
    assert secret not in caplog.text


def test_a_factory_keeps_credentials_out_of_pickles(kind: battery.Kind) -> None:
    secret = "hunter2-very-secret"
    given = {"storage_options": {"aws_secret_access_key": secret}, "columns": ["id"]}
    dataset = StreamingDataset(kind.path, connection_factory=print, **given)
    assert secret.encode() not in pickle.dumps(dataset)
    with StreamingDataLoader(dataset, batch_size=BATCH) as loader:
        next(iter(loader))
        assert secret not in json.dumps(loader.state_dict())


# ---- the position -----------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.just(("begin",)), st.just(("end",)), st.tuples(st.just("set"), st.integers(0, 9))
        ),
        max_size=12,
    )
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_positions_follow_the_loop(events: list[Any]) -> None:
    """Against a plain reading of the rules: what the next iterator does."""
    position = Position(3, 50)
    following: tuple[int, int] = (3, 50)  # epoch and counter at which the next iterator starts
    running: tuple[int, int] | None = None
    for event, *value in events:
        if event == "begin":
            position, running = position.begin(), following
            assert (position.epoch, position.counter) == running
            following = (running[0] + 1, 0)
        elif event == "end" and running is not None:
            position = position.ended()
            running = None
            assert (position.epoch, position.counter) == following
        elif event == "set":
            if position.begun or value[0] != position.epoch:
                following = (value[0], 0)
            position = position.with_epoch(value[0])
            if running is not None:
                assert (position.epoch, position.counter) == running, "the place is kept"
    assert (position.begin().epoch, position.begin().counter) == following


def test_checked_states_are_states(state: dict[str, Any]) -> None:
    assert check_state(state) == state
    assert check_state(state) is not state
    assert Order(10).n == 10
