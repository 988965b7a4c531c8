"""`speculative_config`: who guesses tokens ahead, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmjax.errors import ConfigError

METHODS = ("ngram",)
MAX_GUESSED = 15
"""Tokens that are guessed at once, at most: with the one before them they are the rows that the
CPU's kernels multiply in one order of sums (docs/determinism.md)."""
MAX_NGRAM = 64
DEFAULT_NGRAM = 5
"""Both ends of the n-grams' sizes, where neither is given, as in vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What is guessed ahead of each request, and verified."""

    method: str
    """ngram: what came behind the last tokens where they stood before."""
    num_speculative_tokens: int
    """Tokens that are guessed at once, at most."""
    prompt_lookup_max: int
    """Tokens of the longest n-gram that is looked up."""
    prompt_lookup_min: int
    """Tokens of the shortest one."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "SpeculativeConfig | None":
        """Return the configuration of `speculative_config`; None: nothing is guessed.

        Raises ConfigError for a field that is unknown, missing or out of its bounds.
        """
        if not given:
            return None
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"`speculative_config` has a field `{name}`, which mmjax does not know; known "
                    f"are {', '.join(f'`{one}`' for one in known)}"
                )
        if given.get("method") not in METHODS:
            raise ConfigError(
                f"`speculative_config` has {given.get('method')!r} as its `method`; give 'ngram', "
                "the only one so far"
            )
        largest = _number(given, "prompt_lookup_max", MAX_NGRAM)
        smallest = _number(given, "prompt_lookup_min", MAX_NGRAM)
        config = cls(
            method=given["method"],
            num_speculative_tokens=_number(given, "num_speculative_tokens", MAX_GUESSED) or 0,
            prompt_lookup_max=largest or smallest or DEFAULT_NGRAM,
            prompt_lookup_min=smallest or largest or DEFAULT_NGRAM,
        )
        if not config.num_speculative_tokens:
            raise ConfigError(
                "`speculative_config` lacks `num_speculative_tokens`; give the tokens that are "
                f"guessed at once, from 1 to {MAX_GUESSED}"
            )
        if config.prompt_lookup_min > config.prompt_lookup_max:
            raise ConfigError(
                f"`speculative_config` has {config.prompt_lookup_min} as `prompt_lookup_min`, "
                f"above `prompt_lookup_max`, {config.prompt_lookup_max}; give at most as much"
            )
        return config


def _number(given: Mapping[str, Any], name: str, most: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(
            f"`speculative_config` has {value!r} as `{name}`; give an integer from 1 to {most}"
        )
    return value
