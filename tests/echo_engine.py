"""An engine that says a prompt back, for tests of the doors: no jax, no weights.

`EchoEngine` keeps EngineCore's contract; `EchoSupervisor` stands where P1's supervisor does, in
the test's own process; `run_echo_engine` is a P1 main for the real supervisor.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from mmjax.config import EngineConfig
from mmjax.errors import RequestValueError
from mmjax.frontend.supervisor import EngineListener, EngineState
from mmjax.transport.channel import Receiver, Sender
from mmjax.transport.messages import (
    AbortRequests,
    EngineCoreRequest,
    EngineMessage,
    Heartbeat,
    Ready,
    RequestFailed,
    RequestOutputDelta,
    Shutdown,
    StepOutput,
    TokenLogprobs,
)

REFUSED_TOKEN = 7
"""A prompt that ends with it is refused by the engine."""


@dataclass
class _Running:
    request: EngineCoreRequest
    script: list[int]
    num_sent: int = 0


class EchoEngine:
    """Answers with the prompt's token ids, one a step, then the end token (if there is one)."""

    def __init__(self) -> None:
        self.running: dict[str, _Running] = {}
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[str] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.prompt_token_ids[-1] == REFUSED_TOKEN:
            raise RequestValueError("the engine does not like this prompt", param="prompt")
        self.added.append(request)
        script = list(request.prompt_token_ids)
        if request.sampling_params.ignore_eos:
            script = script * (request.sampling_params.max_tokens or 1)
        self.running[request.request_id] = _Running(request, script)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.running.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def stats(self) -> Heartbeat:
        return Heartbeat(
            num_running=len(self.running), num_waiting=0, kv_cache_usage=0.0, num_compilations=0
        )

    def step(self) -> list[RequestOutputDelta]:
        return [self._advance(state) for state in list(self.running.values())]

    def _advance(self, state: _Running) -> RequestOutputDelta:
        params, request = state.request.sampling_params, state.request
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
        return RequestOutputDelta(
            request_id=request.request_id,
            new_token_ids=[token_id],
            new_logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=3,
        )


@dataclass
class EchoSupervisor:
    """An engine without a process; `delay_s` is how long a step takes."""

    delay_s: float = 0.0
    is_started_ready: bool = True
    state: EngineState = "starting"
    health: bool = True
    pid: int | None = None
    num_restarts: int = 0
    heartbeat: Heartbeat | None = None
    engine: EchoEngine = field(default_factory=EchoEngine)

    @property
    def is_healthy(self) -> bool:
        return self.health

    async def start(self, listener: EngineListener) -> None:
        self._listener = listener
        self._has_work = asyncio.Event()
        self._task = asyncio.create_task(self._loop())
        if self.is_started_ready:
            self.become_ready()

    def become_ready(self) -> None:
        self.state = "ready"
        self._listener.on_ready()

    def die(self, *, restarts: bool) -> None:
        self.engine = EchoEngine()
        self.state = "restarting" if restarts else "dead"
        self.health = False
        self.num_restarts += 1
        self._listener.on_death()

    async def send(self, message: EngineMessage) -> None:
        match message:
            case EngineCoreRequest():
                try:
                    self.engine.add_request(message)
                except RequestValueError as error:
                    self._listener.on_message(
                        RequestFailed(
                            request_id=message.request_id,
                            message=error.message,
                            param=error.param,
                            status=error.status,
                        )
                    )
            case AbortRequests():
                self.engine.abort(message.request_ids)
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
            self._listener.on_message(StepOutput(deltas=self.engine.step()))


# ---- in a process of its own ----------------------------------------------------------------


def run_echo_engine(config: EngineConfig, address_in: str, address_out: str) -> None:
    """P1's main without a model. `hf_config` (a str here) says how it misbehaves."""
    receiver, sender = Receiver(address_in), Sender(address_out)
    mood = config.model.hf_config
    if mood == "dies at start":
        raise SystemExit(3)
    engine = EchoEngine()
    sender.send(Ready(num_kv_blocks=1, num_programs=2))
    while True:
        if mood == "falls silent":
            time.sleep(3600)
        sender.send(engine.stats())
        message = receiver.receive(0.0 if engine.has_unfinished() else 0.05)
        match message:
            case Shutdown():
                break
            case AbortRequests():
                engine.abort(message.request_ids)
            case EngineCoreRequest():
                if mood == "dies on requests":
                    os._exit(9)
                engine.add_request(message)
        if deltas := engine.step():
            sender.send(StepOutput(deltas=deltas))
    receiver.close()
    sender.close(linger_s=1.0)
