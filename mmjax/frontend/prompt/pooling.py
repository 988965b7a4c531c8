"""What a request for vectors asks for, with what the model and the operator say."""

import msgspec

from mmjax.config.engine_config import ModelConfig
from mmjax.errors import ConfigError, RequestValueError
from mmjax.params.pooling_params import PoolingParams, PoolingTask
from mmjax.params.sampling_params import SamplingParams


def pooling_request(pooling: PoolingParams) -> SamplingParams:
    """Return the parameters of a request for vectors: with room for a token, and without one."""
    return SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, pooling=pooling)


def check_runner(config: ModelConfig, *, pools: bool) -> None:
    """Raise RequestValueError where text is asked of a model that gives vectors, or these of it."""
    if pools and not config.pools:
        raise RequestValueError(
            f"`{config.public_name}` is served for text, and gives no vectors; start it with "
            "`--runner pooling`",
            param="model",
        )
    if config.pools and not pools:
        raise RequestValueError(
            f"`{config.public_name}` is served for vectors (`--runner pooling`), and generates no "
            "text; ask /v1/embeddings, /pooling, /score or /rerank, or `LLM.embed`, `encode` or "
            "`score`",
            param="model",
        )


def find_task(pooling: PoolingParams, config: ModelConfig) -> PoolingTask:
    """Return what a request wants: where it does not say, what the model was trained for."""
    return pooling.task or ("token_embed" if config.is_multi_vector else "embed")


def complete_pooling(params: SamplingParams, config: ModelConfig) -> SamplingParams:
    """Return the parameters with all that a request for vectors leaves out; RequestValueError."""
    pooling = params.pooling
    check_runner(config, pools=pooling is not None)
    if pooling is None:
        return params
    task = find_task(pooling, config)
    if task == "embed" and config.is_multi_vector:
        raise RequestValueError(
            f"`{config.public_name}` gives a vector for each token, and none for a whole prompt; "
            "ask for `token_embed`: /pooling, or `LLM.encode`",
            param="task",
        )
    if pooling.dimensions is not None:
        try:
            config.check_dimensions(pooling.dimensions)
        except ConfigError as error:
            raise RequestValueError(str(error), param="dimensions") from error
    pooler, normalizes = config.pooler, pooling.use_activation
    completed = PoolingParams(
        task=task,
        dimensions=pooling.dimensions or pooler.dimensions,
        use_activation=pooler.use_activation if normalizes is None else normalizes,
        pooling_type=pooling.pooling_type or pooler.pooling_type,
    )
    return msgspec.structs.replace(params, pooling=completed)
