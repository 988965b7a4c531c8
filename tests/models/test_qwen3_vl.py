"""Qwen3-VL's rows: embeddings, and behind them what is added to the first layers' outputs."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mmjax import LLM, SamplingParams
from mmjax.errors import CheckpointError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.parity.reference import load_reference
from mmjax.weights.load import load_params
from tests.families import served_model
from tests.families.qwen2_vl import IMAGE
from tests.families.qwen3_vl import QWEN3_VL, hf_processor, tiny_config
from tests.families.tiny import Media, Words
from tests.kit import draw

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32}
IMAGES = [draw(90, 70), draw(60, 140, 1)]


def embed(reference: Any, image: Any) -> dict[str, np.ndarray]:
    """Return what HF's own tower gives for the decoder, side by side, and the grid."""
    inputs = hf_processor()(text=IMAGE, images=[image], return_tensors="pt")
    with torch.no_grad():
        found = reference.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    parts = [*found.pooler_output, *(feature for (feature,) in found.deepstack_features)]
    rows = torch.cat(parts, dim=-1).numpy()
    return {"image_embeds": rows, "image_grid_thw": inputs["image_grid_thw"][0].numpy()}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_embeddings_of_hfs_tower_give_the_images_answers(quantization: str | None):
    reference = load_reference(QWEN3_VL.checkpoint, QWEN3_VL.architecture)
    embeds = [embed(reference, image) for image in IMAGES]
    joined = {name: [one[name] for one in embeds] for name in embeds[0]}
    joined = {
        "image_embeds": np.concatenate(joined["image_embeds"]),
        "image_grid_thw": np.stack(joined["image_grid_thw"]),
    }
    assert joined["image_embeds"].shape[1] == 3 * reference.config.text_config.hidden_size

    def answer(llm: LLM, images: Any) -> list[int]:
        data: Any = {"prompt": f"look {IMAGE * 2} what?", "multi_modal_data": {"image": images}}
        (output,) = llm.generate(data, GREEDY, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    with LLM(
        str(QWEN3_VL.checkpoint),
        enable_mm_embeds=True,
        use_tqdm_on_load=False,
        quantization=quantization,
        **SIZES,
    ) as llm:
        wanted = answer(llm, IMAGES)
        if quantization is None:  # whose tower is HF's own
            assert answer(llm, joined) == wanted
            # Without what is fed to the first layers the answer is another.
            joined["image_embeds"] = joined["image_embeds"].copy()
            joined["image_embeds"][:, 32:] = 0
            assert answer(llm, joined) != wanted
        assert answer(llm, IMAGES) == wanted


def test_each_feature_moves_its_own_layer():
    """A layer's output is as it was, and its own feature is in what the next one reads."""
    model = served_model("qwen3_vl")
    sample = model.draw_sample((Words(1, 4), Media(0), Words(2, 3)))
    plain, width = model.paged.run(sample), 32
    kept = model.paged._run_encoder

    def without(index: int) -> Any:
        def run(*args: Any) -> Any:
            pool, outputs = kept(*args)
            cut = slice(width * (1 + index), width * (2 + index))
            return pool.at[:, cut].set(0), outputs

        return run

    try:
        for index, changed in enumerate(([False, True], [False, False])):
            model.paged._run_encoder = without(index)
            other = model.paged.run(sample)
            names = [f"language_model.layers.{layer}" for layer in range(2)]
            is_other = [bool(np.abs(other[name] - plain[name]).max() > 1e-3) for name in names]
            assert is_other == changed
            assert np.abs(other["logits"] - plain["logits"]).max() > 1e-3
    finally:
        model.paged._run_encoder = kept


@pytest.mark.parametrize(
    ("vision", "match"),
    [
        ({"deepstack_visual_indexes": [0, 3]}, r"\[0, 3\]; expected different blocks of 0 to 2"),
        ({"deepstack_visual_indexes": [1, 1]}, r"\[1, 1\]; expected different blocks"),
        ({"num_position_embeddings": 24}, "is 24; they are those of a square grid"),
        ({"patch_size": [4, 4]}, r"`vision_config.patch_size` is \[4, 4\]"),
        ({"temporal_patch_size": [2]}, r"`vision_config.temporal_patch_size` is \[2\]"),
    ],
)
def test_towers_that_nobody_has(vision: dict[str, Any], match: str):
    config = tiny_config(vision=vision)
    with pytest.raises(CheckpointError, match=match):
        build_abstract(served_model("qwen3_vl").family.model_class, config, dtype=jnp.float32)


def test_experts_of_the_published_layout_are_the_same(tmp_path: Path):
    """`[experts, in, out]`, as the hub has them, and as HF's module has: every array is equal."""
    model = served_model("qwen3_vl_moe")
    stored = {
        name: value.swapaxes(1, 2).contiguous() if ".experts." in name else value
        for name, value in model.reference.state_dict().items()
    }
    save_file(stored, tmp_path / "model.safetensors")
    _, abstract = build_abstract(model.family.model_class, model.config, dtype=jnp.float32)
    loaded = flatten_params(load_params(tmp_path, abstract, model.rules, use_tqdm=False))
    for name, leaf in flatten_params(model.params).items():
        np.testing.assert_array_equal(loaded[name], leaf, err_msg=name)
