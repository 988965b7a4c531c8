"""Rotary position embeddings (Su et al., arXiv 2104.09864): half-split as in HF, or interleaved.

Angles are always float32: in bfloat16 position 257 equals 256.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mmjax.errors import CheckpointError
from mmjax.layers.cpu.rows import rotate_rows
from mmjax.rounding import MARKED_LIMIT


def prevent_fusion(compute: Callable[[Array], Any], x: Array, always: Bool[Array, ""]) -> Any:
    """Return `compute(x)`, computed once: on the CPU in a branch that is `always` taken.

    XLA cannot know that it is. Fused into each of its uses, `compute` would take more time.
    `optimization_barrier` does not prevent that on the CPU.
    """

    def never(x: Array) -> Any:
        return jax.tree.map(jnp.zeros_like, jax.eval_shape(compute, x))

    def on_cpu(x: Array, always: Array) -> Any:
        return jax.lax.cond(always, compute, never, x)

    return jax.lax.platform_dependent(x, always, cpu=on_cpu, default=lambda x, _: compute(x))


def inverse_frequencies(parameters: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return float32[P] from an entry of config.json's `rope_parameters`; `CheckpointError` else.

    `P` is the half of the head's width, or of the part of it that is rotated
    (`partial_rotary_factor`). Kinds: `default` (theta ** (-2i/H)), `linear` (the same, over
    `factor`: position interpolation, arXiv 2306.15595), `llama3` (low frequencies over `factor`),
    `yarn` (arXiv 2309.00071) and `dynamic`, which is `default` up to `max_position_embeddings`, the
    longest prompt that is served. `proportional` (Gemma 4's) turns the first
    `partial_rotary_factor` of the pairs of a whole head, at the frequencies that they have there
    over `factor`, and leaves the others. `longrope` (arXiv 2402.13753) divides each by a number of
    its own: of `short_factor` here; `text_angles` has those of `long_factor`, too.

    The power is rounded from float64, which is torch's float32 value in all but one entry of 128;
    numpy's own float32 power misses one in six, and at position 8191 an error of one bit there
    turns an angle by 1e-3.
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        known = ", ".join(f"`{name}`" for name in _KINDS)
        raise CheckpointError(f"`rope_type` is `{kind}`; mmjax knows {known}")
    # What is null is not given.
    given = {name: value for name, value in parameters.items() if value is not None}
    share = 1.0 if kind == "proportional" else given.get("partial_rotary_factor") or 1.0
    width = int(head_dim * share)
    try:
        frequencies = np.float32(1.0) / _powers(given, width)
        return _KINDS[kind](frequencies, given, width).astype(np.float32)
    except KeyError as error:
        raise CheckpointError(
            f"`rope_type` is `{kind}`, and {error} is not given with it"
        ) from None


def _powers(parameters: Mapping[str, Any], width: int) -> np.ndarray:
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    powers = np.power(np.float64(parameters["rope_theta"]), exponents.astype(np.float64))
    return powers.astype(np.float32)


def _keep(frequencies: np.ndarray, parameters: Mapping[str, Any], width: int) -> np.ndarray:
    return frequencies


def _linear(frequencies: np.ndarray, parameters: Mapping[str, Any], width: int) -> np.ndarray:
    return frequencies / np.float32(parameters["factor"])


def _llama3(frequencies: np.ndarray, parameters: Mapping[str, Any], width: int) -> np.ndarray:
    """Long waves over `factor`, short ones as they are, between them a mixture of both."""
    factor = np.float32(parameters["factor"])
    low, high = (np.float32(parameters[f"{name}_freq_factor"]) for name in ("low", "high"))
    num_waves = parameters["original_max_position_embeddings"] * frequencies / np.float32(2 * np.pi)
    if low == high:  # of which Llama 4's are; between them is nothing
        return np.where(num_waves < low, frequencies / factor, frequencies)
    share = np.clip((num_waves - low) / (high - low), 0, 1)
    return (1 - share) * frequencies / factor + share * frequencies


def _yarn(frequencies: np.ndarray, parameters: Mapping[str, Any], width: int) -> np.ndarray:
    """Interpolate the frequencies that turn less than `beta_slow` times in the original length."""
    original = parameters["original_max_position_embeddings"]
    theta, truncate = parameters["rope_theta"], parameters.get("truncate", True)

    def find_index(num_turns: float) -> float:
        return width * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    first = find_index(float(parameters.get("beta_fast") or 32))
    last = find_index(float(parameters.get("beta_slow") or 1))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last += 0.001 * (first == last)
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - first) / (last - first), 0, 1)
    return frequencies / np.float32(parameters["factor"]) * ramp + frequencies * (1 - ramp)


def _proportional(frequencies: np.ndarray, parameters: Mapping[str, Any], width: int) -> np.ndarray:
    num_turned = int(parameters.get("partial_rotary_factor", 1.0) * width // 2)
    is_turned = np.arange(width // 2) < num_turned
    return np.where(is_turned, frequencies, 0) / np.float32(parameters.get("factor", 1.0))


def _longrope(frequencies: np.ndarray, parameters: Mapping[str, Any], width: int) -> np.ndarray:
    divisors = np.asarray(parameters["short_factor"], np.float32)
    if divisors.shape != frequencies.shape:
        raise CheckpointError(
            f"`short_factor` or `long_factor` of `rope_parameters` has {len(divisors)} numbers; it "
            f"must have {len(frequencies)}, one for each pair of a head that is rotated"
        )
    return np.float32(1.0) / (divisors * _powers(parameters, width))


_KINDS: Mapping[str, Callable[[np.ndarray, Mapping[str, Any], int], np.ndarray]] = {
    "default": _keep,
    "mrope": _keep,
    "dynamic": _keep,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def attention_factor(parameters: Mapping[str, Any]) -> float:
    """Return what cosines and sines are multiplied by: 1 but for `yarn` and `longrope`.

    Section 3.4 of the one's paper, section 3.2 of the other's.
    """
    kind = parameters.get("rope_type")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor = _read_factor(parameters)
    if kind == "longrope":
        trained = parameters["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    scale, scale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if scale and scale_all:
        return _mscale(factor, float(scale)) / _mscale(factor, float(scale_all))
    return _mscale(factor, 1.0)


def find_score_factor(parameters: Mapping[str, Any]) -> float:
    """Return what scores are multiplied by, where queries and keys are rotated in part.

    DeepSeek-V2's `yarn` with `mscale_all_dim`: the parts without positions grow as those with.
    """
    scale_all = parameters.get("mscale_all_dim")
    if parameters.get("rope_type") != "yarn" or not scale_all:
        return 1.0
    return _mscale(_read_factor(parameters), float(scale_all)) ** 2


def _read_factor(parameters: Mapping[str, Any]) -> float:
    if parameters.get("factor") is None:
        raise CheckpointError(
            f"`rope_type` is `{parameters['rope_type']}`, and 'factor' is not given with it"
        )
    return float(parameters["factor"])


def find_query_scales(parameters: Mapping[str, Any], longest: int) -> tuple[int, tuple[float, ...]]:
    """Return the length of a run of positions, and what queries of each run are multiplied by.

    Llama 4's, of `longest` positions: 1 + beta * log(1 + floor(position / length)).
    `CheckpointError` where `rope_parameters` does not say them.
    """
    given = ("llama_4_scaling_beta", "original_max_position_embeddings")
    missing = [name for name in given if parameters.get(name) is None]
    if missing:
        raise CheckpointError(
            f"`rope_parameters` lacks {', '.join(missing)}, by which queries grow with positions"
        )
    beta, length = (parameters[name] for name in given)
    factors = 1 + beta * np.log1p(np.arange(longest // length + 1))
    return length, tuple(factors.tolist())


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def text_angles(
    parameters: Mapping[str, Any], head_dim: int, positions: Int[Array, "3 T"]
) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """Return the cosines and sines of a decoder's tokens, as `rope_parameters` says.

    On as many axes as it has sections (`mrope_section`), else on the first. With four (those of
    HunYuan-VL) the third of `positions` is a row, or of a picture's tokens a row with the fourth in
    it (`rounding.mark`). Where longer prompts than the trained ones have frequencies of their own,
    the third axis is which of them a prompt has (`HostInputs.rotary_positions`): with `longrope` 0
    or 1, with `level_thetas` the base's number.
    """
    frequencies = inverse_frequencies(parameters, head_dim)
    factor, sections = attention_factor(parameters), parameters.get("mrope_section")
    levels = [{**parameters, "rope_theta": theta} for theta in parameters.get("level_thetas", ())]
    if parameters.get("rope_type") == "longrope":
        levels = [parameters, {**parameters, "short_factor": parameters["long_factor"]}]
    if levels and sections:
        raise CheckpointError(
            f"`mrope_section` is {list(sections)} beside a `rope_type` of `longrope`, whose angles "
            "are of one axis here; give another `rope_type`"
        )
    if levels:
        table = np.stack([inverse_frequencies(level, head_dim) for level in levels])
        index = positions[0].astype(jnp.float32)
        return cos_sin(index[:, None] * jnp.asarray(table)[positions[2]], factor)
    if sections and len(sections) == 4:
        _, rows, pictures = unmark(positions[2])
        positions = jnp.stack([*positions[:2], rows, pictures])
    if sections:
        is_interleaved = bool(parameters.get("mrope_interleaved"))
        return multimodal_angles(
            positions, frequencies, sections, factor, is_interleaved=is_interleaved
        )
    return rotary_angles(positions[0], frequencies, factor)


def unmark(
    positions: Int[Array, " T"],
) -> tuple[Bool[Array, " T"], Int[Array, " T"], Int[Array, " T"]]:
    """Return which positions are marked, what they are without, and their groups.

    `rounding.mark` marks. The group of what is not marked is the position itself.
    """
    is_marked = positions < 0
    whole = -1 - positions
    number = jnp.where(is_marked, whole % MARKED_LIMIT, positions)
    return is_marked, number, jnp.where(is_marked, whole // MARKED_LIMIT, positions)


def rotary_angles(
    positions: Int[Array, " T"], frequencies: Float[np.ndarray, " P"], factor: float = 1.0
) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """Return the cosines and sines of every position, float32, times `factor`."""
    return cos_sin(positions.astype(jnp.float32)[:, None] * frequencies[None, :], factor)


def multimodal_angles(
    positions: Int[Array, "_axes T"],
    frequencies: Float[np.ndarray, " P"],
    sections: Sequence[int],
    factor: float = 1.0,
    *,
    is_interleaved: bool = False,
) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """Return the cosines and sines of M-RoPE (arXiv 2409.12191, section 2.1).

    The first `sections[0]` frequencies turn by a token's time, the next by its row, the next by its
    column (`mrope_section`), or by what other axes the positions have. Interleaved
    (`mrope_interleaved`, arXiv 2511.21631), they turn by time, row and column in this order again
    and again, until row or column has its number; the rest turn by time.
    """
    if sum(sections) != len(frequencies):
        raise CheckpointError(
            f"`mrope_section` is {list(sections)}, of a sum of {sum(sections)}; it must be "
            f"{len(frequencies)}, the half of a head's rotated width"
        )
    axes = np.repeat(np.arange(len(sections)), sections)
    if is_interleaved:
        axes = np.zeros(len(frequencies), int)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    return cos_sin(positions.astype(jnp.float32)[axes].T * frequencies[None, :], factor)


def cos_sin(
    angles: Float[Array, "T P"], factor: float = 1.0
) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    """Return the angles' cosines and sines times `factor`, computed once a step."""
    # Computed again for every head of every layer, they would be 5% of a step of 64 tokens.
    cos, sin = prevent_fusion(_cos_sin, angles, angles[0, 0] >= 0)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _cos_sin(angles: Float[Array, "T P"]) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "T N H"], cos: Float[Array, "T P"], sin: Float[Array, "T P"]
) -> Float[Array, "T N H"]:
    """Rotate the pairs (x[i], x[i + P]) of every head by the position's angles.

    Where heads are wider than 2 P, their rest stays as it is (`partial_rotary_factor`).
    """
    return rotate_rows(x, cos, sin, _rotate)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[-1]
    cos, sin = cos.astype(x.dtype)[:, None, :], sin.astype(x.dtype)[:, None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)


def apply_interleaved_rotary(
    x: Float[Array, "T N H"], cos: Float[Array, "T P"], sin: Float[Array, "T P"]
) -> Float[Array, "T N H"]:
    """Rotate the pairs (x[2i], x[2i + 1]) of every head by the position's angles, i < P.

    The first halves of all pairs come first, then the second, then what is not rotated. Queries and
    keys are both turned by this, so that no product of them depends on their order.
    """
    width = 2 * cos.shape[-1]
    parts = [x[..., 0:width:2], x[..., 1:width:2], x[..., width:]]
    pairs = jnp.concatenate(parts if x.shape[-1] > width else parts[:2], axis=-1)
    return apply_rotary(pairs, cos, sin)
