"""Which kwargs an HF processor knows: what it does not know is refused by name, never dropped.

Knows nothing of values: those are the HF processor's, and `hf_kwargs`' where they make bombs.
"""

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, NamedTuple

from mmjax.errors import RequestValueError
from mmjax.processing.hf_kwargs import (
    HF_KWARGS_SCOPES,
    MM_KWARGS_PARAM,
    SERVERS_OWN_KWARGS,
    TOKENIZERS_OWN_KWARGS,
    check_request_kwargs,
)

KnownKwargs = Mapping[str, frozenset[str]]
"""By scope (`images_kwargs`), the names that have an effect there; under "", those of no scope."""

_PART_BY_SCOPE = {
    "images_kwargs": "image_processor",
    "videos_kwargs": "video_processor",
    "audio_kwargs": "feature_extractor",
}
_WITHOUT_EFFECT = frozenset({"device", "disable_grouping"})
"""For torch alone; pictures are processed by Pillow and numpy."""
_MAX_NAME_LENGTH = 64


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
