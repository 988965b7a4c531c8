"""When each token of a transcript is said, by the cross-attention's weights.

As HF's `_extract_token_timestamps` (transformers/models/whisper/generation_whisper.py) has it:
weights are made comparable, smoothed, averaged over heads, and dynamic time warping finds the path
on which tokens and time go forward together.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from mmjax.errors import CheckpointError
from mmjax.models.model_source import read_generation_config

_BOTH, _NEXT_TOKEN, _NEXT_STATE = range(3)
"""Where a path came from."""


def read_alignment_heads(path: Path, hf_config: Any) -> tuple[tuple[int, int], ...]:
    """Return the pairs of a layer and a head in `alignment_heads` of generation_config.json.

    None where it has none; CheckpointError for those that the decoder has not.
    """
    pairs = read_generation_config(path).get("alignment_heads") or ()
    most = (hf_config.decoder_layers, hf_config.decoder_attention_heads)
    is_known = isinstance(pairs, list | tuple) and all(_is_head(pair, most) for pair in pairs)
    if not is_known:
        raise CheckpointError(
            f"`alignment_heads` of generation_config.json is {str(pairs)[:200]}; it must be pairs "
            f"of a layer and a head, of {most[0]} layers with {most[1]} heads each"
        )
    return tuple((layer, head) for layer, head in pairs)


def _is_head(pair: Any, most: tuple[int, int]) -> bool:
    is_pair = isinstance(pair, list | tuple) and len(pair) == 2
    return is_pair and all(
        type(one) is int and 0 <= one < limit for one, limit in zip(pair, most, strict=True)
    )


def find_ends(weights: Float[np.ndarray, "heads T S"], *, width: int) -> Int[np.ndarray, " T"]:
    """Return the encoder's state at which each token begins to be attended to.

    A token that is read attends to what comes behind it: so it is where it ends. `width`: of the
    median filter, odd.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        deviation = weights.std(axis=1, keepdims=True)
        alike = (weights - weights.mean(axis=1, keepdims=True)) / deviation
    smooth = _filter(alike, width).mean(axis=0)
    tokens, states = _find_path(-smooth.astype(np.float64))
    is_first = np.diff(tokens, prepend=-1) > 0
    return states[is_first]


def _filter(values: Float[np.ndarray, "heads T S"], width: int) -> Float[np.ndarray, "heads T S"]:
    """Return medians along the last axis, whose ends are mirrored; NaNs are the greatest."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, ((0, 0), (0, 0), (half, half)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    # Token by token: all windows at once take `width` times the memory of the weights.
    medians = np.empty_like(values)
    for token in range(values.shape[1]):
        medians[:, token] = np.partition(windows[:, token], half, axis=-1)[..., half]
    return medians


def _find_path(
    costs: Float[np.ndarray, "T S"],
) -> tuple[Int[np.ndarray, " path"], Int[np.ndarray, " path"]]:
    """Return the tokens and the states of the cheapest path from the first pair to the last.

    Sums are float32, as HF's. A diagonal of the table at a time: its places depend on the two
    diagonals before.
    """
    num_tokens, num_states = costs.shape
    total = np.full((num_tokens + 1, num_states + 1), np.inf, np.float32)
    origin = np.full(total.shape, _NEXT_TOKEN, np.int8)
    total[0, 0] = 0
    origin[0] = _NEXT_STATE
    for diagonal in range(2, num_tokens + num_states + 1):
        first = max(1, diagonal - num_states)
        tokens = np.arange(first, min(num_tokens, diagonal - 1) + 1)
        states = diagonal - tokens
        both, token = total[tokens - 1, states - 1], total[tokens - 1, states]
        state = total[tokens, states - 1]
        is_both = (both < token) & (both < state)
        is_token = ~is_both & (token < both) & (token < state)
        before = np.where(is_both, both, np.where(is_token, token, state))
        origin[tokens, states] = np.where(
            is_both, _BOTH, np.where(is_token, _NEXT_TOKEN, _NEXT_STATE)
        )
        total[tokens, states] = costs[tokens - 1, states - 1] + before
    return _walk_back(origin)


def _walk_back(
    origin: Int[np.ndarray, "_rows _columns"],
) -> tuple[Int[np.ndarray, " path"], Int[np.ndarray, " path"]]:
    token, state = origin.shape[0] - 1, origin.shape[1] - 1
    path: list[Sequence[int]] = []
    while token > 0 or state > 0:
        path.append((token - 1, state - 1))
        came_from = origin[token, state]
        token -= came_from != _NEXT_STATE
        state -= came_from != _NEXT_TOKEN
    tokens, states = np.array(path[::-1]).T
    return tokens, states
