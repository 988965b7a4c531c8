"""A caller's prompt to messages for the engine: token ids, placeholders, tensors, limits.

In two steps. `prepare` does the work and refuses what cannot be served, in many threads at once,
and changes nothing. `committer.commit` notes what P1 is about to hold and hands the messages over.

Knows nothing of HTTP, of chat or of the engine.
"""

import random
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from mmjax.cache import BaseMultiModalProcessorCache, processor_cache_from_config
from mmjax.config import ModelConfig
from mmjax.errors import RequestValueError
from mmjax.frontend.engine_client.committer import OnCommit, SenderCacheCommitter
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.frontend.prompt.explain import Explanation, explain_prompt
from mmjax.frontend.prompt.processor_pool import ProcessorPool
from mmjax.frontend.prompt.prompts import ParsedPrompt, PromptDict, PromptType, parse_prompt
from mmjax.model_source import load_generation_defaults
from mmjax.processing.media.decode_budget import DecodeControl
from mmjax.processing.prepared import PreparedInputs
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest

__all__ = ["MAX_CHARS_PER_TOKEN", "InputProcessor", "ProcessedRequest", "PromptDict", "PromptType"]

MAX_CHARS_PER_TOKEN = 128
"""Longer texts cannot fit, and are refused before the tokenizer spends its time on them."""


