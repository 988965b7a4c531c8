"""An engine that echoes the prompt, for tests of the server and of `LLM`: no jax, no weights.

`EchoEngine` has EngineCore's interface; `EchoSupervisor` replaces the supervisor of P1, in the
test's process; `run_echo_engine` and `run_item_engine` are P1 mains for the real supervisor. With a
`MultiModalConfig` the engine has the receiver cache, and answers with its items: `item_tokens`.
"""

import asyncio
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mmjax.cache import engine_receiver_cache_from_config
from mmjax.config.engine_config import EngineConfig, MultiModalConfig
from mmjax.engine.scheduling.admission import resolve_features
from mmjax.engine.scheduling.queues import Deadlines
from mmjax.errors import (
    ConfigError,
    MultiModalCacheMissError,
    RequestError,
    RequestTimeoutError,
    RequestValueError,
)
from mmjax.frontend.engine_client.supervisor import EngineListener, EngineState
from mmjax.frontend.engine_client.suspects import EngineExit
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec
from mmjax.transport.channel import MessagesLostError, Receiver, Sender, step_record_path
from mmjax.transport.codec import Remainder, decode, encode
from mmjax.transport.messages import (
    MESSAGES_LOST_STATUS,
    AbortRequests,
    AdapterLoaded,
    CacheMiss,
    ControlEngine,
    EngineChanged,
    EngineCoreRequest,
    EngineMessage,
    FrontendMessage,
    Heartbeat,
    LoadAdapter,
    LoopState,
    Ready,
    RequestFailed,
    RequestOutputDelta,
    Shutdown,
    StepOutput,
    TokenLogprobs,
    UnloadAdapter,
    Vectors,
)
from mmjax.transport.step_record import StepRecord

REFUSED_TOKEN = 7
"""A prompt that ends with it is refused by the engine."""

FORGET_TOKEN = 8
"""A prompt that ends with it makes the engine forget all items before it reads the request's."""

DEATH_TOKEN = 9
"""A prompt that ends with it ends the engine's process."""


BAD_ADAPTER = "bad"
"""The name of a directory whose adapter cannot be loaded."""


def item_tokens(features: Sequence[MultiModalFeatureSpec]) -> list[int]:
    """Return token ids that depend on every bit of the items and on their places."""
    digest = hashlib.sha256()
    for feature in features:
        assert feature.tensors is not None
        position = feature.mm_position
        digest.update(repr((feature.modality, position.offset, position.length)).encode())
        for key in sorted(feature.tensors):
            _add_to(digest, key, feature.tensors[key].data)
    return [100 + byte for byte in digest.digest()[:8]]


def _add_to(digest: Any, key: str, data: Any) -> None:
    parts = data if isinstance(data, list | tuple) else [data]
    for part in parts:
        if isinstance(part, list | tuple):
            _add_to(digest, key, part)
            continue
        array = np.asarray(part)
        digest.update(f"{key} {array.dtype} {array.shape} ".encode() + array.tobytes())


@dataclass
class _Running:
    request: EngineCoreRequest
    script: list[int]
    num_sent: int = 0


def is_gone(path: str | None) -> bool:
    return path is not None and not Path(path).is_dir()


