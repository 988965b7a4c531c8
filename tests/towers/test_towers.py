"""Every vision tower against HF's: the states after every block.

A tower of pictures of one size is a row of `TOWERS`; the others have runners of their own below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    InternVLVisionConfig,
    InternVLVisionModel,
    PixtralVisionConfig,
    PixtralVisionModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)
from transformers.models.exaone4_5.configuration_exaone4_5 import Exaone4_5_VisionConfig
from transformers.models.florence2.configuration_florence2 import Florence2VisionConfig
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone
from transformers.models.llama4.configuration_llama4 import Llama4VisionConfig
from transformers.models.llama4.modeling_llama4 import Llama4VisionModel
from transformers.models.ovis2.configuration_ovis2 import Ovis2VisionConfig
from transformers.models.ovis2.modeling_ovis2 import Ovis2VisionModel
from transformers.models.unlimited_ocr.configuration_unlimited_ocr import (
    UnlimitedOcrVisionEncoderConfig,
)
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import UnlimitedOcrVisionEncoder

from mmjax.errors import CheckpointError
from mmjax.layers.module import bind, build_abstract
from mmjax.models.host_inputs import find_places
from mmjax.models.internvl.model import (
    InternVLForConditionalGeneration,
    count_blocks,
    rename_tower,
)
from mmjax.models.lfm2_vl.host_inputs import Lfm2VLHostInputs
from mmjax.models.lfm2_vl.model import Lfm2VlForConditionalGeneration
from mmjax.models.llama4.model import read_vision as read_llama4
from mmjax.models.llama4.model import rename_tower as rename_llama4
from mmjax.models.ovis2.model import read_vision as read_aimv2
from mmjax.models.ovis2.model import rename_tower as rename_aimv2
from mmjax.models.pixtral.model import PixtralForConditionalGeneration
from mmjax.processing.image_processors.image import patchify
from mmjax.towers.davit import DavitConfig, DavitVisionTower
from mmjax.towers.packed_vit.config import PackedViTConfig
from mmjax.towers.packed_vit.tower import PackedViT
from mmjax.towers.vit import ViT, ViTConfig
from mmjax.weights.rules import Rule
from tests.families.florence2 import VISION as DAVIT
from tests.families.florence2 import fill as fill_davit
from tests.families.internvl import VISION as INTERNVIT
from tests.oracle import TOLERANCE, assert_close, fill_with_unit_norms, params_of

TINY: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3},
    **{"num_attention_heads": 2, "image_size": 32, "patch_size": 8},
}
PIXTRAL: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 64, "patch_size": 4, "hidden_act": "silu"},
}
SIGLIP2: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_patches": 16, "patch_size": 4, "vision_use_head": False},
}
SIZES = [(12, 40), (4, 4), (20, 16)]
"""Heights and widths of Pixtral's pictures."""
NUM_PADDING = 7


