"""`speculative_config`: who guesses tokens ahead, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmjax.errors import ConfigError

METHODS = ("ngram", "draft_model", "mtp", "eagle3")
MAX_GUESSED = 15
"""Tokens that are guessed at once, at most: with the one before them they are the rows that the
CPU's kernels multiply in one order of sums (docs/determinism.md)."""
MAX_NGRAM = 64
DEFAULT_NGRAM = 5
"""Both ends of the n-grams' sizes, where neither is given, as in vLLM."""
_NAMES_OF = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("model", "revision"),
    "mtp": ("model", "revision"),
    "eagle3": ("model", "revision"),
}
"""The fields that not all methods have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What is guessed ahead of each request, and verified."""

    method: str
    """ngram: what came behind the last tokens where they stood before; draft_model: what a smaller
    model of the same family answers; mtp: what a layer of the checkpoint predicts, or of another
    checkpoint that was trained with it; eagle3: what such a one predicts of several layers'
    states."""
    num_speculative_tokens: int
    """Tokens that are guessed at once, at most."""
    prompt_lookup_max: int = 0
    """Tokens of the longest n-gram that is looked up; 0: of another method."""
    prompt_lookup_min: int = 0
    """Tokens of the shortest one."""
    model: str | None = None
    """Directory or hub id of the model that guesses."""
    revision: str | None = None
    """Its branch, tag or commit, of a hub id."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "SpeculativeConfig | None":
        """Return the configuration of `speculative_config`; None: nothing is guessed.

        Raises ConfigError for a field that is unknown, missing or out of its bounds.
        """
        if not given:
            return None
        # As vLLM does, where a model is named and no method.
        method = given.get("method", "draft_model" if given.get("model") is not None else None)
        if method not in METHODS:
            raise ConfigError(
                f"`speculative_config` has {method!r} as its `method`; give 'ngram', "
                "'draft_model' or 'eagle3' with a `model`, or 'mtp'"
            )
        _check_names(given, method, [one.name for one in fields(cls)])
        number = _number(given, "num_speculative_tokens", MAX_GUESSED)
        if number is None:
            raise ConfigError(
                "`speculative_config` lacks `num_speculative_tokens`; give the tokens that are "
                f"guessed at once, from 1 to {MAX_GUESSED}"
            )
        if method == "ngram":
            return cls(method=method, num_speculative_tokens=number, **_parse_ngram(given))
        names_one = method in ("draft_model", "eagle3") or given.get("model") is not None
        own = _parse_draft(given) if names_one else {}
        return cls(method=method, num_speculative_tokens=number, **own)


def _check_names(given: Mapping[str, Any], method: str, known: list[str]) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                f"`speculative_config` has a field `{name}`, which mmjax does not know; known "
                f"are {', '.join(f'`{one}`' for one in known)}"
            )
        owners = [one for one, names in _NAMES_OF.items() if name in names] or [method]
        if method not in owners and given[name] is not None:
            raise ConfigError(
                f"`speculative_config` has a field `{name}`, which is of the method '{owners[0]}', "
                f"and '{method}' as its `method`; leave one of them out"
            )


def _parse_ngram(given: Mapping[str, Any]) -> dict[str, Any]:
    largest = _number(given, "prompt_lookup_max", MAX_NGRAM)
    smallest = _number(given, "prompt_lookup_min", MAX_NGRAM)
    most, least = largest or smallest or DEFAULT_NGRAM, smallest or largest or DEFAULT_NGRAM
    if least > most:
        raise ConfigError(
            f"`speculative_config` has {least} as `prompt_lookup_min`, above `prompt_lookup_max`, "
            f"{most}; give at most as much"
        )
    return {"prompt_lookup_max": most, "prompt_lookup_min": least}


def _parse_draft(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in _NAMES_OF["draft_model"]:
        value = given.get(name)
        if not (isinstance(value, str) and value) and (name == "model" or value is not None):
            raise ConfigError(
                f"`speculative_config` has {value!r} as `{name}`; give "
                + {
                    "model": "the directory or hub id of a smaller model of the same family, or "
                    "of an assistant, or of an EAGLE-3 head",
                    "revision": "a branch, tag or commit",
                }[name]
            )
    return {"model": given["model"], "revision": given.get("revision")}


def _number(given: Mapping[str, Any], name: str, most: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(
            f"`speculative_config` has {value!r} as `{name}`; give an integer from 1 to {most}"
        )
    return value