class InputProcessor:
    """Turns prompts into messages for P1, or refuses them with the field that is wrong.

    Safe to call from several threads, which then work at the same time.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        cache: BaseMultiModalProcessorCache | None = None,
        enable_prefix_caching: bool = True,
    ) -> None:
        """Load tokenizer and processor; `cache` stands for the one of the configuration.

        Without a cache of either kind nobody asks for an item's content, and none is hashed.
        """
        self.model_config = model_config
        self._enable_prefix_caching = enable_prefix_caching
        self.cache = processor_cache_from_config(model_config.mm) if cache is None else cache
        self._pool = ProcessorPool(model_config, self.cache)
        self.tokenizer = self._pool.tokenizer
        self.generation_defaults = load_generation_defaults(model_config)
        self.committer = SenderCacheCommitter(self._pool, self.cache)
        self._random = random.Random(model_config.seed)
        self._counter = count()
        text_config = model_config.hf_config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)

    @property
    def allowed_mm_limits(self) -> Mapping[str, int]:
        """How many items of each modality one prompt may hold."""
        return self._pool.first.info.allowed_mm_limits

    @property
    def takes_embeds(self) -> bool:
        """Whether the model, whatever the operator says, takes embeddings in place of pictures."""
        return self._pool.first.info.get_data_parser().takes_plain_embeds("image")

    def get_placeholder_str(self, modality: str, i: int) -> str | None:
        """Return what stands for the i-th (from 1) item of a modality in a text without parts."""
        return self._pool.first.info.get_placeholder_str(modality, i)

    def check_mm_data(self, mm_data: Mapping[str, Any]) -> None:
        """Refuse what `prepare` would refuse of media, short of decoding them."""
        self._pool.first.info.parse_mm_data(mm_data)

    def default_sampling_params(self) -> SamplingParams:
        """Return what holds when the caller says nothing: the checkpoint's generation_config."""
        return SamplingParams(**self.generation_defaults.sampling)

    def warm_up(self) -> None:
        """Process one image, so that the first request finds everything imported."""
        limits = [name for name, limit in self.allowed_mm_limits.items() if limit > 0]
        with self._pool.borrow() as processor:
            inputs = processor.dummy_inputs.get_dummy_processor_inputs(
                self.model_config.max_model_len, dict.fromkeys(limits, 1)
            )
            processor.prepare(
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
        id_domain: str | None = None,
        priority: int = 0,
        on_commit: OnCommit | None = None,
    ) -> ProcessedRequest:
        """`prepare`, then `committer.commit`."""
        request = self.prepare(
            request_id,
            prompt,
            sampling_params,
            arrival_time=arrival_time,
            continues_prompt=continues_prompt,
            id_domain=id_domain,
            priority=priority,
        )
        self.committer.commit(request, on_commit)
        return request

    # ---- the first step -------------------------------------------------------------------------

    def prepare(
        self,
        request_id: str,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        continues_prompt: bool = True,
        id_domain: str | None = None,
        lora_name: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        control: DecodeControl | None = None,
    ) -> ProcessedRequest:
        """Tokenize, process the media, check the limits, and fan out into `n` messages.

        Changes no cache. `id_domain` says whose media ids these are; `control` is asked before
        anything is decoded.
        """
        params = sampling_params or self.default_sampling_params()
        parts = parse_prompt(prompt)
        self._check_text_length(parts)
        self._check_stop_token_ids(params)
        prepared = self.prepare_inputs(
            parts,
            id_domain=id_domain,
            request_id=self._unshared_id(request_id),
            control=control,
        )
        self._check_prompts(prepared)
        token_ids = list(prepared.prompt_token_ids)
        template = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=self._complete(params, num_prompt_tokens=len(token_ids)),
            eos_token_ids=self._eos_token_ids(),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            deadline=deadline,
            priority=priority,
            cache_salt=parts.cache_salt,
            lora_name=lora_name,
            encoder_prompt_token_ids=prepared.encoder_prompt_token_ids,
        )
        return ProcessedRequest.create(template, prepared, continues_prompt=continues_prompt)

    def prepare_inputs(
        self,
        prompt: ParsedPrompt,
        *,
        id_domain: str | None = None,
        request_id: str | None = None,
        control: DecodeControl | None = None,
    ) -> PreparedInputs:
        """Process a prompt alone: no sampling, no limits of the engine. Changes no cache.

        With `request_id`, items are named after it, and not hashed.
        """
        text = (prompt.token_ids or []) if prompt.text is None else prompt.text
        has_specials = prompt.text is None or prompt.add_special_tokens
        with self._pool.borrow() as processor:
            prepared = processor.prepare(
                text,
                dict(prompt.mm_data),
                mm_uuids=prompt.mm_uuids,
                hf_processor_mm_kwargs=dict(prompt.mm_processor_kwargs),
                tokenization_kwargs={} if has_specials else {"add_special_tokens": False},
                decoder_prompt=prompt.decoder_prompt,
                id_domain=id_domain,
                cache_salt=prompt.cache_salt,
                request_id=request_id,
                control=control,
            )
            processor.validate_item_sizes(prepared)
            return prepared

    def _unshared_id(self, request_id: str) -> str | None:
        """Return a name for items where no cache asks for their content, else None."""
        if self.cache is not None or self._enable_prefix_caching:
            return None
        # A caller may use an id again, and the engine keep an item of that name.
        return f"{request_id}.{next(self._counter)}"

    def explain(
        self,
        prompt: PromptType,
        *,
        id_domain: str | None = None,
        control: DecodeControl | None = None,
    ) -> Explanation:
        """Process a prompt as a request's, and describe it. Changes no cache; asks no engine.

        A prompt that no request could have is refused as the request would be.
        """
        parts = parse_prompt(prompt)
        self._check_text_length(parts)
        prepared = self.prepare_inputs(parts, id_domain=id_domain, control=control)
        self._check_prompts(prepared)
        with self._pool.borrow() as processor:
            return explain_prompt(processor, prepared, self.cache)

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
        own = self.tokenizer.eos_token_id
        known = self.generation_defaults.eos_token_ids or (int(own),)
        return sorted(known, key=lambda token_id: token_id != own)

    def close(self) -> None:
        """Give back what the cache holds outside of Python. Idempotent."""
        if self.cache is not None:
            self.cache.close()

    # ---- limits ---------------------------------------------------------------------------------

    def _check_text_length(self, parts: ParsedPrompt) -> None:
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

    def _check_prompts(self, prepared: PreparedInputs) -> None:
        self._check_prompt(prepared.prompt_token_ids, "prompt")
        if prepared.encoder_prompt_token_ids is not None:
            self._check_prompt(prepared.encoder_prompt_token_ids, "encoder prompt")

    def _check_prompt(self, token_ids: Sequence[int], name: str) -> None:
        if not token_ids:
            raise RequestValueError(f"the {name} is empty; give at least one token", param="prompt")
        longest = self.model_config.max_model_len
        if len(token_ids) >= longest:
            raise RequestValueError(
                f"the {name} has {len(token_ids)} tokens (its images included), but this model "
                f"holds {longest} with the answer; shorten it, or use fewer images",
                param="prompt",
            )
