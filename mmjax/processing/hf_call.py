"""How an HF processor is called: which kwargs it gets, which are refused, and what it may raise.

What it does not know is refused by name, never dropped; values are its own business, but where
they would make a bomb of an image.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from transformers import BatchFeature

from mmjax.decoders.limits import MediaLimits
from mmjax.errors import MMJaxError, ProcessingError, RequestTypeError, RequestValueError
from mmjax.system.logger import get_logger

logger = get_logger(__name__)

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

KnownKwargs = Mapping[str, frozenset[str]]
"""By scope (`images_kwargs`), the names that have an effect there; under "", those of no scope."""

_PART_BY_SCOPE = {
    "images_kwargs": "image_processor",
    "videos_kwargs": "video_processor",
    "audio_kwargs": "feature_extractor",
}
_WITHOUT_EFFECT = frozenset({"device", "disable_grouping"})
"""For torch alone; images are processed by Pillow and numpy."""
_MAX_NAME_LENGTH = 64
_MAX_KWARGS_SHOWN = 500
"""Characters: an error is logged, and kwargs may be a client's."""


def call_hf_processor(
    hf_processor: Callable[..., BatchFeature],
    data: Mapping[str, object],
    kwargs: Mapping[str, Any],
) -> BatchFeature:
    """Call an HF processor; whatever it raises becomes a ProcessingError.

    What a client can get wrong is checked before, and refused by name. Kwargs that a call cannot
    take (a tokenizer's, by a processor without one) are dropped, with a warning.

    Args:
        hf_processor: Any callable that returns tensors by name.
        data: `text`, `images`, `videos`, `audio`.
        kwargs: Flat, or by scope (`images_kwargs`); the operator's and the request's, merged.
    """
    accepted = _only_accepted(hf_processor, kwargs)
    takes_text_alone = taking_text_alone(hf_processor) if data.keys() == {"text"} else nullcontext()
    try:
        with takes_text_alone:
            return hf_processor(**data, **accepted, return_tensors="np")
    except MMJaxError:
        raise
    # HF processors raise anything over data and kwargs that they cannot take.
    except Exception as error:
        name, shown = type(hf_processor).__name__, str(accepted)[:_MAX_KWARGS_SHOWN]
        raise ProcessingError(
            f"Failed to apply {name} on data={_describe(data)} with kwargs={shown}: {error}"
        ) from error


def get_only_row(input_ids: Any) -> list[int]:
    """Return the token ids of a batch of one prompt: `[1, tokens]`, in any form."""
    (row,) = input_ids
    return row.tolist() if hasattr(row, "tolist") else list(row)


@contextmanager
def taking_text_alone(hf_processor: Any) -> Iterator[None]:
    """Have an HF processor take a text whose placeholders stand for media that come apart.

    HF's `ProcessorMixin` refuses it in `validate_inputs`, and does what it does to any text after.
    """
    if not hasattr(hf_processor, "validate_inputs"):
        yield
        return
    hf_processor.validate_inputs = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del hf_processor.validate_inputs


