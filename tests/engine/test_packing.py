"""Packed pictures: every item in one call, each kept apart; a mixed batch is one call of encode."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.engine.core import EngineCore
from mmjax.engine.device import encoder, memory
from mmjax.engine.device.encoder import EncoderCall, patch_buckets, plan_calls
from mmjax.errors import RequestError
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.packed import (
    Grid,
    embed_alone,
    packed_engine,
    packed_message,
    picture_feature,
)
from tests.engine.tiny import answer, drain, tokens_of

# ---- the plan ------------------------------------------------------------------------------------


@given(st.data())
def test_every_item_is_packed_once_and_in_few_calls(data: st.DataObject) -> None:
    per_token = data.draw(st.sampled_from([1, 3, 4, 9]))
    largest = data.draw(st.integers(1, 2000)) * per_token
    budget = data.draw(st.integers(1, 5000)) * per_token
    buckets = patch_buckets(
        largest_item=largest, encoder_budget=budget, patches_per_token=per_token
    )
    sizes = [
        n * per_token
        for n in data.draw(st.lists(st.integers(1, largest // per_token), max_size=40))
    ]
    calls, ends = plan_calls(sizes, buckets, per_token), []
    assert sorted(piece.item for _, pieces in calls for piece in pieces) == list(range(len(sizes)))
    for bucket, pieces in calls:
        place = 0
        for number, first, count, start in pieces:
            assert (first, count) == (0, sizes[number]), "whole"
            assert start >= place
            assert start % per_token == 0
            assert start % min(256, 1 << (sizes[number] - 1).bit_length()) == 0, "as if alone"
            place = start + sizes[number]
        ends.append(place)
        assert bucket >= place
        assert all(smaller < place for smaller in buckets if smaller < bucket), "the smallest"
    if per_token != 9:
        # An item goes on only where the calls before it have no room.
        assert all(a + b + 256 > buckets[-1] for n, a in enumerate(ends) for b in ends[n + 1 :])


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from([1, 2, 3, 4, 9, 16]))
def test_the_ladder_is_short_and_holds_the_largest_item(
    largest: int, budget: int, per_token: int
) -> None:
    buckets = patch_buckets(
        largest_item=largest, encoder_budget=budget, patches_per_token=per_token
    )
    assert all(bucket % per_token == 0 for bucket in buckets)
    assert sorted(set(buckets)) == list(buckets)
    assert all(b <= 2 * a for a, b in pairwise(buckets))
    assert largest <= buckets[-1]
    assert buckets[-1] < max(largest, min(budget, 4096)) + 128 + per_token
    assert len(buckets) <= 11


def test_the_first_call_with_room_takes_an_item() -> None:
    buckets = (128, 256, 512, 1024)
    calls = [(1024, [(1, 0, 700, 0), (2, 0, 100, 768)]), (1024, [(0, 0, 600, 0)])]
    assert plan_calls([600, 700, 100], buckets, 1) == calls
    assert plan_calls([60, 4, 64], buckets, 4) == [
        (128, [(2, 0, 64, 0), (0, 0, 60, 64), (1, 0, 4, 124)])
    ]
    assert plan_calls([], buckets, 1) == []


# ---- an engine -----------------------------------------------------------------------------------

MEASURED: list[str] = []
"""What the engine's start compiled to learn what memory it needs."""


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """Buckets of 128, 256, 512 and 1,024 patches; the largest item has 400."""
    compile_programs = memory.compile_programs

    def record(programs: Sequence[Any], **options: Any) -> list[int]:
        MEASURED.extend(program.label for program in programs)
        return compile_programs(programs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "compile_programs", record)
        return packed_engine(precompile="all")


@pytest.fixture(autouse=True)
def no_compilation(core: EngineCore) -> Iterator[None]:
    """After warm-up nothing compiles, whatever the sizes; and every row returns."""
    yield
    assert core.compilations == 0
    assert not core.has_unfinished()
    assert core.encoder_usage() == 0