def read_internvit(vision_config: Any) -> ViTConfig:
    """Return the tower's configuration, of a model that reads its last state."""
    config = SimpleNamespace(
        vision_config=vision_config,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    return InternVLForConditionalGeneration.read_tower(config)


def make_llama4(config: Any) -> Any:
    """Return HF's tower with its last states in place of what the adapter makes of patches."""
    model: Any = Llama4VisionModel(config)
    model.vision_adapter = torch.nn.Identity()

    def put_last(module: Any, inputs: Any, outputs: Any) -> None:
        outputs.last_hidden_state = model.layernorm_post(outputs.hidden_states[-1])

    model.register_forward_hook(put_last)
    return model


def run_states(tower: Any, pixels: Any) -> dict[str, Any]:
    """Return what the tower itself returns of its blocks."""
    last, states = tower(pixels, feature_layers=range(len(tower.encoder.layers) + 1))
    return {"last": last, **{str(number): state for number, state in enumerate(states)}}


@dataclass(frozen=True, kw_only=True)
class Tower:
    """A class of HF's, ours, and the configurations to compare them at."""

    name: str
    hf_classes: tuple[Any, Any]
    """Config and model."""
    read_config: Callable[[Any], Any]
    rules: tuple[Rule, ...]
    tiny: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    """What differs from `tiny`."""


TOWERS = (
    Tower(
        name="clip",
        hf_classes=(CLIPVisionConfig, CLIPVisionModel),
        read_config=ViTConfig.from_hf,
        rules=(
            Rule(r"^(vision_model\.)?post_layernorm\..*", None),
            Rule(r"^(vision_model\.)?", "vision_tower."),
        ),
        tiny=TINY,
        configs={
            "plain": {},
            "picture no multiple of the patch": {"image_size": 37},
            "exact gelu": {"hidden_act": "gelu"},
            "one channel, coarse eps": {"num_channels": 1, "layer_norm_eps": 1e-2},
        },
    ),
    Tower(
        name="siglip",
        hf_classes=(SiglipVisionConfig, SiglipVisionModel),
        read_config=ViTConfig.from_hf,
        rules=(
            Rule(r"^(vision_model\.)?head\..*", None),
            Rule(r"^(vision_model\.)?", "vision_tower."),
        ),
        tiny={**TINY, "vision_use_head": False},
        configs={
            "plain": {},
            "with a head that is not used": {"vision_use_head": True},
            "picture no multiple of the patch": {"image_size": 37},
            "exact gelu": {"hidden_act": "gelu"},
            "one channel, coarse eps": {"num_channels": 1, "layer_norm_eps": 1e-2},
        },
    ),
    Tower(
        name="internvit",
        hf_classes=(InternVLVisionConfig, InternVLVisionModel),
        read_config=read_internvit,
        rules=(Rule(r"^embeddings\.mask_token$", None), *rename_tower("^")),
        tiny=INTERNVIT,
        configs={
            "300m": {"attention_bias": True, "use_mask_token": True},
            "6b": {"norm_type": "rms_norm", "use_qk_norm": True},
            "final norm, no positions": {
                "use_mean_pooling": False,
                "use_absolute_position_embeddings": False,
            },
            "rms norm before a layer norm, coarse eps": {
                "norm_type": "rms_norm",
                "use_mean_pooling": False,
                "use_qk_norm": True,
                "layer_norm_eps": 1e-2,
            },
            "pixels that fill no patch": {
                "image_size": 37,
                "hidden_act": "quick_gelu",
                "num_channels": 1,
            },
        },
    ),
    Tower(
        name="llama4",
        hf_classes=(Llama4VisionConfig, make_llama4),
        read_config=read_llama4,
        rules=tuple(rename_llama4("^", SimpleNamespace(num_channels=3, patch_size=8))),
        tiny=TINY,
        configs={
            "plain": {},
            "heads of 20, another theta": {
                **{"hidden_size": 40, "rope_parameters": {"rope_theta": 50.0}},
                "norm_eps": 1e-2,  # which HF does not read
            },
        },
    ),
    Tower(
        name="aimv2",
        hf_classes=(Ovis2VisionConfig, Ovis2VisionModel),
        read_config=read_aimv2,
        rules=(Rule("^head_", None), *rename_aimv2("^")),
        # HF's last state is that of the last block, then, and not the normed one.
        tiny={**TINY, "vocab_size": 20, "tie_last_hidden_states": False},
        configs={
            "plain": {},
            "biases": {"qkv_bias": True, "mlp_bias": True},
            "gelu, one channel, coarse eps": {
                **{"hidden_act": "gelu", "num_channels": 1, "rms_norm_eps": 1e-2}
            },
        },
    ),
)


def states_of(outputs: Any) -> dict[str, np.ndarray]:
    """Return HF's states by the names that `run_states` gives."""
    states = {str(number): state.numpy() for number, state in enumerate(outputs.hidden_states)}
    return {"last": outputs.last_hidden_state.numpy(), **states}


@pytest.mark.parametrize(
    ("tower", "changes"),
    [
        pytest.param(tower, changes, id=f"{tower.name}, {name}")
        for tower in TOWERS
        for name, changes in tower.configs.items()
    ],
)
def test_every_state_is_hfs(tower: Tower, changes: Mapping[str, Any]):
    settings = {**tower.tiny, **changes}
    config_class, model_class = tower.hf_classes
    config = config_class(**settings)
    reference = model_class(config).eval()
    fill_with_unit_norms(reference)
    side = settings["image_size"]
    shape = (2, settings.get("num_channels", 3), side, side)
    pixels = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels), output_hidden_states=True)

    graphdef, abstract = build_abstract(ViT, tower.read_config(config), dtype=jnp.float32)
    params = params_of(reference, {"vision_tower": abstract}, tower.rules)["vision_tower"]
    ours = jax.jit(lambda params, x: run_states(bind(graphdef, params), x))(params, pixels)
    assert_close(jax.device_get(ours), states_of(expected), atol=5e-6)


