"""LFM3-VL beyond the laws: packed convolutions, heads rotated in float32, embeddings as given."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.lfm3.modeling_lfm3 import Lfm3RotaryEmbedding, apply_rotary_pos_emb
from transformers.models.lfm3_vl.modeling_lfm3_vl import Lfm3VlVisionShortConv

from mmjax import LLM, SamplingParams
from mmjax.language.lfm2 import HeadGatedAttention, Lfm2Config
from mmjax.layers import decoder
from mmjax.layers.attention.api import DenseAttentionMetadata
from mmjax.layers.module import bind, build_abstract
from mmjax.layers.rope import text_angles
from mmjax.models.host_inputs import find_neighbours, find_places
from mmjax.models.lfm3_vl.host_inputs import Lfm3VLHostInputs
from mmjax.parity.reference import load_reference
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedGatedConvolution
from tests.families.lfm3_vl import LFM3_VL, load_hf, tiny_config
from tests.families.qwen2_vl import IMAGE
from tests.kit import draw
from tests.oracle import assert_close, fill_with_unit_norms, params_of

GRIDS = [(2, 4, 6), (1, 2, 2), (3, 8, 2), (1, 4, 4)]
"""Frames, and rows and columns of patches, of the items of a pack."""
NUM_PADDING = 5


@pytest.mark.parametrize("size", [1, 3, 5, 7])
@pytest.mark.parametrize(("rows", "columns", "merge_size"), [(4, 6, 2), (3, 5, 1), (6, 3, 3)])
def test_neighbours_are_those_of_the_grid(rows: int, columns: int, merge_size: int, size: int):
    found = find_neighbours(rows, columns, merge_size, size)
    places = [tuple(place) for place in find_places(rows, columns, merge_size).tolist()]
    assert found.shape == (rows * columns, size**2)
    for number, (row, column) in enumerate(places):
        for tap, offset in enumerate(found[number].tolist()):
            step = divmod(tap, size)
            seen = (row + step[0] - size // 2, column + step[1] - size // 2)
            if seen in places:
                assert places[number + offset] == seen
            else:
                assert number + offset >= 2**30


@pytest.mark.parametrize(("size", "merge_size"), [(3, 2), (5, 2), (1, 1), (3, 1)])
def test_packed_frames_are_convolved_as_by_hf(size: int, merge_size: int):
    """Next to each other, behind padding that is not zero, and wider kernels than frames."""
    config = tiny_config(vision={"conv_kernel_size": size, "spatial_merge_size": merge_size})
    vision: Any = config.vision_config
    reference = Lfm3VlVisionShortConv(vision, 0).eval()
    fill_with_unit_norms(reference)
    num_patches = int(np.prod(GRIDS, axis=1).sum())
    shape = (num_patches, vision.hidden_size)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(x), grid_thw=[list(grid) for grid in GRIDS]).numpy()

    host_inputs = Lfm3VLHostInputs(config)
    pixels = np.zeros((num_patches, 1), np.uint8)
    items = [
        host_inputs.units({"image_grid_thw": np.array(grid), "pixel_values": pixels})
        for grid in GRIDS
    ]
    neighbours = np.concatenate([item["neighbours"] for item in items])
    pad = ((0, NUM_PADDING), (0, 0))
    graphdef, abstract = build_abstract(
        PackedGatedConvolution, PackedViTConfig.from_hf(vision), dtype=jnp.float32
    )
    module = bind(graphdef, params_of(reference, abstract, ()))
    ours = module(
        jnp.asarray(np.pad(x, pad, constant_values=3.0)), jnp.asarray(np.pad(neighbours, pad))
    )
    assert_close({"out": np.asarray(ours)[:-NUM_PADDING]}, {"out": expected})


def test_heads_are_rotated_in_float32_as_by_hf(monkeypatch: pytest.MonkeyPatch):
    """Nearest to what float32 gives: in bfloat16, what two products nearly cancel would be lost."""
    text: Any = tiny_config().text_config
    config, rotated = Lfm2Config.from_lfm3(text), dict[str, Any]()

    def keep(query: Any, key: Any, value: Any, cache: Any, *args: Any, **options: Any) -> Any:
        rotated.update(query=query, key=key)
        return query, cache

    monkeypatch.setattr(decoder, "attention", keep)
    graphdef, abstract = build_abstract(
        HeadGatedAttention, config, "full_attention", dtype=jnp.bfloat16
    )
    module = bind(graphdef, jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), abstract))
    module.q_norm = module.k_norm = None
    module.k_proj = module.v_proj = lambda x: x[:, : 2 * config.head_dim]
    places = np.arange(3000, 3064)
    shape = (len(places), config.num_attention_heads * config.head_dim)
    states = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)
    positions = jnp.asarray(np.tile(places, (3, 1)), jnp.int32)
    rope = config.rope_parameters["full_attention"]
    angles = text_angles(rope, config.head_dim, positions)
    index = jnp.arange(len(places))
    mask = (index[None] <= index[:, None])[None]
    module.attend(states, states, angles, None, DenseAttentionMetadata(index[None], mask))

    hf_angles = Lfm3RotaryEmbedding(text)(
        torch.zeros(1), torch.from_numpy(places)[None], "full_attention"
    )
    hf_states = torch.from_numpy(np.array(states, np.float32)).to(torch.bfloat16)
    heads = hf_states.reshape(1, len(places), -1, config.head_dim).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, *hf_angles)
    wanted = expected[0].transpose(0, 1).float().numpy()
    for found in (rotated["query"], rotated["key"]):
        ours = np.asarray(found, np.float32)
        np.testing.assert_allclose(ours, wanted[:, : ours.shape[1]], rtol=2**-7, atol=1e-6)


@pytest.mark.slow
def test_embeddings_of_hfs_tower_give_the_pictures_answers():
    reference = load_reference(LFM3_VL.checkpoint, LFM3_VL.architecture)
    pictures = [draw(90, 70), draw(60, 140, 1)]
    inputs = load_hf()(text=IMAGE * 2, images=pictures, return_tensors="pt")
    grids = inputs["image_grid_thw"]
    with torch.no_grad():
        found = reference.get_image_features(inputs["pixel_values"], grids)
    embeds = torch.cat(list(found.pooler_output)).numpy()
    joined: Any = {"image_embeds": embeds, "image_grid_thw": grids.numpy()}

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    settings = {**LFM3_VL.llm_settings, "enable_mm_embeds": True, "precompile": "none"}
    with LLM(LFM3_VL.checkpoint, use_tqdm_on_load=False, **settings) as llm:
        prompts: list[Any] = [
            {"prompt": f"look {IMAGE * 2} what?", "multi_modal_data": {"image": one}}
            for one in (pictures, joined, pictures[::-1])
        ]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    answers = [list(one.outputs[0].token_ids) for one in outputs]
    assert answers[0] == answers[1] != answers[2]
