"""A processed request, with all that is needed to send it to P1, also again."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from mmjax.frontend.output.outputs import RequestOutput
from mmjax.processing.prepared import PreparedInputs
from mmjax.processing.tensors.inputs import argsort_mm_positions
from mmjax.requests.request_times import RequestTimes
from mmjax.transport.messages import EngineCoreRequest


class RequestItem(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a request: its placeholder, and whether P0 had to process it."""

    modality: str
    index: int
    """Index among the items of its modality, in the order given."""
    mm_hash: str
    offset: int
    length: int
    num_embeds: int
    is_processed: bool
    """Whether it was processed for this request; else the processor cache had it."""


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
    num_image_tokens: int
    num_video_tokens: int
    continues_prompt: bool
    """Whether the output continues the prompt's text (a completion; not a chat)."""
    items: list[RequestItem]
    """In the prompt's order."""
    times: RequestTimes

    def to_output(self) -> RequestOutput:
        """Return the output before the first token."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            num_image_tokens=self.num_image_tokens,
            num_video_tokens=self.num_video_tokens,
        )

    @classmethod
    def create(
        cls,
        template: EngineCoreRequest,
        prepared: PreparedInputs,
        *,
        continues_prompt: bool,
        times: RequestTimes,
        generated_token_ids: Sequence[Sequence[int]] = (),
    ) -> "ProcessedRequest":
        """Copy `template` into a message for each sequence, with the tokens that it has already."""
        messages = _fan_out(template)
        if generated_token_ids:
            messages = [
                msgspec.structs.replace(message, output_token_ids=list(token_ids))
                for message, token_ids in zip(messages, generated_token_ids, strict=True)
            ]
        return cls(
            request_id=template.request_id,
            prompt=prepared.prompt,
            prompt_token_ids=template.prompt_token_ids,
            messages=messages,
            prepared=prepared,
            num_image_tokens=_count_embeds(prepared, "image"),
            num_video_tokens=_count_embeds(prepared, "video"),
            continues_prompt=continues_prompt,
            items=_list_items(prepared),
            times=times,
        )

    def release(self) -> None:
        """Drop the tensors, after P1 has received all messages; the data stays."""
        self.prepared = replace(self.prepared, fresh={})
        self.messages = [
            msgspec.structs.replace(message, mm_features=[]) for message in self.messages
        ]


def _count_embeds(prepared: PreparedInputs, modality: str) -> int:
    positions = prepared.mm_placeholders.get(modality, ())
    return sum(position.get_num_embeds() for position in positions)


def _list_items(prepared: PreparedInputs) -> list[RequestItem]:
    return [
        RequestItem(
            modality=modality,
            index=index,
            mm_hash=prepared.mm_hashes[modality][index],
            offset=prepared.mm_placeholders[modality][index].offset,
            length=prepared.mm_placeholders[modality][index].length,
            num_embeds=prepared.mm_placeholders[modality][index].get_num_embeds(),
            is_processed=prepared.mm_hashes[modality][index] in prepared.fresh,
        )
        for modality, index in argsort_mm_positions(prepared.mm_placeholders)
    ]


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
