"""Every program of an engine lowers for TPU and for CUDA here, with the kernels in it.

Lowered, not run. What the TPU's kernel is given is tested by its values in
tests/layers/test_ragged_kernel.py.
"""

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic import tpu_info

from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.device.functions import ModelShape
from mmjax.engine.device.mesh import Placement, make_placement
from mmjax.engine.device.programs import Programs
from mmjax.engine.scheduling.buckets import Buckets, unit_sizes
from mmjax.layers.attention import backend as attention_backend
from mmjax.layers.attention.api import choose_cache_type, span_variants
from mmjax.layers.attention.kv_cache import InterleavedCache, SlotCache
from mmjax.layers.module import bind, build_abstract, seeing_modules
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.internvl.model import InternVLForConditionalGeneration
from tests.engine.tiny import tiny_config
from tests.families import internvl
from tests.layers.on_gpu import as_on_gpu

TPU_KERNEL = re.compile(r"custom_call @tpu_custom_call")
TPU_CALL = re.compile(r"call @ragged_paged_attention")
"""Layers of one kind share one kernel."""
CUDA_KERNEL = re.compile(r"custom_call @__gpu\$xla\.gpu\.triton")
CUDA_CALL = re.compile(r"call @_attend")
CUDNN_KERNEL = re.compile(r"__cudnn\$fmha")
NUM_LAYERS = 3


class CausalGemma3(Gemma3ForConditionalGeneration):
    """The same arrays for a model whose images see only what comes before."""

    sees = "past"


def make_programs(
    model_class: Any,
    platform: str,
    dtype: Any,
    placement: Placement | None = None,
    *,
    width: int = 32,
    num_encoder_rows: int = 16,
    config: Any = None,
) -> Programs:
    """Describe an engine's programs as they are on `platform`; by default of a tiny Gemma 3.

    Of each kind of step the smallest and the largest, which is all by which steps differ.
    """
    if config is None:
        tiny: Any = copy.deepcopy(tiny_config())
        tiny.text_config.hidden_size = width
        tiny.vision_config.hidden_size = 32  # heads of 16: cuDNN takes multiples of 8
        config = tiny
    graphdef, params = build_abstract(model_class, config, dtype=jnp.dtype(dtype))
    model = bind(graphdef, params)
    cache_type = choose_cache_type(platform, model.kv_cache_spec, dtype)
    every = Buckets.create(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        encode_sizes={"encode": unit_sizes(2)},
        span_variants=span_variants(cache_type, has_spans=model.sees != "past"),
    )
    lengths = [bucket.num_tokens for bucket in every.mixed]
    ends = tuple(one for one in every.mixed if one.num_tokens in (lengths[0], lengths[-1]))
    buckets = replace(every, decode=(every.decode[0], every.decode[-1]), mixed=ends)
    return Programs(
        ModelShape.of(graphdef, params),
        params,
        buckets=buckets,
        placement=placement or Placement(),
        host_inputs=model_class.host_inputs(config),
        num_encoder_rows=num_encoder_rows,
        block_size=16,
        max_blocks=8,
        cache_type=cache_type,
    )


