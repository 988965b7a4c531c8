"""Kwargs for HF processors: whose win, what a request may not set, and what would be a bomb."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.processing.media.decode import MediaLimits

HF_KWARGS_SCOPES = ("text_kwargs", "images_kwargs", "videos_kwargs", "audio_kwargs")

MM_KWARGS_PARAM = "mm_processor_kwargs"
"""The field that errors name."""

SERVERS_OWN_KWARGS = frozenset(
    {
        *("text", "images", "videos", "audio", "audios", "return_tensors", "video_metadata"),
        *("return_metadata", "return_mm_token_type_ids", "return_text_replacement_offsets"),
    }
)
TOKENIZERS_OWN_KWARGS = frozenset(
    {
        *("max_length", "pad_to_multiple_of", "padding", "return_overflowing_tokens"),
        *("split_special_tokens", "stride", "text_pair", "text_pair_target", "text_target"),
        *("is_split_into_words", "truncation", "add_special_tokens", "padding_side", "verbose"),
        *("return_attention_mask", "return_length", "return_offsets_mapping"),
        *("return_special_tokens_mask", "return_token_type_ids", "sanitize_control_tokens"),
    }
)
"""A prompt padded to 10^9 tokens does not raise: the tokenizer's allocator ends the process. And a
prompt whose media are cached never comes by the HF processor: there they would change nothing."""
_SIZES = ("size", "crop_size", "pad_size")


def merge_mm_kwargs(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Merge kwargs for an HF processor; later levels win, and in a level the scoped ones.

    `{"a": 1}, {"images_kwargs": {"a": 2}}, {"a": 3}` -> `{"images_kwargs": {}, "a": 3}`.
    """
    merged: dict[str, Any] = {}
    for level in levels:
        for key, value in level.items():
            if key in HF_KWARGS_SCOPES:
                continue
            for scope in HF_KWARGS_SCOPES:
                merged.get(scope, {}).pop(key, None)
            merged[key] = _merge_values(merged.get(key), value)
        for scope in HF_KWARGS_SCOPES:
            for key, value in (level.get(scope) or {}).items():
                merged.pop(key, None)
                scoped = merged.setdefault(scope, {})
                scoped[key] = _merge_values(scoped.get(key), value)
    return merged


def _merge_values(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _merge_values(old.get(key), value) for key, value in new.items()}}


def check_request_kwargs(mm_kwargs: Mapping[str, object]) -> None:
    """Refuse a request's kwargs that only the server sets, and scopes that are no mappings."""
    _check_names(mm_kwargs, "")
    for scope in HF_KWARGS_SCOPES:
        scoped = mm_kwargs.get(scope)
        if isinstance(scoped, Mapping):
            _check_names(scoped, f"{scope}.")
        elif scoped is not None:
            raise RequestTypeError(
                f"mm_processor_kwargs has a `{type(scoped).__name__}` as `{scope}`; give a dict",
                param=MM_KWARGS_PARAM,
            )


def _check_names(kwargs: Mapping[str, object], place: str) -> None:
    for key in sorted(SERVERS_OWN_KWARGS & kwargs.keys()):
        raise RequestValueError(
            f"mm_processor_kwargs has `{place}{key}`, which the server sets itself; leave it out",
            param=MM_KWARGS_PARAM,
        )
    for key in sorted(TOKENIZERS_OWN_KWARGS & kwargs.keys()):
        raise RequestValueError(
            f"mm_processor_kwargs has `{place}{key}`, which is the tokenizer's; leave it out",
            param=MM_KWARGS_PARAM,
        )


def check_sizes(
    mm_data: Mapping[str, object], kwargs: Mapping[str, Any], limits: MediaLimits
) -> None:
    """Refuse kwargs by which media would be scaled, cropped or padded to bombs.

    Args:
        mm_data: `images` and `videos`, as the HF processor takes them.
        kwargs: For it, flat or scoped; sizes in HF's forms.
        limits: Of what may be decoded; what is made of it may be no larger.
    """
    for name, most in (("images", limits.max_image_pixels), ("videos", limits.max_video_pixels)):
        media = mm_data.get(name)
        scoped = {**kwargs, **(kwargs.get(f"{name}_kwargs") or {})}
        asked = {key: scoped[key] for key in _SIZES if scoped.get(key) is not None}
        if not asked or not isinstance(media, list | tuple):
            continue
        for num_frames, shape in _shapes(media):
            for key, size in asked.items():
                num_pixels = num_frames * _count_pixels(size, shape)
                if num_pixels > most:
                    raise RequestValueError(
                        f"`{key}` in mm_processor_kwargs makes {min(num_pixels, 10**18)} pixels "
                        f"of {shape[1]}x{shape[0]}, at most {most} are accepted; lower it, or "
                        "leave it out",
                        param=MM_KWARGS_PARAM,
                    )


def _shapes(media: Iterable[Any]) -> set[tuple[int, tuple[int, int]]]:
    """Return (number of frames, (height, width)) of pictures and videos."""
    shapes = set()
    for one in media:
        frames = one[0] if isinstance(one, tuple) else one
        if isinstance(frames, Image.Image):
            shapes.add((1, (frames.height, frames.width)))
        elif np.ndim(frames) == 4:
            shapes.add((len(frames), tuple(np.shape(frames)[1:3])))
    return shapes


def _count_pixels(size: Any, shape: tuple[int, int]) -> int:
    """Return how many pixels a frame has at a size, however HF reads it; 0 where it will not."""
    if isinstance(size, list | tuple):
        return _product(*size) if len(size) == 2 else 0
    if not isinstance(size, Mapping):
        size = {"shortest_edge": size}
    shortest, longest = size.get("shortest_edge"), size.get("longest_edge")
    by_edges = _product(shortest, shortest) * max(shape) // max(1, min(shape))
    if longest is not None:
        by_longest = _product(longest, longest)
        by_edges = by_longest if shortest is None else min(by_edges, by_longest)
    return max(
        by_edges,
        _product(size.get("height"), size.get("width")),
        _product(size.get("max_height"), size.get("max_width")),
    )


def _product(one: Any, other: Any) -> int:
    sides = (one, other)
    if any(isinstance(side, bool) or not isinstance(side, int | float) for side in sides):
        return 0
    # NaN, infinity and negative sides: no array has them, and HF says so.
    return int(one) * int(other) if all(0 < side < float("inf") for side in sides) else 0