@pytest.mark.parametrize("side", [4, 3, 6])  # of the learned positions, fewer and more
def test_deepseeks_clip_reads_another_towers_states_as_hfs(side: int):
    config = UnlimitedOcrVisionEncoderConfig(**TINY)
    config._attn_implementation = "eager"
    reference = UnlimitedOcrVisionEncoder(config).eval()
    fill_with_unit_norms(reference)
    grid = np.random.default_rng(0).normal(size=(2, 24, side, side)).astype(np.float32)
    with torch.no_grad():
        states = reference(torch.tensor(grid), output_hidden_states=True)
    expected = {str(n): state.numpy() for n, state in enumerate(states.hidden_states)}
    expected["last"] = states.last_hidden_state.numpy()

    graphdef, abstract = build_abstract(ViT, ViTConfig.from_hf(config), dtype=jnp.float32)
    params = params_of(reference, {"tower": abstract}, (Rule("^", "tower."),))["tower"]
    rows = grid.reshape(2, 24, -1).swapaxes(1, 2)
    ours = jax.jit(lambda params, x: run_states(bind(graphdef, params), x))(params, rows)
    assert_close(jax.device_get(ours), expected, atol=5e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"hidden_size": 20}, id="an odd number of frequencies"),
        pytest.param(
            {
                "hidden_act": "gelu",
                "num_channels": 1,
                "rope_parameters": {"rope_type": "axial", "rope_theta": 50.0},
            },
            id="gelu, one channel, another theta",
        ),
    ],
)
def test_pixtrals_states_of_packed_pictures_are_hfs(changes: dict[str, Any]):
    config = PixtralVisionConfig(**{**PIXTRAL, **changes})
    config._attn_implementation = "eager"
    reference = PixtralVisionModel(config).eval()
    fill_with_unit_norms(reference)
    generator = np.random.default_rng(0)
    whole = np.zeros((len(SIZES), config.num_channels, 20, 40), np.float32)
    units = []
    for picture, (height, width) in zip(whole, SIZES, strict=True):
        picture[:, :height, :width] = generator.normal(size=(len(picture), height, width))
        patches = patchify(picture[:, :height, :width], 4, 4, colours_first=True)
        units.append({"pixel_values": patches, "places": find_places(height // 4, width // 4, 1)})
    with torch.no_grad():
        expected = reference(
            torch.tensor(whole), image_sizes=torch.tensor(SIZES), output_hidden_states=True
        )

    graphdef, abstract = build_abstract(
        PackedViT, PackedViTConfig.from_hf(config), dtype=jnp.float32
    )
    text = SimpleNamespace(model_type="mistral")
    wrapper = SimpleNamespace(
        vision_config=config, vision_feature_layer=-1, get_text_config=lambda: text
    )
    rules = PixtralForConditionalGeneration.rules(wrapper)
    whole_model = torch.nn.ModuleDict({"vision_tower": reference})
    params = params_of(whole_model, {"vision_tower": abstract}, rules)["vision_tower"]
    ids = np.repeat(np.arange(len(SIZES), dtype=np.int32), [len(u["places"]) for u in units])
    ids = np.append(ids, np.full(NUM_PADDING, -1, np.int32))
    padding = {
        "pixel_values": np.full((NUM_PADDING, 16 * config.num_channels), 3.0, np.float32),
        "places": np.zeros((NUM_PADDING, 2), np.int32),
    }
    pack = {key: np.concatenate([*(u[key] for u in units), padding[key]]) for key in padding}
    layers = range(config.num_hidden_layers + 1)
    run = jax.jit(
        lambda params, pack, ids: bind(graphdef, params)(
            **pack, segment_ids=ids, feature_layers=layers
        )
    )
    last, states = run(params, pack, ids)
    assert np.isfinite(last).all()
    ours = {"last": np.asarray(last), **{str(i): np.asarray(x) for i, x in enumerate(states)}}
    ours = {key: value[None, :-NUM_PADDING] for key, value in ours.items()}
    assert_close(ours, states_of(expected), atol=5e-6)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"num_patches": 4, "hidden_act": "gelu", "layer_norm_eps": 1e-2},
            id="fewer positions than rows and columns, gelu, coarse eps",
        ),
        pytest.param({"num_patches": 225}, id="more positions than patches"),
    ],
)
def test_siglip_2s_states_of_packed_pictures_are_hfs(changes: dict[str, Any]):
    config = Siglip2VisionConfig(**{**SIGLIP2, **changes})
    reference = Siglip2VisionModel(config).eval()
    fill_with_unit_norms(reference)
    shapes = np.array([(3, 10), (4, 4), (12, 2), (1, 5)])
    counts = shapes.prod(-1)
    pixels = np.random.default_rng(0).normal(size=(counts.sum(), 48)).astype(np.float32)
    pictures = np.split(pixels, np.cumsum(counts)[:-1])
    padded = np.stack([np.pad(one, ((0, counts.max() - len(one)), (0, 0))) for one in pictures])
    with torch.no_grad():
        outputs = reference(
            torch.tensor(padded),
            pixel_attention_mask=torch.tensor(np.arange(counts.max()) < counts[:, None]).int(),
            spatial_shapes=torch.tensor(shapes),
            output_hidden_states=True,
        )
    expected = {
        name: np.concatenate([one[:count] for one, count in zip(state, counts, strict=True)])
        for name, state in states_of(outputs).items()
    }

    graphdef, abstract = build_abstract(
        PackedViT, PackedViTConfig.from_hf(config), dtype=jnp.float32
    )
    rules = Lfm2VlForConditionalGeneration.rules(SimpleNamespace(get_text_config=lambda: config))
    whole = torch.nn.ModuleDict({"vision_tower": reference})
    params = params_of(whole, {"vision_tower": abstract}, rules)["vision_tower"]
    host_inputs = Lfm2VLHostInputs(SimpleNamespace(vision_config=config, downsample_factor=1))
    units = host_inputs.units({"pixel_values": pixels, "spatial_shapes": shapes})
    weights = units["row_weights"], units["column_weights"]
    pad = ((0, NUM_PADDING), (0, 0))
    ids = np.repeat(np.arange(len(shapes), dtype=np.int32), counts)
    last, states = jax.jit(
        lambda params, pixels, ids, weights: bind(graphdef, params)(
            pixels,
            segment_ids=ids,
            axis_weights=weights,
            feature_layers=range(config.num_hidden_layers + 1),
        )
    )(
        params,
        np.pad(pixels, pad, constant_values=3),
        np.append(ids, np.full(NUM_PADDING, -1, np.int32)),
        tuple(np.pad(one, pad) for one in weights),
    )
    assert np.isfinite(last).all()
    ours = {"last": last, **{str(number): state for number, state in enumerate(states)}}
    cut = {name: np.asarray(state)[:-NUM_PADDING] for name, state in ours.items()}
    assert_close(cut, expected, atol=5e-6)


