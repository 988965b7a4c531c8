"""`LLM`: offline inference in the caller's process, for scripts and notebooks."""

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import partial
from inspect import Parameter, Signature
from itertools import count
from pathlib import Path
from typing import Any, cast

from mmjax.cache import config_with_directory
from mmjax.config.engine_config import EngineConfig, llm_settings
from mmjax.engine.core import EngineCore
from mmjax.errors import RequestValueError
from mmjax.frontend.media_budget import with_encoder_budget
from mmjax.frontend.output.output_processor import OutputProcessor
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.explain import Explanation
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.prompt.prompts import PromptType
from mmjax.llm.arguments import (
    LoRARequest,
    LoRARequests,
    Messages,
    as_conversations,
    as_prompts,
    is_conversation,
    params_for,
    parse_keywords,
    priorities_for,
)
from mmjax.llm.inbox import Inbox
from mmjax.models.model_source import load_engine_config, resolve_adapter
from mmjax.models.registry import require_model
from mmjax.requests.request_times import RequestTimes, measuring, recording
from mmjax.requests.sampling_params import SamplingParams
from mmjax.system.logger import get_logger
from mmjax.system.progress import progress
from mmjax.transport.messages import RequestOutputDelta

logger = get_logger(__name__)


class _SettingsSignature:
    """`inspect.signature(LLM)`: every setting with its type and default."""

    def __get__(self, instance: object, owner: type) -> Signature:
        settings = llm_settings()
        model = settings.pop("model")
        return Signature(
            [
                Parameter("model", Parameter.POSITIONAL_OR_KEYWORD, default=model.default),
                *(
                    Parameter(
                        name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.annotation
                    )
                    for name, one in settings.items()
                ),
            ]
        )


