"""/v1/embeddings, /pooling, /rerank and /score: prompts in, vectors or scores out."""

import base64
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mmjax.errors import RequestValueError
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.output.pooled import score_vectors, vectors_of
from mmjax.frontend.prompt.pooling import check_runner, find_task, pooling_request
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.frontend.requests.request import PromptSource
from mmjax.server.openai.chat_completions import ChatService
from mmjax.server.openai.continuation import created_at
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.generation import GenerationService, new_ids, with_extras
from mmjax.server.openai.protocol import ChatCompletionRequest, GenerationRequest
from mmjax.server.openai.streaming import collect, media_headers
from mmjax.server.openai.structure import errors_of_messages, renamed
from mmjax.server.openai.vectors.protocol import (
    ContentParam,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    VectorRequest,
)

_PROMPTS_AT_ONCE = 256
"""Of one request: an index's thousand texts leave room for the requests of others."""


class VectorService:
    """Serves them, where the engine's `runner` is pooling."""

    def __init__(
        self, client: AsyncEngineClient, chats: ChatService, generation: GenerationService
    ) -> None:
        self._chats = chats
        self._model_config = client.input_processor.model_config
        self._generation = generation
        self._at_once = min(_PROMPTS_AT_ONCE, client.capacity.max_num_seqs)

    async def embeddings(self, request: Request, body: EmbeddingRequest) -> Response:
        """Serve POST /v1/embeddings."""
        with _errors_of(body):
            found, answer = await self._run(request, body, "embd", body.prompts())
        data = [
            {"object": "embedding", "index": index, "embedding": _encode(body, vectors[0])}
            for index, vectors in enumerate(found)
        ]
        return answer(data=data)

    async def pooling(self, request: Request, body: PoolingRequest) -> Response:
        """Serve POST /pooling."""
        with _errors_of(body):
            found, answer = await self._run(request, body, "pool", body.prompts())
        is_one = find_task(body.to_pooling(), self._model_config) == "embed"
        data = []
        for index, vectors in enumerate(found):
            shown = vectors[0] if is_one else vectors
            one: dict[str, Any] = {"object": "pooling", "index": index}
            data.append({**one, "data": _encode(body, shown), "shape": list(shown.shape)})
        return answer(data=data)

    async def rerank(self, request: Request, body: RerankRequest) -> Response:
        """Serve POST /rerank."""
        given = [body.query, *body.documents]
        names = ["query", *_name_all("documents", body.documents)]
        vectors, answer = await self._run(request, body, "rerank", given, names=names)
        query, *documents = vectors
        scores = [score_vectors(query, document) for document in documents]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {
                "index": index,
                "relevance_score": scores[index],
                **({"document": _show(body.documents[index])} if body.return_documents else {}),
            }
            for index in order[: body.top_n or None]
        ]
        return answer(results=results)

    async def score(self, request: Request, body: ScoreRequest) -> Response:
        """Serve POST /score."""
        pair = body.pair()
        sides = [getattr(body, name) for name in pair]
        names = [one for side in zip(pair, sides, strict=True) for one in _name_all(*side)]
        first, second = (list(side) if isinstance(side, list) else [side] for side in sides)
        if len(first) not in (1, len(second)):
            raise RequestValueError.about(
                pair[0],
                f"has {len(first)} prompts and `{pair[1]}` {len(second)}; give one, or as many",
            )
        given = [*first, *second]
        vectors, answer = await self._run(request, body, "score", given, names=names)
        queries, documents = vectors[: len(first)], vectors[len(first) :]
        pairs = zip(queries * (len(documents) // len(queries)), documents, strict=True)
        data = [
            {"object": "score", "index": index, "score": score_vectors(*both)}
            for index, both in enumerate(pairs)
        ]
        return answer(data=data)

    async def _run(
        self,
        request: Request,
        body: VectorRequest,
        prefix: str,
        given: Sequence[Any],
        *,
        names: Sequence[str] = (),
    ) -> tuple[list[np.ndarray], Callable[..., Response]]:
        """Return the vectors of each prompt, and what makes the answer of its own fields.

        `names`: as those of `GenerationService.submit`; none: of `input`.
        """
        names = names or (["input"] if len(given) == 1 else _name_all("input", given))
        check_runner(self._model_config, pools=True)
        generation = body.to_generation()
        self._generation.check(request, generation)
        request_id, answer_id = new_ids(prefix, generation)
        sources: list[PromptSource] = [
            partial(self._make_prompt, one, body, generation) for one in given
        ]
        if isinstance(generation, ChatCompletionRequest):
            sources = [await self._chats.prompt_source(request, generation)]
        params = pooling_request(body.to_pooling())
        outputs: list[RequestOutput] = []
        streams: list[RequestStream] = []
        for start in range(0, len(sources), self._at_once):
            added = await self._generation.submit(
                request,
                generation,
                f"{request_id}-{start}" if start else request_id,
                sources[start : start + self._at_once],
                params,
                names=names[start : start + self._at_once],
            )
            found: dict[int, RequestOutput] = {}
            await collect(request, added, found.__setitem__)
            outputs += [found[number] for number in range(len(added))]
            streams += added
        number = sum(len(output.prompt_token_ids) for output in outputs)
        head = {
            "id": answer_id,
            "object": "list",
            "created": created_at(),
            "model": self._generation.answer_name(body.model),
            "usage": {"prompt_tokens": number, "completion_tokens": 0, "total_tokens": number},
        }

        def answer(**fields: Any) -> Response:
            return JsonResponse({**head, **fields}, headers=media_headers(streams))

        return [vectors_of(output) for output in outputs], answer

    def _make_prompt(
        self, given: Any, body: VectorRequest, generation: GenerationRequest
    ) -> PromptDict:
        """Return the prompt of a text, of token ids or of parts; in a thread."""
        if isinstance(given, str):
            made: PromptDict = {"prompt": given, "add_special_tokens": body.has_special_tokens}
        elif isinstance(given, ContentParam):
            message = {"role": "user", "content": given.model_dump()["content"]}
            made = self._chats.parser.parse([message])
        else:
            made = {"prompt_token_ids": given}
        return with_extras(made, generation)


def _name_all(name: str, given: Any) -> list[str]:
    """Return what the prompts of a field are called in errors."""
    return [f"{name}[{index}]" for index in range(len(given))] if type(given) is list else [name]


def _errors_of(body: EmbeddingRequest) -> AbstractContextManager[None]:
    """Rename the field of errors from the prompt to that which holds it."""
    return renamed({"prompt": "input"}) if body.messages is None else errors_of_messages()


def _encode(body: EmbeddingRequest, vectors: np.ndarray) -> Any:
    if body.encoding_format == "base64":
        return base64.b64encode(vectors.astype("<f4").tobytes()).decode()
    return vectors.tolist()


def _show(document: str | ContentParam) -> dict[str, Any]:
    if isinstance(document, str):
        return {"text": document}
    return {"multi_modal": document.model_dump()["content"]}
