"""The engine over the kernels' KV layouts, on the CPU: other memory and programs, equal answers."""

from typing import Any

import jax
import pytest

from mmjax.layers.attention.gpu import gpu_attention
from mmjax.layers.attention.kv_cache import InterleavedCache, RowCache, SlotCache
from tests.engine.tiny import (
    answer,
    answer_all,
    dense_greedy,
    drain,
    message,
    tiny_engine,
    tokens_of,
)

PROMPTS: list[list[Any]] = [
    [[5, 6, 7]],
    [list(range(3, 60))],
    [[5], (1, 1), [6, 7]],
    [[8, 9], (2, 2), list(range(10, 30)), (3, 1), [4]],
]


LAYOUTS = {"ragged": InterleavedCache, "triton": SlotCache, "rows": RowCache}


def make_engine(backend: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        "mmjax.layers.attention.api.choose_backend", lambda platform, **options: backend
    )
    if backend == "rows":
        monkeypatch.setattr("mmjax.engine.start.choose_cache_type", lambda *_, **options: RowCache)
    return tiny_engine(max_num_seqs=2, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    # By default of a block's rows; each layout is in `tests/layers`.
    "backend",
    [*(pytest.param(one, marks=pytest.mark.slow) for one in ("ragged", "triton")), "rows"],
)
def test_answers_are_the_oracles(backend: str, monkeypatch: pytest.MonkeyPatch):
    core = make_engine(backend, monkeypatch)
    assert isinstance(core._runner._state.kv_cache[0], LAYOUTS[backend])
    requests = [message(f"r{i}", parts) for i, parts in enumerate(PROMPTS)]
    alone = [answer(core, request) for request in requests]
    assert alone == [dense_greedy(request) for request in requests]
    assert answer_all(core, requests) == alone
    assert core.compilations == 0


@pytest.mark.slow
def test_the_kernel_for_cuda_answers_as_the_oracle(monkeypatch: pytest.MonkeyPatch):
    """The whole engine through the kernel, interpreted."""
    calls = []

    def interpreted(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return gpu_attention(*arguments, **options, interpret=True)

    def on_cuda(*arguments: Any, default: Any, **platforms: Any) -> Any:
        kernel = platforms.get("cuda")
        if kernel is not None and kernel.func is interpreted:
            return kernel(*arguments)
        return dependent(*arguments, default=default, **platforms)

    dependent = jax.lax.platform_dependent
    monkeypatch.setattr("mmjax.layers.attention.api.gpu_attention", interpreted)
    monkeypatch.setattr(jax.lax, "platform_dependent", on_cuda)
    core = make_engine("triton", monkeypatch)
    requests = [message(f"r{i}", parts) for i, parts in enumerate(PROMPTS)]
    for request in requests:
        core.add_request(request)
    news = drain(core)
    assert calls
    expected = [dense_greedy(request) for request in requests]
    assert [tokens_of(news[request.request_id]) for request in requests] == expected


def test_steps_with_and_without_images_have_programs_of_their_own(monkeypatch: pytest.MonkeyPatch):
    """Where a kernel is causal: the TPU's."""
    core = make_engine("ragged", monkeypatch)
    variants = {bucket.has_spans for bucket in core._runner.buckets.mixed}
    assert variants == {False, True}
    assert not any(bucket.has_spans for bucket in core._runner.buckets.steps[:1]), "decoding"
