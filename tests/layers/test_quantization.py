"""Weights in 8 and 4 bits: how they are rounded, what they give, where they are, what they save."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mmjax import LLM, SamplingParams
from mmjax.config.engine_config import ParallelConfig, Quantization
from mmjax.convert import main as convert
from mmjax.engine.device.mesh import settings_digest
from mmjax.errors import CheckpointError
from mmjax.layers.cpu.groups import Grouped, dequantize
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear
from mmjax.layers.module import bind, build_abstract, flatten_params
from mmjax.layers.quantization import (
    INT4,
    Int8Embed,
    Int8Linear,
    find_quantized,
    quantize_groups,
    quantize_params,
)
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.models.interface import build_model
from mmjax.models.model_source import load_model_config
from mmjax.rounding import quantize_rows
from mmjax.weights.load import load_params
from tests.engine.tiny import engine_config, tiny_config
from tests.kit import draw, tiny_gemma3_checkpoint

BOTH: tuple[Quantization, ...] = ("int8", "int8-weights")


def make_layer(
    quantization: Quantization, weight: np.ndarray, bias: np.ndarray | None = None
) -> Int8Linear:
    plain = Linear(weight.shape[1], len(weight), use_bias=bias is not None, dtype=jnp.float32)
    layer = Int8Linear(plain, quantization)
    layer.weight[...], layer.weight_scale[...] = map(jnp.asarray, quantize_rows(weight))
    if bias is not None and layer.bias is not None:
        layer.bias[...] = jnp.asarray(bias)
    return layer


# ---- rounding ------------------------------------------------------------------------------------


def test_numbers_become_the_nearest_multiple_of_their_rows_scale():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(40, 64)) * rng.lognormal(sigma=4, size=(40, 1))
    rounded, scale = quantize_rows(weight.astype(np.float32))
    assert (rounded.dtype, scale.dtype) == (np.int8, np.float32)
    assert (np.abs(rounded).max(1) == 127).all()
    error = np.abs(rounded * scale[:, None] - weight)
    assert (error <= 0.5001 * scale[:, None]).all()


def test_a_row_of_zeros_stays_zero():
    rounded, scale = quantize_rows(np.zeros((2, 3), np.float32))
    assert not rounded.any()
    assert np.isfinite(scale).all()
    assert (scale > 0).all()


def test_four_bits_are_the_nearest_of_a_groups_sixteen_numbers():
    weight = np.random.default_rng(0).normal(size=(300, 100)).astype(np.float32)
    weight[3] = 0
    codes, scale = quantize_groups(weight)
    arrays = {"": (codes.shape, codes.dtype), "_scale": (scale.shape, scale.dtype)}
    assert arrays == INT4.describe(weight.shape)
    packed = Grouped(layout=INT4, codes=jnp.asarray(codes), scale=jnp.asarray(scale))
    numbers = np.asarray(dequantize(packed, 100, jnp.float32))
    assert not numbers[3].any()
    spread = np.repeat(scale.astype(np.float32), INT4.group_size, axis=1)[:, :100]
    steps = weight / np.where(spread == 0, 1, spread)
    inside = (steps >= -8) & (steps <= 7)
    assert (np.abs(numbers - weight)[inside] <= 0.5001 * np.abs(spread[inside])).all()
    peaks = np.abs(weight).reshape(300, -1)
    assert np.abs(numbers - weight).max() < 0.15 * peaks.max()
    error = np.sqrt(np.square(numbers - weight).mean())
    assert error < 0.088, "a sixteenth of a group's range, and less"


# ---- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", BOTH)
@pytest.mark.parametrize("shape", [(24,), (1, 24), (7, 24), (2, 3, 24)])
def test_a_layer_is_the_formula(quantization: Quantization, shape: tuple[int, ...]):
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(10, 24)), rng.normal(size=10).astype(np.float32)
    rounded, scale = quantize_rows(weight.astype(np.float32))
    x = rng.normal(size=shape).astype(np.float32)
    inputs = x.astype(np.float64)
    if quantization == "int8":
        step = np.abs(inputs).max(-1, keepdims=True) / 127
        inputs = np.rint(inputs / step) * step
    expected = inputs @ (rounded * scale[:, None]).T + bias
    got = make_layer(quantization, weight, bias)(jnp.asarray(x))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_rows_of_zeros_and_of_large_numbers_stay_apart():
    weight = np.random.default_rng(2).normal(size=(8, 16))
    x = np.zeros((3, 16), np.float32)
    x[1], x[2, 0] = 1e30, 1e-30
    got = np.asarray(make_layer("int8", weight)(jnp.asarray(x)))
    assert np.isfinite(got).all()
    assert not got[0].any()
    np.testing.assert_allclose(got[2], 1e-30 * weight[:, 0], rtol=0.5, atol=2e-32)


@pytest.mark.as_served
def test_a_row_has_the_same_bits_among_any_others():
    rng = np.random.default_rng(3)
    layer = make_layer("int8", rng.normal(size=(96, 640)))
    x = jnp.asarray(rng.normal(size=(65, 640)), jnp.float32)
    run = jax.jit(lambda x: layer(x))
    whole = np.asarray(run(x))
    for count in (1, 2, 3, 17, 64):
        np.testing.assert_array_equal(run(x[:count]), whole[:count])


def test_bfloat16_in_is_bfloat16_out():
    layer = make_layer("int8", np.eye(8, dtype=np.float32))
    x = jnp.arange(8, dtype=jnp.bfloat16)[None]
    assert layer(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(layer(x).astype(jnp.float32), x.astype(jnp.float32), atol=0.05)


@pytest.mark.as_served
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_table_is_the_formula(dtype: str):
    rng = np.random.default_rng(4)
    weight = rng.normal(size=(600, 512)).astype(np.float32)
    rounded, scale = quantize_rows(weight)
    table = rounded * scale[:, None]
    embed = Int8Embed(Embed(600, 512, dtype=dtype))
    embed.weight[...], embed.weight_scale[...] = jnp.asarray(rounded), jnp.asarray(scale)
    rows = embed(jnp.asarray([5, 599, 0, 600, -1]))
    np.testing.assert_array_equal(rows, jnp.asarray(table[[5, 599, 0, 0, 0]]).astype(dtype))
    x = jnp.asarray(rng.normal(size=(65, 512)), dtype)
    project = jax.jit(lambda x: embed.project(x))
    whole = project(x[:64])
    expected = np.asarray(x, np.float64) @ table.T
    np.testing.assert_allclose(whole, expected[:64], atol=3e-3)
    np.testing.assert_allclose(project(x), expected, atol=3e-3)
    for count in (1, 3, 16, 17, 33):
        np.testing.assert_array_equal(project(x[:count]), whole[:count])


# ---- models --------------------------------------------------------------------------------------


def test_a_model_has_them_in_its_language_model_alone():
    graphdef, params = build_abstract(
        build_model, Gemma3ForConditionalGeneration, tiny_config(), None, "int8", dtype=jnp.float32
    )
    model = bind(graphdef, params)
    kinds = {path: type(one) for path, one in nnx.iter_modules(model)}
    of_language = {kind for path, kind in kinds.items() if path[:1] == ("language_model",)}
    assert Int8Linear in of_language
    assert Linear not in of_language
    assert Int8Linear not in {
        kind for path, kind in kinds.items() if path[:1] != ("language_model",)
    }
    quantized = find_quantized(flatten_params(params))
    assert "language_model.layers.0.mlp.down_proj.weight" in quantized
    assert "language_model.embed_tokens.weight" in quantized
    assert isinstance(model.language_model.embed_tokens, Int8Embed)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma3_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.as_served
def test_weights_are_rounded_as_they_are_loaded(checkpoint: Path):
    config = load_model_config(str(checkpoint))
    loaded = []
    for quantization in (None, "int8"):
        _, abstract = build_abstract(
            build_model,
            Gemma3ForConditionalGeneration,
            config.hf_config,
            None,
            quantization,
            dtype=jnp.float32,
        )
        rules = Gemma3ForConditionalGeneration.rules(config.hf_config)
        loaded.append(flatten_params(load_params(checkpoint, abstract, rules, use_tqdm=False)))
    plain, rounded = loaded
    quantized = find_quantized(rounded)
    assert rounded.keys() == plain.keys() | set(quantized.values())
    for name, array in plain.items():
        if name not in quantized:
            np.testing.assert_array_equal(rounded[name], array)
            continue
        expected, scale = quantize_rows(np.asarray(array))
        np.testing.assert_array_equal(rounded[name], expected)
        np.testing.assert_array_equal(rounded[quantized[name]], scale)
        assert 4 * rounded[name].nbytes == array.nbytes


@pytest.mark.as_served
def test_four_bits_are_made_as_they_are_loaded(checkpoint: Path):
    config = load_model_config(str(checkpoint))
    model_class = Gemma3ForConditionalGeneration
    rules = model_class.rules(config.hf_config)
    trees = []
    for quantization in (None, "int4"):
        parts = (model_class, config.hf_config, None, quantization)
        _, abstract = build_abstract(build_model, *parts, dtype=jnp.float32)
        trees.append((load_params(checkpoint, abstract, rules, use_tqdm=False), abstract))
    (plain, _), (loaded, abstract) = trees
    expected, found = map(flatten_params, (quantize_params(plain, abstract), loaded))
    for name, leaf in flatten_params(abstract).items():
        assert (found[name].shape, found[name].dtype) == (leaf.shape, leaf.dtype), name
        np.testing.assert_array_equal(found[name], expected[name])


def ask(model: Path, **settings: Any) -> list[list[int]]:
    """Return the tokens of two answers, asked together and each alone."""
    picture = {
        "prompt": "<start_of_image> What is it?",
        "multi_modal_data": {"image": draw(60, 40)},
    }
    prompts: list[Any] = ["Say something.", picture]
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64}
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(model, use_tqdm_on_load=False, **sizes, **settings) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([one], params, use_tqdm=False)[0] for one in prompts]
        assert llm.engine.compilations == 0
    answers = [output.outputs[0].token_ids for output in together]
    assert [output.outputs[0].token_ids for output in alone] == answers
    return answers


@pytest.mark.as_served
@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        ("int8", 1),
        # From a snapshot and over devices at once: an engine takes many seconds.
        pytest.param("int8", 2, marks=pytest.mark.slow),
        *(pytest.param(one, 1, marks=pytest.mark.slow) for one in ("int8-weights", "int4")),
    ],
)
def test_answers_are_the_same_from_a_snapshot_and_over_devices(
    checkpoint: Path, tmp_path: Path, quantization: Quantization, size: int
):
    answers = ask(checkpoint, quantization=quantization)
    assert all(len(tokens) == 8 for tokens in answers)
    out = tmp_path / "snapshot"
    assert convert([str(checkpoint), str(out), "--quantization", quantization]) == 0
    assert ask(out, quantization=quantization, tensor_parallel_size=size) == answers
    with pytest.raises(CheckpointError, match=r"in 8 bits or 4; give `--quantization"):
        ask(out)


def test_a_snapshot_of_whole_weights_is_not_rounded_in_silence(checkpoint: Path, tmp_path: Path):
    out = tmp_path / "snapshot"
    assert convert([str(checkpoint), str(out)]) == 0
    with pytest.raises(CheckpointError, match=r"`quantization` is set: make it again"):
        ask(out, quantization="int8")


def test_processes_that_serve_together_round_alike():
    config = replace(engine_config(), parallel=ParallelConfig())
    other = replace(config, model=replace(config.model, quantization="int8"))
    assert settings_digest(config) != settings_digest(other)
