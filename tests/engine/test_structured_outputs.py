"""Sampling fields and grammars in the engine: alone, beside others, preempted, in chunks."""

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from mmjax.engine import core as engine_core
from mmjax.engine.core import EngineCore
from mmjax.engine.device.runner import InFlight
from mmjax.engine.scheduling.logit_rules import Grammars
from mmjax.errors import RequestError, RequestRuntimeError, RequestValueError
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.params.structured_outputs import make_grammar
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta
from tests.engine.grammars import (
    LETTERS,
    choice,
    constrained,
    install_tokenizer,
    prompt,
    regex,
    text_of,
    tokenizer,
)
from tests.engine.tiny import (
    EOS,
    VOCAB_SIZE,
    answer,
    dense_greedy,
    dense_logits,
    drain,
    message,
    tiny_engine,
    tokens_of,
)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return install_tokenizer(tiny_engine(max_num_batched_tokens=16))


@pytest.fixture(scope="module")
def in_order() -> EngineCore:
    return install_tokenizer(tiny_engine(max_num_batched_tokens=16, async_scheduling=False))


NAME = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "n": {"type": "integer", "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)


def hostile() -> list[EngineCoreRequest]:
    """Neighbours that ask for all there is."""
    bad_words = message("bans", [prompt(31)], max_tokens=30, bad_words=["x"])
    return [
        message("penalties", [prompt(32)], max_tokens=30, repetition_penalty=3.0, seed=1),
        message("bias", [prompt(33)], max_tokens=30, logit_bias=dict.fromkeys(range(2, 50), 9.0)),
        msgspec.structs.replace(bad_words, bad_words_token_ids=[[5], [6, 7]]),
        constrained("neighbour", regex("(xy|z){5,10}"), seed=34, temperature=1.5, top_k=4),
        message("reports", [prompt(35, 40)], max_tokens=5, prompt_logprobs=3, logprobs=20),
    ]


FIELDS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.9},
    "frequency": {"frequency_penalty": -1.5},
    "bias": {"logit_bias": {5: 30.0, 17: -100.0}},
    "allowed": {"allowed_token_ids": [5, 6, 17, 40, 41]},
    "drawn": {"temperature": 1.2, "repetition_penalty": 1.3, "top_p": 0.9, "min_p": 0.01},
    "all": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {9: 3.0},
        "allowed_token_ids": list(range(4, 60)),
        "min_tokens": 3,
        "logprobs": 2,
        "no_repeat_ngram_size": 3,
    },
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_CVE_2026_105755_an_answer_does_not_depend_on_its_neighbours(
    core: EngineCore, in_order: EngineCore, fields: dict[str, Any]
) -> None:
    def request() -> EngineCoreRequest:
        return message("mine", [prompt(3)], max_tokens=24, seed=8, **fields)

    alone = answer(in_order, request())
    assert alone != dense_greedy(message("plain", [prompt(3)], max_tokens=24))
    for one in (*hostile()[:2], request(), *hostile()[2:]):
        core.add_request(one)
    assert tokens_of(drain(core)["mine"]) == alone
    assert core.compilations == 0


def test_penalties_count_the_token_in_flight(core: EngineCore) -> None:
    """The oracle: HF's processor, and OpenAI's formula, on the logits of dense passes."""
    request = message(
        "a",
        [prompt(5)],
        max_tokens=20,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.6,
    )
    process: Any = RepetitionPenaltyLogitsProcessor(1.4)
    token_ids, first = list(request.prompt_token_ids), len(request.prompt_token_ids)
    for _ in range(20):
        logits = torch.tensor(dense_logits(token_ids, ())[len(token_ids) - 1])[None]
        scores = process(torch.tensor(token_ids)[None], logits)[0].numpy()
        for token in set(token_ids[first:]):
            scores[token] -= 0.6 * token_ids[first:].count(token) + 0.3
        token_ids.append(int(scores.argmax()))
    assert answer(core, request) == token_ids[first:]


