"""`LLM.embed`, `encode` and `score`: prompts to vectors, under vLLM's names."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any, cast

import msgspec

from mmjax.config.engine_config import EngineConfig
from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.output.pooled import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    score_vectors,
    vectors_of,
)
from mmjax.frontend.prompt.pooling import find_task, pooling_request
from mmjax.frontend.requests.prompts import PromptType
from mmjax.llm.arguments import LoRARequests, as_prompts
from mmjax.params.pooling_params import PoolingParams, PoolingTask


def _complete(params: PoolingParams | None, **fields: Any) -> PoolingParams:
    """Return parameters with some fields set; RequestTypeError for what are none."""
    if params is not None and not isinstance(params, PoolingParams):
        raise RequestTypeError.about(
            "pooling_params",
            f"is a {type(params).__name__}; give a PoolingParams, for all prompts, as in "
            "PoolingParams(use_activation=False)",
        )
    return msgspec.structs.replace(params or PoolingParams(), **fields)


class PoolingMethods:
    """What an `LLM` with `runner` pooling answers."""

    config: EngineConfig

    def embed(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector for each prompt; the prompts are those of `generate`."""
        params = _complete(pooling_params, task="embed")
        outputs = self._run_pooling(prompts, params, use_tqdm, lora_request)
        return [
            PoolingRequestOutput.of(
                output, EmbeddingOutput(embedding=vectors_of(output)[0].tolist())
            )
            for output in outputs
        ]

    def encode(
        self,
        prompts: PromptType | Iterable[PromptType],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a vector for each prompt, or for each of its tokens.

        Args:
            prompts: As of `generate`.
            pooling_params: Of all of them.
            use_tqdm: Whether progress is shown.
            lora_request: As in `generate`.
            pooling_task: "embed" or "token_embed"; None: what the model was trained for.
        """
        task = {} if pooling_task is None else {"task": pooling_task}
        params = _complete(pooling_params, **task)
        outputs = self._run_pooling(prompts, params, use_tqdm, lora_request)
        is_one = find_task(params, self.config.model) == "embed"
        found = [vectors_of(output) for output in outputs]
        return [
            PoolingRequestOutput.of(output, PoolingOutput(data=one[0] if is_one else one))
            for output, one in zip(outputs, found, strict=True)
        ]

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequests = None,
    ) -> list[ScoringRequestOutput]:
        """Return how alike pairs of prompts are: one to one, or one to each of many.

        The late interaction (MaxSim) of the vectors of a model of many; the cosine of one's.
        A prompt may also be `{"content": [...]}`, of parts as a message has.
        """
        first, second = (
            [self._as_prompt(one) for one in as_prompts(cast(Any, data))]
            for data in (data_1, data_2)
        )
        if len(first) not in (1, len(second)):
            raise RequestValueError.about(
                "data_1",
                f"has {len(first)} prompts and `data_2` {len(second)}; give one, or as many",
            )
        # A cosine is of vectors of length 1, whatever these have else.
        params = _complete(pooling_params, use_activation=True)
        outputs = self._run_pooling([*first, *second], params, use_tqdm, lora_request)
        pairs = zip(cycle(outputs[: len(first)]), outputs[len(first) :], strict=False)
        scored = []
        for query, document in pairs:
            score = score_vectors(vectors_of(query), vectors_of(document))
            made = PoolingRequestOutput.of(document, ScoringOutput(score=score))
            made.prompt_token_ids = [*query.prompt_token_ids, *document.prompt_token_ids]
            scored.append(made)
        return scored

    def _as_prompt(self: Any, given: Any) -> PromptType:
        if isinstance(given, Mapping) and "content" in given:
            return self._chat.parse([{"role": "user", "content": given["content"]}])
        return cast(PromptType, given)

    def _run_pooling(
        self: Any,
        prompts: PromptType | Iterable[PromptType],
        params: PoolingParams,
        use_tqdm: bool,
        lora_request: LoRARequests,
    ) -> list[RequestOutput]:
        options = {"use_tqdm": use_tqdm, "lora_request": lora_request}
        return self.generate(as_prompts(prompts), pooling_request(params), **options)