class EchoEngine:
    """Answers with the prompt's token ids, one a step, then the end token (if there is one)."""

    def __init__(self, mm: MultiModalConfig | None = None) -> None:
        """With `mm`: keep P1's cache, and answer a request with items by `item_tokens`, at once."""
        self._has_eyes = mm is not None
        self.cache = None if mm is None else engine_receiver_cache_from_config(mm)
        self.running: dict[str, _Running] = {}
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.adapters: dict[str, str] = {}
        """Path by name."""
        self.answer: list[int] | None = None
        """What is said instead of an echo."""
        self.num_steps = 0
        self.changes: list[ControlEngine] = []
        """Of the engine as a whole."""
        self.weights_version = 0
        self.is_sleeping = self.is_paused = False
        self._deadlines = Deadlines()

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.cache is not None and request.prompt_token_ids[-1] == FORGET_TOKEN:
            self.cache.clear_cache()
        if self._has_eyes:
            resolve_features(request.mm_features, self.cache)
        if request.prompt_token_ids[-1] == REFUSED_TOKEN:
            raise RequestValueError("the engine does not like this prompt", param="prompt")
        self.added.append(request)
        script = list(request.prompt_token_ids if self.answer is None else self.answer)
        if request.sampling_params.ignore_eos:
            script = script * (request.sampling_params.max_tokens or 1)
        self.running[request.request_id] = _Running(
            request, script, num_sent=len(request.output_token_ids)
        )
        self._deadlines.set(request.request_id, request.deadline)

    def load_adapter(self, message: LoadAdapter) -> AdapterLoaded:
        if message.lora_path.endswith(BAD_ADAPTER):
            error = RequestValueError("its file is damaged", param="lora_path")
            failed = RequestFailed.from_error(message.lora_name, error)
            return AdapterLoaded(lora_name=message.lora_name, error=failed)
        self.adapters[message.lora_name] = message.lora_path
        return AdapterLoaded(lora_name=message.lora_name)

    def change(self, message: ControlEngine) -> EngineChanged:
        self.changes.append(message)
        error, lacks_weights = None, False
        match message.action:
            case "sleep" | "wake_up":
                self.is_sleeping = message.action == "sleep"
            case "pause" | "resume":
                self.is_paused = message.action == "pause"
            case "load_weights" if message.weights_mark and is_gone(message.path):
                error = RequestFailed.from_error("", RequestValueError("they are gone"))
                self.weights_version, lacks_weights = message.weights_version or 0, True
            case "load_weights" if (message.path or "").endswith(BAD_ADAPTER):
                refusal = RequestValueError("it lacks a tensor", param="path")
                error = RequestFailed.from_error("", refusal)
            case "load_weights":
                self.weights_version = message.weights_version or self.weights_version + 1
        return EngineChanged(
            number=message.number,
            error=error,
            weights_version=self.weights_version,
            weights_mark="mark",
            lacks_weights=lacks_weights,
            is_sleeping=self.is_sleeping,
            is_paused=self.is_paused,
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def expire(self) -> list[str]:
        expired = self._deadlines.pop_expired(time.monotonic())
        return [request_id for request_id in expired if self.running.pop(request_id, None)]

    def pop_failed(self) -> list[tuple[str, RequestError]]:
        return []

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def stats(self) -> Heartbeat:
        return Heartbeat(
            num_running=len(self.running), num_waiting=0, kv_cache_usage=0.0, num_compilations=0
        )

    def step(self) -> list[RequestOutputDelta]:
        self.num_steps += 1
        return [self._advance(state) for state in list(self.running.values())]

    def _advance(self, state: _Running) -> RequestOutputDelta:
        params, request = state.request.sampling_params, state.request
        if self._has_eyes and request.mm_features:
            del self.running[request.request_id]
            return RequestOutputDelta(
                request_id=request.request_id,
                new_token_ids=item_tokens(request.mm_features),
                finish_reason="length",
            )
        ends = request.eos_token_ids[:1]
        script = state.script + ([] if params.ignore_eos else ends)
        token_id = script[state.num_sent]
        state.num_sent += 1
        reason: str | None = None
        stop_reason: int | None = None
        if token_id in params.stop_token_ids:
            reason, stop_reason = "stop", token_id
        elif state.num_sent == len(script) and not params.ignore_eos:
            reason = "stop"
        elif state.num_sent == params.max_tokens or state.num_sent == len(script):
            reason = "length"
        if reason is not None:
            del self.running[request.request_id]
        logprobs = None
        if params.logprobs is not None:
            others = [0, 1, 2][: params.logprobs]
            logprobs = [
                TokenLogprobs(
                    token_ids=[token_id, *others],
                    logprobs=[-2.0, *(-0.5 * (i + 1) for i in range(len(others)))],
                    sampled_rank=9,
                )
            ]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and state.num_sent == 1:
            rows = [
                TokenLogprobs(token_ids=[one], logprobs=[-1.0], sampled_rank=1)
                for one in request.prompt_token_ids[1:]
            ]
            prompt_logprobs = [None, *rows]
        return RequestOutputDelta(
            request_id=request.request_id,
            new_token_ids=[token_id],
            new_logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=3,
            vectors=None if params.pooling is None else _echo_vector(request.prompt_token_ids),
        )


def _echo_vector(token_ids: Sequence[int]) -> Vectors:
    """Return one vector, the prompt's token ids."""
    return Vectors(width=len(token_ids), data=np.array(token_ids, np.float32).tobytes())


@dataclass
class EchoSupervisor:
    """An engine without a process; `delay_s` is how long a step takes."""

    delay_s: float = 0.0
    is_started_ready: bool = True
    state: EngineState = "starting"
    health: bool = True
    pid: int | None = None
    num_restarts: int = 0
    retry_after_s: float | None = None
    ready: Ready | None = None
    heartbeat: Heartbeat | None = None
    mm: MultiModalConfig | None = None
    """The engine's, which then has a cache, and gets its messages as the bridge carries them."""
    num_bytes: list[int] = field(default_factory=list)
    """Of each request that came over the bridge."""
    engine: EchoEngine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = EchoEngine(self.mm)

    @property
    def is_healthy(self) -> bool:
        return self.health and self.state == "ready"

    async def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._has_work = asyncio.Event()
        self._has_started = asyncio.Event()
        self._task = asyncio.create_task(self._loop())
        if self.is_started_ready:
            self.become_ready()

    async def wait_started(self) -> None:
        await self._has_started.wait()

    def become_ready(self) -> None:
        self.state = "ready"
        self._has_started.set()
        self._listener.on_ready()

    def wake(self) -> None:
        """Interrupt a step that takes long."""
        self._task.cancel()
        self._task = asyncio.create_task(self._loop())

    def die(
        self,
        *,
        restarts: bool,
        engine_exit: EngineExit | None = None,
        state: EngineState = "restarting",
    ) -> None:
        if self.engine.cache is not None:
            self.engine.cache.close()
        self.engine = EchoEngine(self.mm)
        self.state = state if restarts else "dead"
        self.health = False
        self._has_started.set()
        self.num_restarts += 1
        self._listener.on_exit(engine_exit or EngineExit())

    def send(self, message: EngineMessage) -> None:
        if self.mm is not None:
            frames = [bytes(frame) for frame in encode(message)]
            message = decode(frames)  # type: ignore[assignment]
            if isinstance(message, EngineCoreRequest):
                self.num_bytes.append(sum(map(len, frames)))
        match message:
            case EngineCoreRequest():
                try:
                    self.engine.add_request(message)
                except MultiModalCacheMissError as miss:
                    self._listener.on_message(
                        CacheMiss(request_id=message.request_id, mm_hashes=miss.mm_hashes)
                    )
                except RequestError as error:
                    self._listener.on_message(RequestFailed.from_error(message.request_id, error))
            case AbortRequests():
                self.engine.abort(message.request_ids)
            case LoadAdapter():
                self._listener.on_message(self.engine.load_adapter(message))
            case UnloadAdapter():
                self.engine.adapters.pop(message.lora_name, None)
            case ControlEngine():
                self._listener.on_message(self.engine.change(message))
        self._has_work.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.state = "dead"

    async def _loop(self) -> None:
        while True:
            await self._has_work.wait()
            if not self.engine.has_unfinished():
                self._has_work.clear()
                continue
            await asyncio.sleep(self.delay_s)
            for request_id in self.engine.expire():
                failed = RequestFailed.from_error(request_id, RequestTimeoutError())
                self._listener.on_message(failed)
            self._listener.on_message(StepOutput(deltas=self.engine.step()))


# ---- in a process of its own ----------------------------------------------------------------


def run_echo_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """P1's main without a model. `hf_config` (a str here) says how it misbehaves."""
    _run(EchoEngine(), config.model.hf_config, address_in, address_out)


def run_item_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """P1's main without a model, but with P1's cache: answers with what it was given to see."""
    _run(EchoEngine(config.model.mm), "", address_in, address_out)


def run_compiling_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """P1's main without a model, with a thread that is still at work when it ends."""
    threading.Thread(target=threading.Event().wait, name="compiles for ever").start()
    run_echo_engine(config, address_in, address_out)


def _run(engine: EchoEngine, mood: str, address_in: str, address_out: str) -> None:
    try:
        _serve(engine, mood, address_in, address_out)
    except MessagesLostError as error:
        raise SystemExit(MESSAGES_LOST_STATUS) from error


def _fail_at_start(mood: str) -> None:
    match mood:
        case "dies at start":
            print("the flag is wrong", file=sys.stderr)
            raise SystemExit(3)
        case "refuses a flag":
            raise ConfigError("the flag is wrong")
        case "has a bug":
            raise KeyError("lost")


def _take(
    engine: EchoEngine,
    mood: str,
    message: EngineCoreRequest,
    say: Callable[[FrontendMessage], None],
) -> None:
    if mood == "dies on requests" or message.prompt_token_ids[-1] == DEATH_TOKEN:
        os._exit(9)
    try:
        engine.add_request(message)
    except MultiModalCacheMissError as miss:
        say(CacheMiss(request_id=message.request_id, mm_hashes=miss.mm_hashes))


def _serve(engine: EchoEngine, mood: str, address_in: str, address_out: str) -> None:
    receiver, sender = Receiver(address_in), Sender(address_out)
    record = StepRecord(step_record_path(address_in))
    num_turns = num_sent = 0

    def say(message: FrontendMessage) -> None:
        nonlocal num_sent
        num_sent += 1
        sender.send(message)

    _fail_at_start(mood)
    say(Ready(num_kv_blocks=1, num_programs=2))
    while True:
        if mood == "falls silent":
            time.sleep(3600)
        if mood == "slow" and engine.has_unfinished():
            time.sleep(0.02)
        num_turns += 1
        loop = LoopState(num_turns=num_turns, num_received=receiver.num_received, num_sent=num_sent)
        sender.send(msgspec.structs.replace(engine.stats(), loop=loop))
        message = receiver.receive(0.0 if engine.has_unfinished() else 0.05)
        match message:
            case Shutdown():
                break
            case Remainder():
                for request_id in message.request_ids:
                    say(RequestFailed(request_id=request_id, message="it could not be read"))
            case AbortRequests():
                engine.abort(message.request_ids)
            case EngineCoreRequest():
                record.write((*engine.running, message.request_id))
                _take(engine, mood, message, say)
        record.write(list(engine.running))
        if deltas := engine.step():
            say(StepOutput(deltas=deltas))
    receiver.close()
    sender.close(linger_s=1.0)
