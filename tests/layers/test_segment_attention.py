"""Attention of packed images equals that of each image alone."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.layers.attention import segments as attention_segments
from mmjax.layers.attention.api import dense_attention
from mmjax.layers.attention.segments import PADDING, refine_segments, segment_attention
from mmjax.layers.cpu.product import has_tiles
from tests.layers.on_gpu import as_on_gpu

NUM_HEADS, HEAD_DIM = 3, 16
SCALE = 0.3
TOLERANCE = 2e-6
PACKS = [
    [5],
    [128],
    [40, 3, 1, 60],
    [256, 256],
    [300, 20, 256, 7],
    [1] * 30,
    [700, 1, 90],
]
"""Around blocks of 256 rows: inside of one, exactly filled, over their borders."""


@pytest.fixture(params=["squares", "the kernel for CUDA"])
def attend(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What the CPU computes by, and what a GPU does: interpreted where none is."""
    if request.param == "squares":
        return jax.jit(partial(segment_attention, scale=SCALE))
    kernel = partial(attention_segments._kernel_attention, interpret=jax.default_backend() != "gpu")
    return jax.jit(partial(kernel, scale=SCALE))


def draw(num_rows: int, seed: int = 0) -> np.ndarray:
    """Return queries, keys and values."""
    shape = (3, num_rows, NUM_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ids_of(sizes: Sequence[int], num_rows: int) -> np.ndarray:
    ids = np.full(num_rows, PADDING, np.int32)
    ids[: sum(sizes)] = np.repeat(np.arange(len(sizes)), sizes)
    return ids


# Compiled as one program a shape, not one for every operation.
attend_densely = jax.jit(partial(dense_attention, mask=None, scale=SCALE))


def alone(rows: np.ndarray | jax.Array) -> np.ndarray:
    query, key, value = jnp.asarray(rows)[:, None]
    return np.asarray(attend_densely(query, key, value))[0]


@pytest.mark.parametrize(
    ("sizes", "padding"),
    [
        # By default no padding where rows fill blocks of their own, or begin one.
        pytest.param(sizes, padding, marks=() if is_default else pytest.mark.slow)
        for sizes in PACKS
        for padding in (0, 45)
        for is_default in [padding > 0 or sum(sizes) % 128 == 0 or len(sizes) == 1]
    ],
)
def test_each_image_attends_as_it_does_alone(
    attend: Callable[..., Any], sizes: list[int], padding: int
) -> None:
    num_rows = sum(sizes) + padding
    rows = draw(num_rows)
    out = np.asarray(attend(*rows, ids_of(sizes, num_rows)))
    assert np.isfinite(out).all()
    starts = np.cumsum([0, *sizes])
    for start, end in pairwise(starts):
        np.testing.assert_allclose(out[start:end], alone(rows[:, start:end]), atol=TOLERANCE)


@pytest.mark.as_served
@pytest.mark.skipif(not has_tiles(), reason="a CPU without AMX, or without the kernels")
@pytest.mark.parametrize("order", ["in order", "mixed"])
@pytest.mark.parametrize("sizes", PACKS)
def test_tiles_attend_within_segments_wherever_their_rows_stand(
    sizes: list[int], order: str
) -> None:
    """With the bits of each alone; of mixed rows, too."""
    num_rows = sum(sizes) + 45
    rows, ids = jnp.asarray(draw(num_rows), jnp.bfloat16), ids_of(sizes, num_rows)
    if order == "mixed":
        ids = np.random.default_rng(1).permutation(ids)
    attend = jax.jit(partial(segment_attention, scale=SCALE))
    assert "mmjax_segment_attention" in attend.lower(*rows, ids).as_text()
    out = np.asarray(attend(*rows, ids).astype(jnp.float32))
    assert (out[ids == PADDING] == 0).all()
    for number in range(len(sizes)):
        own = rows[:, ids == number]
        np.testing.assert_array_equal(out[ids == number], alone(own).astype(np.float32))


@pytest.mark.as_served
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_neighbour_changes_no_bit(attend: Callable[..., Any], place: int) -> None:
    sizes = [200, 310, 90]
    ids = ids_of(sizes, 640)
    mine = ids == place
    rows, others = draw(640, seed=1), 50 * draw(640, seed=2)
    others[:, mine] = rows[:, mine]
    expected = np.asarray(attend(*rows, ids))[mine]
    np.testing.assert_array_equal(np.asarray(attend(*others, ids))[mine], expected)
    # Nor do other cuts of what stands beside it, or nobody there at all.
    halves = np.where(mine, 10, np.where(np.arange(640) % 2 == 0, 3, 20)).astype(np.int32)
    nobody = np.where(mine, 0, PADDING).astype(np.int32)
    for neighbours in (halves, nobody):
        np.testing.assert_array_equal(np.asarray(attend(*others, neighbours))[mine], expected)


@pytest.mark.as_served
def test_a_larger_bucket_changes_no_bit() -> None:
    """Squares have one size: so an image's answer depends on its place in the pack alone."""
    sizes = [300, 150]
    attend = jax.jit(partial(segment_attention, scale=SCALE))
    rows = draw(2048)
    small = attend(*rows[:, :512], ids_of(sizes, 512))
    large = attend(*rows, ids_of([*sizes, 900, 5], 2048))
    np.testing.assert_array_equal(np.asarray(small)[:450], np.asarray(large)[:450])


@pytest.mark.as_served
def test_a_bucket_smaller_than_a_block_changes_no_bit() -> None:
    """Such are those of a tower that joins patches midway."""
    attend = jax.jit(partial(segment_attention, scale=SCALE))
    rows, ids = draw(256), ids_of([8, 9], 256)
    expected = np.asarray(attend(*rows, ids))[:17]
    for size in (32, 64, 96):
        found = np.asarray(attend(*rows[:, :size], ids[:size]))[:17]
        np.testing.assert_array_equal(found, expected, err_msg=f"{size=}")


@pytest.mark.parametrize("loudness", [0.0, 1.0, 1e15])
def test_padding_stays_finite(attend: Callable[..., Any], loudness: float) -> None:
    rows = np.float32(loudness) * draw(600)
    for sizes in ([], [100], [600]):
        assert np.isfinite(attend(*rows, ids_of(sizes, 600))).all()


def test_padding_is_not_attended_to() -> None:
    """Also where it shares a block with an image, whose values never enter its sums."""
    rows = draw(600)
    out = np.asarray(jax.jit(partial(segment_attention, scale=SCALE))(*rows, ids_of([100], 600)))
    assert out[:100].all()
    assert not out[100:].any()


def test_ids_in_any_order_are_right(attend: Callable[..., Any]) -> None:
    ids = np.random.default_rng(3).integers(0, 5, 600).astype(np.int32)
    rows = draw(600)
    out = np.asarray(attend(*rows, ids))
    for segment in range(5):
        mine = ids == segment
        np.testing.assert_allclose(out[mine], alone(rows[:, mine]), atol=TOLERANCE)


def test_only_blocks_of_its_own_segments_are_computed() -> None:
    ids = np.array([[0, 0], [0, 1], [2, 2], [2, -1], [-1, -1]], np.int32)
    first, end = attention_segments._block_range(jnp.asarray(ids), jnp.asarray(ids))
    assert first.tolist()[:4] == [0, 0, 2, 2]
    assert (end - first).tolist() == [2, 2, 2, 2, 0]


def test_windows_are_segments(attend: Callable[..., Any]) -> None:
    segment_ids = ids_of([24, 12], 40)
    window_ids = np.concatenate([np.repeat(np.arange(3), 8), np.repeat(np.arange(3), 4), [0] * 4])
    ids = refine_segments(jnp.asarray(segment_ids), jnp.asarray(window_ids, jnp.int32), num_parts=3)
    assert ids.tolist() == ids_of([8, 8, 8, 4, 4, 4], 40).tolist()
    rows = draw(40)
    out = np.asarray(attend(*rows, np.asarray(ids)))
    np.testing.assert_allclose(out[24:28], alone(rows[:, 24:28]), atol=TOLERANCE)


def test_halves_stay_halves() -> None:
    rows = jnp.asarray(draw(300)).astype(jnp.bfloat16)
    query, key, value = rows
    ids = jnp.asarray(ids_of([100, 150], 300))
    out = segment_attention(query, key, value, ids, scale=SCALE)
    assert out.dtype == jnp.bfloat16
    expected = alone(np.asarray(rows.astype(jnp.float32))[:, :100])
    np.testing.assert_allclose(np.asarray(out[:100], np.float32), expected, atol=2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_lowers_for_cuda(dtype: str) -> None:
    row = jax.ShapeDtypeStruct((256, NUM_HEADS, HEAD_DIM), dtype)
    ids = jax.ShapeDtypeStruct((256,), "int32")
    with as_on_gpu():
        traced = jax.jit(partial(segment_attention, scale=SCALE)).trace(row, row, row, ids)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @__gpu\$xla\.gpu\.triton", text)) == 1
    assert "stablehlo.while" not in text, "the host would wait for every round of a loop"
    assert traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.as_served
@pytest.mark.parametrize("size", [4, 24, 40, 100, 200, 700])
def test_an_image_at_a_multiple_of_its_size_has_the_same_bits(size: int) -> None:
    """Beside whatever, in a pack of any bucket (docs/determinism.md)."""
    attend = jax.jit(partial(segment_attention, scale=SCALE))
    step = min(256, 1 << (size - 1).bit_length())
    image, found = draw(size), set()
    for bucket in (128, 256, 384, 512, 1024, 1536):
        for start in {0, step, 3 * step, bucket - size - (bucket - size) % step}:
            if start < 0 or start + size > bucket:
                continue
            rows = draw(bucket, seed=bucket + start)
            rows[:, start : start + size] = image
            ids = np.repeat([0, 1, 2], [start, size, bucket - start - size]).astype(np.int32)
            out = np.asarray(attend(*rows, ids))[start : start + size]
            found.add(out.tobytes())
    assert len(found) == 1
