"""Vision transformers over packed patches of pictures of any size, most with rotary places.

Pixtral's (arXiv 2410.07073), Qwen2-VL's (arXiv 2409.12191), Qwen2.5-VL's (arXiv 2502.13923), EXAONE
4.5's (the same with fewer keys than queries; arXiv 2604.08644), PaddleOCR-VL's (arXiv 2510.14528),
GLM-V's (arXiv 2507.01006), Qwen3-VL's (arXiv 2511.21631), Qwen3.5's, ERNIE 4.5 VL's and MoonViT
(arXiv 2504.07491), whose clips are pooled over their frames in Kimi K2.5's (arXiv 2602.02276);
without rotary places, SigLIP 2's (arXiv 2502.14786), MiniCPM-V 4.6's and HunyuanOCR's (arXiv
2511.19575); LFM3-VL's (Liquid AI, 2026), most of whose blocks convolve a frame in place of
attention. They differ by configuration alone: norms, MLPs, windows, learned positions, whether and
how squares of patches merge, and after which blocks beside the last.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from mmjax.layers.activation import get_activation
from mmjax.layers.attention.segments import segment_attention
from mmjax.layers.embed import Embed
from mmjax.layers.linear import Linear, linear
from mmjax.layers.mlp import MLP, GatedMLP
from mmjax.layers.module import call_block
from mmjax.layers.norm import LayerNorm, RMSNorm
from mmjax.layers.rope import (
    apply_interleaved_rotary,
    apply_rotary,
    inverse_frequencies,
    multimodal_angles,
    rotary_angles,
)
from mmjax.towers.packed_vit.config import PackedViTConfig

Angles = tuple[Float[Array, "P _turned"], Float[Array, "P _turned"]]
"""Cosines and sines of every patch's place, half a head wide."""
PositionTaps = tuple[Int[Array, "P _taps"], Float[Array, "P _taps"]]
"""Rows of the table of learned positions, and their weights."""
FrameTaps = tuple[Int[Array, "P _frames"], Float[Array, "P _frames"]]
"""Where the frames of a square's patch stand from its row, and how much of each it is."""
AxisWeights = tuple[Float[Array, "P _side"], Float[Array, "P _side"]]
"""Weights of all rows, and of all columns, of a square of learned positions."""


class PatchEmbed(nnx.Module):
    """A convolution whose stride is its kernel, over patches that are cut already."""

    def __init__(self, width: int, kernel: Sequence[int], *, use_bias: bool, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((width, *kernel), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype)) if use_bias else None

    def __call__(self, pixel_values: Float[Array, "P _pixels"]) -> Float[Array, "P D"]:
        """Project patches whose pixels lie as the kernel's."""
        weight = self.weight[...]
        bias = None if self.bias is None else self.bias[...]
        return linear(pixel_values, weight.reshape(len(weight), -1), bias)


