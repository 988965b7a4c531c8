"""Packed pictures: every item in one call, each kept apart; a mixed batch is one call of encode."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from mmjax.layers.module import flatten_params
from mmjax.parity.arrays import Sample
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import answer_all, check_idle
from tests.families import served_model
from tests.families.qwen2_vl import draw_grid
from tests.families.tiny import DrawnItem, Media, Part, Words
from tests.models.served import make_request, start_model

pytestmark = pytest.mark.as_served

# ---- the plan ------------------------------------------------------------------------------------


@given(st.data())
def test_every_item_is_packed_once_and_in_few_calls(data: st.DataObject) -> None:
    per_token = data.draw(st.sampled_from([1, 3, 4, 9]))
    largest = data.draw(st.integers(1, 2000)) * per_token
    budget = data.draw(st.integers(1, 5000)) * per_token
    buckets = patch_buckets(
        largest_item=largest, encoder_budget=budget, patches_per_start=per_token
    )
    sizes = [
        n * per_token
        for n in data.draw(st.lists(st.integers(1, largest // per_token), max_size=40))
    ]
    calls, ends = plan_calls(sizes, buckets, per_token), []
    assert sorted(piece.item for _, pieces in calls for piece in pieces) == list(range(len(sizes)))
    for bucket, pieces in calls:
        place = 0
        for number, first, count, start, pack in pieces:
            assert (first, count, pack) == (0, sizes[number], 0), "whole"
            assert start >= place
            assert start % per_token == 0
            assert start % min(256, 1 << (sizes[number] - 1).bit_length()) == 0, "as if alone"
            place = start + sizes[number]
        ends.append(place)
        assert bucket >= place
        assert all(smaller < place for smaller in buckets if smaller < bucket), "the smallest"
    # An item goes on only where the calls before it have no room.
    apart = math.lcm(256, per_token)
    assert all(a + b + apart > buckets[-1] for n, a in enumerate(ends) for b in ends[n + 1 :])


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from([1, 2, 3, 4, 9, 16]))
def test_the_ladder_is_short_and_holds_the_largest_item(
    largest: int, budget: int, per_token: int
) -> None:
    buckets = patch_buckets(
        largest_item=largest, encoder_budget=budget, patches_per_start=per_token
    )
    assert all(bucket % per_token == 0 for bucket in buckets)
    assert sorted(set(buckets)) == list(buckets)
    assert all(b <= 2 * a for a, b in pairwise(buckets))
    assert largest <= buckets[-1]
    assert buckets[-1] < max(largest, min(budget, 4096)) + 128 + per_token
    assert len(buckets) <= 13


def test_usual_pictures_are_padded_little() -> None:
    buckets = patch_buckets(largest_item=16384, encoder_budget=16384, patches_per_start=4)
    assert buckets == (128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384)


def test_the_first_call_with_room_takes_an_item() -> None:
    buckets = (128, 256, 512, 1024)
    calls = [(1024, [(1, 0, 700, 0, 0), (2, 0, 100, 768, 0)]), (1024, [(0, 0, 600, 0, 0)])]
    assert plan_calls([600, 700, 100], buckets, 1) == calls
    assert plan_calls([60, 4, 64], buckets, 4) == [
        (128, [(2, 0, 64, 0, 0), (0, 0, 60, 64, 0), (1, 0, 4, 124, 0)])
    ]
    assert plan_calls([], buckets, 1) == []
    # Where four patches are a key to others, a block of keys is of 1,024 patches.
    for per_key, start in ((1, 768), (4, 1024)):
        calls = [(2048, [(0, 0, 600, 0, 0), (1, 0, 300, start, 0)])]
        assert plan_calls([600, 300], (2048,), 1, patches_per_key=per_key) == calls


@given(st.lists(st.integers(1, 1024), min_size=1, max_size=40), st.sampled_from([2, 4, 8]))
def test_packs_are_balanced(sizes: list[int], num_packs: int) -> None:
    calls = plan_calls(sizes, (128, 256, 512, 1024), 1, num_packs=num_packs)
    assert sorted(piece.item for _, pieces in calls for piece in pieces) == list(range(len(sizes)))
    for bucket, pieces in calls:
        ends = [0] * num_packs
        for number, first, count, start, pack in pieces:
            assert (first, count) == (0, sizes[number]), "whole"
            assert start >= ends[pack]
            assert start % min(256, 1 << (count - 1).bit_length()) == 0, "as if alone"
            assert ends[pack] == min(ends), "the emptiest pack"
            ends[pack] = start + count
        assert bucket >= max(ends)
        assert bucket == 128 or bucket < 2 * max(ends)
    if len(sizes) <= num_packs:
        ((_, pieces),) = calls
        assert len({piece.pack for piece in pieces}) == len(sizes), "a pack for each"


# ---- an engine, of Qwen2.5-VL: windows, and layers that see a whole picture ----------------------

MODEL = served_model("qwen2_5_vl")
MAX_EMBEDS = 100
"""Of the largest picture, of 400 patches."""
GRIDS = [(2, 2), (10, 20), (6, 10), (2, 20), (12, 4)]
"""4, 200, 60, 40 and 48 patches; a picture's seed, in tens, decides its grid."""
SEVERAL = [(16, 20), (12, 20), (6, 10)]
PICTURES = [Media(seed) for seed in range(5)]
MIXED: list[tuple[Part, ...]] = [
    (Words(1, 5), PICTURES[0], Words(2, 3)),
    (PICTURES[1], Words(3, 2)),
    (Words(4, 1), PICTURES[2], Words(5, 2), PICTURES[3], Words(6, 1)),
    (Words(7, 4), PICTURES[4], PICTURES[0], Words(8, 2)),
]
MEASURED: list[str] = []
"""What the engine's start compiled to learn what memory it needs."""


