"""Process prompts to messages for the engine: token ids, placeholders, tensors, limits.

In two steps. `prepare` does the work and refuses invalid requests, in several threads at once, and
changes nothing. `committer.commit` updates the sender cache and passes the messages on.

Knows nothing of HTTP, of chat or of the engine.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import msgspec

from mmjax.cache import BaseMultiModalProcessorCache, processor_cache_from_config
from mmjax.config.engine_config import ModelConfig
from mmjax.errors import ContextLengthError, RequestValueError
from mmjax.frontend.media.connector import MediaConnector
from mmjax.frontend.prompt.committer import OnCommit, SenderCacheCommitter
from mmjax.frontend.prompt.explain import Explanation, explain_prompt
from mmjax.frontend.prompt.grammars import GrammarReader
from mmjax.frontend.prompt.pooling import complete_pooling
from mmjax.frontend.prompt.processor_pool import ProcessorPool
from mmjax.frontend.requests.prompts import ParsedPrompt, PromptType, parse_prompt
from mmjax.frontend.requests.request import GenerateRequest, ProcessedRequest
from mmjax.models.model_source import load_generation_defaults
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.encoder_budget import MultiModalProfiler
from mmjax.processing.media.decode_budget import Cancellation
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.transcripts import Transcriber
from mmjax.processing.validation import validate_num_embeds
from mmjax.system.request_times import current_times, measuring
from mmjax.transport.messages import EngineCoreRequest

MAX_CHARS_PER_TOKEN = 128
"""Longer texts cannot fit, and are refused before tokenization."""

_MEDIA: Mapping[str, str] = {"image": "images", "video": "videos", "audio": "clips of sound"}
"""Modality -> its items, as errors call them."""


class InputProcessor:
    """Processes prompts to messages for P1; `RequestError` names a wrong field. Thread-safe."""

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        cache: BaseMultiModalProcessorCache | None = None,
        make_connector: Callable[..., MediaConnector] = MediaConnector,
        enable_prefix_caching: bool = True,
        enable_tower_connector_lora: bool = False,
    ) -> None:
        """Load tokenizer and processor; `cache` None: that of `model_config`.

        `make_connector` takes what `MediaConnector` does. Without a processor cache and prefix
        caching (or what else of `CacheConfig.finds_items`), items are not hashed.
        """
        self.model_config = model_config
        self._enable_prefix_caching = enable_prefix_caching
        self.cache = processor_cache_from_config(model_config.mm) if cache is None else cache
        self._pool = ProcessorPool(model_config, self.cache)
        self.item_store = self._pool.item_store
        """What was processed, on disk; None: nothing is kept there."""
        self.connector = make_connector(
            model_config.mm,
            # Whether an image must be decoded is not known before it was looked for on disk.
            budget=None if self.item_store is not None else self._pool.first.decode_budget,
            is_cached=self._is_cached,
        )
        self.tokenizer = self._pool.tokenizer
        self.generation_defaults = load_generation_defaults(model_config)
        self.grammars = GrammarReader()
        self.committer = SenderCacheCommitter(
            self._pool, self.cache, enable_tower_connector_lora=enable_tower_connector_lora
        )
        self._random = random.Random(model_config.seed)
        self._counter = count()
        text_config = model_config.hf_config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        self._described_tokens: Mapping[str, int] | None = None
        added = self.tokenizer.added_tokens_decoder
        self.special_ids = {
            *self.tokenizer.all_special_ids,
            *(token_id for token_id, token in added.items() if token.special),
        }
        """Ids of control tokens."""

    @property
    def info(self) -> BaseProcessingInfo:
        """What the model's family says of its items; for reading alone."""
        return self._pool.first.info

    @property
    def max_prompt_chars(self) -> int:
        """The longest text; a longer one cannot fit, whatever the tokenizer makes of it."""
        return self.model_config.max_model_len * MAX_CHARS_PER_TOKEN

    @property
    def keeps_token_ids(self) -> bool:
        """Whether a prompt of token ids goes to the model as it is, around its images.

        Not where the family's processor reads text, and writes ids into text before.
        """
        kind, base = type(self._pool.first), BaseMultiModalProcessor
        return (
            kind._apply_hf_processor_tokens_only is base._apply_hf_processor_tokens_only
            and kind._create_prompts is base._create_prompts
        )

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids."""
        self._check_text_length(ParsedPrompt(text=text))
        with self._pool.borrow() as processor:
            tokenizer = processor.info.get_tokenizer()
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def tokenize_pieces(
        self, pieces: Sequence[tuple[str, bool]], add_special_tokens: bool
    ) -> list[int]:
        """Return the ids of a prompt in pieces, each with whether it is mere text.

        RequestValueError if one that is mere text would become a special token all the same.
        """
        token_ids: list[int] = []
        with self._pool.borrow() as processor:
            tokenizer = processor.info.get_tokenizer()
            for place, (text, is_literal) in enumerate(pieces):
                if is_literal:
                    token_ids += self._tokenize_literal(tokenizer, text)
                else:
                    is_first = add_special_tokens and place == 0
                    token_ids += tokenizer.encode(text, add_special_tokens=is_first)
        return token_ids

    def _tokenize_literal(self, tokenizer: Any, text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if self.special_ids & set(ids):
            raise RequestValueError(
                f"a text holds `{text}`, which this model reads as a control token; remove it, or "
                "put a space into it",
                param="prompt",
            )
        return list(ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        _check_ids(token_ids, len(self.tokenizer), "tokens")
        with self._pool.borrow() as processor:
            tokenizer = processor.info.get_tokenizer()
            return tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def get_transcriber(self) -> Transcriber:
        """Return what has clips transcribed; `RequestError` for a model of another kind."""
        transcriber = self.info.transcriber
        if transcriber is None:
            hears = "audio" in self.info.supported_mm_limits
            other = ", or ask about the clip in a chat" if hears else ""
            raise RequestValueError(
                f"`{self.model_config.public_name}` does not transcribe; serve a Whisper, a "
                f"Voxtral or a Qwen3-ASR{other}",
                param="model",
            )
        return transcriber

    def default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's default sampling parameters (generation_config.json)."""
        return SamplingParams(**self.generation_defaults.sampling)

    def warm_up(self, num_processors: int = 1) -> None:
        """Process one image, so that the first request waits for no imports.

        `num_processors`: used at a time, so that no request waits until one is made.
        """
        self._pool.fill(num_processors)
        limits = [name for name, limit in self.info.allowed_mm_limits.items() if limit > 0]
        with self._pool.borrow() as processor:
            inputs = processor.dummy_inputs.get_dummy_processor_inputs(
                self.model_config.max_model_len, dict.fromkeys(limits, 1)
            )
            # One that is on disk would need no imports.
            processor.item_store = None
            processor.prepare(
                inputs.prompt,
                inputs.mm_data,
                hf_processor_mm_kwargs=inputs.hf_processor_mm_kwargs,
            )
            processor.item_store = self.item_store

    def process(
        self, request: GenerateRequest, on_commit: OnCommit | None = None
    ) -> ProcessedRequest:
        """`prepare`, then `committer.commit`."""
        processed = self.prepare(request)
        self.committer.commit(processed, on_commit)
        return processed

    # ---- prepare --------------------------------------------------------------------------------

    def prepare(
        self, request: GenerateRequest, *, cancellation: Cancellation | None = None
    ) -> ProcessedRequest:
        """Tokenize, process the media, check the limits, and make `n` messages. Changes no cache.

        `cancellation`: asked before each batch is decoded.
        """
        params = complete_pooling(request.sampling_params, self.model_config)
        parts = parse_prompt(request.prompt)
        self._check_text_length(parts)
        self._check_token_ids(request)
        banned = self._tokenize_bad_words(params.bad_words)
        if params.transcript is None:  # whose rules have them, and allow others first
            banned += map(list, self.generation_defaults.banned_token_ids)
        grammar = None
        if params.structured_outputs is not None:
            grammar = self.grammars.read(params.structured_outputs)
        prepared = self._prepare_inputs(
            parts,
            id_domain=request.id_domain,
            request_id=self._unshared_id(request.request_id),
            cancellation=cancellation,
        )
        self._check_prompts(prepared)
        token_ids = list(prepared.prompt_token_ids)
        template = EngineCoreRequest(
            request_id=request.request_id,
            prompt_token_ids=token_ids,
            sampling_params=self._complete(params, num_prompt_tokens=len(token_ids)),
            eos_token_ids=self._eos_token_ids(),
            deadline=request.deadline,
            priority=request.priority,
            cache_salt=parts.cache_salt,
            lora_name=request.lora_name,
            encoder_prompt_token_ids=prepared.encoder_prompt_token_ids,
            bad_words_token_ids=banned,
            grammar=grammar,
        )
        return ProcessedRequest.create(request, template, prepared, current_times())

    def _prepare_inputs(
        self,
        prompt: ParsedPrompt,
        *,
        id_domain: str | None = None,
        request_id: str | None = None,
        cancellation: Cancellation | None = None,
    ) -> PreparedInputs:
        """Process a prompt, without sampling parameters or the engine's limits. Changes no cache.

        With `request_id`, items are identified by it, and not hashed.
        """
        text = (prompt.token_ids or []) if prompt.text is None else prompt.text
        has_specials = prompt.text is None or prompt.add_special_tokens
        with self._pool.borrow() as processor:
            with measuring("process"):
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
                    cancellation=cancellation,
                )
            self._validate_item_sizes(processor, prepared)
            return self._truncate(prepared, prompt.truncate_prompt_tokens)

    def _truncate(self, prepared: PreparedInputs, most: int | None) -> PreparedInputs:
        """Keep the last tokens of a prompt."""
        if most is None:
            return prepared
        if prepared.mm_placeholders or prepared.encoder_prompt_token_ids is not None:
            raise RequestValueError.about(
                "truncate_prompt_tokens",
                "would cut a prompt with media, or an encoder's; leave it out",
            )
        # An answer has one token at least.
        most = self.model_config.max_model_len - 1 if most == -1 else most
        return replace(prepared, prompt_token_ids=list(prepared.prompt_token_ids)[-most:])

    def _validate_item_sizes(
        self, processor: BaseMultiModalProcessor[Any], prepared: PreparedInputs
    ) -> None:
        """Refuse an item with more embeddings than one of the size that the operator described."""
        if self._described_tokens is None:
            self._described_tokens = MultiModalProfiler(processor).measure_described()
        validate_num_embeds(processor.info, prepared.mm_placeholders, self._described_tokens)

    def _is_cached(self, modality: str, item: Any, cache_salt: str | None) -> bool:
        """Return whether the cache has an encoded item under the name of its content and salt."""
        first, base = self._pool.first, BaseMultiModalProcessor
        if self.cache is None or type(first)._get_hash_kwargs is not base._get_hash_kwargs:
            return False
        names = first.item_hasher.find_names(modality, item, cache_salt)
        return any(self.cache.is_cached(names))

    def _unshared_id(self, request_id: str) -> str | None:
        """Return an id for items that need no hash, since no cache is on; else None."""
        if self.cache is not None or self._enable_prefix_caching:
            return None
        # Request ids may repeat while the engine still caches the item of the first.
        return f"{request_id}.{next(self._counter)}"

    def explain(
        self,
        prompt: PromptType,
        *,
        id_domain: str | None = None,
        cancellation: Cancellation | None = None,
        is_bounded: bool = True,
    ) -> Explanation:
        """Process a prompt as `prepare` does, and describe the result. Changes no cache.

        Without `is_bounded`, also a prompt that is too long for the model.
        """
        parts = parse_prompt(prompt)
        self._check_text_length(parts)
        prepared = self._prepare_inputs(parts, id_domain=id_domain, cancellation=cancellation)
        if is_bounded:
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
        """Return what ends an answer: the tokenizer's EOS, the files' others, and the family's."""
        own = self.tokenizer.eos_token_id
        first = () if own is None else (int(own),)
        others = (*self.generation_defaults.eos_token_ids, *self.info.get_ending_token_ids())
        return list(dict.fromkeys((*first, *others)))

    def close(self) -> None:
        """End what decodes and what reads grammars, and free the cache's resources. Idempotent."""
        self.connector.close()
        self.grammars.close()
        if self.cache is not None:
            self.cache.close()
        if self.item_store is not None:
            self.item_store.close()

    # ---- limits ---------------------------------------------------------------------------------

    def _check_text_length(self, parts: ParsedPrompt) -> None:
        if parts.text is not None and len(parts.text) > self.max_prompt_chars:
            raise ContextLengthError(
                f"the prompt has {len(parts.text)} characters, and this model reads "
                f"{self.model_config.max_model_len} tokens; shorten it",
                param="prompt",
            )

    def _check_token_ids(self, request: GenerateRequest) -> None:
        params, generated = request.sampling_params, request.generated_token_ids
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            _check_ids(getattr(params, name) or (), self._vocab_size, name)
        if generated and len(generated) != params.n:
            raise RequestValueError.about(
                "generated_token_ids",
                f"holds tokens of {len(generated)} sequences, and `n` is {params.n}; give a list "
                "for each",
            )
        for token_ids in generated:
            _check_ids(token_ids, self._vocab_size, "generated_token_ids")

    def _tokenize_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return each word's tokens, and those it has behind a space if these are others.

        As vLLM's `SamplingParams.update_from_tokenizer`.
        """
        if not words:
            return []
        sequences: list[list[int]] = []
        with self._pool.borrow() as processor:
            tokenizer = processor.info.get_tokenizer()
            for word in words:
                plain, spaced = (
                    list(tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
                    for space in ("", " ")
                )
                if not plain:
                    raise RequestValueError.about(
                        "bad_words", "holds a text without a token; remove it"
                    )
                sequences.append(plain)
                if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                    sequences.append(spaced)
        return sequences

    def _check_prompts(self, prepared: PreparedInputs) -> None:
        longest = self.model_config.max_model_len
        media = [_MEDIA.get(name, name) for name, held in prepared.mm_hashes.items() if held]
        # Where there is an encoder's prompt, its items are in that one.
        has_encoder = prepared.encoder_prompt_token_ids is not None
        _check_prompt(prepared.prompt_token_ids, "prompt", longest, () if has_encoder else media)
        if prepared.encoder_prompt_token_ids is not None:
            own = self.info.max_encoder_len
            longest = longest if own is None else own + 1
            _check_prompt(prepared.encoder_prompt_token_ids, "encoder prompt", longest, media)


def _check_prompt(token_ids: Sequence[int], name: str, longest: int, media: Sequence[str]) -> None:
    if not token_ids:
        raise RequestValueError(f"the {name} is empty; give at least one token", param="prompt")
    if len(token_ids) >= longest:
        kinds = " and ".join(media)
        raise ContextLengthError(
            f"the {name} has {len(token_ids)} tokens{f' (its {kinds} included)' if kinds else ''}, "
            f"but max_model_len is {longest}, the answer included; shorten it"
            + (f", or use fewer {kinds}" if kinds else ""),
            param="prompt",
        )


def _check_ids(token_ids: Iterable[int], size: int, name: str) -> None:
    bad = next((i for i in token_ids if not 0 <= i < size), None)
    if bad is not None:
        raise RequestValueError.about(name, f"holds {bad}; ids of this model lie in [0, {size})")
