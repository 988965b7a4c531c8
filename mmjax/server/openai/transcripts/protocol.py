"""What /v1/audio/transcriptions and /v1/audio/translations take and answer."""

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mmjax.errors import RequestValueError
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.transcripts import TranscriptFallback
from mmjax.server.openai.protocol import GenerationRequest, Label, Strict, bounded
from mmjax.server.openai.transcripts.form import Form

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
WITH_TIMES = frozenset({"srt", "verbose_json", "vtt"})
_FILE = "file"
_LISTS = ("timestamp_granularities", "include")
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_THRESHOLDS = ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold")


class TranslationRequest(Strict):
    """The fields of a form beside its file. Values are texts there, and become numbers here."""

    model: Label | None = None
    prompt: Annotated[str, Field(max_length=64 * 2**10)] = ""
    """A text before the transcript, whose style and words it goes on with."""
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, bounded("temperature")] = 0.0
    language: Label | None = None
    """The clip's."""
    stream: bool = False
    # vLLM's.
    top_p: Annotated[float, bounded("top_p")] | None = None
    top_k: Annotated[int, bounded("top_k")] | None = None
    min_p: Annotated[float, bounded("min_p")] | None = None
    frequency_penalty: Annotated[float, bounded("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, bounded("presence_penalty")] | None = None
    repetition_penalty: Annotated[float, bounded("repetition_penalty")] | None = None
    seed: Annotated[int, bounded("seed")] | None = None
    # HF's: a window whose text passes one is transcribed again at higher temperatures, up to 1.
    compression_ratio_threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logprob_threshold: Annotated[float, Field(le=0, allow_inf_nan=False)] | None = None
    no_speech_threshold: Annotated[float, Field(ge=0, le=1)] | None = None

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core_schema, handler)
        fields = handler.resolve_ref_schema(schema)
        file = {"type": "string", "format": "binary"}
        fields["properties"] = {_FILE: file, **fields["properties"]}
        fields["required"] = [_FILE]
        return schema

    @property
    def has_segments(self) -> bool:
        """Whether verbose_json has them."""
        return True

    @property
    def has_words(self) -> bool:
        """Whether it has words with their times."""
        return False

    def check_supported(self) -> None:
        """Refuse what is not made."""
        self.to_fallback()
        if self.stream and self.response_format in WITH_TIMES:
            raise RequestValueError.about(
                "stream",
                f"is not made of `response_format` {self.response_format}; ask for json or text",
            )

    def to_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return how each window is sampled."""
        given = {name: getattr(self, name) for name in _SAMPLING}
        known = {name: value for name, value in given.items() if value is not None}
        wants_logprobs = self.response_format == "verbose_json"
        return msgspec.structs.replace(defaults, **known, logprobs=0 if wants_logprobs else None)

    def to_fallback(self) -> TranscriptFallback | None:
        """Return when a window is transcribed again; None: never."""
        given = {name: getattr(self, name) for name in _THRESHOLDS}
        if not any(value is not None for value in given.values()):
            return None
        higher = tuple(one for one in TranscriptFallback().temperatures if one > self.temperature)
        return TranscriptFallback(**given, temperatures=higher)

    def to_generation(self) -> GenerationRequest:
        """Return what all requests to the engine have."""
        return GenerationRequest(model=self.model, stream=self.stream)


class TranscriptionRequest(TranslationRequest):
    """The same of a transcription."""

    timestamp_granularities: tuple[Literal["segment", "word"], ...] = ("segment",)
    include: tuple[Label, ...] = ()
    chunking_strategy: Literal["auto"] | None = None
    """No effect: long clips are always cut."""

    def check_supported(self) -> None:
        super().check_supported()
        if self.has_words and self.response_format != "verbose_json":
            streamed = "; words are not streamed" if self.stream else ""
            raise RequestValueError.about(
                "timestamp_granularities",
                f"has `word`, and `response_format` {self.response_format} has no words' times; "
                f"ask for verbose_json, or leave `word` out{streamed}",
            )
        if self.include:
            raise RequestValueError.about("include", "is not supported yet; leave it out")

    @property
    def has_segments(self) -> bool:
        return "segment" in self.timestamp_granularities

    @property
    def has_words(self) -> bool:
        return "word" in self.timestamp_granularities


def read_form(form: Form) -> tuple[dict[str, Any], bytes]:
    """Return a form's fields, as the models above take them, and its file."""
    fields: dict[str, Any] = {}
    for name, values in form.fields.items():
        bare = name.removesuffix("[]")
        if bare in _LISTS:
            fields[bare] = [*fields.get(bare, ()), *values]
        elif len(values) > 1:
            raise RequestValueError.about(name[:64], "is given twice; give it once")
        else:
            fields[name] = values[0]
    unknown = [name for name in form.files if name != _FILE]
    if unknown:
        raise RequestValueError.about(unknown[0][:64], f"is a file; the clip is `{_FILE}`")
    if _FILE not in form.files:
        raise RequestValueError.about(_FILE, "is missing; send the clip as a file of the form")
    # An empty field is one that is left out.
    return {name: value for name, value in fields.items() if value != ""}, form.files[_FILE]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What is counted of a clip."""

    type: Literal["duration"] = "duration"
    seconds: int


class SegmentObject(msgspec.Struct, frozen=True, kw_only=True):
    """One of `segments` of verbose_json."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None
    """None: not of a Whisper."""


class WordObject(msgspec.Struct, frozen=True, kw_only=True):
    """One of `words` of verbose_json."""

    word: str
    start: float
    end: float


class TranscriptObject(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer in json, and with more fields in verbose_json."""

    task: str | msgspec.UnsetType = msgspec.UNSET
    language: str | msgspec.UnsetType = msgspec.UNSET
    duration: float | msgspec.UnsetType = msgspec.UNSET
    text: str
    segments: list[SegmentObject] | msgspec.UnsetType = msgspec.UNSET
    words: list[WordObject] | msgspec.UnsetType = msgspec.UNSET
    usage: Usage
