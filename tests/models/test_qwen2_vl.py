"""Qwen2-VL's arrays against HF's, live: block by block, for every key that matters."""

from typing import Any

import numpy as np
import pytest

from mmjax.parity.reference import generate_reference, run_reference
from tests.models.qwen2_vl import (
    CLASSES,
    draw_sample,
    paged_qwen,
    random_qwen,
    tiny_qwen,
    torch_inputs,
)
from tests.oracle import assert_close

TWO_IMAGES = [9, ("image", 1, (1, 6, 10)), 5, ("image", 2, (1, 8, 2)), 7]
MIXED = [
    3,
    ("image", 1, (1, 6, 10)),
    2,
    ("video", 2, (5, 6, 2), 0.7),
    4,
    ("image", 3, (1, 2, 8)),
    5,
]
"""As many patches in each, or one of two numbers: as few programs. Frames of whole and cut windows;
a video longer than its frames are wide."""
OTHER_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_vl, all else": (
        "qwen2_vl",
        {
            "is_tied": True,
            "text": {"rope_parameters": OTHER_SECTIONS},
            "vision": {
                "hidden_act": "gelu",
                "rope_parameters": {"rope_theta": 100.0},
                "temporal_patch_size": 1,
                "in_channels": 6,
            },
        },
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_5_vl, all else": (
        "qwen2_5_vl",
        {
            "is_tied": True,
            "vision": {
                "window_size": 24,
                "fullatt_block_indexes": [0, 2],
                "tokens_per_second": 4,
                "hidden_act": "gelu",
            },
        },
    ),
}
"""Every key that published checkpoints vary, or may."""


@pytest.mark.parametrize("name", CONFIGS)
def test_states_logits_and_tokens_are_hfs(name: str):
    kind, settings = CONFIGS[name]
    reference = random_qwen(kind, **settings)
    ours = paged_qwen(reference)
    rules = ours.model_class.rules(reference.config)
    for parts in (TWO_IMAGES, MIXED):
        sample = draw_sample(parts)
        inputs = torch_inputs(sample, reference)
        expected = run_reference(reference, inputs, rules)
        assert len(expected) == reference.config.vision_config.depth + 1 + 2 + 2
        if parts is MIXED:  # HF calls the tower twice, and a hook keeps the last call alone
            expected = {name: value for name, value in expected.items() if "visual" not in name}
        assert_close(ours.run(sample), expected)
        tokens = generate_reference(reference, inputs, 32)
        assert ours.generate(sample, 32) == tokens
        # A tied head says its own token again, and shows no more than that.
        assert settings.get("is_tied") or len(set(tokens)) > 4


@pytest.mark.parametrize("kind", CLASSES)
def test_a_video_alone(kind: str):
    reference, ours = tiny_qwen(kind)
    sample = draw_sample([4, ("video", 3, (3, 4, 6), 0.5), 6])
    rules = ours.model_class.rules(reference.config)
    assert_close(ours.run(sample), run_reference(reference, torch_inputs(sample, reference), rules))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "parts",
    [
        TWO_IMAGES,
        [("image", 1, (1, 2, 2)), 1],
        [3, ("video", 1, (2, 8, 4)), 2, ("image", 1, (1, 4, 12)), 1, ("image", 1, (1, 2, 6)), 4],
        [3, ("video", 1, (9, 2, 4), 0.3), 2, ("video", 1, (5, 4, 2), 1.25), 4],
    ],
)
def test_positions_are_hfs(kind: str, parts: Any):
    reference, ours = tiny_qwen(kind)
    sample = draw_sample(parts)
    inputs = torch_inputs(sample, reference)
    given = {name: value for name, value in inputs.items() if name.endswith(("_thw", "_ts"))}
    expected, _ = reference.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], **given
    )
    found = ours.host_inputs.rotary_positions(sample.num_tokens, sample.items)
    assert found is not None
    np.testing.assert_array_equal(found.prompt, expected[:, 0].numpy())
    # As `generate` goes on: one behind the last token of text.
    assert found.offset == int(expected[0, 0, -1]) + 1 - sample.num_tokens
    assert found.prompt.dtype == np.int32


def test_text_alone_is_at_its_indices():
    _, ours = tiny_qwen()
    assert ours.host_inputs.rotary_positions(7, []) is None
