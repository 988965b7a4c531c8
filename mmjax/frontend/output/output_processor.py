"""Engine outputs to RequestOutputs: text, stop strings, logprobs, the `n` sequences joined.

Knows nothing of sockets or of HTTP: the caller aborts sequences in the engine that a stop string
ended here.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from mmjax.frontend.output.detokenizer import (
    IncrementalDetokenizer,
    OutputText,
    StopChecker,
    TokenDecoder,
)
from mmjax.frontend.output.outputs import (
    CompletionOutput,
    FinishedSequence,
    ItemOutput,
    Logprob,
    NewTokens,
    RequestOutput,
    SampleLogprobs,
)
from mmjax.frontend.output.token_bytes import (
    MAX_CHARACTER_BYTES,
    begins_within,
    split_unfinished,
)
from mmjax.frontend.requests.request import ProcessedRequest, RequestItem
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta, TokenLogprobs

_CONTEXT_TOKENS = 5
"""Prompt tokens that precede the first output token's decoding, for its leading space."""


Sending = Literal["committing", "waiting", "sent", "running"]
"""Where a sequence's message is: a thread completes it, it waits for its turn, it was sent to P1
(or is queued in the socket), P1 has answered."""


class ProcessedOutputs(NamedTuple):
    """The outputs of one engine step."""

    request_outputs: list[RequestOutput]
    request_ids_to_abort: list[str]
    """Sequences that a stop string ended, and the engine still runs."""
    new_tokens: list[NewTokens]
    finished: list[FinishedSequence]

    @classmethod
    def empty(cls) -> "ProcessedOutputs":
        """Return one to which outputs are added."""
        return cls([], [], [], [])


