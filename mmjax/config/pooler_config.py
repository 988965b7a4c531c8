"""`pooler_config`: how a prompt's hidden states become vectors, under vLLM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from mmjax.errors import ConfigError, RequestError
from mmjax.params.pooling_params import PoolingParams, PoolingType


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerConfig:
    """What holds for requests that do not say it."""

    pooling_type: PoolingType = "LAST"
    """Of `embed`: the last token's state, or the mean of all."""
    use_activation: bool = True
    """Whether vectors are divided by their length."""
    dimensions: int | None = None
    """As of a request; of a model that was trained so."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "PoolerConfig":
        """Return the configuration; ConfigError for a field that is unknown or wrong."""
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(
                    f"`pooler_config` has a field `{name}`, which mmjax does not know; known are "
                    f"{', '.join(f'`{one}`' for one in known)}"
                )
        config = cls(**{name: value for name, value in given.items() if value is not None})
        try:
            PoolingParams(**{name: getattr(config, name) for name in known})
        except RequestError as error:
            raise ConfigError(f"`pooler_config` is wrong: {error.message}") from error
        return config
