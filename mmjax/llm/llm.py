"""`LLM`: offline inference in the caller's process, for scripts and notebooks."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from inspect import Parameter, Signature
from itertools import count, cycle
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import jax
import numpy as np

from mmjax.cache import config_with_directory
from mmjax.config.engine_config import EngineConfig, llm_settings
from mmjax.engine.core import EngineCore
from mmjax.errors import MultiModalCacheMissError, RequestError
from mmjax.frontend.engine_client.request_table import RequestTable
from mmjax.frontend.media_budget import with_encoder_budget
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.output.transcripts import Transcript
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.committer import CommittedMessage
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.prompts import PromptDict, PromptType
from mmjax.frontend.requests.request import GenerateRequest, PromptSource
from mmjax.layers.module import Params
from mmjax.llm.arguments import (
    LoRARequest,
    LoRARequests,
    Messages,
    adapters_for,
    as_conversations,
    as_prompts,
    check_level,
    check_mode,
    check_one_for_all,
    find_stream,
    is_conversation,
    params_for,
    parse_keywords,
    priorities_for,
    read_clip,
)
from mmjax.llm.devices import choose_devices
from mmjax.llm.pooling import PoolingMethods
from mmjax.llm.turn import OneCall, Turn
from mmjax.models.model_source import load_engine_config, resolve_adapter
from mmjax.models.registry import require_model
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.transcripts import Task, TranscriptFallback, TranscriptOptions
from mmjax.system.logger import get_logger
from mmjax.system.progress import progress
from mmjax.system.request_times import RequestTimes, measuring, recording
from mmjax.transport.messages import (
    AbortRequests,
    CacheMiss,
    EngineCoreRequest,
    EngineMessage,
    UpdateMode,
)
from mmjax.weights.sharding import Device

logger = get_logger(__name__)

_MAX_AHEAD = 4
"""Prompts of an iterator that are in work or wait for their turn to be given back, for each
sequence that runs."""

_PLACES = ("devices", "mesh")
"""What `LLM` takes besides settings: no flag or file can name them."""


class _SettingsSignature:
    """`inspect.signature(LLM)`: every setting with its type and default."""

    def __get__(self, instance: object, owner: type) -> Signature:
        settings = llm_settings()
        model = settings.pop("model")
        return Signature(
            [
                Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=model.default),
                *(Parameter(one, Parameter.KEYWORD_ONLY, default=None) for one in _PLACES),
                *(
                    Parameter(
                        name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.annotation
                    )
                    for name, one in settings.items()
                ),
            ]
        )


class LLM(PoolingMethods):
    """A model with its processor and engine; use it in a `with`, or `close()` it."""

    __signature__ = _SettingsSignature()

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        devices: Sequence[Device] | None = None,
        mesh: jax.sharding.Mesh | None = None,
        **settings: Any,
    ) -> None:
        """Load and compile `model`.

        Args:
            model: A directory, a hub id, or None for the embedded default.
            devices: Those of this process that the engine has, as a trainer has the others: the
                model is sharded over all of them. It may use `gpu_memory_utilization` of what is
                free there, not of all. None: the first `tensor_parallel_size`.
            mesh: In place of `devices`, for those of a mesh; its shape does not matter.
            settings: By name, see docs/configuration.md; None: the default.

        Raises:
            TypeError: For an unknown setting.
            ConfigError: For an invalid value.
        """
        chosen = choose_devices(devices, mesh, settings.get("tensor_parallel_size"))
        if chosen is not None:
            settings["tensor_parallel_size"] = len(chosen)
        config = load_engine_config(parse_keywords(model, settings))
        require_model(config.model.architecture)
        self._open(config, chosen)

    def _open(self, config: EngineConfig, devices: Sequence[Device] | None) -> None:
        self.config = config = with_encoder_budget(config)
        self._input_processor = InputProcessor(
            config.model,
            enable_prefix_caching=config.cache.finds_items,
            enable_tower_connector_lora=config.lora.enable_tower_connector_lora,
        )
        self._chat = ChatParser.for_model(self._input_processor, are_objects_allowed=True)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-process")
        with ExitStack() as opened:
            opened.callback(self._input_processor.close)
            opened.callback(self._pool.shutdown, cancel_futures=True)
            warm_up = self._pool.submit(self._input_processor.warm_up)
            cache = self._input_processor.cache
            mm = config_with_directory(config.model.mm, cache)
            self.engine = EngineCore(config.with_mm(mm), devices=devices)
            opened.callback(self.engine.close)
            warm_up.result()
            opened.pop_all()
        self._committed: deque[CommittedMessage] = deque()
        """Messages that the engine has yet to take, in the order of their commits."""
        self._failures: list[Exception] = []
        self._requests = RequestTable(
            self._input_processor.committer,
            copy.deepcopy(self.get_tokenizer()),  # which the caller may use in another thread
            send=self._send,
            fail=lambda _, error: self._failures.append(error),
            on_commit=self._committed.append,
            run=_run_now,
        )
        self._requests.on_ready()
        self._request_ids = count()
        self._is_closed = False
        self._turn, self._call = Turn(), OneCall()
        self._is_awake = threading.Event()
        self._is_awake.set()
        self._sleeper = 0
        """The thread that has called `sleep`."""
        self._outputs: list[RequestOutput] = []
        """Of steps that an update of the weights has made; `_serve` yields them."""
        self._loaded: dict[str, LoRARequest] = {}
        """Adapters that the engine has, by name."""

    def generate(
        self,
        prompts: PromptType | Iterable[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        return_mm_inputs: bool = False,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; the outputs are in the prompts' order.

        Args:
            prompts: Texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids`,
                `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`; one, or any
                iterable. An iterator is read as prompts are needed, and answered by an iterator, in
                its order (type checkers take it for a list): until that is exhausted or closed,
                nothing else can be asked, also not by the prompts' own. An image of
                `multi_modal_data` is a PIL image, an array, a file's bytes, a path, or a `data:`,
                `https:` or `http:` URL.
            sampling_params: For all prompts, or one per prompt; None: the checkpoint's defaults.
            use_tqdm: Whether progress is shown, where the number of prompts is known.
            lora_request: An adapter for all prompts, or one (or None) per prompt.
            priority: Per prompt, with `scheduling_policy="priority"`; lower ones first.
            return_mm_inputs: Whether outputs have `multi_modal_inputs`: the prompt as the engine
                computed it, for a forward pass of one's own.
        """
        prompts, is_stream = find_stream(prompts, int)
        return self._ask(
            cast(Iterator[PromptType], prompts) if is_stream else as_prompts(prompts),
            sampling_params=sampling_params,
            lora_request=lora_request,
            priority=priority,
            use_tqdm=use_tqdm,
            returns_mm_inputs=return_mm_inputs,
        )

    def chat(
        self,
        messages: Messages | Iterable[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        return_mm_inputs: bool = False,
    ) -> list[RequestOutput]:
        """Answer one or many conversations in OpenAI's form.

        A part `{"type": "image_pil", "image_pil": ...}` has an image as `generate` takes it.

        Args:
            messages: One conversation, or an iterable of them; an iterator as in `generate`.
            sampling_params: Of all of them, or of each.
            use_tqdm: Whether progress is shown.
            lora_request: As in `generate`.
            chat_template: In place of the model's.
            add_generation_prompt: Whether the template ends with the beginning of an answer.
            continue_final_message: Whether the answer continues the last message.
            tools: Functions for the template; the answer is the model's text as it is.
            chat_template_kwargs: The template's own options.
            media_io_kwargs: How videos are sampled, as `{"video": {"num_frames": 8}}`.
            return_mm_inputs: As in `generate`.
        """
        parse = self._parser(
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
            media_io_kwargs=media_io_kwargs,
        )
        messages, is_stream = find_stream(messages, Mapping)
        many = messages if is_stream else as_conversations(messages)
        prompts = (partial(parse, conversation) for conversation in many)
        return self._ask(
            prompts if is_stream else list(prompts),
            sampling_params=sampling_params,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
            continues_prompt=continue_final_message,
            returns_mm_inputs=return_mm_inputs,
        )

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation, and yield what each step adds to it.

        Until it is exhausted or closed, nothing else can be asked.
        """
        (adapter,) = self._load_adapters(adapters_for(lora_request, 1))
        request = self._make_request(
            partial(self._chat.parse, messages),
            sampling_params,
            stream=True,
            continues_prompt=False,
            lora_name=adapter,
        )
        yield from self._serve([request])

    def embed_multimodal(self, prompt: PromptType | Messages) -> list[np.ndarray]:
        """Return the embeddings of a prompt's media, `[rows, D]` each, in the prompt's order.

        They are what the model reads where the media stand: the outputs of its tower and connector,
        in the engine's dtype, with features for several layers side by side. `image_embeds` takes
        them in place of the picture. RuntimeError if the encoder cache cannot hold all at once.
        """
        if is_conversation(prompt):
            prompt = self._chat.parse(cast(Messages, prompt))
        if not isinstance(prompt, Mapping):
            return []  # text has no media
        # With its prefix cached, a prompt would need no embeddings.
        salted = cast(PromptType, {**prompt, "cache_salt": uuid4().hex})
        params = SamplingParams(temperature=0.0, max_tokens=1)
        (output,) = self.generate(salted, params, use_tqdm=False)
        found = [self.engine.read_embeds(item.mm_hash) for item in output.items]
        embeds = [one for one in found if one is not None]
        if len(embeds) < len(found):
            raise RuntimeError(
                f"the encoder cache holds {len(embeds)} of the prompt's {len(found)} items; "
                "ask about fewer at a time, or raise `encoder_cache_size`"
            )
        return embeds

    def transcribe(
        self,
        audio: Any,
        *,
        language: str | None = None,
        task: Task = "transcribe",
        prompt: str = "",
        has_timestamps: bool = True,
        has_word_times: bool = False,
        sampling_params: SamplingParams | None = None,
        fallback: TranscriptFallback | None = None,
    ) -> Transcript:
        """Transcribe a clip, of any length that the limits allow, window by window.

        Args:
            audio: Samples at the model's rate, or a pair of samples and their rate.
            language: A code (`en`) or a name (`english`); None: it is found out.
            task: Or `translate`: into English.
            prompt: A text before the transcript, whose style and words it goes on with.
            has_timestamps: Whether segments have times; those of long clips always do.
            has_word_times: Whether `find_words` of the transcript returns words with their times;
                of a checkpoint with `alignment_heads`.
            sampling_params: Of each window; None: greedy.
            fallback: When a window is transcribed again, at a higher temperature; None: never.

        Raises:
            RequestError: For a model that transcribes nothing, a clip or a language that it does
                not take.
        """
        processor = self._input_processor
        transcriber = processor.get_transcriber()
        samples = read_clip(processor.info.parse_mm_data({"audio": audio}))
        prompt = prompt.strip() and transcriber.before_prompt + prompt.strip()
        options = TranscriptOptions(
            task=task,
            language=language,
            prompt_token_ids=processor.tokenize_pieces([(prompt, True)], False) if prompt else (),
            has_timestamps=has_timestamps,
            has_word_times=has_word_times,
            sampling_params=sampling_params or SamplingParams(temperature=0.0),
            fallback=fallback,
        )
        transcription = transcriber.start(samples, options)
        transcript = Transcript.of(transcriber, processor.tokenizer, samples)
        for asked in iter(transcription.next_request, None):
            window = cast(PromptType, asked.prompt)
            (output,) = self.generate([window], asked.sampling_params, use_tqdm=False)
            found = (output.outputs[0], output.prompt_logprobs, output.alignment)
            transcript.add(transcription, *found)
        return transcript

    def explain(
        self,
        prompt: PromptType | Messages,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> Explanation:
        """Process a prompt or a conversation, and describe the result, without running the model.

        Notebooks show it as HTML: tokens as cells, placeholders coloured by item.
        """
        if is_conversation(prompt):
            parse = self._parser(
                chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            prompt = parse(cast(Messages, prompt))
        whole = self._input_processor.connector.fetch_now(cast(PromptType, prompt))
        return self._input_processor.explain(whole)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's default sampling parameters."""
        return self._input_processor.default_sampling_params()

    # ---- weights --------------------------------------------------------------------------------

    @property
    def params(self) -> Params:
        """The model's parameters: nested dicts of `jax.Array`, by names of its own tree.

        They are the engine's arrays: whoever donates them to a function of their own copies them
        first, as by `jax.tree.map(jnp.copy, llm.params)`.
        """
        return self.engine.params

    @property
    def weights_version(self) -> int:
        """How often the weights were changed since the start; outputs tell theirs."""
        return self.engine.weights_version

    def update_weights(
        self,
        params: Mapping[Any, Any],
        *,
        prefix: str = "",
        mode: UpdateMode = "wait",
        donate: bool = False,
        lora_name: str | None = None,
    ) -> int:
        """Replace parameters between two steps; return the version of the new weights.

        Nothing that the old ones computed is served afterwards: no block of the prefix cache, and
        no embeddings of a changed tower. Thread-safe: another thread may be in `generate`.

        Args:
            params: Arrays of JAX or numpy, nested or by dotted names, of any part of the model:
                all by the names of `params`, or all by those of the checkpoint's files. They are
                cast to the engine's dtypes, sharded over its devices, and quantised where its
                weights are.
            prefix: What each name has before it: `update_weights(new, prefix="language_model")`.
            mode: What becomes of requests that the engine has begun. "wait": they are finished
                before; "keep": they go on by the new weights, behind the tokens that they have;
                "abort": they end, with the `finish_reason` "abort".
            donate: Whether the arrays are the engine's from now on, so that none is copied that is
                in its dtype and place already, and those that are cast or cut are freed; else
                each is copied.
            lora_name: A loaded adapter, of which `params` are all arrays, by PEFT's names; the
                model's own weights stay.

        Raises:
            CheckpointError: For names or shapes that the model does not have; nothing is changed.
        """
        check_mode(mode)
        with self._turn:
            self._check_open()
            if lora_name is not None:
                adapter = self.engine.match_adapter(lora_name, params, prefix)
                self._settle(mode)
                self.engine.replace_adapter(lora_name, adapter)
            else:
                replacements = self.engine.match_weights(params, prefix=prefix)
                self._settle(mode)
                self.engine.replace_weights(replacements, donate=donate)
            return self.engine.weights_version

    def sleep(self, level: int = 1, *, mode: UpdateMode = "wait") -> None:
        """Free the memory of the KV cache and of the encoders' outputs until `wake_up`.

        Weights may be updated meanwhile. A `generate` of another thread goes on after `wake_up`.

        Args:
            level: 1 keeps the weights where they are; 2 frees them, too.
            mode: What becomes of requests that the engine has begun, as in `update_weights`.
        """
        check_mode(mode)
        check_level(level)
        with self._turn:
            self._check_open()
            if not self.is_sleeping:
                self._settle(mode)
                self._sleeper = threading.get_ident()
                self._is_awake.clear()
            self.engine.sleep(level)

    def wake_up(self) -> None:
        """Allocate what `sleep` has freed.

        Weights that it freed are those that `update_weights` has given since; where some are
        missing, all are read from the checkpoint again.
        """
        with self._turn:
            self._check_open()
            self.engine.wake_up()
            self._is_awake.set()

    def reset_prefix_cache(self) -> bool:
        """Let no prefix be found any more; requests in work keep what they have. Always True."""
        with self._turn:
            self.engine.reset_prefix_cache()
        return True

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` not since."""
        return self.engine.is_sleeping

    def _settle(self, mode: UpdateMode) -> None:
        """Read the step on the device, and finish or abort what is in work."""
        if mode == "wait" and self.is_sleeping and self.engine.has_unfinished():
            raise RuntimeError(
                "this LLM sleeps, so that no request can be finished; give `mode` keep or abort, "
                "or call `wake_up` first"
            )
        while mode == "wait" and self.engine.has_unfinished():
            self._outputs += self._requests.take(self.engine.step()).request_outputs
            # For whoever has asked for them, who would wait for ever.
            self._failures += [error for _, error in self.engine.pop_failed()]
        self._outputs += self._requests.take(self.engine.drain()).request_outputs
        if mode == "abort":
            self._outputs += self._requests.take(self.engine.abort_all()).request_outputs

    def close(self) -> None:
        """Stop the processing thread, and free the caches. Idempotent."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.engine.close()
        self._input_processor.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- parts ----------------------------------------------------------------------------------

    def _load_adapters(self, each: Sequence[LoRARequest | None]) -> list[str | None]:
        """Return each prompt's adapter by name, all of them loaded."""
        for adapter in dict.fromkeys(each):
            if adapter is not None and self._loaded.get(adapter.lora_name) != adapter:
                self._load_adapter(adapter)
        return [None if adapter is None else adapter.lora_name for adapter in each]

    def _load_adapter(self, adapter: LoRARequest) -> None:
        path = resolve_adapter(adapter.lora_path, download_dir=self.config.model.download_dir)
        if self._loaded.pop(adapter.lora_name, None) is not None:
            self.engine.unload_adapter(adapter.lora_name)
        self.engine.load_adapter(adapter.lora_name, path)
        self.engine.wait_loaded()
        self._loaded[adapter.lora_name] = adapter

    def _parser(self, chat_template: str | None, **options: Any) -> Callable[..., PromptDict]:
        """Return what makes a conversation's prompt, by the model's template or another."""
        template = None if chat_template is None else self._chat.template.with_source(chat_template)
        return partial(self._chat.parse, template=template, **options)

    def _ask(
        self,
        prompts: Iterator[PromptSource] | Sequence[PromptSource],
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequests,
        priority: Sequence[int] | None = None,
        use_tqdm: bool,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer a sequence of prompts by a list, and an iterator over them by an iterator."""
        if isinstance(prompts, Iterator):
            number = 1
            check_one_for_all(
                sampling_params=sampling_params, lora_request=lora_request, priority=priority
            )
        else:
            number = len(prompts)
        each_params = params_for(sampling_params, number)
        priorities = priorities_for(priority, number, self.config.scheduler)
        adapters = adapters_for(lora_request, number)

        def make() -> Iterator[GenerateRequest]:
            # In its turn: until then another call may need, or load, others of the same names.
            each = zip(each_params, priorities, self._load_adapters(adapters), strict=True)
            for prompt, (params, one, adapter) in zip(prompts, cycle(each), strict=False):
                yield self._make_request(prompt, params, priority=one, lora_name=adapter, **options)

        if isinstance(prompts, Iterator):
            return cast(Any, self._stream(make()))
        return self._run(make(), number, use_tqdm=use_tqdm)

    def _make_request(
        self, prompt: PromptSource, params: SamplingParams | None, **options: Any
    ) -> GenerateRequest:
        params = params or self.get_default_sampling_params()
        return GenerateRequest(str(next(self._request_ids)), prompt, params, **options)

    def _run(
        self, requests: Iterable[GenerateRequest], number: int, *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Return the finished outputs in the requests' order, which is that of their ids."""
        served: list[RequestOutput] = []
        shown = progress(logger, "requests", number, is_shown=use_tqdm)
        with shown as update, closing(self._serve(requests)) as outputs:
            for output in outputs:
                served.append(output)
                update(1)
        return sorted(served, key=lambda output: int(output.request_id))

    def _stream(self, requests: Iterable[GenerateRequest]) -> Iterator[RequestOutput]:
        """Yield the finished outputs in the requests' order, and read few requests ahead."""
        order: deque[str] = deque()
        served: dict[str, RequestOutput] = {}

        def noted() -> Iterator[GenerateRequest]:
            for request in requests:
                order.append(request.request_id)
                yield request

        limit = _MAX_AHEAD * self.config.scheduler.max_num_seqs
        with closing(self._serve(noted(), may_take=lambda: len(order) < limit)) as outputs:
            for output in outputs:
                served[output.request_id] = output
                while order and order[0] in served:
                    yield served.pop(order.popleft())

    def _serve(
        self,
        requests: Iterable[GenerateRequest],
        *,
        may_take: Callable[[], bool] = lambda: True,
    ) -> Generator[RequestOutput, None, None]:
        """Yield each request when it is finished; a streamed one with what each step adds.

        Further requests are taken while `may_take` says so.
        """
        self._check_open()
        self._call.begin()
        unfinished: set[str] = set()

        def noted() -> Iterator[GenerateRequest]:
            for request in requests:
                unfinished.add(request.request_id)
                yield request

        waiting = noted()
        processing: deque[Future[None]] = deque()
        added: set[str] = set()
        self._failures.clear()
        try:
            while True:
                self._wait_awake()
                with self._turn:
                    if self.is_sleeping:
                        continue
                    if may_take():
                        self._prepare(waiting, processing)
                    if not unfinished:
                        return
                    self._add(processing, added)
                    outputs = self._take_step()
                for output in outputs:
                    if output.finished:
                        unfinished.discard(output.request_id)
                        added.discard(output.request_id)
                    yield output
        except BaseException:  # also of whoever reads no further
            self._break_off(processing, unfinished)
            raise
        finally:
            self._call.end()

    def _break_off(self, processing: Iterable[Future[None]], unfinished: Iterable[str]) -> None:
        """Forget requests that nobody waits for any more."""
        for future in processing:
            future.cancel()
        wait(processing)
        with self._turn:
            self._outputs.clear()
            for request_id in unfinished:
                self._requests.remove(request_id)
            # The sender cache counts on the engine to take them, though nobody waits for them.
            while self._committed:
                self._requests.put(self._committed.popleft())

    def _take_step(self) -> list[RequestOutput]:
        """Return what an update of the weights has left to be told, or what a step tells."""
        if not self._outputs:
            return self._requests.take(self.engine.step()).request_outputs
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wait_awake(self) -> None:
        """Wait while another thread lets the engine sleep."""
        if not self._is_awake.is_set() and self._sleeper == threading.get_ident():
            raise RuntimeError("this LLM sleeps; call `wake_up` first")
        self._is_awake.wait()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this LLM is closed; make another one")

    def _prepare(
        self, waiting: Iterator[GenerateRequest], processing: "deque[Future[None]]"
    ) -> None:
        """Process one batch of prompts ahead of the engine in the thread."""
        while len(processing) + len(self._committed) < self.config.scheduler.max_num_seqs:
            request = next(waiting, None)
            if request is None:
                return
            processing.append(self._pool.submit(self._process, request))

    def _process(self, request: GenerateRequest) -> None:
        with recording(RequestTimes(arrived_at=time.monotonic())):
            prompt = request.prompt() if callable(request.prompt) else request.prompt
            with measuring("fetch"):
                prompt = self._input_processor.connector.fetch_now(prompt)
            self._input_processor.process(replace(request, prompt=prompt), self._committed.append)

    def _add(self, processing: "deque[Future[None]]", added: set[str]) -> None:
        """Add processed prompts to the engine; wait for one only if the engine is idle."""
        while processing and processing[0].done():
            processing.popleft().result()
        if processing and not self._committed and not self.engine.has_unfinished():
            processing.popleft().result()
        max_waiting = self.config.scheduler.max_num_seqs
        while self._committed and self.engine.num_waiting < max_waiting:
            committed = self._committed.popleft()
            if committed.request.request_id not in added:
                added.add(committed.request.request_id)
                self._requests.outputs.add_request(committed.request)
            self._requests.put(committed)
            committed.request.keep_inputs(committed.message.mm_features)
        for _, error in self.engine.pop_failed():
            raise error
        if self._failures:
            raise self._failures[0]

    def _send(self, message: EngineMessage) -> None:
        """Give a message to the engine, which answers at once."""
        if isinstance(message, AbortRequests):
            self.engine.abort(message.request_ids)
        elif isinstance(message, EngineCoreRequest):
            try:
                self.engine.add_request(message)
            except MultiModalCacheMissError as miss:
                mm_hashes = list(miss.mm_hashes)
                self._requests.on_miss(
                    CacheMiss(request_id=message.request_id, mm_hashes=mm_hashes)
                )
            except RequestError as error:
                self._requests.fail(message.request_id, error)
            else:
                self._requests.acknowledge(message.request_id)


def _run_now(job: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
    try:
        job()
    except Exception as error:
        done(error)
    else:
        done(None)