# None are a request's own where the checkpoint's files suppress tokens.
@pytest.mark.parametrize("own", [["a", "b", "c"], []], ids=["a request's", "the files'"])
def test_bad_words_are_not_completed(core: EngineCore, own: list[str]) -> None:
    """Also where the token before is in flight; words of the answer alone, as vLLM's."""
    free = dense_greedy(message("free", [prompt(7)], max_tokens=20))
    words = [free[2:3], free[8:10], free[13:16]]
    token_ids = prompt(7)
    expected: list[int] = []
    for _ in range(20):
        logits = dense_logits([*token_ids, *expected], ())[
            len(token_ids) + len(expected) - 1
        ].copy()
        for *before, last in words:
            if not before or expected[-len(before) :] == before:
                logits[last] = -np.inf
        expected.append(int(logits.argmax()))
    request = message("a", [token_ids], max_tokens=20, bad_words=own)
    banned = msgspec.structs.replace(request, bad_words_token_ids=words)
    assert answer(core, banned) == expected != free


def test_prompt_logprobs_are_those_of_dense_passes(core: EngineCore) -> None:
    """In chunks, beside others, also a second time: nothing of them is in the prefix cache."""
    token_ids = prompt(9, 100)
    logits = dense_logits(token_ids, ())[:100].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for _ in range(2):
        core.add_request(message("other", [prompt(1, 30)]))
        core.add_request(message("a", [token_ids], max_tokens=2, prompt_logprobs=4))
        first, second = drain(core)["a"]
        assert second.prompt_logprobs is None
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == 100
        assert first.prompt_logprobs[0] is None
        for place, entry in enumerate(first.prompt_logprobs[1:], 1):
            assert entry is not None
            row = logprobs[place - 1]
            assert entry.token_ids[0] == token_ids[place]
            assert entry.token_ids[1:] == np.argsort(-row)[:4].tolist()
            np.testing.assert_allclose(entry.logprobs, row[entry.token_ids], atol=1e-4)
            assert entry.sampled_rank == 1 + (row > row[token_ids[place]]).sum()
    assert core.compilations == 0


STRUCTURES = {
    "regex": (regex("[a-c]{3,6}-[0-9]{2}"), r"[a-c]{3,6}-[0-9]{2}"),
    "choice": (choice("red", "green", 'a "b"\\'), r'red|green|a "b"\\'),
    "grammar": (
        StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'),
        r"\(*x\)*",
    ),
    "json": (NAME, None),
}


@pytest.mark.parametrize(("structure", "pattern"), STRUCTURES.values(), ids=STRUCTURES)
def test_answers_match(
    core: EngineCore, in_order: EngineCore, structure: StructuredOutputsParams, pattern: str | None
) -> None:
    def requests() -> list[EngineCoreRequest]:
        return [
            constrained(f"drawn {n}", structure, seed=n, temperature=1.0, max_tokens=60)
            for n in range(3)
        ]

    alone = [answer(in_order, request) for request in requests()]
    for request in (*requests(), *hostile()[:2]):
        core.add_request(request)
    news = drain(core)
    together = [tokens_of(news[f"drawn {n}"]) for n in range(3)]
    assert together == alone
    for token_ids in together:
        if len(token_ids) == 60:
            continue  # a number may be of any length
        assert token_ids[-1] == EOS
        shown = text_of(token_ids)
        if pattern is None:
            assert json.loads(shown)["a"] in ("x", "y")
        else:
            assert re.fullmatch(pattern, shown), shown
    assert core.compilations == 0


def test_a_grammar_says_where_the_text_ends(core: EngineCore) -> None:
    """`ignore_eos` and `min_tokens` give way to it."""
    request = constrained("a", choice("abc"), ignore_eos=True, min_tokens=20)
    core.add_request(request)
    deltas = drain(core)["a"]
    assert text_of(tokens_of(deltas)) == "abc"
    assert deltas[-1].finish_reason == "stop"


def serve_by_step(core: EngineCore, batch: Sequence[EngineCoreRequest]) -> dict[str, list[int]]:
    """Serve a batch; return at which steps each request got its tokens."""
    for request in batch:
        core.add_request(request)
    times: dict[str, list[int]] = {request.request_id: [] for request in batch}
    for number in range(200):
        if not core.has_unfinished():
            break
        for delta in core.step():
            times[delta.request_id].append(number)
    assert not core.has_unfinished()
    return times


