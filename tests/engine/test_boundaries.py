"""A fault in what the engine does for one request ends that request, and no other."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.engine.device import runner as runner_module
from mmjax.engine.process import EngineLoop
from mmjax.engine.scheduling import logit_rules
from mmjax.engine.scheduling.outputs import ScheduledRequest
from mmjax.engine.scheduling.request import Request
from mmjax.errors import RequestError
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.transport.channel import IpcDirectory, Receiver, Sender
from mmjax.transport.messages import EngineCoreRequest, RequestFailed, StepOutput
from mmjax.transport.step_record import StepRecord
from tests.engine.tiny import (
    answer,
    check_idle,
    dense_greedy,
    drain,
    message,
    text,
    tiny_engine,
    tokens_of,
)

BAD = "bad"
BAD_PICTURE = "picture-13-1"


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return tiny_engine(max_num_batched_tokens=16)


@pytest.fixture(autouse=True)
def everything_returns(core: EngineCore) -> Iterator[None]:
    # With empty caches: what was encoded for an earlier test is not found.
    assert core.recover() == []
    yield
    assert core.step() == []
    check_idle(core)


def good_requests() -> list[EngineCoreRequest]:
    parts = [[text(1, 9)], [text(2, 70), (2, 1)], [(3, 1), text(3, 4)], [text(4, 3)], [text(5, 9)]]
    return [message(f"good {n}", part) for n, part in enumerate(parts)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [dense_greedy(request) for request in good_requests()]


def bad_request(**sampling: Any) -> EngineCoreRequest:
    return message(BAD, [text(6, 5), (13, 1), text(7, 4)], **sampling)


# ---- where a fault may be ------------------------------------------------------------------------

Faults = Callable[[EngineCore, pytest.MonkeyPatch], None]


def fault() -> RuntimeError:
    return RuntimeError("a fault that only this request has")


def check(requests: Sequence[ScheduledRequest]) -> None:
    if any(scheduled.request.request_id == BAD for scheduled in requests):
        raise fault()


def in_its_window(core: EngineCore, patch: pytest.MonkeyPatch) -> None:
    fit = core._scheduler._windows.fit

    def fit_or_fail(request: Request, *args: Any) -> Any:
        if request.request_id == BAD:
            raise fault()
        return fit(request, *args)

    patch.setattr(core._scheduler._windows, "fit", fit_or_fail)


def in_encoding_its_picture(core: EngineCore, patch: pytest.MonkeyPatch) -> None:
    calls = core._runner._encoders
    fill = calls.fill

    def fill_or_fail(items: Any, *args: Any) -> Any:
        if any(item.identifier == BAD_PICTURE for item in items):
            raise fault()
        return fill(items, *args)

    patch.setattr(calls, "fill", fill_or_fail)


def in_the_batch(core: EngineCore, patch: pytest.MonkeyPatch) -> None:
    build = core._runner._builder.build

    def build_or_fail(requests: Any, bucket: Any) -> Any:
        check(requests)
        return build(requests, bucket)

    patch.setattr(core._runner._builder, "build", build_or_fail)


def in_sampling(core: EngineCore, patch: pytest.MonkeyPatch) -> None:
    make_tables = runner_module.make_tables

    def make_or_fail(sampled: Any, empty: Any) -> Any:
        check(sampled)
        return make_tables(sampled, empty)

    patch.setattr(runner_module, "make_tables", make_or_fail)


def in_reading_its_token(core: EngineCore, patch: pytest.MonkeyPatch) -> None:
    read = core._runner.read

    def read_or_fail(in_flight: Any) -> Any:
        check(in_flight.sampled)
        return read(in_flight)

    patch.setattr(core._runner, "read", read_or_fail)


def in_taking_its_token(core: EngineCore, patch: pytest.MonkeyPatch) -> None:
    append = Request.append_token

    def append_or_fail(self: Request, token_id: int) -> None:
        if self.request_id == BAD:
            raise fault()
        append(self, token_id)

    patch.setattr(Request, "append_token", append_or_fail)


SITES: dict[str, Faults] = {
    site.__name__: site
    for site in (
        in_its_window,
        in_encoding_its_picture,
        in_the_batch,
        in_sampling,
        in_reading_its_token,
        in_taking_its_token,
    )
}


def serve(core: EngineCore, batch: Sequence[EngineCoreRequest]) -> tuple[dict[str, list[int]], Any]:
    """Do what the engine's loop does; return the answers, and the failures."""
    with IpcDirectory() as directory:
        receiver = Receiver(directory.address("in"), bind=True)
        sender = Sender(directory.address("out"), bind=True)
        sent: list[Any] = []
        sender.send = sent.append  # type: ignore[method-assign]
        try:
            loop = EngineLoop(core, receiver, sender, StepRecord(directory.step_record_path))
            for request in batch:
                loop._take(request)
            while core.has_unfinished():
                loop._expire()
                loop._step()
        finally:
            receiver.close()
            sender.close()
    answers: dict[str, list[int]] = {}
    for one in sent:
        for delta in one.deltas if isinstance(one, StepOutput) else ():
            answers.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    return answers, [one for one in sent if isinstance(one, RequestFailed)]


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("site", SITES)
def test_a_fault_ends_its_own_request_alone(
    core: EngineCore,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    site: str,
    place: int,
) -> None:
    """Wherever it is, and whoever else is in the step: the others' answers are what they were."""
    SITES[site](core, monkeypatch)
    # Sampling has tables of its own only where it is not plain.
    bad = bad_request(logit_bias={5: 1.0} if site == "in_sampling" else None)
    good = good_requests()
    answers, failures = serve(core, [*good[:place], bad, *good[place:]])
    assert [answers[request.request_id] for request in good] == expected
    assert BAD not in answers
    assert [(one.request_id, one.status, one.code) for one in failures] == [
        (BAD, 500, "internal_error")
    ]
    assert "fault" not in failures[0].message
    monkeypatch.undo()
    bad = bad_request()
    assert answer(core, bad) == dense_greedy(bad)


