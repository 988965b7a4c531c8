"""P0's view of adapters and of the engine, whoever waits until one is loaded or changed."""

import asyncio
from pathlib import Path

import pytest

from mmjax.errors import RequestValueError
from mmjax.frontend.engine_client.control import AdapterClient, ControlClient
from mmjax.transport.messages import (
    AdapterLoaded,
    ControlAction,
    ControlEngine,
    EngineChanged,
    EngineMessage,
    LoadAdapter,
    RequestFailed,
    UnloadAdapter,
)


@pytest.mark.parametrize("is_good", [True, False])
async def test_who_leaves_while_one_is_loaded_leaves_no_name_behind(is_good: bool) -> None:
    error = RequestFailed.from_error("a", RequestValueError("it is bad", param="lora_path"))

    sent: list[EngineMessage] = []
    client = AdapterClient({}, put=sent.append)
    leaving = asyncio.create_task(client.load("a", Path("/a")))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    client.on_loaded(AdapterLoaded(lora_name="a", error=None if is_good else error))
    await asyncio.sleep(0)
    assert client.names == (["a"] if is_good else [])
    if is_good:
        client.unload("a")
    again = asyncio.create_task(client.load("a", Path("/a")))
    await asyncio.sleep(0)
    client.on_loaded(AdapterLoaded(lora_name="a"))
    await again
    assert client.names == ["a"]


async def test_one_that_is_asked_for_during_a_restart_is_loaded_by_the_next_engine() -> None:
    """A message to an engine that has ended is lost; one to the next may wait until it is ready."""
    sent: list[EngineMessage] = []
    client = AdapterClient({}, put=sent.append)
    client.on_exit()
    asked = asyncio.create_task(client.load("a", Path("/a")))
    await asyncio.sleep(0)
    sent.clear()
    client.on_ready()
    assert sent == [UnloadAdapter(lora_name="a"), LoadAdapter(lora_name="a", lora_path="/a")]
    for _ in range(2):  # as an engine that got both
        client.on_loaded(AdapterLoaded(lora_name="a"))
    await asked
    assert client.names == ["a"]


async def test_an_engine_that_ends_before_it_sleeps_again_is_followed_by_one_that_sleeps() -> None:
    sent: list[EngineMessage] = []
    client = ControlClient(put=sent.append)
    actions: list[ControlAction] = ["load_weights", "sleep"]
    for number, action in enumerate(actions, 1):
        asked = asyncio.create_task(client.change(action, path=Path("/weights")))
        await asyncio.sleep(0)
        client.on_changed(make_reply(number, is_sleeping=number == 2))
        await asked
    for _ in range(2):
        client.on_exit()
        sent.clear()
        client.on_ready()
        assert [one.action for one in sent if isinstance(one, ControlEngine)] == actions
        # It has loaded the weights, and ends.
        client.on_changed(make_reply(0, is_sleeping=False))


def make_reply(number: int, *, is_sleeping: bool) -> EngineChanged:
    return EngineChanged(number=number, weights_version=1, is_sleeping=is_sleeping, is_paused=False)
