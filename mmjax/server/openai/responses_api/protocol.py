"""The body of POST /v1/responses.

Fields that chat has, too, are checked by chat's own model, under the same names.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, StrictInt, Tag

from mmjax.errors import RequestValueError
from mmjax.server.openai.protocol import (
    MAX_MESSAGES,
    Label,
    MetadataValue,
    Object,
    Objects,
    ReasoningEffort,
    StreamOptions,
    Strict,
    Text,
    bounded,
    form_of,
)

LOGPROBS = "message.output_text.logprobs"

Includable = Literal[
    "message.output_text.logprobs",
    # What is nowhere in these answers: there are no tools of the server's and no apart reasoning,
    # and an input's pictures are shown as they were sent.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Parts of an answer that may be asked for with `include`."""

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        MetadataValue,
    ],
    Field(max_length=16, fail_fast=True),
]

Input = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Object], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")],
    form_of("a text or a list of items"),
]


class TextOptions(Strict):
    """`text`: what the answer is."""

    format: Object | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """`reasoning`: its effort is chat's `reasoning_effort`, and no summary is of none."""

    effort: ReasoningEffort | None = None
    summary: Label | None = None
    generate_summary: Label | None = None
    context: Label | None = None


class ResponseQuery(Strict):
    """The query of GET /v1/responses/{id}, without effect: all that there is is always shown."""

    include: list[Includable] | None = None
    include_obfuscation: Literal["true", "false"] | None = None


class PageQuery(Strict):
    """The query of a list."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None

    def page_of(self, items: Iterable[tuple[str, Any]], wrong_after: str) -> dict[str, Any]:
        """Return OpenAI's list of some of the items, given by ids in the order of their creation.

        `wrong_after`: what is said of an `after` that is none of the ids.
        """
        found = list(items) if self.order == "asc" else list(items)[::-1]
        if self.after is not None:
            ids = [item_id for item_id, _ in found]
            if self.after not in ids:
                raise RequestValueError.about("after", wrong_after)
            found = found[ids.index(self.after) + 1 :]
        page = found[: self.limit]
        return {
            "object": "list",
            "data": [item for _, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": len(page) < len(found),
        }


class ItemsQuery(PageQuery):
    """The query of GET /v1/responses/{id}/input_items."""

    include: list[Includable] | None = None
    """No effect, as of the response's own."""


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: Label | None = None
    input: Input
    instructions: Text | None = None
    previous_response_id: Label | None = None
    store: StrictBool | None = True
    metadata: Metadata | None = None
    stream: StrictBool | None = False
    max_output_tokens: Annotated[StrictInt, bounded("max_tokens")] | None = None
    top_logprobs: Annotated[StrictInt, bounded("logprobs")] | None = None
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    text: TextOptions | None = None
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = True
    truncation: Literal["disabled"] | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: Label | None = None
    reasoning: Reasoning | None = None
    service_tier: Label | None = None
    max_tool_calls: Annotated[StrictInt, Field(ge=0, lt=2**31)] | None = None
    """No effect: of tools that a server runs itself, which there are none of."""
    stream_options: StreamOptions | None = None
    # As chat's, and checked there.
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    structured_outputs: Any = None
    cache_salt: Any = None
    priority: Any = None
    timeout: Any = None
    mm_processor_kwargs: Any = None
    chat_template_kwargs: Any = None
    # Not supported: only the value without effect is allowed.
    background: StrictBool | None = None
    conversation: Any = None
    context_management: Any = None
    moderation: Any = None
    prompt: Any = None

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "conversation": (None,),
        "context_management": (None, []),
        "moderation": (None,),
        "prompt": (None,),
    }

    def check_supported(self) -> None:
        """Refuse fields that mmjax does not support."""
        for name, neutral in self.NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise RequestValueError.about(name, "is not supported; leave it out")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise RequestValueError.about(
                "stream_options.continuous_usage_stats",
                "has no place in the events of a response, of which the last has its usage; leave "
                "it out",
            )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer bears log-probabilities."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())