def test_a_fault_that_does_not_come_again_ends_nobody(
    core: EngineCore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, num_reads = core._runner.read, 0

    def fail_once(in_flight: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            raise fault()
        return read(in_flight)

    monkeypatch.setattr(core._runner, "read", fail_once)
    answers, failures = serve(core, good_requests())
    assert not failures
    assert [answers[request.request_id] for request in good_requests()] == expected


def test_a_sampled_answer_is_the_same_behind_a_failed_step(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = [message(f"s{n}", [text(n, 5)], temperature=1.0, seed=n) for n in range(3)]
    undisturbed, _ = serve(core, batch)
    read, num_reads = core._runner.read, 0

    def fail_once(in_flight: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 4:
            raise fault()
        return read(in_flight)

    monkeypatch.setattr(core._runner, "read", fail_once)
    answers, failures = serve(core, batch)
    assert (answers, failures) == (undisturbed, [])


def test_a_request_that_came_meanwhile_waits_for_the_search(
    core: EngineCore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_batch(core, monkeypatch)
    good, late = good_requests()[:2], good_requests()[2]
    for request in (bad_request(), *good):
        core.add_request(request)
    with pytest.raises(RuntimeError):
        core.step()
    assert core.recover() == []
    core.add_request(late)
    ended: list[str] = []
    news: dict[str, list[int]] = {}
    while core.has_unfinished():
        try:
            deltas = core.step()
        except RuntimeError:
            ended += core.recover()
            continue
        for delta in deltas:
            news.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    assert ended == [BAD]
    assert [news[request.request_id] for request in (*good, late)] == expected[:3]


def test_an_aborted_suspect_does_not_hold_up_the_search(
    core: EngineCore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_batch(core, monkeypatch)
    good = good_requests()[:2]
    for request in (bad_request(), *good):
        core.add_request(request)
    with pytest.raises(RuntimeError):
        core.step()
    assert core.recover() == []
    core.abort([BAD])
    news = drain(core)
    assert [tokens_of(news[request.request_id]) for request in good] == expected[:2]


def test_a_fault_of_a_grammar_ends_its_request_alone(
    core: EngineCore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise fault()

    monkeypatch.setattr(logit_rules.Grammars, "_make_matcher", fail)
    params = StructuredOutputsParams(choice=["a"])
    bad = bad_request(structured_outputs=params)
    bad = msgspec.structs.replace(bad, grammar="start: a")
    good = good_requests()
    answers, failures = serve(core, [bad, *good])
    assert [answers[request.request_id] for request in good] == expected
    assert [(one.request_id, one.status) for one in failures] == [(BAD, 500)]


@pytest.mark.parametrize("method", ["add_request", "_item"])
def test_a_fault_of_taking_a_request_in_leaves_nothing_of_it(
    core: EngineCore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Also one behind the last line that could refuse it: it does not run on for nobody."""
    target, name = (
        (core._deadlines, "set") if method == "add_request" else (core._requests, "_to_item")
    )
    real = getattr(target, name)

    def fail(first: Any, *args: Any) -> Any:
        if BAD in (first, getattr(first, "request_id", None)) or (
            getattr(first, "identifier", None) == BAD_PICTURE
        ):
            raise fault()
        return real(first, *args)

    monkeypatch.setattr(target, name, fail)
    good = good_requests()
    answers, failures = serve(core, [*good[:2], bad_request(), *good[2:]])
    assert [answers[request.request_id] for request in good] == expected
    assert BAD not in answers
    assert [one.request_id for one in failures] == [BAD]


def test_what_is_aborted_is_free_at_once(core: EngineCore) -> None:
    """Whatever it was at: waiting, in a chunk of its prompt, at its picture, with a token due."""
    for num_steps in range(7):
        batch = [message(f"{n}", [text(n, 70), (n, 1), text(n, 5)]) for n in range(6)]
        for request in batch:
            core.add_request(request)
        for _ in range(num_steps):
            core.step()
        core.abort([request.request_id for request in batch])
        assert core.step() == []
        check_idle(core)
        scheduler = core._scheduler
        assert not scheduler._item_sizes._entries
        assert not scheduler.waiting._arrivals


def test_an_error_of_the_clients_is_no_fault(core: EngineCore) -> None:
    with pytest.raises(RequestError):
        core.add_request(message("long", [text(1, 500)]))