class PackedAttention(nnx.Module):
    """Attention among the patches of one segment, with rotary places where there are angles."""

    def __init__(self, config: PackedViTConfig, *, dtype: Any) -> None:
        width, self.config = config.hidden_size, config
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        keys = self.num_kv_heads * config.head_dim
        options = {"use_bias": config.has_bias, "dtype": dtype}
        if config.has_fused_qkv:
            self.qkv = Linear(width, width + 2 * keys, **options)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                Linear(width, rows, **options) for rows in (width, keys, keys)
            )
        self.proj = Linear(width, width, **options)
        self.q_norm, self.k_norm = (
            RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype)
            if config.has_qk_norm
            else None
            for _ in range(2)
        )

    def __call__(
        self, x: Float[Array, "P D"], angles: Angles | None, segment_ids: Int[Array, " P"]
    ) -> Float[Array, "P D"]:
        """Attend within each segment."""
        config = self.config
        if config.has_fused_qkv:
            ends = (config.num_heads, config.num_heads + self.num_kv_heads)
            projected = self.qkv(x).reshape(len(x), -1, config.head_dim)
            query, key, value = jnp.split(projected, ends, axis=1)
        else:
            query, key, value = (
                project(x).reshape(len(x), -1, config.head_dim)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            # bfloat16 would round the angles of every place.
            dtype = x.dtype if config.alternates_axes else jnp.float32
            rotate = apply_interleaved_rotary if config.pairs_axes else apply_rotary
            query, key = (
                rotate(part.astype(dtype), *angles).astype(x.dtype) for part in (query, key)
            )
        per_key = config.num_heads // self.num_kv_heads
        if per_key > 1:
            key, value = (jnp.repeat(part, per_key, axis=1) for part in (key, value))
        out = segment_attention(query, key, value, segment_ids, scale=config.head_dim**-0.5)
        return self.proj(out.reshape(x.shape))


class PackedConvolution(nnx.Module):
    """`torch.nn.Conv2d(groups=D, padding=size // 2)` over frames: parameter `weight[D, 1, _, _]`.

    Frames of any size lie in a pack, their patches in any order.
    """

    def __init__(self, width: int, size: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((width, 1, size, size), dtype))

    def __call__(
        self, x: Float[Array, "P D"], neighbours: Int[Array, "P _taps"]
    ) -> Float[Array, "P D"]:
        """Convolve; `neighbours` are of `find_neighbours`. Added in float32."""
        weight = self.weight[...].astype(jnp.float32)
        rows = jnp.arange(len(x), dtype=jnp.int32)
        out = jnp.zeros(x.shape, jnp.float32)
        for offset, tap in zip(neighbours.T, weight.reshape(len(weight), -1).T, strict=True):
            seen = x.at[rows + offset].get(mode="fill", fill_value=0)
            out = out + seen.astype(jnp.float32) * tap[None]
        return out.astype(x.dtype)


class PackedGatedConvolution(nnx.Module):
    """A convolution of frames between two gates, of which patches make their own (LFM3-VL's)."""

    def __init__(self, config: PackedViTConfig, *, dtype: Any) -> None:
        width, options = config.hidden_size, {"use_bias": config.has_bias, "dtype": dtype}
        self.in_proj = Linear(width, 3 * width, **options)
        self.spatial_conv = PackedConvolution(width, config.conv_size, dtype=dtype)
        self.out_proj = Linear(width, width, **options)

    def __call__(
        self, x: Float[Array, "P D"], neighbours: Int[Array, "P _taps"]
    ) -> Float[Array, "P D"]:
        """Convolve within each frame."""
        before, behind, value = jnp.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(behind * self.spatial_conv(before * value, neighbours))


class PackedBlock(nnx.Module):
    """A pre-norm transformer block, of attention or of a convolution."""

    def __init__(self, config: PackedViTConfig, *, convolves: bool = False, dtype: Any) -> None:
        self.norm1 = config.make_norm(dtype=dtype)
        self.norm2 = config.make_norm(dtype=dtype)
        self.attn = None if convolves else PackedAttention(config, dtype=dtype)
        self.conv = PackedGatedConvolution(config, dtype=dtype) if convolves else None
        self.mlp = (GatedMLP if config.is_gated else MLP)(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            use_bias=config.has_bias,
            dtype=dtype,
        )

    def __call__(
        self,
        x: Float[Array, "P D"],
        angles: Angles | None,
        segment_ids: Int[Array, " P"],
        neighbours: Int[Array, "P _taps"] | None = None,
    ) -> Float[Array, "P D"]:
        """Return the residual stream after this block; the last are of one that convolves."""
        normed = self.norm1(x)
        if self.conv is not None:
            with jax.named_scope("conv"):
                assert neighbours is not None, "a block that convolves is given no neighbours"
                x = x + self.conv(normed, neighbours)
        if self.attn is not None:
            with jax.named_scope("attn"):
                x = x + self.attn(normed, angles, segment_ids)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Each square of `merge_size` patches a side becomes one embedding."""

    def __init__(
        self,
        config: PackedViTConfig,
        out_features: int,
        *,
        norms_squares: bool = False,
        dtype: Any,
    ) -> None:
        """`norms_squares`: whether the patches of a square are normed together."""
        num_patches = config.merge_size**2
        width = config.hidden_size * num_patches
        num_normed = num_patches if norms_squares else 1
        self.ln_q = config.make_norm(num_normed, eps=config.merger_norm_eps, dtype=dtype)
        self.norms_squares = norms_squares
        self.fc1 = Linear(width, width, use_bias=True, dtype=dtype)
        self.fc2 = Linear(width, out_features, use_bias=True, dtype=dtype)
        self.activation = get_activation("gelu")
        self.width = width

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "_rows _out"]:
        """Project squares; the patches of one stand behind each other."""
        normed = self.ln_q(x.reshape(-1, self.width) if self.norms_squares else x)
        return self.fc2(self.activation(self.fc1(normed.reshape(-1, self.width))))


class DownsamplingMerger(GatedMLP):
    """A convolution makes one row of each square, which a gated MLP transforms; GLM-V's."""

    def __init__(self, config: PackedViTConfig, out_features: int, *, dtype: Any) -> None:
        inner, side = config.merger_inner, config.merge_size
        assert inner is not None
        super().__init__(out_features, inner, activation=config.hidden_act, dtype=dtype)
        kernel = (config.hidden_size, side, side)
        self.downsample = PatchEmbed(out_features, kernel, use_bias=True, dtype=dtype)
        self.proj = Linear(out_features, out_features, use_bias=False, dtype=dtype)
        self.post_projection_norm = LayerNorm(out_features, eps=1e-5, dtype=dtype)
        self.first_activation = get_activation("gelu")
        self.per_square = side**2

    def __call__(self, x: Float[Array, "P D"]) -> Float[Array, "_rows _out"]:
        """Merge squares; the patches of one stand behind each other."""
        squares = x.reshape(-1, self.per_square, x.shape[-1]).transpose(0, 2, 1)
        rows = self.proj(self.downsample(squares.reshape(len(squares), -1)))
        return super().__call__(self.first_activation(self.post_projection_norm(rows)))


class PackedViT(nnx.Module):
    """Packed patches to embeddings; parameters bear the names of HF's Qwen2-VL."""

    def __init__(self, config: PackedViTConfig, *, dtype: Any) -> None:
        """`config.num_blocks` may be what is read, and not what there is."""
        options = {"use_bias": config.has_patch_bias, "dtype": dtype}
        self.patch_embed = (
            Linear(config.kernel[0], config.hidden_size, **options)
            if len(config.kernel) == 1
            else PatchEmbed(config.hidden_size, config.kernel, **options)
        )
        self.first_norm = config.make_norm(dtype=dtype) if config.has_first_norm else None
        self.blocks = nnx.List(
            [
                PackedBlock(config, convolves=number in config.convolved_blocks, dtype=dtype)
                for number in range(config.num_blocks)
            ]
        )
        num_positions = config.num_positions
        self.pos_embed = (
            None if num_positions is None else Embed(num_positions, config.hidden_size, dtype=dtype)
        )
        self.post_layernorm = config.make_norm(dtype=dtype) if config.has_last_norm else None
        width = config.merged_width
        kind = PatchMerger if config.merger_inner is None else DownsamplingMerger
        self.merger = None if width is None else kind(config, width, dtype=dtype)
        self.deepstack_merger_list = nnx.List(
            [
                PatchMerger(config, width or config.hidden_size, norms_squares=True, dtype=dtype)
                for _ in config.fed_blocks
            ]
        )
        self.config = config

    def __call__(
        self,
        pixel_values: Float[Array, "P _pixels"],
        *,
        places: Int[Array, "P 2"] | None = None,
        segment_ids: Int[Array, " P"],
        window_ids: Int[Array, " P"] | None = None,
        neighbours: Int[Array, "P _taps"] | None = None,
        positions: PositionTaps | None = None,
        axis_weights: AxisWeights | None = None,
        square_offsets: Int[Array, " P"] | None = None,
        frame_numbers: Int[Array, " P"] | None = None,
        frame_taps: FrameTaps | None = None,
        feature_layers: Sequence[int] = (),
    ) -> tuple[Float[Array, "_rows _out"], list[Float[Array, "P D"]]]:
        """Return the last state, merged where the config says so, and the states asked for.

        Behind the last state stand those of `fed_blocks`, merged, in the order of the blocks.

        Args:
            pixel_values: A patch a row, square by square where squares are merged and there are no
                `square_offsets`.
            places: Row and column of each patch in its picture or frame, where they are rotary.
            segment_ids: Its picture or frame.
            window_ids: Its window, numbered over all pictures, where the config has windows.
            neighbours: Where the patches around each stand from its row, where blocks convolve: of
                `find_neighbours`.
            positions: Where they are learned: those around each patch, and their weights.
            axis_weights: In their place, where a patch may have any number of those around it.
            square_offsets: Patches come row by row; that of row i + offsets[i] is the i-th one
                square by square.
            frame_numbers: Of each patch's frame in its clip, from 1 on; 0: it is a picture's.
            frame_taps: In place of `square_offsets`, of a tower that pools the frames of clips: the
                i-th patch, square by square, of a clip's first frame is the weighted sum of those
                of the rows i + offsets[i].
            feature_layers: As HF's `hidden_states`: 0 is the normed embedding, n the output of
                block n - 1.
        """
        embedded = self.embed_patches(pixel_values, positions, axis_weights)
        if frame_numbers is not None:
            table = jnp.asarray(_sinusoids(self.config.num_frames, embedded.shape[1]))
            embedded = embedded + table[frame_numbers].astype(embedded.dtype)
        states = [embedded]
        angles = None if places is None else self._angles(places)
        full = self.config.full_attention_blocks
        for number, block in enumerate(self.blocks):
            sees_all = full is None or window_ids is None or number in full
            seen = segment_ids if sees_all else window_ids
            states.append(call_block(block, states[-1], angles, seen, neighbours))
        last = states[-1] if self.post_layernorm is None else self.post_layernorm(states[-1])
        if square_offsets is not None:
            last = last[jnp.arange(len(last)) + square_offsets]
        if frame_taps is not None:
            last = _pool_frames(last, *frame_taps)
        last = last if self.merger is None else self.merger(last)
        mergers = sorted(zip(self.config.fed_blocks, self.deepstack_merger_list, strict=True))
        if mergers:
            fed = [merge(states[number + 1]) for number, merge in mergers]
            last = jnp.concatenate([last, *fed], axis=-1)
        return last, [states[layer] for layer in feature_layers]

    def embed_patches(
        self,
        pixel_values: Float[Array, "P _pixels"],
        positions: PositionTaps | None = None,
        axis_weights: AxisWeights | None = None,
    ) -> Float[Array, "P D"]:
        """Return what the first block reads; arguments are those of a call."""
        x = self.patch_embed(pixel_values.astype(self.patch_embed.weight[...].dtype))
        x = x if self.first_norm is None else self.first_norm(x)
        if self.pos_embed is not None and positions is not None:
            x = x + self._weigh_positions(*positions).astype(x.dtype)
        if axis_weights is not None:
            x = x + self._weigh_axes(*axis_weights).astype(x.dtype)
        return x

    def _weigh_positions(
        self, taps: Int[Array, "P _taps"], weights: Float[Array, "P _taps"]
    ) -> Float[Array, "P D"]:
        """Return the weighted sums of learned positions, in float32."""
        assert self.pos_embed is not None
        total = jnp.zeros((len(taps), self.config.hidden_size), jnp.float32)
        # Tap by tap: all of them at once would be 4 or 16 times as large as the patches.
        for tap, weight in zip(taps.T, weights.T, strict=True):
            total = total + self.pos_embed(tap).astype(jnp.float32) * weight[:, None]
        return total

    def _weigh_axes(
        self, rows: Float[Array, "P _side"], columns: Float[Array, "P _side"]
    ) -> Float[Array, "P D"]:
        """Return the sums of all learned positions, by the product of both weights, in float32."""
        assert self.pos_embed is not None
        weights = (rows[:, :, None] * columns[:, None, :]).reshape(len(rows), -1)
        return linear(weights, self.pos_embed.weight[...].astype(jnp.float32).T)

    def _angles(self, places: Int[Array, "P 2"]) -> Angles:
        theta, width = {"rope_theta": self.config.rope_theta}, self.config.head_dim
        if self.config.pairs_axes:
            frequencies = inverse_frequencies(theta, width // 2)
            by_axis = (rotary_angles(places[:, axis], frequencies) for axis in (1, 0))
            cos, sin = (jnp.stack(pair, axis=-1) for pair in zip(*by_axis, strict=True))
            return cos.reshape(len(places), -1), sin.reshape(len(places), -1)
        if not self.config.alternates_axes:
            frequencies = inverse_frequencies(theta, width // 2)
            by_axis = (rotary_angles(places[:, axis], frequencies) for axis in (0, 1))
            cos, sin = (jnp.concatenate(pair, axis=-1) for pair in zip(*by_axis, strict=True))
            return cos, sin
        frequencies = inverse_frequencies(theta, width)
        by_row, by_column = frequencies[0::2], frequencies[1::2]
        rows, columns = places.T
        return multimodal_angles(
            jnp.stack([rows, columns, columns]),
            np.concatenate([by_row, by_column]),
            (len(by_row), len(by_column), 0),
        )


def _sinusoids(num_frames: int, width: int) -> np.ndarray:
    """Return float32[1 + num_frames, width]: of no frame, zeros, and of each of a clip's.

    Sines, then cosines, of a frame's number (from 0 on) times frequencies as of rotary positions.
    """
    frequencies = inverse_frequencies({"rope_theta": 10_000.0}, width)
    angles = np.arange(num_frames, dtype=np.float32)[:, None] * frequencies
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((1, 0), (0, 0))).astype(np.float32)


def _pool_frames(
    x: Float[Array, "P D"], offsets: Int[Array, "P _frames"], weights: Float[Array, "P _frames"]
) -> Float[Array, "P D"]:
    """Return the weighted sums of the rows at `offsets` from each, in float32 until the end."""
    rows = jnp.arange(len(x))
    total = jnp.zeros(x.shape, jnp.float32)
    for offset, weight in zip(offsets.T, weights.T, strict=True):
        total = total + x[rows + offset].astype(jnp.float32) * weight[:, None]
    return total.astype(x.dtype)
