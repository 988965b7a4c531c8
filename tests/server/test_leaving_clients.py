"""Clients leave at every stage of their requests: nothing of them is held afterwards."""

import asyncio
import gc
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from benchmarks.leaving_clients import STAGES, leave
from mmjax.cache import ShmObjectStoreSenderCache, config_with_directory
from mmjax.config.engine_config import MultiModalConfig, SchedulerConfig, ServerConfig
from mmjax.frontend.engine_client.client import AsyncEngineClient
from mmjax.frontend.media.connector import MediaConnector
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.server.app import create_app
from tests.cache.shm_kit import num_mapped
from tests.echo_engine import EchoSupervisor
from tests.kit import draw
from tests.test_serve import message_about

AT_ONCE = 8


@dataclass
class Serving:
    """A server over the echo engine, in this event loop, and a host that never answers."""

    port: int
    silent_port: int
    client: AsyncEngineClient
    supervisor: EchoSupervisor
    cache: ShmObjectStoreSenderCache

    @property
    def held(self) -> dict[str, int]:
        """What requests hold, of everything that must come back."""
        client = self.client
        numbers = {
            "requests": client.num_requests,
            "sequences": client.capacity.num_seqs,
            "streams": len(client._streams),
            "reserved tokens": len(client.capacity._reserved_tokens),
            "unsent messages": len(client.requests._waiting),
            "outputs": len(client.requests.outputs._states),
            "sequences' outputs": len(client.requests.outputs.sequences),
            "the engine's requests": len(self.supervisor.engine.running),
            "items in shared memory": num_mapped(self.cache.path),
        }
        return {name: number for name, number in numbers.items() if number}

    async def wait_until_nothing_is_held(self) -> None:
        for _ in range(600):
            # Views of shared memory are released with their last reference; the echo engine notes
            # what it was given.
            self.supervisor.engine.added.clear()
            gc.collect()
            if not self.held:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"held after a minute: {self.held}")

    def bodies(self, number: int) -> dict[str, Any]:
        """Return requests that are at different things when their clients leave."""
        fields = {"stream": True, "max_tokens": 200, "ignore_eos": True}
        text = {"role": "user", "content": "a red circle"}
        far = {"url": f"http://127.0.0.1:{self.silent_port}/{number}.png"}
        fetched = {"role": "user", "content": [{"type": "image_url", "image_url": far}]}
        return {
            "text": {"messages": [text], **fields},
            "new picture": {"messages": [message_about(draw(40, 30, number), "red")], **fields},
            "known picture": {"messages": [message_about(draw(40, 30, 7), "red")], **fields},
            "fetched": {"messages": [fetched], **fields},
            "structured": {
                "messages": [text],
                "structured_outputs": {"choice": ["red", "blue"]},
                **fields,
            },
            "two answers": {"messages": [text], "n": 2, **fields},
        }


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Never answer, until the other side has left."""
    with suppress(ConnectionError):
        while await reader.read(2**16):
            pass
    writer.close()


@asynccontextmanager
async def serving(checkpoint: Path) -> AsyncIterator[Serving]:
    mm = MultiModalConfig(
        mm_processor_cache_type="shm",
        mm_processor_cache_gb=2**-10,
        allow_private_media_addresses=True,
        media_decode_workers=1,
    )
    config = load_model_config(str(checkpoint), max_model_len=256, served_model_name="tiny")
    config = replace(config, mm=mm)
    make_connector = partial(MediaConnector.with_workers, num_cores=1)
    processor = InputProcessor(config, make_connector=make_connector)
    cache = processor.cache
    assert isinstance(cache, ShmObjectStoreSenderCache)
    supervisor = EchoSupervisor(mm=config_with_directory(mm, cache), delay_s=0.01)
    client = AsyncEngineClient(processor, supervisor, SchedulerConfig())
    app = create_app(client, ChatParser.for_model(processor), ServerConfig())
    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    # Not `serve`, which would take the process's signals.
    task = asyncio.create_task(server._serve([listener]))
    # What is there now stays, and collections need not look at it.
    gc.collect()
    gc.freeze()
    try:
        yield Serving(
            listener.getsockname()[1],
            silent.sockets[0].getsockname()[1],
            client,
            supervisor,
            cache,
        )
    finally:
        gc.unfreeze()
        server.should_exit = True
        await task
        listener.close()
        silent.close()


async def leave_often(checkpoint: Path, num_clients: int) -> None:
    rng, left = random.Random(num_clients), Counter[str]()
    plan = [(stage, kind) for stage in STAGES for kind in range(6)]
    async with serving(checkpoint) as server:

        async def be_a_client(number: int) -> None:
            stage, kind = plan[number % len(plan)]
            bodies = server.bodies(number)
            name = list(bodies)[kind]
            if name == "fetched" and stage in ("half-open", "at the first token", "in the stream"):
                # It never comes so far, and its server would wait as long as it may.
                stage = "while it waits"
            left[stage] += 1
            await leave(server.port, stage, json.dumps(bodies[name]).encode(), rng)

        for first in range(0, num_clients, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, num_clients))
            await asyncio.gather(*map(be_a_client, numbers))
            await server.wait_until_nothing_is_held()
    assert set(left) == set(STAGES)


def test_nothing_is_held_for_clients_that_have_left(tiny_gemma3: Path) -> None:
    asyncio.run(leave_often(tiny_gemma3, 6 * len(STAGES)))


@pytest.mark.slow
def test_nothing_is_held_for_a_thousand_clients_that_have_left(tiny_gemma3: Path) -> None:
    asyncio.run(leave_often(tiny_gemma3, 1_000))
