"""What a config.json says of a packed ViT, by HF's `model_type`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from flax import nnx

from mmjax.config.hf_config import read_config
from mmjax.errors import CheckpointError
from mmjax.layers.norm import LayerNorm, RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedViTConfig:
    """What the arrays depend on, of each config in `_READERS`."""

    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int | None = None
    """Heads of keys and values, each for as many heads of queries; None: `num_heads`."""
    kernel: tuple[int, ...]
    """The shape of a patch's pixels: channels, frames where it has several, rows, columns; or one
    number, where files have a matrix."""
    hidden_act: str
    norm_eps: float
    has_rms_norm: bool = False
    is_gated: bool = False
    """Whether MLPs are."""
    has_bias: bool = True
    has_fused_qkv: bool = False
    has_first_norm: bool = False
    """Whether the embeddings of patches are normed."""
    has_last_norm: bool = False
    """Whether the last state is, before patches merge."""
    has_patch_bias: bool = False
    has_qk_norm: bool = False
    """Whether each head's queries and keys are normed, before they are rotated."""
    merger_inner: int | None = None
    """Width inside of the gated MLP behind a convolution that merges squares; None: they are merged
    by two linear layers."""
    rope_theta: float
    has_rotary: bool = True
    """Whether queries and keys are rotated by their places; else positions are learned alone."""
    alternates_axes: bool = False
    """Whether every second frequency turns by the row and the others by the column; else those of
    the first half turn by the row. In float32 then, as HF does."""
    pairs_axes: bool = False
    """Whether neighbours in a head are a pair that is rotated, and each frequency turns one by the
    column and the next by the row."""
    convolved_blocks: tuple[int, ...] = ()
    """The blocks that convolve the patches of a frame, and do not attend."""
    conv_size: int = 0
    """How many rows and columns such a convolution reads: odd."""
    full_attention_blocks: tuple[int, ...] | None = None
    """The blocks that see whole pictures, and not a window; None: all."""
    merge_size: int = 1
    """Side of the square of patches that becomes one embedding."""
    merged_width: int | None = None
    """Width of these embeddings; None: patches are not merged."""
    num_positions: int | None = None
    """Learned positions, those of a square grid; None: places are rotary alone."""
    num_frames: int = 0
    """Frames of a clip, whose number in it is added to their patches as a sinusoid; 0: none is."""
    merger_norm_eps: float | None = None
    """Of the norm before they merge; None: as of the others."""
    fed_blocks: tuple[int, ...] = ()
    """The blocks whose outputs are merged, too, each by a merger of its own (DeepStack)."""

    @staticmethod
    def from_hf(hf_config: Any) -> "PackedViTConfig":
        """Read HF's vision config; `CheckpointError` for a rotary kind or a patch that it lacks."""
        rope = getattr(hf_config, "rope_parameters", None) or {}
        kind = rope.get("rope_type", "axial")
        if kind != "axial" and (kind, hf_config.model_type) != ("default", "pixtral"):
            raise CheckpointError(
                f"`vision_config.rope_parameters.rope_type` is `{kind}`; expected `axial`"
            )
        for key in ("image_size", "patch_size", "temporal_patch_size"):
            if not isinstance(size := getattr(hf_config, key, 1), int):
                raise CheckpointError(
                    f"`vision_config.{key}` is {size!r}; a `{hf_config.model_type}` has one number "
                    "there"
                )
        theta = float(rope.get("rope_theta", 10_000.0))
        own = _READERS[hf_config.model_type](hf_config)
        return read_config(PackedViTConfig, hf_config, rope_theta=theta, **own)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    def make_norm(
        self, num_patches: int = 1, *, eps: float | None = None, dtype: Any
    ) -> nnx.Module:
        """Return a norm of the tower's width, or of so many patches together."""
        kind = RMSNorm if self.has_rms_norm else LayerNorm
        return kind(self.hidden_size * num_patches, eps=eps or self.norm_eps, dtype=dtype)


def _read_pixtral(vision: Any) -> dict[str, Any]:
    return {
        "num_blocks": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "kernel": (vision.num_channels, vision.patch_size, vision.patch_size),
        "norm_eps": 1e-5,  # no key of the config
        **dict.fromkeys(("has_rms_norm", "is_gated", "has_first_norm", "alternates_axes"), True),
        "has_bias": False,
    }


def _read_qwen2_vl(vision: Any) -> dict[str, Any]:
    return {
        **_read_qwen(vision),
        "hidden_size": vision.embed_dim,
        "intermediate_size": int(vision.embed_dim * vision.mlp_ratio),
        "merged_width": vision.hidden_size,
    }