@pytest.fixture
def calls(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[EncoderCall]:
    """The calls of `encode` since the test began."""
    return record_calls(core, monkeypatch)


def record_calls(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[EncoderCall]:
    made: list[EncoderCall] = []
    encode = core._runner._run_encode
    monkeypatch.setattr(
        core._runner, "_run_encode", lambda call: (made.append(call), encode(call))[1]
    )
    return made


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 90, length).tolist()


PICTURES: list[tuple[int, Grid]] = [
    (1, (2, 2)),
    (2, (16, 20)),
    (3, (6, 10)),
    (4, (2, 20)),
    (5, (12, 4)),
]
"""4, 320, 60, 40 and 48 patches."""
MIXED: list[tuple[Any, ...]] = [
    (text(1, 5), PICTURES[0], text(2, 3)),
    (PICTURES[1], text(3, 2)),
    (text(4, 1), PICTURES[2], text(5, 2), PICTURES[3], text(6, 1)),
    (text(7, 4), PICTURES[4], PICTURES[0], text(8, 2)),
]


def requests(prefix: str, seed: int = 0) -> list[EngineCoreRequest]:
    """Build the mixed requests; another `seed` has other pictures."""
    return [
        packed_message(
            f"{prefix} {number}",
            [(part[0] + seed, part[1]) if isinstance(part, tuple) else part for part in parts],
        )
        for number, parts in enumerate(MIXED)
    ]


def serve(core: EngineCore, batch: Sequence[EngineCoreRequest]) -> list[list[int]]:
    for request in batch:
        core.add_request(request)
    news = drain(core)
    return [tokens_of(news[request.request_id]) for request in batch]


def test_a_mixed_batch_is_one_call_with_the_answers_of_each_alone(
    core: EngineCore, calls: list[EncoderCall]
) -> None:
    together = serve(core, requests("together", seed=100))
    assert [len(call.inputs["segment_ids"]) for call in calls] == [512]
    sizes = np.bincount(calls[0].inputs["segment_ids"] + 1)
    assert sizes.tolist() == [512 - 472, 320, 60, 48, 40, 4]
    core.reset_prefix_cache()
    evict(core)
    calls.clear()
    alone = [answer(core, request) for request in requests("alone", seed=100)]
    assert len(calls) == 4, "one for each request, but for what it shares with another"
    assert alone == together


def evict(core: EngineCore) -> None:
    """Fill the pool with other pictures, so that those before must be encoded again."""
    for number in range(4):
        grids = [(20, 20), (4, 20)]
        parts = [(1000 + 10 * number + n, grid) for n, grid in enumerate(grids)]
        answer(core, packed_message(f"evict {number}", [*parts, [5]], max_tokens=1))


def test_answers_depend_on_every_picture(core: EngineCore) -> None:
    answers = serve(core, requests("these", seed=200))
    others = serve(core, requests("others", seed=300))
    assert all(a != b for a, b in zip(answers, others, strict=True))


def test_the_pool_holds_what_dense_attention_gives(
    core: EngineCore, calls: list[EncoderCall]
) -> None:
    """Rows of the pool, picture by picture, against the tower over one picture alone."""
    serve(core, requests("pool", seed=400))
    (call,) = calls
    pool = np.asarray(core._runner._pool)
    ids = call.inputs["segment_ids"][::4]
    by_size = sorted(PICTURES, key=lambda picture: -picture[1][0] * picture[1][1])
    for number, (seed, grid) in enumerate(by_size):
        rows = pool[call.dst_rows[ids == number]]
        np.testing.assert_allclose(rows, embed_alone(seed + 400, grid), atol=2e-5, rtol=2e-5)
    assert (call.dst_rows[ids < 0] == len(pool)).all()


def test_the_start_measures_the_largest_call(core: EngineCore) -> None:
    assert core._runner.buckets.encode == (128, 256, 512, 1024)
    assert "encode 1024" in MEASURED
    assert sum(label.startswith("encode") for label in MEASURED) == 1
    assert core.num_programs == core._runner.buckets.num_programs


def test_more_than_one_call_holds_takes_several(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "MAX_PACKED_PATCHES", 128)
    small = packed_engine()
    assert small._runner.buckets.encode == (128, 256, 512)
    calls = record_calls(small, monkeypatch)
    # 320, 240 and 60 patches: the third fits beside the first.
    batch = [[PICTURES[1], [3]], [(7, (12, 20)), [4]], [PICTURES[2], [5]]]
    messages = [packed_message(f"several {n}", parts) for n, parts in enumerate(batch)]
    answers = serve(small, messages)
    assert [len(call.inputs["segment_ids"]) for call in calls] == [512, 256]
    assert [answer(core, message) for message in messages] == answers
    assert small.compilations == 0


def test_items_that_do_not_fit_their_placeholders_are_refused(core: EngineCore) -> None:
    def refuse(words: str, grid: Grid = (4, 4), **instead: np.ndarray) -> None:
        message = packed_message("bad", [(1, grid), [3]])
        message.mm_features[0] = picture_feature(9, grid, 0, **instead)
        with pytest.raises(RequestError, match=words):
            core.add_request(message)

    pixels = np.zeros((20, 12), np.float32)
    refuse(
        r"inputs of item .* have \[16, 20\] patch rows; all must have as many", pixel_values=pixels
    )
    refuse("each patch must have shape", pixel_values=pixels[:16, :5])
    refuse("each patch must have shape", pixel_values=np.array(1.0))
    refuse("lacks what the model encodes", grid=(4, 4), pixel_values=np.array(["a"] * 16))
    refuse("1156 patches; the encoder takes 1024", grid=(34, 34))


def test_a_pack_is_whole_on_every_device(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    spread = packed_engine(tensor_parallel_size=2)
    calls = record_calls(spread, monkeypatch)
    answers = serve(spread, requests("spread", seed=500))
    assert len(calls) == 1
    assert answers == serve(core, requests("one device", seed=500))
    assert spread.compilations == 0
    program = spread._runner._programs.by_kind(spread.num_kv_blocks)["encode"][0]
    lowered = program.jitted.lower(**program.arguments).compile().as_text()
    assert "all-gather" not in lowered
    assert "all-reduce" not in lowered