def lower(program: Any, platform: str) -> str:
    """Return the lowered text, in which every block has its own calls."""
    with as_on_gpu() if platform == "cuda" else nullcontext():
        with seeing_modules(lambda module: None):
            traced = program.jitted.trace(**program.arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()


def pick_steps(programs: Programs) -> list[Any]:
    """Return a step that decodes and one that does not: of a causal model all sizes are alike."""
    steps = programs.by_kind(8)["step"]
    return [steps[0], steps[-1]]


@pytest.fixture
def as_on_tpu() -> Iterator[None]:
    """Let Mosaic lower for a TPU v5e."""
    device = jax.sharding.AbstractDevice(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


@pytest.fixture
def as_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let JAX lower as if its CUDA plugin, with cuDNN, were installed."""
    monkeypatch.setattr(attention_backend, "_cudnn_max_head_dim", lambda: 128)
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000
    )


# TPUs compute in bfloat16, which the default run lowers.
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.usefixtures("as_on_tpu")
def test_a_causal_model_steps_through_the_tpu_kernel(dtype: str):
    programs = make_programs(CausalGemma3, "tpu", jnp.dtype(dtype))
    assert isinstance(programs.describe_arrays(1).state.kv_cache[0], InterleavedCache)
    for program in programs.by_kind(8)["step"]:
        text = lower(program, "tpu")
        assert TPU_KERNEL.search(text), program.label
        assert len(TPU_CALL.findall(text)) == NUM_LAYERS, program.label


@pytest.mark.usefixtures("as_on_tpu")
def test_only_steps_with_images_both_ways_do_without_the_tpu_kernel():
    programs = make_programs(Gemma3ForConditionalGeneration, "tpu", jnp.dtype(jnp.bfloat16))
    found = {
        bucket: len(TPU_CALL.findall(lower(program, "tpu")))
        for bucket, program in zip(
            reversed(programs.buckets.steps), programs.by_kind(8)["step"], strict=True
        )
    }
    assert {bucket.has_spans for bucket in found} == {False, True}
    for bucket, count in found.items():
        assert count == (0 if bucket.has_spans else NUM_LAYERS), bucket


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.usefixtures("as_on_tpu", "as_with_cuda")
def test_sinks_are_in_our_kernel_and_in_xla(platform: str):
    """Of gpt-oss' two layers; JAX's kernel for TPUs has none."""
    config = internvl.tiny_config(text=internvl.GPT_OSS)
    programs = make_programs(
        InternVLForConditionalGeneration, platform, jnp.dtype(jnp.bfloat16), config=config
    )
    for program in pick_steps(programs):
        text = lower(program, platform)
        assert len(CUDA_CALL.findall(text)) == 2 * (platform == "cuda"), program.label
        assert not TPU_CALL.search(text), program.label


def test_on_a_mesh_each_device_calls_the_kernel_with_its_heads(monkeypatch: pytest.MonkeyPatch):
    chip = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5E, 1)
    monkeypatch.setitem(tpu_info.registry, "cpu", lambda: chip)
    placement = make_placement(ParallelConfig(tensor_parallel_size=2), num_kv_heads=1)
    programs = make_programs(CausalGemma3, "tpu", jnp.dtype(jnp.bfloat16), placement)
    for program in pick_steps(programs):
        text = lower(program, "tpu")
        assert len(TPU_CALL.findall(text)) == NUM_LAYERS, program.label
        rows = next(iter(re.findall(r"call @ragged_paged_attention\S*\(.*?tensor<(\w+)>", text)))
        assert rows.split("x")[1] == "1", "one of the two heads of the queries"


@pytest.mark.parametrize("kind", ["encode", "sample"])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.usefixtures("as_on_tpu")
def test_the_other_programs_lower_everywhere(kind: str, platform: str):
    programs = make_programs(Gemma3ForConditionalGeneration, platform, jnp.dtype(jnp.bfloat16))
    for program in programs.by_kind(8)[kind]:
        assert "func.func public @main" in lower(program, platform)


@pytest.mark.usefixtures("as_with_cuda")
# Steps of Gemma 3 are with spans and without, as a causal model's are.
@pytest.mark.parametrize(
    "model_class",
    [pytest.param(CausalGemma3, marks=pytest.mark.slow), Gemma3ForConditionalGeneration],
)
def test_steps_lower_for_cuda(model_class: Any):
    programs = make_programs(model_class, "gpu", jnp.dtype(jnp.bfloat16))
    assert isinstance(programs.describe_arrays(1).state.kv_cache[0], SlotCache)
    for program in programs.by_kind(8)["step"]:
        text = lower(program, "cuda")
        assert CUDA_KERNEL.search(text), program.label
        assert len(CUDA_CALL.findall(text)) == NUM_LAYERS, program.label
        assert "stablehlo.while" not in text, "the host would wait for every round of a loop"


@pytest.mark.usefixtures("as_with_cuda")
def test_on_a_mesh_each_gpu_calls_the_kernel_with_its_heads():
    placement = make_placement(ParallelConfig(tensor_parallel_size=2), num_kv_heads=1)
    programs = make_programs(CausalGemma3, "gpu", jnp.dtype(jnp.bfloat16), placement)
    text = lower(programs.by_kind(8)["step"][-1], "cuda")
    assert len(CUDA_CALL.findall(text)) == NUM_LAYERS
    rows = next(iter(re.findall(r"call @_attend\S*\(.*?tensor<(\w+)>", text)))
    assert rows.split("x")[1] == "1", "one of the two heads of the queries"


@pytest.mark.usefixtures("as_with_cuda")
def test_towers_go_through_cudnn_in_half_precision():
    lowered = partial(make_programs, Gemma3ForConditionalGeneration, "gpu")
    for program in lowered(jnp.dtype(jnp.bfloat16)).by_kind(8)["encode"]:
        text = lower(program, "cuda")
        assert CUDNN_KERNEL.search(text), program.label
    for program in lowered(jnp.dtype(jnp.float32)).by_kind(8)["encode"]:
        assert not CUDNN_KERNEL.search(lower(program, "cuda"))


@pytest.mark.usefixtures("as_with_cuda")
def test_the_cpu_never_sees_cudnn():
    programs = make_programs(Gemma3ForConditionalGeneration, "cpu", jnp.dtype(jnp.bfloat16))
    for program in programs.by_kind(8)["encode"]:
        assert not CUDNN_KERNEL.search(lower(program, "cpu"))


def rows_of_a_lone_token(programs: Programs) -> int:
    """Return the rows of the last norm in the program of one decoding token."""
    program = next(
        program for program in programs.by_kind(8)["step"] if program.label == "step 1 x 1"
    )
    jaxpr = str(program.jitted.trace(**program.arguments).jaxpr)
    *_, last_norm = re.findall(r":f32\[(\d+),\d+\] = mmjax_kernel", jaxpr)
    return int(last_norm)


def test_a_lone_token_of_a_small_model_gets_a_row_beside_it() -> None:
    """XLA has other code for one row; where weights are large, that is what makes it fast."""
    small, wide = (
        make_programs(Gemma3ForConditionalGeneration, "cpu", jnp.float32, width=width)
        for width in (32, 8192)
    )
    assert rows_of_a_lone_token(small) == 2
    assert rows_of_a_lone_token(wide) == 1
