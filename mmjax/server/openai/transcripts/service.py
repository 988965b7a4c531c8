"""/v1/audio/transcriptions and /v1/audio/translations: a clip in a form, its transcript out."""

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.engine_client.request_stream import RequestStream
from mmjax.frontend.output.outputs import CompletionOutput, SampleLogprobs
from mmjax.frontend.output.transcripts import TextDeltas, Transcript
from mmjax.frontend.requests.prompts import PromptDict
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.media.encoded import EncodedAudio
from mmjax.processing.transcripts import (
    Segment,
    Task,
    Transcriber,
    Transcription,
    TranscriptOptions,
    name_language,
)
from mmjax.server.openai.continuation import new_hex
from mmjax.server.openai.errors import JsonResponse
from mmjax.server.openai.generation import GenerationService, with_extras
from mmjax.server.openai.protocol import GenerationRequest
from mmjax.server.openai.request_body import RequestReader, validated
from mmjax.server.openai.streaming import join, merge, while_connected
from mmjax.server.openai.transcripts.form import parse_form
from mmjax.server.openai.transcripts.protocol import (
    WITH_TIMES,
    SegmentObject,
    TranscriptionRequest,
    TranscriptObject,
    TranslationRequest,
    Usage,
    WordObject,
    read_form,
)
from mmjax.server.openai.transcripts.room import Room

MAX_SECONDS_AT_ONCE = 2 * 3600
"""Of all clips that are held decoded, with their spectrograms: less than a gigabyte; others
wait."""
_LEAST_SECONDS = 30.0
"""A shorter clip has silence behind it."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One request's clip, on its way."""

    request: Request
    body: TranslationRequest
    generation: GenerationRequest
    task: Task
    answer_id: str
    transcription: Transcription
    transcript: Transcript
    streams: list[RequestStream]
    """All that were begun."""


class TranscriptService:
    """Serves both routes."""

    def __init__(
        self, client: AsyncEngineClient, generation: GenerationService, reader: RequestReader
    ) -> None:
        self._client = client
        self._generation = generation
        self._reader = reader
        self._room = Room(MAX_SECONDS_AT_ONCE)

    async def transcriptions(self, request: Request) -> Response:
        """Serve POST /v1/audio/transcriptions."""
        return await self._serve(request, TranscriptionRequest, "transcribe")

    async def translations(self, request: Request) -> Response:
        """Serve POST /v1/audio/translations."""
        return await self._serve(request, TranslationRequest, "translate")

    async def _serve(
        self, request: Request, model: type[TranslationRequest], task: Task
    ) -> Response:
        # Before the clip is received: a server that transcribes nothing has no use for it.
        transcriber = self._client.input_processor.get_transcriber()
        data = await self._reader.receive(request, is_json=False)
        form = parse_form(data, request.headers.get("content-type", ""))
        del data
        fields, file = read_form(form)
        body = validated(model, fields)
        body.check_supported()
        generation = body.to_generation()
        self._generation.check(request, generation)
        connector = self._client.input_processor.connector
        clip = cast(EncodedAudio, connector.open_audio_file(file, "file"))
        header = await while_connected(request, asyncio.to_thread(clip.read_header))
        seconds = max(header.seconds, _LEAST_SECONDS)
        with await while_connected(request, self._room.take(seconds)) as hold:
            begin = partial(self._begin, transcriber, body, task, clip)
            transcription, transcript = await while_connected(request, asyncio.to_thread(begin))
            job = _Job(
                request=request,
                body=body,
                generation=generation,
                task=task,
                answer_id=f"transcript-{new_hex()}",
                transcription=transcription,
                transcript=transcript,
                streams=[],
            )
            if not body.stream:
                return await self._answer(job)
            response = await self._stream(job)
            # It closes all of them, even where the client leaves before the first event.
            job.streams.append(cast(RequestStream, hold.pop_all()))
            return response

    async def _stream(self, job: _Job) -> Response:
        events = self._events(job)
        first = await while_connected(job.request, anext(events))
        return self._generation.event_stream(join(first, events), job.streams)

    async def _answer(self, job: _Job) -> Response:
        await while_connected(job.request, self._finish(job))
        # Words are found by decoding every token.
        return await asyncio.to_thread(_WRITERS[job.body.response_format], job)

    def _begin(
        self, transcriber: Transcriber, body: TranslationRequest, task: Task, clip: EncodedAudio
    ) -> tuple[Transcription, Transcript]:
        """Decode the clip, and make its spectrogram; in a thread."""
        processor = self._client.input_processor
        prompt = body.prompt.strip() and transcriber.before_prompt + body.prompt.strip()
        options = TranscriptOptions(
            task=task,
            language=body.language,
            prompt_token_ids=processor.tokenize_pieces([(prompt, True)], False) if prompt else (),
            has_timestamps=body.response_format in WITH_TIMES,
            has_word_times=body.has_words,
            sampling_params=body.to_sampling_params(SamplingParams(temperature=0.0)),
            fallback=body.to_fallback(),
            has_silence=body.response_format == "verbose_json" and body.has_segments,
        )
        try:
            samples = clip.decode(transcriber.sampling_rate)
        finally:
            clip.drop_pixels()
        transcription = transcriber.start(samples, options)
        return transcription, Transcript.of(transcriber, processor.tokenizer, samples)

    async def _finish(self, job: _Job) -> None:
        async for _ in self._run(job):
            pass

    async def _run(self, job: _Job) -> AsyncGenerator[CompletionOutput | list[Segment], None]:
        """Have window after window answered; yield text as it comes, and segments at their end."""
        for asked in iter(job.transcription.next_request, None):
            number = len(job.streams)
            streams = await self._generation.submit(
                job.request,
                job.generation,
                f"{job.answer_id}-{number}",
                [with_extras(cast(PromptDict, dict(asked.prompt)), job.generation)],
                asked.sampling_params,
                names=["prompt" if job.body.prompt else "file"],
            )
            job.streams.extend(streams)
            logprobs: SampleLogprobs = []
            whole = CompletionOutput(index=0, text="", token_ids=[], logprobs=logprobs)
            prompt_logprobs = alignment = None
            outputs = merge(streams)
            try:
                async for _, output in outputs:
                    (item,) = output.outputs
                    prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                    alignment = output.alignment
                    whole.token_ids += item.token_ids
                    logprobs += item.logprobs or ()
                    if asked.is_text:
                        yield item
            finally:
                await outputs.aclose()
            add = partial(job.transcript.add, job.transcription, whole, prompt_logprobs)
            segments = add() if alignment is None else await asyncio.to_thread(add, alignment)
            if not asked.is_text:
                yield segments

    async def _events(self, job: _Job) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield OpenAI's events: what is new of the text, and at the end all of it."""
        transcript = job.transcript
        deltas = TextDeltas(transcript.transcriber, transcript.decode)
        news = self._run(job)
        try:
            async for item in news:
                parts = item if isinstance(item, list) else [item]
                text = deltas.add([one for part in parts for one in part.token_ids])
                if text:
                    yield {"type": "transcript.text.delta", "delta": text}
        finally:
            await news.aclose()
        if rest := deltas.finish():
            yield {"type": "transcript.text.delta", "delta": rest}
        yield {"type": "transcript.text.done", "text": transcript.text, "usage": _usage(job)}