def packed_engine(**settings: Any) -> EngineCore:
    sizes = {"max_num_encoder_input_tokens": 256, "encoder_cache_size": 4 * MAX_EMBEDS}
    # A step holds all mixed requests.
    sizes |= {"max_num_batched_tokens": 128, "max_num_seqs": 4, "max_model_len": 256}
    model_class, embeds = MODEL.family.model_class, {"image": MAX_EMBEDS}
    settings = {**sizes, **settings}
    return start_model(model_class, MODEL.config, MODEL.params, max_embeds=embeds, **settings)


def draw_picture(config: Any, media: Media) -> DrawnItem:
    height, width = GRIDS[media.seed % 10]
    return draw_grid(config, "image", media.seed, (1, height, width), 0.0)


def draw(parts: Sequence[Part]) -> Sample:
    return replace(MODEL.family, draw_item=draw_picture).draw_sample(MODEL.config, parts)


def requests(prefix: str, turn: int = 0) -> list[EngineCoreRequest]:
    """Build the mixed requests; another `turn` has other pictures."""
    return [
        make_request(
            f"{prefix} {number}",
            draw([Media(p.seed + 10 * turn) if isinstance(p, Media) else p for p in parts]),
            max_tokens=6,
        )
        for number, parts in enumerate(MIXED)
    ]


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
    check_idle(core)


