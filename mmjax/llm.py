"""`LLM`: the engine in the caller's own process, for scripts and notebooks."""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

from tqdm import tqdm

from mmjax.config import (
    DEFAULT_SHM_OBJECT_SIZE_MB,
    CacheConfig,
    DtypeName,
    EngineConfig,
    HasherAlgorithm,
    MultiModalConfig,
    ProcessorCacheType,
    SchedulerConfig,
)
from mmjax.engine.core import EngineCore
from mmjax.errors import RequestValueError
from mmjax.frontend.chat import ChatParser
from mmjax.frontend.input_processor import (
    InputProcessor,
    ProcessedRequest,
    PromptDict,
    PromptType,
)
from mmjax.frontend.output_processor import OutputProcessor
from mmjax.frontend.outputs import RequestOutput
from mmjax.model_source import load_model_config
from mmjax.models.registry import require_model
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import RequestOutputDelta

Messages = Sequence[Mapping[str, Any]]
"""One conversation."""


class LLM:
    """A model and everything it needs to answer; use it in a `with`, or `close()` it."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: DtypeName = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        mm_processor_cache_type: ProcessorCacheType = "lru",
        mm_processor_cache_gb: float = 4.0,
        mm_shm_cache_max_object_size_mb: int = DEFAULT_SHM_OBJECT_SIZE_MB,
        mm_hasher_algorithm: HasherAlgorithm = "blake3",
        seed: int = 0,
        revision: str | None = None,
        served_model_name: str | None = None,
        chat_template: str | None = None,
        block_size: int = 32,
        kv_cache_memory_bytes: int | None = None,
        compilation_cache_dir: str | Path | None = None,
        use_tqdm_on_load: bool = True,
    ) -> None:
        """Load `model` (None: the embedded default; a directory; a hub id) and compile it."""
        model_config = load_model_config(
            None if model is None else str(model),
            revision=revision,
            dtype=dtype,
            max_model_len=max_model_len,
            served_model_name=served_model_name,
            chat_template=chat_template,
            seed=seed,
            mm=MultiModalConfig(
                limit_mm_per_prompt=limit_mm_per_prompt or {},
                mm_processor_kwargs=mm_processor_kwargs or {},
                mm_processor_cache_type=mm_processor_cache_type,
                mm_processor_cache_gb=mm_processor_cache_gb,
                mm_shm_cache_max_object_size_mb=mm_shm_cache_max_object_size_mb,
                mm_hasher_algorithm=mm_hasher_algorithm,
            ),
        )
        require_model(model_config.architecture)
        config = EngineConfig(
            model=model_config,
            cache=CacheConfig(block_size=block_size, kv_cache_memory_bytes=kv_cache_memory_bytes),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            compilation_cache_dir=(
                None if compilation_cache_dir is None else Path(compilation_cache_dir)
            ),
            use_tqdm=use_tqdm_on_load,
        )
        self.config = config
        # First what is quick to fail: tokenizer, processor and template.
        self._input_processor = InputProcessor(model_config)
        self._chat = ChatParser.for_model(self._input_processor, are_objects_allowed=True)
        # A copy: a thread encodes while this one decodes, and one tokenizer cannot do both.
        self._output_processor = OutputProcessor(copy.deepcopy(self._input_processor.tokenizer))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-process")
        self._pool.submit(self._input_processor.warm_up)
        self.engine = EngineCore(config)
        self._request_ids = count()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, one or many; the outputs come in the prompts' order.

        Args:
            prompts: Texts, lists of token ids, or dicts with `prompt` or `prompt_token_ids`,
                `multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`.
            sampling_params: For all prompts, or one for each; None: the checkpoint's defaults.
            use_tqdm: Whether to show a progress bar.
        """
        many = _as_prompts(prompts)
        jobs = [
            partial(self._input_processor.process, prompt=prompt, sampling_params=params)
            for prompt, params in zip(
                many, self._params_for(sampling_params, len(many)), strict=True
            )
        ]
        return self._run(jobs, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations, one or many, in OpenAI's form (also with `image_pil` parts)."""
        many = _as_conversations(messages)
        template = None if chat_template is None else self._chat.template.with_source(chat_template)
        parse = partial(
            self._chat.parse,
            template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        jobs = [
            partial(self._process_chat, parse=partial(parse, conversation), params=params)
            for conversation, params in zip(
                many, self._params_for(sampling_params, len(many)), strict=True
            )
        ]
        return self._run(jobs, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self._input_processor.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what holds where no `sampling_params` are given."""
        return self._input_processor.default_sampling_params()

    def close(self) -> None:
        """Stop the thread that processes inputs; arrays go with the object."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- parts ----------------------------------------------------------------------------------

    def _process_chat(
        self, request_id: str, *, parse: Callable[[], PromptDict], params: SamplingParams | None
    ) -> ProcessedRequest:
        return self._input_processor.process(request_id, parse(), params, continues_prompt=False)

    def _params_for(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> Sequence[SamplingParams | None]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params] * number
        if len(sampling_params) != number:
            raise RequestValueError(
                f"there are {number} prompts and {len(sampling_params)} `sampling_params`; "
                "give one for all, or one for each",
                param="sampling_params",
            )
        return sampling_params

    def _run(
        self, jobs: Sequence[Callable[[str], ProcessedRequest]], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        request_ids = [str(next(self._request_ids)) for _ in jobs]
        outputs: dict[str, RequestOutput] = {}
        waiting = iter(zip(jobs, request_ids, strict=True))
        processing: deque[Future[ProcessedRequest]] = deque()
        with tqdm(total=len(jobs), desc="requests", disable=not use_tqdm) as bar:
            try:
                while len(outputs) < len(jobs):
                    self._prepare(waiting, processing)
                    self._add(processing)
                    for output in self._take(self.engine.step()):
                        outputs[output.request_id] = output
                        bar.update()
            except BaseException:
                for future in processing:
                    future.cancel()
                self.engine.abort(self._output_processor.abort(request_ids))
                raise
        return [outputs[request_id] for request_id in request_ids]

    def _prepare(
        self,
        waiting: Iterator[tuple[Callable[[str], ProcessedRequest], str]],
        processing: "deque[Future[ProcessedRequest]]",
    ) -> None:
        """Keep the thread ahead of the engine by one batch, and by no more memory than that."""
        while len(processing) < self.config.scheduler.max_num_seqs:
            job, request_id = next(waiting, (None, ""))
            if job is None:
                return
            processing.append(self._pool.submit(job, request_id))

    def _add(self, processing: "deque[Future[ProcessedRequest]]") -> None:
        """Give the engine what is processed; wait for it only when there is nothing to run."""
        limit = self.config.scheduler.max_num_seqs
        while processing and (processing[0].done() or not self.engine.has_unfinished()):
            if self.engine.stats().num_waiting >= limit:
                return
            request = processing.popleft().result()
            self._output_processor.add_request(request)
            for message in request.messages:
                self.engine.add_request(message)

    def _take(self, deltas: list[RequestOutputDelta]) -> list[RequestOutput]:
        processed = self._output_processor.process(deltas)
        if processed.request_ids_to_abort:
            self.engine.abort(processed.request_ids_to_abort)
        return processed.request_outputs


def _as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    if isinstance(prompts, str | Mapping):
        return [cast(PromptType, prompts)]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [cast(list[int], list(prompts))]
    return cast(list[PromptType], list(prompts))


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if messages and all(isinstance(item, Mapping) for item in messages):
        return [cast(Messages, messages)]
    if not messages:
        raise RequestValueError("`messages` is empty; give at least one", param="messages")
    return cast(list[Messages], list(messages))