@pytest.mark.parametrize(("height", "width"), [(24, 24), (21, 39)])
def test_davits_grids_that_fill_no_window_are_hfs(height: int, width: int):
    settings: dict[str, Any] = {**DAVIT, "depths": [1, 2]}
    reference = Florence2VisionBackbone(Florence2VisionConfig(**settings)).eval()
    fill_davit(reference)
    config = DavitConfig.from_hf(reference.config)
    graphdef, abstract = build_abstract(DavitVisionTower, config, dtype=jnp.float32)
    params = params_of(reference, abstract, ())
    pixels = np.random.default_rng(0).standard_normal((2, 3, height, width)).astype(np.float32)
    with torch.no_grad():
        expected = reference(torch.tensor(pixels)).last_hidden_state.permute(0, 2, 3, 1).numpy()
    ours = jax.jit(lambda p, x: bind(graphdef, p)(x))(params, pixels)
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("read", "settings", "changes", "match"),
    [
        *(
            (ViTConfig.from_hf, CLIPVisionConfig(**TINY), {name: [32, 16]}, words)
            for name in ("image_size", "patch_size")
            for words in [rf"`vision_config.{name}` is \[32, 16\]; .* square"]
        ),
        (
            PackedViTConfig.from_hf,
            PixtralVisionConfig(**PIXTRAL),
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            r"rope_type` is `yarn`",
        ),
        (
            PackedViTConfig.from_hf,
            PixtralVisionConfig(**PIXTRAL),
            {"patch_size": [16, 14]},
            r"`vision_config.patch_size` is \[16, 14\]; .* one number",
        ),
        (
            PackedViTConfig.from_hf,
            Exaone4_5_VisionConfig(num_heads=16),
            {"num_key_value_heads": 6},
            r"`vision_config.num_heads` is 16; .* multiple of `num_key_value_heads`",
        ),
        (
            PackedViTConfig.from_hf,
            Siglip2VisionConfig(**SIGLIP2),
            {"num_patches": 15},
            r"`vision_config.num_patches` is 15; .* square grid",
        ),
        (
            DavitConfig.from_hf,
            Florence2VisionConfig(**DAVIT),
            {"depths": [1]},
            "their lengths differ: `depths` 1, `patch_size` 2",
        ),
        (
            read_internvit,
            InternVLVisionConfig(**INTERNVIT),
            {"norm_type": "batch_norm"},
            r"norm_type.*batch_norm",
        ),
    ],
)
def test_what_no_tower_can_be_is_refused(
    read: Callable[[Any], Any], settings: Any, changes: dict[str, Any], match: str
):
    with pytest.raises(CheckpointError, match=match):
        read(SimpleNamespace(**{**settings.to_dict(), **changes}))


def test_internvits_states_count_from_both_ends():
    counts = [count_blocks(layer, 3, name="select_layer") for layer in range(-4, 4)]
    assert counts == [0, 1, 2, 3, 0, 1, 2, 3]
    for layer in (-5, 4, [1, 2], None, 1.0):
        with pytest.raises(CheckpointError, match="select_layer"):
            count_blocks(layer, 3, name="select_layer")