@pytest.fixture
def calls(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[EncoderCall]:
    """The calls of `encode` since the test began."""
    return record_calls(core, monkeypatch)


def record_calls(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[EncoderCall]:
    runner, made = core._runner, list[EncoderCall]()
    encode = runner._run_encode
    monkeypatch.setattr(runner, "_run_encode", lambda call: (made.append(call), encode(call)))
    return made


def test_a_mixed_batch_is_one_call_with_the_answers_of_each_alone(
    core: EngineCore, calls: list[EncoderCall]
) -> None:
    together = answer_all(core, requests("together", turn=1))
    assert [len(call.inputs["segment_ids"]) for call in calls] == [512]
    sizes = np.bincount(calls[0].inputs["segment_ids"] + 1)
    assert sizes.tolist() == [512 - 352, 200, 60, 48, 40, 4]
    assert core.recover() == []  # nothing is held of them
    calls.clear()
    alone = [answer for one in requests("alone", turn=1) for answer in answer_all(core, [one])]
    assert len(calls) == 4, "one for each request, but for what it shares with another"
    assert alone == together
    others = answer_all(core, requests("others", turn=2))
    assert all(a != b for a, b in zip(together, others, strict=True)), "no picture changes them"


def test_the_pool_holds_what_each_picture_gives_alone(
    core: EngineCore, calls: list[EncoderCall]
) -> None:
    batch = requests("pool", turn=4)
    answer_all(core, batch)
    (call,) = calls
    pool, held = np.asarray(core._runner._pool), core._runner.rows
    for parts, request in zip(MIXED, batch, strict=True):
        pictures = [part for part in parts if isinstance(part, Media)]
        for picture, feature in zip(pictures, request.mm_features, strict=True):
            alone = MODEL.paged.embed(draw([Media(40 + picture.seed), Words(1, 1)]))
            rows = pool[held.get(feature.identifier)]
            np.testing.assert_allclose(rows, alone, atol=2e-5, rtol=2e-5)
    assert (call.dst_rows[call.inputs["segment_ids"][::4] < 0] == len(pool)).all()


def test_the_start_measures_the_largest_call(core: EngineCore) -> None:
    assert core._runner.buckets.encode == (128, 256, 512, 1024)
    assert "encode 1024" in MEASURED
    assert sum(label.startswith("encode") for label in MEASURED) == 1
    assert core.num_programs == core._runner.buckets.num_programs


def test_more_than_one_call_holds_takes_several(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "MAX_PACKED_PATCHES", 128)
    monkeypatch.setattr("tests.engine.test_packing.GRIDS", SEVERAL)
    small = packed_engine(max_num_batched_tokens=256)
    assert small._runner.buckets.encode == (128, 256, 512)
    calls = record_calls(small, monkeypatch)
    # 320, 240 and 60 patches: the third fits beside the first.
    batch = [
        make_request(f"several {n}", draw([Media(70 + n), Words(n, 2)]), max_tokens=6)
        for n in range(3)
    ]
    answers = answer_all(small, batch)
    assert [len(call.inputs["segment_ids"]) for call in calls] == [512, 256]
    assert [answer for one in batch for answer in answer_all(core, [one])] == answers
    assert small.compilations == 0


def test_items_that_do_not_fit_their_placeholders_are_refused(core: EngineCore) -> None:
    sample = draw([Media(2), Words(1, 1)])
    (item,) = sample.items

    def refuse(words: str, **instead: np.ndarray) -> None:
        request = make_request("bad", sample, tensors=[{**item.tensors, **instead}])
        with pytest.raises(RequestError, match=words):
            core.add_request(request)

    pixels = np.asarray(item.tensors["pixel_values"])
    refuse(r"all must have as many", pixel_values=np.concatenate([pixels, pixels[:4]]))
    refuse("each patch must have shape", pixel_values=pixels[:, :5])
    refuse("1156 patches; the encoder takes 1024", image_grid_thw=np.array([1, 34, 34]),
           pixel_values=np.zeros((1156, pixels.shape[1]), np.uint8))  # fmt: skip


@pytest.mark.slow  # 25 s; what devices exchange is asked by default, and a lone device's packs
@pytest.mark.parametrize("size", [2, 4])
def test_each_device_encodes_a_pack_of_its_own(
    size: int, core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = packed_engine(size=size)
    calls = record_calls(spread, monkeypatch)
    # Other numbers fill other buckets, for which more programs are compiled.
    for number in (1, 3) if size == 2 else (1, 2, 3, 5):
        pictures = [Media(100 * size + 10 * number + n) for n in range(number)]
        request = make_request(f"{size}, {number}", draw([*pictures, Words(1, 2)]), max_tokens=6)
        assert answer_all(spread, [request]) == answer_all(core, [request])
        together, expected = (find_rows(one, request) for one in (spread, core))
        # One device multiplies by kernels in C++, of which the sums have another order.
        for rows, of_one in zip(together, expected, strict=True):
            np.testing.assert_allclose(rows, of_one, atol=2e-5, rtol=2e-5)
        (call,) = calls
        packs = call.inputs["segment_ids"].reshape(size, -1)
        assert (packs >= 0).any(1).sum() == min(number, size)
        # Beside the largest picture, of 200 patches, is none of those of 4 to 60.
        assert (packs >= 0).sum(1).max() == (4 if number == 1 else 200)
        assert spread.recover() == []  # nothing is held of them
        for rows, picture in zip(together, pictures, strict=True):
            alone = make_request(f"{picture.seed}", draw([picture, Words(1, 1)]))
            answer_all(spread, [alone])
            np.testing.assert_array_equal(rows, find_rows(spread, alone)[0])
        calls.clear()
    assert spread.compilations == 0


def find_rows(engine: EngineCore, request: EngineCoreRequest) -> list[np.ndarray]:
    """Return what the pool holds of each item."""
    pool, held = np.asarray(engine._runner._pool), engine._runner.rows
    return [pool[held.get(feature.identifier)] for feature in request.mm_features]


def test_devices_exchange_embeddings_alone(core: EngineCore) -> None:
    spread = packed_engine(size=2)
    program = spread._runner._programs.by_kind(spread.num_kv_blocks)["encode"][0]
    compiled = program.jitted.lower(**program.arguments).compile().as_text()
    found = re.findall(r"= \w+\[([\d,]+)\]\S* (all-\w+|reduce-scatter|collective-\w+)", compiled)
    width = spread._runner._pool.shape[1]
    assert found == [(f"{2 * 1024 // 4},{width}", "all-gather")]
    leaves = flatten_params(spread.params)
    tower = [leaves[name] for name in spread._runner._programs.find_encoder_params()]
    assert tower
    assert all(leaf.sharding.is_fully_replicated for leaf in tower)
