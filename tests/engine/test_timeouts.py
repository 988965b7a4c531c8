"""A request that is not finished by its deadline ends, wherever it is, and gives all back."""

import time
from collections.abc import Iterator

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.queues import Deadlines
from tests.engine.tiny import check_idle, dense_greedy, drain, message, tiny_engine, tokens_of


def test_the_earliest_deadline_is_the_first() -> None:
    deadlines = Deadlines()
    for deadline, name in ((3.0, "c"), (1.0, "a"), (2.0, "b"), (None, "never")):
        deadlines.set(name, deadline)
    assert deadlines.pop_expired(0.5) == []
    assert deadlines.pop_expired(2.0) == ["a", "b"]
    assert deadlines.pop_expired(9.0) == ["c"]
    assert len(deadlines) == 0


def test_a_deadline_is_void_for_a_later_request_of_that_name() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    assert deadlines.pop_expired(2.0) == []
    deadlines.set("a", None)
    assert deadlines.pop_expired(9.0) == []


def test_a_deadline_that_is_no_time_is_none() -> None:
    deadlines = Deadlines()
    deadlines.set("a", float("nan"))
    deadlines.set("b", 1.0)
    assert deadlines.pop_expired(2.0) == ["b"]


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """Two run at once, in chunks of 16; blocks for one long request and a little."""
    return tiny_engine(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=17)


@pytest.fixture(autouse=True)
def returned(core: EngineCore) -> Iterator[None]:
    yield
    check_idle(core)


LONG = [2 + i % 80 for i in range(60)]


def add(core: EngineCore, name: str, *parts: object, deadline: float | None = 10.0) -> None:
    request = message(name, parts, max_tokens=60)
    core.add_request(msgspec.structs.replace(request, deadline=deadline))


def end(core: EngineCore, name: str, how: str) -> None:
    """End a request: by its client, or by its time."""
    if how == "abort":
        core.abort([name])
        return
    assert core.expire(9.99) == []
    assert core.expire(10.0) == [name]
    assert core.expire(99.0) == []


@pytest.mark.parametrize("how", ["abort", "timeout"])
@pytest.mark.parametrize(
    "stage", ["waiting", "first chunk", "later chunk", "picture", "decode", "in flight"]
)
def test_a_request_ends_at_every_stage(core: EngineCore, stage: str, how: str) -> None:
    other = message("other", [[7, 8, 9]], max_tokens=6)
    core.add_request(other)
    parts = [LONG[:10], (1, 2), LONG] if stage == "picture" else [LONG]
    if stage == "waiting":
        core.add_request(message("second", [[4, 5]], max_tokens=1))
    add(core, "ended", *parts)
    num_steps = {"waiting": 0, "first chunk": 1, "later chunk": 3, "picture": 2}.get(stage, 7)
    news: dict[str, list[int]] = {}
    for _ in range(num_steps):
        for delta in core.step():
            news.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    if stage in ("decode", "in flight"):
        assert news["ended"]
    if stage == "in flight":
        assert core._in_flight is not None
    end(core, "ended", how)
    for name, deltas in drain(core).items():
        assert name != "ended"
        news.setdefault(name, []).extend(tokens_of(deltas))
    assert news["other"] == dense_greedy(other)


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_a_preempted_request_ends(core: EngineCore, how: str) -> None:
    first = message("first", [LONG], max_tokens=50)
    core.add_request(first)
    add(core, "ended", LONG[::-1])
    before = core.num_preemptions
    news: list[int] = []
    while core.num_preemptions == before:
        for delta in core.step():
            news += delta.new_token_ids if delta.request_id == "first" else []
    assert core.stats().num_waiting == 1
    end(core, "ended", how)
    news += tokens_of(drain(core)["first"])
    assert news == dense_greedy(first)


def test_a_request_that_was_late_already_ends_at_once(core: EngineCore) -> None:
    add(core, "late", [3, 4], deadline=time.monotonic() - 1)
    assert core.expire() == ["late"]


def test_a_request_that_is_done_has_no_deadline_any_more(core: EngineCore) -> None:
    request = message("quick", [[3, 4]], max_tokens=2)
    core.add_request(msgspec.structs.replace(request, deadline=10.0))
    drain(core)
    assert core.expire(99.0) == []