def test_a_grammar_has_a_token_a_step(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device computes its token while the grammar reads it; so beside others, and alone."""
    monkeypatch.setattr(engine_core, "_MASK_WAIT_S", 60.0)
    bound = constrained("bound", regex("[ab]{12}"))
    for batch in ([message("free", [prompt(2)], max_tokens=20), bound], [bound]):
        times = serve_by_step(core, batch)
        for steps in times.values():
            assert steps == list(range(steps[0], steps[0] + len(steps)))
        assert len(times["bound"]) == 13


@pytest.fixture
def may_read(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What the grammars' threads wait for before they read a token."""
    event, submit = threading.Event(), core._grammars._submit
    monkeypatch.setattr(
        core._grammars, "_submit", lambda job: submit(lambda: (event.wait(60), job())[1])
    )
    yield event
    event.set()


def test_others_run_ahead_while_a_grammar_reads_its_token(
    core: EngineCore, in_order: EngineCore, may_read: threading.Event
) -> None:
    """A free request has a token a step, and the late one its own when the grammar is ready."""
    may_read.set()
    bound = constrained("bound", regex("[ab]{12}"), temperature=1.0, logprobs=2)
    alone = answer(in_order, bound)
    core.add_request(message("free", [prompt(2)], max_tokens=20))
    core.add_request(bound)
    got: dict[str, list[int]] = {"free": [], "bound": []}
    times = []
    for number in range(200):
        if not core.has_unfinished():
            break
        for delta in core.step():
            got[delta.request_id] += delta.new_token_ids
            times += [number] * (delta.request_id == "free")
        if len(got["bound"]) == 3 and len(got["free"]) < 15:
            may_read.clear()
        else:
            may_read.set()
    assert times == list(range(times[0], times[0] + 20))
    assert got["bound"] == alone


def test_tokens_that_were_read_go_out_before_a_failure(
    core: EngineCore, in_order: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the next step cannot be sampled with what the grammars made of them."""
    batch = [message("free", [prompt(2)], max_tokens=20), constrained("bound", regex("[ab]{12}"))]
    alone = [answer(in_order, request) for request in batch]
    sample, calls = core._runner.sample, []

    def fail_once(*args: Any) -> InFlight:
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("no sample")
        return sample(*args)

    monkeypatch.setattr(core._runner, "sample", fail_once)
    for request in batch:
        core.add_request(request)
    got: dict[str, list[int]] = {"free": [], "bound": []}
    num_failures = 0
    while core.has_unfinished():
        try:
            deltas = core.step()
        except RuntimeError:
            assert core.recover() == []
            num_failures += 1
            continue
        for delta in deltas:
            got[delta.request_id] += delta.new_token_ids
    assert num_failures == 1
    assert [got["free"], got["bound"]] == alone


def test_preempted_and_chunked_grammars_go_on(in_order: EngineCore) -> None:
    small = install_tokenizer(
        tiny_engine(max_model_len=64, num_blocks=13, max_num_batched_tokens=16)
    )
    requests = [
        constrained(f"{n}", regex("[a-f]{30}"), seed=n, repetition_penalty=1.5) for n in range(4)
    ]
    expected = [answer(in_order, request) for request in requests]
    for request in requests:
        small.add_request(request)
    news = drain(small)
    assert small.num_preemptions > 0
    assert [tokens_of(news[f"{n}"]) for n in range(4)] == expected


def test_CVE_2025_48942_a_grammar_that_fails_ends_its_request_alone(core: EngineCore) -> None:
    core.add_request(message("free", [prompt(2)], max_tokens=12))
    core.add_request(constrained("torn", regex("[ab]{9}"), allowed_token_ids=[5, 6]))
    core.add_request(_with_grammar("bad", "start: what"))
    failed: dict[str, RequestError] = {}
    news: dict[str, list[int]] = {}
    while core.has_unfinished():
        failed |= dict(core.pop_failed())
        for delta in core.step():
            news.setdefault(delta.request_id, []).extend(delta.new_token_ids)
    assert isinstance(failed["torn"], RequestRuntimeError)
    assert isinstance(failed["bad"], RequestValueError)
    assert {error.param for error in failed.values()} == {"structured_outputs"}
    assert news["free"] == dense_greedy(message("free", [prompt(2)], max_tokens=12))
    assert core.stats().kv_cache_usage == 0


def test_no_token_is_drawn_from_nothing(core: EngineCore) -> None:
    """Where a grammar leaves none of the allowed tokens: an error, and no token of NaN before it.

    `[ab]c`, and c is not allowed: one token, then the error.
    """
    a, b = (LETTERS.index(letter) + 2 for letter in "ab")
    request = constrained("a", regex("[ab]c"), allowed_token_ids=[a, b], logprobs=2)
    core.add_request(request)
    deltas: list[RequestOutputDelta] = []
    errors: list[tuple[str, RequestError]] = []
    while core.has_unfinished():
        deltas += core.step()
        errors += core.pop_failed()
    ((_, error),) = errors
    assert isinstance(error, RequestRuntimeError)
    (delta,) = deltas
    assert delta.new_token_ids[0] in (a, b)
    assert delta.new_logprobs is not None
    assert np.isfinite(delta.new_logprobs[0].logprobs).all()


def test_a_token_without_a_logit_is_no_way_on() -> None:
    """The tokenizer has letters beyond the logits, in the same word of bits."""
    grammars = Grammars(tokenizer, VOCAB_SIZE - 20)
    grammar = grammars.start(make_grammar(regex(f"[{LETTERS[-1]}a]b")), [EOS])
    assert grammar.allowed_bits.view(np.uint8).sum() > 0
    none = grammars.start(make_grammar(choice(LETTERS[-1])), [EOS])
    assert not none.is_ready_by(time.monotonic() + 60)
    assert isinstance(none.error, RequestRuntimeError)
    grammars.close()


def _with_grammar(name: str, grammar: str) -> EngineCoreRequest:
    return msgspec.structs.replace(constrained(name, regex("a")), grammar=grammar)


def test_a_slow_vocabulary_delays_nobody_else(core: EngineCore) -> None:
    """The tokenizer is loaded for the first grammar, in a thread."""
    may_load = threading.Event()

    def load() -> PreTrainedTokenizerFast:
        assert may_load.wait(60)
        return tokenizer()

    before, core._grammars = core._grammars, Grammars(load, VOCAB_SIZE)
    core.add_request(constrained("bound", choice("ab")))
    core.add_request(message("free", [prompt(2)], max_tokens=6))
    got: list[int] = []
    while len(got) < 6:
        got += [token for d in core.step() for token in d.new_token_ids if d.request_id == "free"]
    may_load.set()
    assert text_of(tokens_of(drain(core)["bound"])) == "ab"
    core._grammars.close()
    core._grammars = before


def test_many_grammars_keep_few() -> None:
    grammars = Grammars(tokenizer, VOCAB_SIZE)
    for number in range(600):
        grammar = grammars.start(make_grammar(choice(f"{number}")), [EOS])
        assert grammar.allowed_bits.any()
    started = grammars._started
    assert len(started) <= started.capacity // 4096 < 600
    grammars.close()


UNKNOWN: dict[str, Any] = {
    "logit_bias": {VOCAB_SIZE: 1.0},
    "allowed_token_ids": [3, VOCAB_SIZE],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_token_without_a_logit_is_refused(core: EngineCore, name: str) -> None:
    with pytest.raises(RequestValueError) as caught:
        core.add_request(message("a", [prompt(2)], **{name: UNKNOWN[name]}))
    assert caught.value.param == name


@pytest.mark.parametrize("words", [[[VOCAB_SIZE]], [[-1]], [[]], [[5]] * 257], ids=str)
def test_bad_words_that_no_p0_sends_are_refused(core: EngineCore, words: list[list[int]]) -> None:
    request = message("a", [prompt(2)], bad_words=["x"])
    with pytest.raises(RequestValueError) as caught:
        core.add_request(msgspec.structs.replace(request, bad_words_token_ids=words))
    assert caught.value.param == "bad_words"
    with pytest.raises(RequestRuntimeError, match="P0"):
        core.add_request(request)