class LLM:
    """A model with its processor and engine; use it in a `with`, or `close()` it."""

    __signature__ = _SettingsSignature()

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """Load and compile `model`.

        Args:
            model: A directory, a hub id, or None for the embedded default.
            settings: By name, see docs/configuration.md; None: the default.

        Raises:
            TypeError: For an unknown setting.
            ConfigError: For an invalid value.
        """
        config = load_engine_config(parse_keywords(model, settings))
        require_model(config.model.architecture)
        self._open(config)

    def _open(self, config: EngineConfig) -> None:
        self.config = config = with_encoder_budget(config)
        self._input_processor = InputProcessor(
            config.model,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            enable_tower_connector_lora=config.lora.enable_tower_connector_lora,
        )
        self._chat = ChatParser.for_model(self._input_processor, are_objects_allowed=True)
        # A copy: tokenizers are not thread-safe, and a thread encodes while this one decodes.
        self._output_processor = OutputProcessor(copy.deepcopy(self._input_processor.tokenizer))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-process")
        with ExitStack() as opened:
            opened.callback(self._input_processor.close)
            opened.callback(self._pool.shutdown, cancel_futures=True)
            warm_up = self._pool.submit(self._input_processor.warm_up)
            cache = self._input_processor.cache
            self.engine = EngineCore(config.with_mm(config_with_directory(config.model.mm, cache)))
            opened.callback(self.engine.close)
            warm_up.result()
            opened.pop_all()
        begin = self._output_processor.add_request
        self._inbox = Inbox(self._input_processor.committer, self.engine, begin=begin)
        self._request_ids = count()
        self._is_closed = False
        self._loaded: dict[str, LoRARequest] = {}
        """Adapters that the engine has, by name."""

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete one or many prompts; the outputs are in the prompts' order.

        Args:
            prompts: Texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids`,
                `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`.
            sampling_params: For all prompts, or one per prompt; None: the checkpoint's defaults.
            use_tqdm: Whether progress is shown.
            lora_request: An adapter for all prompts, or one (or None) per prompt.
            priority: Per prompt, with `scheduling_policy="priority"`; lower ones first.
        """
        many = as_prompts(prompts)
        each_params = params_for(sampling_params, len(many))
        each_priority = priorities_for(priority, len(many), self.config.scheduler)
        adapters = self._load_adapters(lora_request, len(many))
        jobs = [
            partial(
                self._process,
                make_prompt=partial(_identity, prompt),
                params=one,
                priority=two,
                lora_name=adapter,
            )
            for prompt, one, two, adapter in zip(
                many, each_params, each_priority, adapters, strict=True
            )
        ]
        return self._run(jobs, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
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
    ) -> list[RequestOutput]:
        """Answer one or many conversations in OpenAI's form (also with `image_pil` parts).

        Args:
            messages: One conversation, or several.
            sampling_params: Of all of them, or of each.
            use_tqdm: Whether progress is shown.
            lora_request: As in `generate`.
            chat_template: In place of the model's.
            add_generation_prompt: Whether the template ends with the beginning of an answer.
            continue_final_message: Whether the answer continues the last message.
            tools: Functions for the template; the answer is the model's text as it is.
            chat_template_kwargs: The template's own options.
            media_io_kwargs: How videos are sampled, as `{"video": {"num_frames": 8}}`.
        """
        many = as_conversations(messages)
        template = None if chat_template is None else self._chat.template.with_source(chat_template)
        parse = partial(
            self._chat.parse,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
            media_io_kwargs=media_io_kwargs,
        )
        jobs = [
            self._chat_job(partial(parse, conversation), params, adapter)
            for conversation, params, adapter in zip(
                many,
                params_for(sampling_params, len(many)),
                self._load_adapters(lora_request, len(many)),
                strict=True,
            )
        ]
        return self._run(jobs, use_tqdm=use_tqdm)

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
        (adapter,) = self._load_adapters(lora_request, 1)
        job = self._chat_job(partial(self._chat.parse, messages), sampling_params, adapter)
        yield from self._serve([job], is_stream=True)

    def _chat_job(
        self,
        make_prompt: Callable[[], PromptType],
        params: SamplingParams | None,
        lora_name: str | None = None,
    ) -> Callable[[str], None]:
        return partial(
            self._process,
            make_prompt=make_prompt,
            params=params,
            continues_prompt=False,
            lora_name=lora_name,
        )

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
            template = None
            if chat_template is not None:
                template = self._chat.template.with_source(chat_template)
            prompt = self._chat.parse(
                cast(Messages, prompt),
                template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        whole = self._input_processor.connector.fetch_now(cast(PromptType, prompt))
        return self._input_processor.explain(whole)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the checkpoint's default sampling parameters."""
        return self._input_processor.default_sampling_params()

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

    def _load_adapters(self, given: LoRARequests, number: int) -> list[str | None]:
        """Return each prompt's adapter by name, all of them loaded."""
        each = [given] * number if given is None or isinstance(given, LoRARequest) else given
        if len(each) != number:
            raise RequestValueError(
                f"there are {number} prompts and {len(each)} `lora_request`s; give one for all, or "
                "one for each",
                param="lora_request",
            )
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

    def _process(
        self,
        request_id: str,
        *,
        make_prompt: Callable[[], PromptType],
        params: SamplingParams | None,
        continues_prompt: bool = True,
        priority: int = 0,
        lora_name: str | None = None,
    ) -> None:
        with recording(RequestTimes(arrived_at=time.monotonic())):
            prompt = make_prompt()
            with measuring("fetch"):
                prompt = self._input_processor.connector.fetch_now(prompt)
            self._input_processor.process(
                request_id,
                prompt,
                params,
                continues_prompt=continues_prompt,
                lora_name=lora_name,
                priority=priority,
                on_commit=self._inbox.put,
            )

    def _run(self, jobs: Sequence[Callable[[str], None]], *, use_tqdm: bool) -> list[RequestOutput]:
        """Return the finished outputs in the jobs' order."""
        served: dict[int, RequestOutput] = {}
        with (
            progress(logger, "requests", len(jobs), is_shown=use_tqdm) as update,
            closing(self._serve(jobs)) as outputs,
        ):
            for output in outputs:
                served[int(output.request_id)] = output
                update(1)
        # Ids count up.
        return [served[request_id] for request_id in sorted(served)]

    def _serve(
        self, jobs: Sequence[Callable[[str], None]], *, is_stream: bool = False
    ) -> Generator[RequestOutput, None, None]:
        """Yield each request when it is finished; with `is_stream`, what each step adds."""
        if self._is_closed:
            raise RuntimeError("this LLM is closed; make another one")
        request_ids = [str(next(self._request_ids)) for _ in jobs]
        num_finished = 0
        waiting = iter(zip(jobs, request_ids, strict=True))
        processing: deque[Future[None]] = deque()
        self._inbox.is_stream = is_stream
        try:
            while num_finished < len(jobs):
                self._prepare(waiting, processing)
                self._add(processing)
                for _, error in self.engine.pop_failed():
                    raise error
                for output in self._take(self.engine.step()):
                    num_finished += output.finished
                    yield output
        except BaseException:  # also of whoever reads no further
            for future in processing:
                future.cancel()
            wait(processing)
            self._inbox.discard()
            self.engine.abort(self._output_processor.abort(request_ids))
            raise

    def _prepare(
        self,
        waiting: Iterator[tuple[Callable[[str], None], str]],
        processing: "deque[Future[None]]",
    ) -> None:
        """Process one batch of prompts ahead of the engine in the thread."""
        while len(processing) + len(self._inbox) < self.config.scheduler.max_num_seqs:
            job, request_id = next(waiting, (None, ""))
            if job is None:
                return
            processing.append(self._pool.submit(job, request_id))

    def _add(self, processing: "deque[Future[None]]") -> None:
        """Add processed prompts to the engine; wait for one only if the engine is idle."""
        while processing and processing[0].done():
            processing.popleft().result()
        if processing and not self._inbox and not self.engine.has_unfinished():
            processing.popleft().result()
        while self._inbox and self.engine.stats().num_waiting < self.config.scheduler.max_num_seqs:
            self._inbox.take()

    def _take(self, deltas: list[RequestOutputDelta]) -> list[RequestOutput]:
        processed = self._output_processor.process(deltas)
        if processed.request_ids_to_abort:
            self.engine.abort(processed.request_ids_to_abort)
        return processed.request_outputs


def _identity(prompt: PromptType) -> PromptType:
    return prompt
