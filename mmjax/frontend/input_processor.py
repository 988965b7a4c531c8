"""A caller's prompt to messages for the engine: token ids, placeholders, tensors, limits.

Knows nothing of HTTP, of chat or of the engine. Safe to call from several threads.
"""

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import msgspec

from mmjax.cache import processor_cache_from_config
from mmjax.config import ModelConfig
from mmjax.errors import RequestTypeError, RequestValueError
from mmjax.model_source import load_generation_defaults
from mmjax.models.registry import create_processor
from mmjax.processing.inputs import MultiModalInputs
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest

MAX_CHARS_PER_TOKEN = 128
"""Longer texts cannot fit, and are refused before the tokenizer spends its time on them."""

_MAX_SALT_LENGTH = 128


class PromptDict(TypedDict, total=False):
    """A prompt with more to it than text."""

    prompt: str
    prompt_token_ids: list[int]
    multi_modal_data: Mapping[str, Any] | None
    multi_modal_uuids: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    add_special_tokens: bool


PromptType = str | list[int] | PromptDict
"""What `LLM.generate` takes as one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedRequest:
    """One request, ready for the engine: one message for each of its `n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    messages: list[EngineCoreRequest]
    num_image_tokens: int
    continues_prompt: bool
    """Whether the output reads on from the prompt (a completion) or begins anew (a chat)."""


class _Prompt(NamedTuple):
    text: str | None
    token_ids: list[int] | None
    mm_data: Mapping[str, Any]
    mm_uuids: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any]
    cache_salt: str | None
    add_special_tokens: bool


class InputProcessor:
    """Turns prompts into messages for P1, or refuses them with the field that is wrong."""

    def __init__(self, model_config: ModelConfig) -> None:
        self.model_config = model_config
        # As for several senders: every request brings its tensors along.
        cache = processor_cache_from_config(model_config.mm, num_api_processes=2)
        self._processor = create_processor(model_config, cache=cache)
        self.tokenizer = self._processor.info.get_tokenizer()
        self.generation_defaults = load_generation_defaults(model_config)
        # HF tokenizers keep state while they encode: one thread at a time.
        self._lock = threading.Lock()
        self._random = random.Random(model_config.seed)
        text_config = model_config.hf_config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)

    @property
    def allowed_mm_limits(self) -> Mapping[str, int]:
        """How many items of each modality one prompt may hold."""
        return self._processor.info.allowed_mm_limits

    def default_sampling_params(self) -> SamplingParams:
        """Return what holds when the caller says nothing: the checkpoint's generation_config."""
        return SamplingParams(**self.generation_defaults.sampling)

    def warm_up(self) -> None:
        """Process one image, so that the first request finds everything imported."""
        limits = [name for name, limit in self.allowed_mm_limits.items() if limit > 0]
        inputs = self._processor.dummy_inputs.get_dummy_processor_inputs(
            self.model_config.max_model_len, dict.fromkeys(limits, 1)
        )
        with self._lock:
            self._processor.apply(
                inputs.prompt,
                inputs.mm_data,
                hf_processor_mm_kwargs=inputs.hf_processor_mm_kwargs,
            )

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        continues_prompt: bool = True,
    ) -> ProcessedRequest:
        """Tokenize, process the media, check the limits, and fan out into `n` messages."""
        params = sampling_params or self.default_sampling_params()
        parts = _parse_prompt(prompt)
        self._check_text_length(parts)
        self._check_stop_token_ids(params)
        with self._lock:
            inputs = self._apply(parts)
        token_ids = list(inputs.prompt_token_ids)
        features = inputs.to_features()
        self._check_prompt(token_ids)
        params = self._complete(params, num_prompt_tokens=len(token_ids))
        template = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            mm_features=features,
            sampling_params=params,
            eos_token_ids=self._eos_token_ids(),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            cache_salt=parts.cache_salt,
        )
        return ProcessedRequest(
            request_id=request_id,
            prompt=parts.text,
            prompt_token_ids=token_ids,
            messages=_fan_out(template),
            num_image_tokens=sum(item.mm_position.get_num_embeds() for item in features),
            continues_prompt=continues_prompt,
        )

    def _apply(self, parts: _Prompt) -> MultiModalInputs:
        prompt = (parts.token_ids or []) if parts.text is None else parts.text
        has_specials = parts.text is None or parts.add_special_tokens
        return self._processor.apply(
            prompt,
            dict(parts.mm_data),
            mm_uuids=parts.mm_uuids,
            hf_processor_mm_kwargs=dict(parts.mm_processor_kwargs),
            tokenization_kwargs={} if has_specials else {"add_special_tokens": False},
        )

    def _complete(self, params: SamplingParams, *, num_prompt_tokens: int) -> SamplingParams:
        room = self.model_config.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = params.seed
        if seed is None and not params.is_greedy:
            seed = self._random.getrandbits(31)
        return msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            seed=seed,
        )

    def _eos_token_ids(self) -> list[int]:
        known = self.generation_defaults.eos_token_ids
        return list(known) if known else [int(self.tokenizer.eos_token_id)]

    # ---- limits ---------------------------------------------------------------------------------

    def _check_text_length(self, parts: _Prompt) -> None:
        limit = self.model_config.max_model_len * MAX_CHARS_PER_TOKEN
        if parts.text is not None and len(parts.text) > limit:
            raise RequestValueError(
                f"the prompt has {len(parts.text)} characters, and this model reads "
                f"{self.model_config.max_model_len} tokens; shorten it",
                param="prompt",
            )

    def _check_stop_token_ids(self, params: SamplingParams) -> None:
        bad = next((i for i in params.stop_token_ids if not 0 <= i < self._vocab_size), None)
        if bad is not None:
            raise RequestValueError(
                f"`stop_token_ids` holds {bad}; ids of this model lie in [0, {self._vocab_size})",
                param="stop_token_ids",
            )

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestValueError("the prompt is empty; give at least one token", param="prompt")
        longest = self.model_config.max_model_len
        if len(token_ids) >= longest:
            raise RequestValueError(
                f"the prompt has {len(token_ids)} tokens (its images included), but this model "
                f"holds {longest} with the answer; shorten it, or use fewer images",
                param="prompt",
            )


def _parse_prompt(prompt: PromptType) -> _Prompt:
    if isinstance(prompt, str):
        return _Prompt(prompt, None, {}, None, {}, None, True)
    if isinstance(prompt, list):
        return _Prompt(None, _token_list(prompt), {}, None, {}, None, True)
    if not isinstance(prompt, Mapping):
        raise RequestTypeError(
            f"a prompt is a str, a list of ids or a dict, not {type(prompt).__name__}",
            param="prompt",
        )
    unknown = sorted(set(prompt) - set(PromptDict.__annotations__))
    if unknown:
        raise RequestValueError(
            f"a prompt has no field `{unknown[0]}`; known are "
            f"{', '.join(f'`{name}`' for name in PromptDict.__annotations__)}",
            param=unknown[0],
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if (text is None) == (token_ids is None):
        raise RequestValueError(
            "a prompt needs either `prompt` or `prompt_token_ids`, and not both", param="prompt"
        )
    if text is not None and not isinstance(text, str):
        raise RequestTypeError(f"`prompt` must be a str, not {type(text).__name__}", param="prompt")
    return _Prompt(
        text=text,
        token_ids=None if token_ids is None else _token_list(token_ids),
        mm_data=_mapping(prompt, "multi_modal_data"),
        mm_uuids=_mapping(prompt, "multi_modal_uuids") or None,
        mm_processor_kwargs=_mapping(prompt, "mm_processor_kwargs"),
        cache_salt=_salt(prompt.get("cache_salt")),
        add_special_tokens=prompt.get("add_special_tokens", True),
    )


def _token_list(token_ids: Any) -> list[int]:
    if not isinstance(token_ids, Sequence) or any(
        isinstance(i, bool) or not isinstance(i, int) for i in token_ids
    ):
        raise RequestTypeError(
            "`prompt_token_ids` must be a list of integers", param="prompt_token_ids"
        )
    return list(token_ids)


def _mapping(prompt: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = prompt.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestTypeError(f"`{name}` must be a dict, not {type(value).__name__}", param=name)
    return value


def _salt(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_SALT_LENGTH:
        raise RequestValueError(
            f"`cache_salt` must be a str of 1 to {_MAX_SALT_LENGTH} characters",
            param="cache_salt",
        )
    return value


def _fan_out(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}-{index}",
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else _next_seed(params.seed, index),
            ),
        )
        for index in range(params.n)
    ]


def _next_seed(seed: int, index: int) -> int:
    # Seeds are 64-bit: the last one's neighbour is the first.
    return (seed + index + 2**63) % 2**64 - 2**63