def _read_qwen(vision: Any) -> dict[str, Any]:
    side = vision.patch_size
    return {
        "num_blocks": vision.depth,
        "kernel": (vision.in_channels, vision.temporal_patch_size, side, side),
        "norm_eps": 1e-6,  # no key of the config
        "has_fused_qkv": True,
        "merge_size": vision.spatial_merge_size,
    }


def _read_qwen2_5_vl(vision: Any) -> dict[str, Any]:
    return {
        **_read_qwen(vision),
        "merged_width": vision.out_hidden_size,
        "full_attention_blocks": tuple(vision.fullatt_block_indexes),
        **dict.fromkeys(("has_rms_norm", "is_gated"), True),
    }


def _read_exaone4_5(vision: Any) -> dict[str, Any]:
    return {**_read_qwen2_5_vl(vision), "num_kv_heads": _read_kv_heads(vision, "num_heads")}


def _read_kv_heads(vision: Any, key: str) -> int:
    """Return the heads of keys and values, which divide those of queries, `key` of the config."""
    heads, kv_heads = getattr(vision, key), vision.num_key_value_heads
    if heads % kv_heads:
        raise CheckpointError(
            f"`vision_config.{key}` is {heads}; it must be a multiple of "
            f"`num_key_value_heads`, which is {kv_heads}"
        )
    return kv_heads


def _read_qwen2_5_omni(vision: Any) -> dict[str, Any]:
    return {**_read_qwen2_5_vl(vision), "has_fused_qkv": False}


def _read_ernie4_5_vl(vision: Any) -> dict[str, Any]:
    return {
        "num_blocks": vision.depth,
        "kernel": (vision.in_channels * vision.patch_size**2,),
        "norm_eps": vision.rms_norm_eps,
        "has_fused_qkv": True,
        "has_last_norm": True,
        "merge_size": vision.spatial_merge_size,
    }


def _read_paddleocr_vl(vision: Any) -> dict[str, Any]:
    return {
        **_read_siglip(vision),
        "merge_size": vision.spatial_merge_size,
        "merger_norm_eps": 1e-5,  # no key of the config
    }


def _read_minicpmv4_6(vision: Any) -> dict[str, Any]:
    return {**_read_siglip(vision), "has_rotary": False}