# ---- forms of the answer ------------------------------------------------------------------------


def _usage(job: _Job) -> Usage:
    return Usage(seconds=math.ceil(job.transcript.duration))


def _write_json(job: _Job) -> Response:
    return JsonResponse(TranscriptObject(text=job.transcript.text, usage=_usage(job)))


def _write_verbose_json(job: _Job) -> Response:
    transcript, body = job.transcript, job.body
    segments = [
        _describe(transcript, number, segment) for number, segment in enumerate(transcript.segments)
    ]
    fields: dict[str, Any] = {"segments": segments} if body.has_segments else {}
    if body.has_words:
        fields["words"] = [
            WordObject(word=word.text, start=word.start, end=word.end)
            for word in transcript.find_words()
        ]
    if transcript.language is not None:
        fields["language"] = name_language(transcript.language)
    return JsonResponse(
        TranscriptObject(
            task=job.task,
            duration=round(transcript.duration, 3),
            text=transcript.text,
            usage=_usage(job),
            **fields,
        )
    )


def _describe(transcript: Transcript, number: int, segment: Segment) -> SegmentObject:
    text = transcript.decode_segment(segment)
    data = text.encode()
    return SegmentObject(
        id=number,
        seek=segment.seek,
        start=transcript.cut(segment.start),
        end=transcript.cut(segment.end),
        text=text,
        tokens=list(segment.token_ids),
        temperature=segment.temperature,
        avg_logprob=segment.avg_logprob or 0.0,
        compression_ratio=len(data) / len(zlib.compress(data)),
        no_speech_prob=segment.no_speech_prob,
    )


_WRITERS: Mapping[str, Callable[[_Job], Response]] = {
    "json": _write_json,
    "verbose_json": _write_verbose_json,
    "text": lambda job: PlainTextResponse(f"{job.transcript.text}\n"),
    "srt": lambda job: PlainTextResponse(job.transcript.to_srt()),
    "vtt": lambda job: Response(job.transcript.to_vtt(), media_type="text/vtt"),
}
