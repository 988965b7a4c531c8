"""A front before replicas over the echo engine, all in the test's own process, without Ray."""

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from mmjax.config.engine_config import SchedulerConfig, ServerConfig
from mmjax.deploy.exchange import Patience
from mmjax.deploy.front import create_front
from mmjax.deploy.held import HeldAnswers
from mmjax.deploy.replica import (
    ForwardedRequest,
    Replica,
    ReplicaLostError,
    ResponseItem,
)
from mmjax.deploy.routing import AffinityTable
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.app import create_app
from tests.echo_engine import EchoSupervisor


class Engine(EchoSupervisor):
    """The echo engine, with what a replica waits for."""

    async def wait_ready(self) -> None:
        await self.wait_started()


@dataclass
class LocalReplicas:
    """Replicas in this process, of which any can be cut off."""

    replicas: dict[str, HeldAnswers]
    table: AffinityTable = field(default_factory=AffinityTable)
    cuts: list[int] = field(default_factory=list)
    """After how many items of each of the next tries its replica dies."""
    tries: list[tuple[str, ForwardedRequest]] = field(default_factory=list)
    run_on: bool = False
    """Whether a replica goes on with what a front that is gone has asked for, as in Ray."""
    _reading: list[asyncio.Task[None]] = field(default_factory=list)

    async def respond(
        self, request: ForwardedRequest, *, keys: list[str], avoided: list[str]
    ) -> AsyncGenerator[ResponseItem, None]:
        loads = dict.fromkeys(self.replicas, 0)
        name = self.table.rank(keys, loads, now=time.monotonic(), avoided=set(avoided))[0]
        self.table.note(keys, name, now=time.monotonic())
        # A copy, as over a network: the front goes on to change it.
        request = copy.deepcopy(request)
        self.tries.append((name, request))
        num_left = self.cuts.pop(0) if self.cuts else None
        items = self.replicas[name].respond(request)
        if self.run_on:
            items = self._running_on(items)
        try:
            async for item in items:
                if num_left == 0:
                    raise ReplicaLostError
                yield item
                num_left = None if num_left is None else num_left - 1
        finally:
            await items.aclose()

    async def _running_on(
        self, items: AsyncGenerator[ResponseItem, None]
    ) -> AsyncGenerator[ResponseItem, None]:
        """Yield `items`, which are read to their end whether or not these are."""
        queue: asyncio.Queue[ResponseItem | None] = asyncio.Queue()

        async def read() -> None:
            async for item in items:
                queue.put_nowait(item)
            queue.put_nowait(None)

        self._reading.append(asyncio.create_task(read()))
        while (item := await queue.get()) is not None:
            yield item


@dataclass(frozen=True)
class Deployment:
    front: FastAPI
    http: TestClient
    replicas: LocalReplicas
    engines: list[Engine]
    encode: Callable[[str], list[int]]
    other_front: FastAPI
    """Before the same replicas."""

    def post(self, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        """Post a body; a chat's message is given if `fields` do not say."""
        if path.endswith("chat/completions"):
            fields.setdefault("messages", [{"role": "user", "content": "a red circle"}])
        return self.http.post(path, json=fields)

    def will_say(self, text: str) -> None:
        """Let all engines answer with `text` from now on, instead of an echo."""
        for engine in self.engines:
            engine.engine.answer = self.encode(text)

    def tried(self) -> list[str]:
        """Return the replicas that were tried since the last call."""
        names = [name for name, _ in self.replicas.tries]
        self.replicas.tries.clear()
        return names


MakeProcessor = Callable[[], InputProcessor]


@pytest.fixture(scope="session")
def new_input_processor(tiny_gemma3: Path) -> MakeProcessor:
    # With room for tools in a prompt.
    config = load_model_config(str(tiny_gemma3), max_model_len=4096, served_model_name="tiny")
    return lambda: InputProcessor(config)


@pytest.fixture(scope="session")
def input_processors(new_input_processor: MakeProcessor) -> list[InputProcessor]:
    """One for each of two replicas, whose engines live."""
    return [new_input_processor() for _ in range(2)]


MakeDeployment = Callable[..., Deployment]


@pytest.fixture
def make_deployment(
    input_processors: list[InputProcessor], new_input_processor: MakeProcessor
) -> Iterator[MakeDeployment]:
    """Return a function that starts replicas and a front before them."""
    with ExitStack() as stack:

        def make(
            *,
            max_requests: int = 64,
            has_deaths: bool = False,
            scheduler: SchedulerConfig | None = None,
            chat_template: str | None = None,
            patience: Patience | None = None,
            max_body_bytes: int = 2**31,
            held_s: float = 60.0,
            **config: Any,
        ) -> Deployment:
            server = ServerConfig(**config)
            engines = [Engine() for _ in input_processors]
            replicas: dict[str, Replica] = {}
            held: dict[str, HeldAnswers] = {}
            for number, engine in enumerate(engines):
                # A client forgets what its engine held when that dies.
                processor = new_input_processor() if has_deaths else input_processors[number]
                client = AsyncEngineClient(processor, engine, scheduler or SchedulerConfig())
                parser = ChatParser.for_model(processor)
                if chat_template is not None:
                    template = ChatTemplate(chat_template, processor.tokenizer)
                    parser = replace(parser, template=template)
                app = create_app(client, parser, server)
                name = str(number)
                replica = replicas[name] = Replica(name, app, engine)
                held[name] = HeldAnswers(name, replica.respond, seconds=held_s, max_bytes=2**20)
            local = LocalReplicas(held)
            front, other_front = (
                create_front(
                    local,
                    server,
                    max_requests=max_requests,
                    max_body_bytes=max_body_bytes,
                    patience=patience,
                )
                for _ in range(2)
            )
            http = stack.enter_context(TestClient(front, raise_server_exceptions=False))
            assert http.portal is not None
            # In the front's own event loop; one after the other, as a task group needs.
            for name, replica in replicas.items():
                http.portal.call(replica.open)
                stack.callback(_close_in, http, replica)
                stack.callback(_close_in, http, held[name])
            encode = partial(input_processors[0].tokenizer.encode, add_special_tokens=False)
            made = Deployment(front, http, local, engines, encode, other_front)
            # An echo of a chat would hold the tokens that end an answer, and go on after them.
            made.will_say("a red circle, and a blue square")
            return made

        yield make


def _close_in(http: TestClient, opened: Replica | HeldAnswers) -> None:
    assert http.portal is not None
    http.portal.call(opened.close)


@pytest.fixture
def deployment(make_deployment: MakeDeployment) -> Deployment:
    """A front and two replicas."""
    return make_deployment()