def _only_accepted(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    known = _read_signature(function)
    if known is None:
        return dict(kwargs)
    dropped = kwargs.keys() - known[""]
    if dropped:
        names = ", ".join(f"`{name}`" for name in sorted(dropped))
        logger.warning("%s does not take %s: dropped", type(function).__name__, names)
    return {key: value for key, value in kwargs.items() if key in known[""]}


def _describe(data: Mapping[str, object]) -> dict[str, str]:
    described = {}
    for key, value in data.items():
        if isinstance(value, str):
            described[key] = f"{len(value)} characters"
        elif isinstance(value, list):
            described[key] = ", ".join(str(getattr(v, "size", type(v).__name__)) for v in value)
        else:
            described[key] = type(value).__name__
    return described


# ---- whose kwargs win, and which only the server sets --------------------------------------------


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
    """Return (number of frames, (height, width)) of images and videos."""
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


# ---- which kwargs a processor knows --------------------------------------------------------------


class UnknownKwarg(NamedTuple):
    """A name that changes nothing, and what may have been meant."""

    path: str
    """As `images_kwargs.sise`."""
    hint: str


def list_known_kwargs(hf_processor: Any) -> KnownKwargs | None:
    """Return what a processor says that it knows; None where it takes any name.

    It says so by `known_kwargs`, by HF's typed dicts, or by the signature of its call.
    """
    known = getattr(hf_processor, "known_kwargs", None)
    if known is None and hasattr(hf_processor, "valid_processor_kwargs"):
        known = _read_typed_dicts(hf_processor)
    if known is None:
        known = _read_signature(hf_processor)
    if known is None:
        return None
    servers = SERVERS_OWN_KWARGS | TOKENIZERS_OWN_KWARGS | _WITHOUT_EFFECT
    return {scope: names - servers for scope, names in known.items()}


def names_of(valid_kwargs: Any) -> frozenset[str]:
    """Return the names of a typed dict, or those of a collection."""
    return frozenset(getattr(valid_kwargs, "__annotations__", valid_kwargs))


def find_unknown(mm_kwargs: Mapping[str, Any], known: KnownKwargs) -> UnknownKwarg | None:
    """Return the first name that the processor does not know, with the nearest that it knows."""
    everywhere = frozenset().union(*known.values())
    for scope, name, _ in iter_kwargs(mm_kwargs):
        if name not in (known.get(scope, frozenset()) if scope else everywhere):
            shown = str(name)[:_MAX_NAME_LENGTH]
            return UnknownKwarg(f"{scope}.{shown}" if scope else shown, _hint(shown, known))
    return None


def iter_kwargs(mm_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield (scope, name, value), with the scope "" for flat ones."""
    for name, value in mm_kwargs.items():
        if name not in HF_KWARGS_SCOPES:
            yield "", name, value
        elif isinstance(value, Mapping):
            yield from ((name, key, inner) for key, inner in value.items())


def check_known_kwargs(mm_kwargs: Mapping[str, Any], known: KnownKwargs | None) -> None:
    """Refuse a request's kwargs that the server sets itself, and those that nothing knows."""
    check_request_kwargs(mm_kwargs)
    unknown = None if known is None else find_unknown(mm_kwargs, known)
    if unknown is not None:
        raise RequestValueError(
            f"mm_processor_kwargs has `{unknown.path}`, which this model's processor does not "
            f"know; {unknown.hint}",
            param=f"{MM_KWARGS_PARAM}.{unknown.path}",
        )


def check_ceilings(mm_kwargs: Mapping[str, Any], largest: Mapping[str, Any]) -> None:
    """Refuse a request's numbers above those that memory was planned for.

    Args:
        mm_kwargs: The request's.
        largest: The kwargs under which an item is largest, flat or scoped. A flat one of the
            request is held against the largest of its name.
    """
    ceilings: dict[tuple[str, str], int] = {}
    for scope, path, most in _iter_numbers(largest):
        for place in {(scope, path), ("", path)}:
            ceilings[place] = max(most, ceilings.get(place, most))
    for scope, path, value in _iter_numbers(mm_kwargs):
        most = ceilings.get((scope, path), ceilings.get(("", path)))
        if most is not None and value > most:
            name = f"{scope}.{path}" if scope else path
            raise RequestValueError(
                f"`{name}` is {min(value, 10**18)} in mm_processor_kwargs, at most {most} is "
                "planned for; lower it, or raise it for the whole server by "
                "`--mm-processor-kwargs`",
                param=f"{MM_KWARGS_PARAM}.{name}",
            )


def _iter_numbers(mm_kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (scope, name or `name.key`, whole number)."""
    for scope, name, value in iter_kwargs(mm_kwargs):
        inner = value if isinstance(value, Mapping) else {"": value}
        for key, number in inner.items():
            if isinstance(number, int) and not isinstance(number, bool):
                yield scope, f"{name}.{key}" if key else name, number


def _read_typed_dicts(hf_processor: Any) -> KnownKwargs:
    """Read `ProcessorMixin.valid_processor_kwargs`, and its parts' own `valid_kwargs`.

    A modality that the processor has no part for has no names: they would change nothing.
    """
    declared = hf_processor.valid_processor_kwargs.__annotations__
    known = {"": names_of(declared) - {*HF_KWARGS_SCOPES, "common_kwargs"}}
    for scope, part_name in _PART_BY_SCOPE.items():
        part = getattr(hf_processor, part_name, None)
        names = names_of(declared.get(scope, ())) | names_of(getattr(part, "valid_kwargs", ()))
        known[scope] = frozenset() if part is None else names
    known["text_kwargs"] = names_of(declared.get("text_kwargs", ()))
    return known


def _read_signature(function: Callable[..., Any]) -> KnownKwargs | None:
    parameters = signature(function).parameters.values()
    if any(one.kind is Parameter.VAR_KEYWORD for one in parameters):
        return None
    keywords = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return {"": frozenset(one.name for one in parameters if one.kind in keywords)}


def _hint(name: str, known: KnownKwargs) -> str:
    paths = {
        key: f"{scope}.{key}" if scope else key for scope, keys in known.items() for key in keys
    }
    nearest = get_close_matches(name, sorted(paths), n=1)
    if nearest:
        return f"do you mean `{nearest[0]}`?"
    if not paths:
        return "it takes none"
    return f"known are {', '.join(f'`{key}`' for key in sorted(paths))}"
