"""A request that brings tokens goes on as if this engine had generated them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import RequestError
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta
from tests.engine import tiny_encoder_decoder as encoder_decoder
from tests.engine.grammars import constrained, install_tokenizer, prompt, regex
from tests.engine.test_structured_outputs import FIELDS, NAME
from tests.engine.tiny import EOS, drain, message, tiny_engine, tokens_of


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return install_tokenizer(tiny_engine(max_num_batched_tokens=16))


def serve(core: EngineCore, request: EngineCoreRequest) -> list[RequestOutputDelta]:
    core.add_request(request)
    return drain(core)[request.request_id]


def resumed(request: EngineCoreRequest, output: Sequence[int]) -> EngineCoreRequest:
    return msgspec.structs.replace(request, output_token_ids=list(output))


REQUESTS: dict[str, EngineCoreRequest] = {
    **{
        name: message("a", [prompt(3), (1, 1), [7]], max_tokens=20, seed=8, **fields)
        for name, fields in FIELDS.items()
    },
    "greedy": message("a", [prompt(5), (2, 2), [9]], max_tokens=20, logprobs=3),
    "until eos": message("a", [prompt(5)], max_tokens=60, seed=3, temperature=3.0, eos=[EOS, 7, 8]),
    "bad words": msgspec.structs.replace(
        message("a", [prompt(7)], max_tokens=20, bad_words=["x"]),
        bad_words_token_ids=[[11], [12, 13]],
    ),
    "grammar": constrained("a", NAME),
    "drawn grammar": constrained("a", regex("(xy|z){5,10}"), temperature=1.5, top_k=4),
    "prompt logprobs": message("a", [prompt(9, 40)], max_tokens=6, prompt_logprobs=2),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_what_comes_after_the_cut_is_what_came_there(
    core: EngineCore, request_: EngineCoreRequest
) -> None:
    whole = serve(core, request_)
    token_ids = tokens_of(whole)
    assert len(whole) > 3
    for cut in {1, 2, len(token_ids) // 2, len(token_ids) - 1}:
        core.reset_prefix_cache()
        rest = serve(core, resumed(request_, token_ids[:cut]))
        assert tokens_of(rest) == token_ids[cut:], cut
        assert [delta.new_logprobs for delta in rest] == [
            delta.new_logprobs for delta in whole[cut:]
        ]
        assert (rest[-1].finish_reason, rest[-1].stop_reason) == (
            whole[-1].finish_reason,
            whole[-1].stop_reason,
        )


def test_nothing_that_came_with_the_first_token_comes_again(core: EngineCore) -> None:
    request = message("a", [prompt(11, 40), (3, 1)], max_tokens=5, prompt_logprobs=2)
    first, *_ = serve(core, request)
    assert first.prompt_logprobs
    assert first.times is not None
    before = core.stats()
    rest = serve(core, resumed(request, tokens_of([first])))
    assert all(delta.prompt_logprobs is None and delta.times is None for delta in rest)
    assert all(delta.num_cached_tokens == 0 and not delta.encoded for delta in rest)
    after = core.stats()
    assert after.num_prompt_tokens == before.num_prompt_tokens
    assert after.prefix_cache_queries == before.prefix_cache_queries
    assert after.num_generation_tokens == before.num_generation_tokens + 4


def test_many_go_on_beside_each_other_and_are_preempted() -> None:
    roomy = tiny_engine(max_num_batched_tokens=16)
    requests = [
        message(f"r{number}", [prompt(number, 20 + number), (number % 3, 1)], max_tokens=30)
        for number in range(6)
    ]
    whole = [tokens_of(serve(roomy, request)) for request in requests]
    crowded = tiny_engine(max_num_batched_tokens=16, num_blocks=20)
    for number, request in enumerate(requests):
        crowded.add_request(resumed(request, whole[number][: 5 * number]))
    news = drain(crowded)
    assert crowded.num_preemptions
    for number, request in enumerate(requests):
        assert tokens_of(news[request.request_id]) == whole[number][5 * number :]


@pytest.mark.parametrize("picture", [None, 4])
def test_an_encoder_decoder_goes_on(picture: int | None) -> None:
    core = encoder_decoder.tiny_encoder_decoder()
    encoder_ids = [5, 6, 7, 8, 9, 10, 11, 12]
    request = encoder_decoder.message("a", encoder_ids, [2, 3], picture=picture, max_tokens=8)
    token_ids = tokens_of(serve(core, request))
    assert token_ids == encoder_decoder.dense_greedy(request)
    fresh = encoder_decoder.tiny_encoder_decoder()
    for cut in (1, 4, 7):
        assert tokens_of(serve(fresh, resumed(request, token_ids[:cut]))) == token_ids[cut:]


BAD: dict[str, tuple[dict[str, Any], list[int], str]] = {
    "all": ({"max_tokens": 4}, [5, 6, 7, 8], "nothing left"),
    "more": ({"max_tokens": 4}, [5] * 200, "nothing left"),
    "unknown": ({}, [5, 10**6], "cannot give"),
    "negative": ({}, [-1], "cannot give"),
}


@pytest.mark.parametrize(("fields", "output", "text"), BAD.values(), ids=BAD)
def test_tokens_that_cannot_be_its_own_are_refused(
    core: EngineCore, fields: dict[str, Any], output: list[int], text: str
) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        core.add_request(resumed(message("bad", [prompt(1)], **fields), output))
    assert caught.value.param == "output_token_ids"
    assert not core.has_unfinished()


def test_tokens_against_the_grammar_end_that_request(core: EngineCore) -> None:
    core.add_request(resumed(constrained("bad", NAME), [5, 6, 7]))
    core.add_request(good := message("good", [prompt(2)], max_tokens=4))
    failed: list[tuple[str, RequestError]] = []
    news: list[int] = []
    while core.has_unfinished():
        failed += core.pop_failed()
        news += tokens_of([one for one in core.step() if one.request_id == "good"])
    assert [request_id for request_id, _ in failed] == ["bad"]
    assert "generated already" in failed[0][1].message
    assert len(news) == good.sampling_params.max_tokens
