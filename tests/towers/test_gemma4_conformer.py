"""Gemma 4's encoder of sounds against HF's, of clips side by side in one pack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Gemma4AudioConfig, Gemma4AudioModel

from mmjax.engine.device.compilation import compiler_options
from mmjax.errors import CheckpointError
from mmjax.layers.lora import LoRA
from mmjax.layers.module import bind, build_abstract, flatten_params, unflatten_params
from mmjax.towers.gemma4_conformer import (
    FRAMES_PER_ROW,
    ConformerAttention,
    Gemma4Conformer,
    Gemma4ConformerConfig,
    find_look_back,
)
from mmjax.weights.rules import Rule
from tests.families.gemma4 import AUDIO, fill
from tests.oracle import assert_close, params_of

RULES = (
    Rule(r"(\.layer\d)\.norm\.", r"\1.channel_norm."),
    Rule(r"^layers\.(.*)\.linear\.", r"encoder_layers.\1."),
    Rule(r"^layers\.", "encoder_layers."),
)
LENGTHS = (37, 1, 24, 7, 2, 30)
"""Frames of clips: every rest of four, more rows than a state sees, fewer, and one alone."""


def pack(clips: list[np.ndarray], size: int) -> dict[str, Any]:
    """Return the rows of clips, one behind the other, and padding."""
    rows, counts, ids = [], [], []
    for number, clip in enumerate(clips):
        padded = np.pad(clip, ((0, -len(clip) % FRAMES_PER_ROW), (0, 0)))
        rows.append(padded.reshape(-1, FRAMES_PER_ROW * clip.shape[1]))
        left = len(clip) - FRAMES_PER_ROW * np.arange(len(rows[-1]))
        counts.append(np.minimum(left, FRAMES_PER_ROW))
        ids.append(np.full(len(rows[-1]), number))
    end = size - sum(map(len, rows))
    return {
        "input_features": jnp.asarray(np.pad(np.concatenate(rows), ((0, end), (0, 0)))),
        "num_frames": jnp.asarray(np.pad(np.concatenate(counts), (0, end)), jnp.int32),
        "segment_ids": jnp.asarray(np.pad(np.concatenate(ids), (0, end), constant_values=-1)),
    }


CLIPPED: dict[str, Any] = {"use_clipped_linears": False, "gradient_clipping": 0.5}
WIDE_CHUNKS: dict[str, Any] = {"attention_chunk_size": 6, "attention_context_left": 5}
CAPPED: dict[str, Any] = {"attention_logit_cap": 1.5, "residual_weight": 0.3}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="as published"),
        pytest.param(CLIPPED | WIDE_CHUNKS | CAPPED, id="all at once"),
        pytest.param(CLIPPED, id="clipped", marks=pytest.mark.slow),
        pytest.param(WIDE_CHUNKS, id="wide chunks", marks=pytest.mark.slow),
        pytest.param(CAPPED, id="capped", marks=pytest.mark.slow),
    ],
)
def test_the_states_are_hfs(settings: dict[str, Any]):
    config = Gemma4AudioConfig(**{**AUDIO, **settings})
    reference = Gemma4AudioModel(config).eval()
    fill(reference)
    read = Gemma4ConformerConfig.from_hf(config)
    rng = np.random.default_rng(0)
    clips = [rng.normal(size=(n, read.num_mel_bins)).astype(np.float32) for n in LENGTHS]
    mask = np.arange(max(LENGTHS) + 5) < np.array(LENGTHS)[:, None]
    padded = np.zeros((*mask.shape, read.num_mel_bins), np.float32)
    padded[mask] = np.concatenate(clips)
    with torch.no_grad():
        found = reference(torch.tensor(padded), torch.tensor(mask))
    expected = found.last_hidden_state[found.attention_mask].numpy()

    graphdef, abstract = build_abstract(Gemma4Conformer, read, dtype=jnp.float32)
    params = params_of(reference, abstract, RULES)
    # Without them, norms of 4,096 numbers and more would add in another order.
    options = compiler_options("cpu")
    run = jax.jit(lambda params, inputs: bind(graphdef, params)(**inputs), compiler_options=options)
    states = np.asarray(run(params, pack(clips, 40)))[: len(expected)]
    # Against float64, HF's own float32 is 4.0e-6 of the largest state away where states are cut to
    # 0.5, and ours 4.5e-6; without cuts 0.4e-6 each. What rounds values of 3 stays when they are
    # cut, and the norm behind the cut makes it larger.
    atol = 1e-5 if "gradient_clipping" in settings else 5e-6
    assert_close({"states": states}, {"states": expected}, atol=atol)
    # In calls of any size, and whatever lies beside a clip, its bits are the same.
    if not settings:  # a second program, of the same layers
        larger = np.asarray(run(params, pack(clips, 256)))[: len(expected)]
        np.testing.assert_array_equal(larger, states)
    alone = [np.asarray(run(params, pack([clip], 40))) for clip in clips]
    joined = np.concatenate(
        [one[: -(-n // FRAMES_PER_ROW)] for one, n in zip(alone, LENGTHS, strict=True)]
    )
    np.testing.assert_array_equal(joined, states)


def test_distances_have_each_clips_own_adapter():
    hf_config = Gemma4AudioConfig(**AUDIO, use_clipped_linears=False)
    config = Gemma4ConformerConfig.from_hf(hf_config)
    rng = np.random.default_rng(0)
    graphdef, abstract = build_abstract(ConformerAttention, config, dtype=jnp.float32)
    plain = {
        name: jnp.asarray(rng.normal(size=leaf.shape) * 0.3, jnp.float32)
        for name, leaf in flatten_params(abstract).items()
    }
    width, rank, num_slots = config.hidden_size, 3, 2
    a = rng.normal(size=(num_slots, rank, width)).astype(np.float32)
    b = rng.normal(size=(width, num_slots, rank)).astype(np.float32)
    clips, slot_of_clip = np.repeat(np.arange(3, dtype=np.int32), (9, 6, 7)), (1, -1, 0)
    x = jnp.asarray(rng.normal(size=(len(clips), width)), jnp.float32)

    @jax.jit
    def compute(weight: Any, slots: Any) -> Any:
        layer: Any = bind(graphdef, unflatten_params({**plain, "relative_k_proj.weight": weight}))
        if slots is not None:
            lora = LoRA(width, width, num_slots=num_slots, rank=rank, dtype=jnp.float32)
            lora.a, lora.b, lora.slots = map(nnx.Param, map(jnp.asarray, (a, b, slots)))
            layer.relative_k_proj.lora = nnx.data(lora)
        return layer(x, find_look_back(jnp.asarray(clips)))

    def run(added: Any, slots: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(compute(plain["relative_k_proj.weight"] + added, slots))

    found = run(0, np.array(slot_of_clip, np.int32)[clips])
    for clip, slot in enumerate(slot_of_clip):
        expected = run(b[:, slot] @ a[slot] if slot >= 0 else 0)[clips == clip]
        assert_close({"states": found[clips == clip]}, {"states": expected}, atol=1e-5)
        assert (slot < 0) == np.allclose(expected, run(0)[clips == clip], rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention_context_right": 1}, "attention_context_right` is 1; expected 0"),
        ({"attention_context_left": 1}, "attention_context_left` is 1; expected 2 to 5"),
        ({"attention_context_left": 6}, "attention_context_left` is 6; expected 2 to 5"),
    ],
)
def test_what_is_not_served(settings: dict[str, Any], words: str):
    with pytest.raises(CheckpointError, match=words):
        Gemma4ConformerConfig.from_hf(Gemma4AudioConfig(**{**AUDIO, **settings}))
