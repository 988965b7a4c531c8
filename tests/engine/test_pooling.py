"""Prompts that become vectors: the same bits alone, among others, in chunks, computed again."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.errors import RequestRuntimeError
from mmjax.params.pooling_params import PoolingParams
from mmjax.transport.codec import decode, encode
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta, StepOutput
from tests.engine.tiny import drain, engine_config, message, start_tiny

pytestmark = pytest.mark.as_served

WORDS = [*range(5, 40)]
PARTS: list[list[Any]] = [
    [WORDS, (1, 1), WORDS[:9]],
    [WORDS[4:30], (2, 1), (1, 1), WORDS[:17]],
    [WORDS[::-1], WORDS[:13]],
    [WORDS[:3]],
    [WORDS, (1, 1), WORDS[3:20]],
]
WANTED: list[dict[str, Any]] = [
    {"task": "embed", "pooling_type": "LAST", "use_activation": True},
    {"task": "embed", "pooling_type": "MEAN", "use_activation": True},
    {"task": "token_embed", "pooling_type": "LAST", "use_activation": False},
]


def make_requests(prompts: list[list[Any]] = PARTS) -> list[EngineCoreRequest]:
    """Return each prompt as each kind of vectors."""
    return [
        message(f"{kind}-{number}", parts, max_tokens=1, pooling=PoolingParams(**wanted))
        for number, parts in enumerate(prompts)
        for kind, wanted in enumerate(WANTED)
    ]


CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 16, "encoder_cache_size": 16}
"""Of an engine whose steps, beside decoding, are of one size."""


def start(**settings: Any) -> EngineCore:
    config = engine_config(max_model_len=80, **settings)
    return start_tiny(replace(config, model=replace(config.model, runner="pooling")))


def read(news: list[RequestOutputDelta]) -> np.ndarray:
    (delta,) = news
    assert delta.new_token_ids == []
    assert delta.finish_reason == "stop"
    received = decode(encode(StepOutput(deltas=[delta])))
    assert isinstance(received, StepOutput)
    (sent,) = received.deltas
    assert sent.vectors is not None
    return np.frombuffer(sent.vectors.data, np.float32).reshape(-1, sent.vectors.width)


@pytest.fixture(scope="module")
def alone() -> dict[str, np.ndarray]:
    core = start(enable_prefix_caching=False, precompile="all")
    found = {}
    for request in make_requests():
        core.add_request(request)
        found |= {name: read(news) for name, news in drain(core).items()}
    assert core.compilations == 0
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**CHUNKED, "max_num_batched_tokens": 7, "max_num_encoder_input_tokens": 16},
        {**CHUNKED, "max_num_seqs": 2, "async_scheduling": False},
    ],
    ids=["at once", "in chunks of 7", "two by two, each step read at once"],
)
def test_the_same_bits(alone: dict[str, np.ndarray], settings: dict[str, Any]) -> None:
    core = start(**settings)
    for _ in ("cold", "warm"):
        for request in make_requests():
            core.add_request(request)
        found = {name: read(news) for name, news in drain(core).items()}
        assert found.keys() == alone.keys()
        for name, vectors in found.items():
            np.testing.assert_array_equal(vectors, alone[name], err_msg=name)
    assert core.stats().prefix_cache_hits > 0
    assert core.compilations == 0


def test_preempted_requests_give_the_same_bits() -> None:
    """Each waits for its next picture's rows amid its prompt, so that all hold blocks and grow."""
    prompts = [
        [WORDS[n : 12 + n], *[(10 * n + picture, 1) for picture in range(6)], WORDS[:20]]
        for n in range(3)
    ]
    sizes = {"num_blocks": 16, "max_num_seqs": 5, "encoder_cache_size": 4}
    core = start(**sizes, max_num_batched_tokens=16, enable_prefix_caching=False)
    alone = {}
    for request in make_requests(prompts):
        core.add_request(request)
        alone |= {name: read(news) for name, news in drain(core).items()}
    assert core.stats().num_preemptions == 0
    for request in make_requests(prompts):
        core.add_request(request)
    found = {name: read(news) for name, news in drain(core).items()}
    assert core.stats().num_preemptions > 0
    assert found.keys() == alone.keys()
    for name, vectors in found.items():
        np.testing.assert_array_equal(vectors, alone[name], err_msg=name)


def test_they_are_of_the_prompt(alone: dict[str, np.ndarray]) -> None:
    for number, _ in enumerate(PARTS):
        last, mean, states = (alone[f"{kind}-{number}"] for kind in range(3))
        assert len(states) == len(make_requests()[3 * number].prompt_token_ids)
        for vector, expected in ((last, states[-1]), (mean, states.mean(0))):
            norm = np.linalg.norm(expected)
            np.testing.assert_allclose(vector[0], expected / norm, rtol=0, atol=1e-6)


def test_a_failed_step_changes_nothing(alone: dict[str, np.ndarray]) -> None:
    """All but one that was alone in it are computed again, on empty caches."""
    core = start(**CHUNKED)
    for request in make_requests():
        core.add_request(request)
    news = {delta.request_id: [delta] for _ in range(6) for delta in core.step()}
    ended = core.recover()
    news |= drain(core)
    assert len(ended) <= 1
    assert news.keys() == alone.keys() - {*ended}
    for name, (delta,) in news.items():
        np.testing.assert_array_equal(read([delta]), alone[name])


def test_a_request_for_text_is_refused() -> None:
    core = start()
    with pytest.raises(RequestRuntimeError, match="`runner` is 'pooling'"):
        core.add_request(message("text", [WORDS]))