class _Added(NamedTuple):
    """What a step adds to a sequence."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: SampleLogprobs | None = None


class OutputProcessor:
    """Holds the output state of all unfinished requests."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decoder = TokenDecoder(tokenizer)
        self.sequences: dict[str, SequenceState] = {}
        """The unfinished ones by id, in the order in which they came."""
        self._states: dict[str, RequestState] = {}

    def add_request(self, request: ProcessedRequest) -> ProcessedOutputs:
        """Add a request; with `request.stream`, its outputs hold only what each step adds.

        Returns what a stream tells of tokens that it brings: the same as of tokens of an engine.
        """
        state = self._states[request.request_id] = RequestState(request=request)
        for index, message in enumerate(request.messages):
            sequence = SequenceState(
                index=index,
                parent=state,
                params=message.sampling_params,
                text=self._output_text(request, message.sampling_params),
            )
            state.sequences.append(sequence)
            self.sequences[message.request_id] = sequence
        brought = ProcessedOutputs.empty()
        for sequence, message in zip(state.sequences, request.messages, strict=True):
            if message.output_token_ids:
                self._resume(sequence, message, brought)
        return brought

    def remove(self, request_id: str) -> list[str]:
        """Remove a request; return the ids of its unfinished sequences."""
        state = self._states.pop(request_id, None)
        if state is None:
            return []
        for sequence in state.sequences:
            self.sequences.pop(sequence.sequence_id, None)
        return [sequence.sequence_id for sequence in state.unfinished()]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of requests without output, for each of their sequences. Thread-safe."""
        return sum(
            len(state.request.prompt_token_ids)
            for state in list(self._states.values())
            for sequence in state.sequences
            if not sequence.token_ids
        )

    def process(self, delta: RequestOutputDelta, outputs: ProcessedOutputs) -> None:
        """Take in what a step gave one sequence; add to `outputs` what that tells.

        An unknown id (aborted meanwhile) is skipped.
        """
        sequence = self.sequences.get(delta.request_id)
        if sequence is None:
            return
        added = self._apply(sequence, delta)
        tokens = sequence.note_tokens(len(delta.new_token_ids), time.monotonic())
        if delta.new_token_ids or delta.vectors is not None:  # else it is aborted
            outputs.new_tokens.append(tokens)
        if sequence.finish_reason is not None:
            del self.sequences[delta.request_id]
            outputs.finished.append(sequence.to_finished())
            if delta.finish_reason is None:
                outputs.request_ids_to_abort.append(delta.request_id)
        output = self._request_output(sequence, added)
        if output is not None:
            outputs.request_outputs.append(output)

    # ---- one sequence ---------------------------------------------------------------------------

    def _output_text(self, request: ProcessedRequest, params: SamplingParams) -> OutputText:
        detokenizer = IncrementalDetokenizer(
            self._decoder,
            context=self._context(request, params),
            skip_special_tokens=params.skip_special_tokens,
        )
        checker = StopChecker(params.stop, include_in_output=params.include_stop_str_in_output)
        return OutputText(detokenizer, checker)

    def _context(self, request: ProcessedRequest, params: SamplingParams) -> list[int]:
        """Return tokens without which decoding would drop a space at the answer's beginning."""
        special_ids = self._decoder.special_ids
        last, num_wanted = reversed(request.prompt_token_ids), _CONTEXT_TOKENS
        if params.structured_outputs is not None:
            text, num_wanted = (i for i in last if i not in special_ids), 1
        elif request.continues_prompt:
            text = itertools.takewhile(lambda i: i not in special_ids, last)
        else:
            return []
        context: list[int] = []
        # Byte tokens in a row are decoded together, and all to U+FFFD where one is no character's.
        for token_id in itertools.islice(text, num_wanted + MAX_CHARACTER_BYTES - 1):
            context.insert(0, token_id)
            if len(context) >= num_wanted and not begins_within(self._tokenizer, token_id):
                break
        return context

    def _apply(self, sequence: "SequenceState", delta: RequestOutputDelta) -> _Added:
        sequence.num_cached_tokens = max(sequence.num_cached_tokens, delta.num_cached_tokens)
        sequence.parent.note(delta)
        if delta.prompt_logprobs is not None:
            sequence.parent.prompt_logprobs = [
                None if entry is None else self._position(entry) for entry in delta.prompt_logprobs
            ]
        if delta.alignment is not None:
            weights = np.frombuffer(delta.alignment.weights, "<f4")
            sequence.parent.alignment = weights.reshape(delta.alignment.shape)
        if delta.vectors is not None:
            flat = np.frombuffer(delta.vectors.data, np.float32)
            sequence.parent.vectors = flat.reshape(-1, delta.vectors.width)
            sequence.finish_reason = delta.finish_reason
            return _Added()
        new_text, taken = self._take(sequence, delta)
        logprobs = self._logprobs(delta, len(taken))
        sequence.logprobs += logprobs or []
        return _Added(new_text, taken, logprobs)

    def _resume(
        self, sequence: "SequenceState", message: EngineCoreRequest, outputs: ProcessedOutputs
    ) -> None:
        """Take in the tokens that a sequence brings; add to `outputs` what they tell."""
        for delta in _brought(message):
            new_text, taken = self._take(sequence, delta)
            if sequence.finish_reason is not None:
                del self.sequences[message.request_id]
                sequence.note_tokens(0, time.monotonic())
                outputs.finished.append(sequence.to_finished())
            output = self._request_output(sequence, _Added(new_text, taken))
            outputs.request_outputs.extend([] if output is None else [output])
            if sequence.finish_reason is not None:
                break

    def _take(self, sequence: "SequenceState", delta: RequestOutputDelta) -> tuple[str, list[int]]:
        """Add a delta's tokens, up to a stop string; return the new text, and those tokens."""
        params = sequence.params
        token_ids = delta.new_token_ids
        visible: Sequence[int] = token_ids
        if delta.finish_reason == "stop" and not params.include_stop_str_in_output:
            # The last id is the EOS or a stop token, which is not part of the text.
            visible = token_ids[:-1]
        if not params.detokenize:
            visible = ()
        new_text = ""
        num_taken = 0
        for token_id in visible:
            num_taken += 1
            # Token by token, so that a stop string also ends the ids there.
            may_stop = len(sequence.token_ids) + num_taken > params.min_tokens
            new_text += sequence.text.append(token_id, check_stop=may_stop)
            if sequence.text.stop_string is not None:
                break
        is_stopped = sequence.text.stop_string is not None
        taken = token_ids[:num_taken] if is_stopped else token_ids
        sequence.token_ids += taken
        sequence.weights_versions += [delta.weights_version] * len(taken)
        if params.detokenize and not is_stopped and delta.finish_reason is not None:
            may_stop = len(sequence.token_ids) > params.min_tokens
            new_text += sequence.text.finish(check_stop=may_stop)
            is_stopped = sequence.text.stop_string is not None
        if is_stopped:
            sequence.finish_reason, sequence.stop_reason = "stop", sequence.text.stop_string
        else:
            sequence.finish_reason, sequence.stop_reason = delta.finish_reason, delta.stop_reason
        parse = sequence.request.prepared.parse_answer
        if parse is not None and sequence.finish_reason is not None:
            whole, _ = split_unfinished(self._tokenizer, sequence.token_ids)
            sequence.parsed = parse(whole) or None
        return new_text, taken

    def _logprobs(self, delta: RequestOutputDelta, count: int) -> SampleLogprobs | None:
        if delta.new_logprobs is None:
            return None
        return [self._position(entry) for entry in delta.new_logprobs[:count]]

    def _position(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        position: dict[int, Logprob] = {}
        for place, (token_id, logprob) in enumerate(
            zip(entry.token_ids, entry.logprobs, strict=True)
        ):
            rank = entry.sampled_rank if place == 0 else place
            if token_id not in position:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
                position[token_id] = Logprob(logprob=logprob, rank=rank, decoded_token=text)
        return position

    # ---- the request ----------------------------------------------------------------------------

    def _request_output(self, sequence: "SequenceState", added: _Added) -> RequestOutput | None:
        parent = sequence.parent
        is_finished = not parent.unfinished()
        if is_finished:
            self._states.pop(parent.request.request_id, None)
        if parent.request.stream:
            if not (added.text or added.token_ids or sequence.finish_reason):
                return None
            return parent.output([sequence.completion(*added)], finished=is_finished)
        if not is_finished:
            return None
        return parent.output([item.whole() for item in parent.sequences], finished=True)


@dataclass(slots=True, kw_only=True)
class RequestState:
    """What has come of one request."""

    request: ProcessedRequest
    sequences: list["SequenceState"] = field(default_factory=list)
    encoding: dict[str, Literal["computed", "disk", "worker"]] = field(default_factory=dict)
    """How P1 came by the outputs of items, by hash; the others were cached, or not needed."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    alignment: np.ndarray | None = None
    vectors: np.ndarray | None = None

    def unfinished(self) -> list["SequenceState"]:
        """Return the sequences that go on."""
        return [one for one in self.sequences if one.finish_reason is None]

    def note(self, delta: RequestOutputDelta) -> None:
        """Record when tokens came, and what P1 says with the first one."""
        times = self.request.times
        times.note_token(time.monotonic())
        if delta.times is not None:
            times.add_engine(delta.times)
        if delta.encoded or delta.found_on_disk or delta.encoded_apart:
            self.encoding.update((name, "computed") for name in delta.encoded)
            self.encoding.update((name, "disk") for name in delta.found_on_disk)
            self.encoding.update((name, "worker") for name in delta.encoded_apart)

    def output(self, outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        # The others find what the first one computed.
        num_cached_tokens = self.sequences[0].num_cached_tokens
        items = self.request.items if finished else ()
        prompt_logprobs = self.prompt_logprobs
        if self.request.stream:
            self.prompt_logprobs = None
        return RequestOutput.of(
            self.request,
            prompt_logprobs=prompt_logprobs,
            alignment=self.alignment,
            outputs=outputs,
            finished=finished,
            num_cached_tokens=num_cached_tokens,
            items=[self._item(item, num_cached_tokens) for item in items],
            times=self.request.times,
            mm_items=self.request.prepared.mm_items if finished else None,
            multi_modal_inputs=self.request.mm_inputs if finished else None,
            vectors=self.vectors,
        )

    def _item(self, item: RequestItem, num_cached_tokens: int) -> ItemOutput:
        # An encoder's prompt is in no prefix cache.
        is_in_prompt = self.request.prepared.encoder_prompt_token_ids is None
        is_in_prefix = is_in_prompt and item.offset + item.length <= num_cached_tokens
        cache = "prefix_cache" if is_in_prefix else "encoder_cache"
        return ItemOutput(
            **msgspec.structs.asdict(item), encoding=self.encoding.get(item.mm_hash, cache)
        )


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """What has come of one of a request's `n` sequences, and what was sent for it."""

    index: int
    parent: RequestState
    params: SamplingParams
    text: OutputText
    token_ids: list[int] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)
    """Of the weights that each token was sampled with."""
    logprobs: SampleLogprobs = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    first_token_at: float = 0.0
    """In `time.monotonic()` seconds, as `last_token_at`; 0: there is none yet."""
    last_token_at: float = 0.0
    parsed: Mapping[str, Any] | None = None
    sending: Sending = "committing"
    num_misses: int = 0
    """Cache misses of its message in the present P1."""

    @property
    def request(self) -> ProcessedRequest:
        """The request that it is a sequence of."""
        return self.parent.request

    @property
    def sequence_id(self) -> str:
        """The id of its message."""
        return self.request.messages[self.index].request_id

    def note_tokens(self, num_tokens: int, now: float) -> NewTokens:
        """Record when tokens came."""
        is_first = not self.first_token_at
        before = self.request.times.arrived_at if is_first else self.last_token_at
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        return NewTokens(self.request, num_tokens, is_first, now - before)

    def to_finished(self) -> FinishedSequence:
        """Describe the sequence, which has its finish reason."""
        return FinishedSequence(
            request=self.request,
            request_id=self.sequence_id,
            finish_reason=self.finish_reason or "",
            text=self.text.text,
            num_tokens=len(self.token_ids),
            num_cached_tokens=self.num_cached_tokens,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            is_last=not self.parent.unfinished(),
            max_num_tokens=max(len(one.token_ids) for one in self.parent.sequences),
        )

    def completion(
        self, text: str, token_ids: Sequence[int], logprobs: SampleLogprobs | None
    ) -> CompletionOutput:
        versions = self.weights_versions[len(self.weights_versions) - len(token_ids) :]
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=list(token_ids),
            cumulative_logprob=self._cumulative_logprob(),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            parsed=self.parsed,
            weights_version=self.weights_versions[-1] if self.weights_versions else 0,
            weights_versions=versions if len(set(versions)) > 1 else None,
        )

    def whole(self) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        return self.completion(
            self.text.text, self.token_ids, self.logprobs if has_logprobs else None
        )

    def _cumulative_logprob(self) -> float | None:
        if self.params.logprobs is None:
            return None
        return sum((next(iter(one.values())).logprob for one in self.logprobs), 0.0)


def _brought(message: EngineCoreRequest) -> list[RequestOutputDelta]:
    """Return the tokens that a sequence brings as an engine would have sent them, one by one."""
    reason, stop_reason = _find_end(message)
    deltas = [
        RequestOutputDelta(request_id=message.request_id, new_token_ids=[token_id])
        for token_id in message.output_token_ids
    ]
    deltas[-1] = msgspec.structs.replace(deltas[-1], finish_reason=reason, stop_reason=stop_reason)
    return deltas


def _find_end(message: EngineCoreRequest) -> tuple[str | None, int | None]:
    """Return why the tokens that a sequence brings end it, if they do, and by which stop token."""
    params, num_tokens = message.sampling_params, len(message.output_token_ids)
    last = message.output_token_ids[-1]
    is_structured = message.grammar is not None
    ends = [] if params.ignore_eos and not is_structured else message.eos_token_ids
    may_stop = num_tokens >= params.min_tokens or is_structured
    if may_stop and last in (*ends, *params.stop_token_ids):
        return "stop", None if last in ends[:1] else last
    is_long = params.max_tokens is not None and num_tokens >= params.max_tokens
    return ("length" if is_long else None), None
