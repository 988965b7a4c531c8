"""A request in the API server process: as its caller gives it, and processed, ready to be sent."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import msgspec

from mmjax.frontend.requests.prompts import PromptType
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalInputs,
    MultiModalKwargsItem,
    argsort_mm_positions,
)
from mmjax.system.request_times import RequestTimes
from mmjax.transport.messages import EngineCoreRequest

PromptSource = PromptType | Callable[[], PromptType]
"""A prompt, or a function that makes it (decodes its images) outside of the event loop."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What HTTP or `LLM` asks of the engine: one prompt, with all that is said about it."""

    request_id: str
    """Unique among unfinished requests."""
    prompt: PromptSource
    sampling_params: SamplingParams
    """With `n` sequences."""
    _: KW_ONLY
    stream: bool = False
    """Whether outputs hold what each step adds, rather than all so far."""
    continues_prompt: bool = True
    """Whether the output continues the prompt's text (a completion, a message that goes on)."""
    id_domain: str | None = None
    """The namespace of the prompt's media ids; None: the global one."""
    lora_name: str | None = None
    """The adapter, or None."""
    priority: int = 0
    """Lower ones first."""
    deadline: float | None = None
    """When it ends with RequestTimeoutError, in `time.monotonic()` seconds; None: never."""
    generated_token_ids: Sequence[Sequence[int]] = ()
    """For each sequence, what an engine elsewhere has generated: it goes on after them, and a
    stream tells of them first."""
    returns_mm_inputs: bool = False
    """Whether the output has the processed prompt, in the engine's own process."""


class PlacedItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a prompt, and its placeholder."""

    modality: str
    index: int
    """Index among the items of its modality, in the order given."""
    offset: int
    length: int
    num_embeds: int
    mm_hash: str
    """What caches know it by."""


ProcessingSource = Literal["processor_cache", "disk", "computed"]


class RequestItem(PlacedItem, frozen=True, kw_only=True):
    """One item of a request, and whether the processor cache had it."""

    processing: ProcessingSource
    """Where its tensors came from."""


@dataclass(slots=True, kw_only=True)
class ProcessedRequest:
    """One request: a message for each of its `n` sequences."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    messages: list[EngineCoreRequest]
    """Without features until they are committed."""
    prepared: PreparedInputs
    """The items' tensors, or the data that they are processed from."""
    num_embeds: Counter[str]
    """Positions of the prompt that hold embeddings, by modality."""
    continues_prompt: bool
    stream: bool
    items: list[RequestItem]
    """In the prompt's order."""
    times: RequestTimes
    returns_mm_inputs: bool
    mm_inputs: MultiModalInputs | None = None
    """With `returns_mm_inputs`, the prompt as the engine got it."""

    @classmethod
    def create(
        cls,
        request: GenerateRequest,
        template: EngineCoreRequest,
        prepared: PreparedInputs,
        times: RequestTimes,
    ) -> "ProcessedRequest":
        """Copy `template` into a message for each sequence, with the tokens that it has already."""
        messages = _fan_out(template)
        if request.generated_token_ids:
            messages = [
                msgspec.structs.replace(message, output_token_ids=list(token_ids))
                for message, token_ids in zip(messages, request.generated_token_ids, strict=True)
            ]
        items = list_items(prepared)
        num_embeds: Counter[str] = Counter()
        for item in items:
            num_embeds[item.modality] += item.num_embeds
        return cls(
            request_id=request.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=template.prompt_token_ids,
            messages=messages,
            prepared=prepared,
            num_embeds=num_embeds,
            continues_prompt=request.continues_prompt,
            stream=request.stream,
            items=items,
            times=times,
            returns_mm_inputs=request.returns_mm_inputs,
        )

    def keep_inputs(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        """Keep the prompt with its items' tensors, if it is asked for.

        `features`: a message's, with the tensors that the engine found; if it lacks any, nothing.
        """
        items = [one.data for one in features if isinstance(one.data, MultiModalKwargsItem)]
        if not self.returns_mm_inputs or len(items) < len(features):
            return
        places = argsort_mm_positions(self.prepared.mm_placeholders)
        views = [item.read_only() for item in items]
        self.mm_inputs = self.prepared.to_inputs(dict(zip(places, views, strict=True)))

    def release(self) -> None:
        """Drop the tensors, after P1 has received all messages; the data stays."""
        self.prepared = replace(self.prepared, fresh={})
        self.messages = [
            msgspec.structs.replace(message, mm_features=[]) for message in self.messages
        ]


def list_items(prepared: PreparedInputs) -> list[RequestItem]:
    """Return a prompt's items, in its order."""
    items: list[RequestItem] = []
    for modality, index in argsort_mm_positions(prepared.mm_placeholders):
        place = prepared.mm_placeholders[modality][index]
        mm_hash = prepared.mm_hashes[modality][index]
        items.append(
            RequestItem(
                modality=modality,
                index=index,
                mm_hash=mm_hash,
                offset=place.offset,
                length=place.length,
                num_embeds=place.get_num_embeds(),
                processing=_find_source(prepared, mm_hash),
            )
        )
    return items


def _find_source(prepared: PreparedInputs, mm_hash: str) -> ProcessingSource:
    if mm_hash not in prepared.fresh:
        return "processor_cache"
    return "disk" if prepared.fresh[mm_hash][0].is_from_disk else "computed"


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
                # They are the same for all.
                prompt_logprobs=None if index else params.prompt_logprobs,
                seed=None if params.seed is None else _next_seed(params.seed, index),
            ),
        )
        for index in range(params.n)
    ]


def _next_seed(seed: int, index: int) -> int:
    # Seeds are signed 64-bit integers, and wrap around.
    return (seed + index + 2**63) % 2**64 - 2**63