def _read_siglip(vision: Any) -> dict[str, Any]:
    return {
        "num_blocks": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "kernel": (vision.num_channels, vision.patch_size, vision.patch_size),
        "norm_eps": vision.layer_norm_eps,
        "num_positions": (vision.image_size // vision.patch_size) ** 2,
        **dict.fromkeys(("has_last_norm", "has_patch_bias"), True),
    }


def _read_hunyuan_vl(vision: Any) -> dict[str, Any]:
    if vision.interpolate_mode != "bilinear":
        raise CheckpointError(
            f"`vision_config.interpolate_mode` is `{vision.interpolate_mode}`; mmjax's HunYuan-VL "
            "stretches learned positions by `bilinear`, as published"
        )
    return {
        "num_blocks": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "kernel": (vision.num_channels, vision.patch_size, vision.patch_size),
        "norm_eps": vision.rms_norm_eps,
        # The first is of a class token, which the tower does not have.
        "num_positions": (vision.max_image_size // vision.patch_size) ** 2 + 1,
        "has_patch_bias": True,
        "has_rotary": False,
        "merge_size": vision.spatial_merge_size,
    }


def _read_siglip2(vision: Any) -> dict[str, Any]:
    if math.isqrt(vision.num_patches) ** 2 != vision.num_patches:
        raise CheckpointError(
            f"`vision_config.num_patches` is {vision.num_patches}; learned positions are those of "
            "a square grid"
        )
    return {
        "num_blocks": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "kernel": (vision.num_channels * vision.patch_size**2,),
        "norm_eps": vision.layer_norm_eps,
        "num_positions": vision.num_patches,
        "has_rotary": False,
        **dict.fromkeys(("has_last_norm", "has_patch_bias"), True),
    }


def _read_kimi_k25(vision: Any) -> dict[str, Any]:
    height, width = vision.pos_emb_height, vision.pos_emb_width
    rows, columns = vision.merge_kernel_size
    if height != width or rows != columns:
        raise CheckpointError(
            f"`vision_config` has {height} x {width} learned positions and a `merge_kernel_size` "
            f"of {rows} x {columns}; mmjax's MoonViT has squares"
        )
    return {
        "num_blocks": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "kernel": (3, vision.patch_size, vision.patch_size),
        "norm_eps": 1e-5,  # no key of the config
        "merge_size": rows,
        "num_positions": height**2,
        "num_frames": vision.pos_emb_time,
        **dict.fromkeys(("has_last_norm", "has_patch_bias", "pairs_axes"), True),
    }


def _read_glm4v(vision: Any) -> dict[str, Any]:
    if vision.attention_bias:
        raise CheckpointError(
            "`vision_config.attention_bias` is true; mmjax's GLM-4.1V has it false, as published"
        )
    return {
        **_read_glm(vision),
        "intermediate_size": vision.out_hidden_size,
        "num_positions": (vision.image_size // vision.patch_size) ** 2,
        "has_first_norm": True,
        "has_bias": False,
        "merger_inner": vision.intermediate_size,
    }


def _read_glm_ocr(vision: Any) -> dict[str, Any]:
    return {
        **_read_glm(vision),
        "has_bias": vision.attention_bias,
        "has_qk_norm": True,
        "merger_inner": vision.out_hidden_size * vision.in_channels,
    }


def _read_glm(vision: Any) -> dict[str, Any]:
    return {
        **_read_qwen(vision),
        "norm_eps": vision.rms_norm_eps,
        "merged_width": vision.out_hidden_size,
        **dict.fromkeys(("has_rms_norm", "is_gated", "has_last_norm", "has_patch_bias"), True),
    }


def _read_lfm3_vl(vision: Any) -> dict[str, Any]:
    kinds, size = vision.layer_types, vision.conv_kernel_size
    if unknown := sorted(set(kinds) - {"conv", "full_attention"}):
        raise CheckpointError(
            f"`vision_config.layer_types` holds {unknown}; known: conv, full_attention"
        )
    if size < 1 or size % 2 == 0:
        raise CheckpointError(
            f"`vision_config.conv_kernel_size` is {size}; it must be odd, so that frames keep "
            "their size"
        )
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "num_blocks": vision.num_hidden_layers,
        "num_heads": vision.num_attention_heads,
        "num_kv_heads": _read_kv_heads(vision, "num_attention_heads"),
        "kernel": (pixels,),
        "hidden_act": "silu",  # no key of the config
        "merge_size": vision.spatial_merge_size,
        "convolved_blocks": tuple(n for n, kind in enumerate(kinds) if kind == "conv"),
        "conv_size": size,
        **dict.fromkeys(("has_rms_norm", "is_gated", "has_first_norm", "has_qk_norm"), True),
        "has_bias": False,
    }


def _read_qwen3_vl(vision: Any) -> dict[str, Any]:
    num_positions = vision.num_position_embeddings
    fed = tuple(getattr(vision, "deepstack_visual_indexes", ()))  # Qwen3.5's tower has none
    if math.isqrt(num_positions) ** 2 != num_positions:
        raise CheckpointError(
            f"`vision_config.num_position_embeddings` is {num_positions}; they are those of a "
            "square grid"
        )
    if len(set(fed)) != len(fed) or not all(0 <= block < vision.depth for block in fed):
        raise CheckpointError(
            f"`vision_config.deepstack_visual_indexes` is {list(fed)}; expected different blocks "
            f"of 0 to {vision.depth - 1}"
        )
    return {
        **_read_qwen(vision),
        "merged_width": vision.out_hidden_size,
        "num_positions": num_positions,
        "has_patch_bias": True,
        "fed_blocks": fed,
    }


_READERS: Mapping[str, Callable[[Any], dict[str, Any]]] = MappingProxyType(
    {
        "ernie4_5_vl_moe_vision": _read_ernie4_5_vl,
        "exaone4_5_vision": _read_exaone4_5,
        "glm4v_moe_vision": _read_glm4v,
        "glm4v_vision": _read_glm4v,
        "glm_ocr_vision": _read_glm_ocr,
        "hunyuan_vl_vision": _read_hunyuan_vl,
        "minicpm_ocr_vision": _read_minicpmv4_6,
        "kimi_k25_vision": _read_kimi_k25,
        "lfm3_vl_vision": _read_lfm3_vl,
        "minicpmv4_6_vision": _read_minicpmv4_6,
        "minicpmv4_7_vision": _read_minicpmv4_6,
        "paddleocr_vl_vision": _read_paddleocr_vl,
        "pixtral": _read_pixtral,
        "qwen2_vl_vision": _read_qwen2_vl,
        "qwen2_5_omni_vision_encoder": _read_qwen2_5_omni,
        "qwen2_5_vl_vision": _read_qwen2_5_vl,
        "qwen3_5_moe_vision": _read_qwen3_vl,
        "qwen3_5_vision": _read_qwen3_vl,
        "qwen3_omni_moe_vision_encoder": _read_qwen3_vl,
        "qwen3_vl_vision": _read_qwen3_vl,
        "qwen3_vl_moe_vision": _read_qwen3_vl,
        "siglip2_vision_model": _read_siglip2,
    }
)
"""By `model_type`."""
