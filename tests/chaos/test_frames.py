"""Frames between P0 and P1 are lost, doubled, reordered and damaged: no answer differs."""

import asyncio
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import zmq

from mmjax.errors import InternalError
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.channel import _NUMBER
from mmjax.transport.messages import StepOutput
from tests.chaos.service import DEADLINE_S, ECHO_MAIN, Service, echo_config, serving

SLOW = pytest.mark.slow
LONG = SamplingParams(ignore_eos=True, max_tokens=60)

Mischief = Callable[[list[list[Any]]], list[list[Any]]]
"""What becomes of three messages on the way."""


def damage(frames: list[Any]) -> list[Any]:
    number, header, *arrays = frames
    return [number, header[:9] + bytes([header[9] ^ 64]) + header[10:], *arrays]


MISCHIEF: dict[str, tuple[Mischief, bool]] = {
    "lost": (lambda m: m[1:], True),
    "doubled": (lambda m: [m[0], m[0], *m[1:]], False),
    "reordered": (lambda m: [m[1], m[0], m[2]], True),
    "damaged": (lambda m: [damage(m[0]), *m[1:]], True),
}
"""With whether P1 must be replaced."""


class Bridge:
    """One direction of the bridge; does mischief once, to some messages in a row."""

    def __init__(
        self, mischief: Mischief, is_due: Callable[[list[Any]], bool], count: int = 3
    ) -> None:
        self._mischief: Mischief | None = mischief
        self._is_due = is_due
        self._count = count
        self._kept: list[list[Any]] = []
        self.is_done = False

    def carry(self, frames: list[Any]) -> list[list[Any]]:
        """Return the messages that arrive in place of this one."""
        if self._mischief is None or not self._is_due(frames):
            return [frames]
        self._kept.append(frames)
        if len(self._kept) < self._count:
            return []
        mischief, self._mischief = self._mischief, None
        self.is_done = True
        return mischief(self._kept)


def is_a(*kinds: str) -> Callable[[list[Any]], bool]:
    def check(frames: list[Any]) -> bool:
        return any(kind.encode() in frames[1] for kind in kinds)

    return check


def to_p1(service: Service, bridge: Bridge) -> None:
    sender = service.supervisor._engine.sender
    assert sender is not None
    send = sender._socket.send_multipart

    def carry(frames: list[Any], copy: bool = True) -> "asyncio.Future[Any]":
        carried = bridge.carry([bytes(frame) for frame in frames])
        return asyncio.gather(*(send(one, copy=copy) for one in carried))

    sender._socket.send_multipart = carry


def from_p1(service: Service, bridge: Bridge) -> None:
    receiver = service.supervisor._engine.receiver
    assert receiver is not None
    receive = receiver.read

    def read(frames: Any) -> Any:
        came = bridge.carry([frame.bytes for frame in frames])
        messages = [receive([zmq.Frame(frame) for frame in one]) for one in came]
        for message in messages[:-1]:
            if isinstance(message, StepOutput):
                service.supervisor._num_received += 1
                service.client.on_message(message)
        return messages[-1] if messages else None

    receiver.read = read  # type: ignore[method-assign]


async def ask_all(service: Service) -> Any:
    texts = [f"red {number} circle" for number in range(4)]
    return await asyncio.gather(*(service.ask(text, LONG) for text in texts))


@pytest.mark.parametrize(
    ("mischief", "is_fatal", "direction"),
    [
        # Each starts a P1, or two: by default a direction has half of them.
        pytest.param(
            *values,
            direction,
            id=f"{direction}-{name}",
            marks=() if (direction == "requests") == (name in ("lost", "doubled")) else SLOW,
        )
        for name, values in MISCHIEF.items()
        for direction in ("requests", "outputs")
    ],
)
async def test_no_answer_differs(
    input_processor: InputProcessor, mischief: Mischief, is_fatal: bool, direction: str
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        config = echo_config(input_processor.model_config, "slow")
        async with serving(config, input_processor, main=ECHO_MAIN) as service:
            expected = await ask_all(service)
            if direction == "requests":
                bridge = Bridge(mischief, is_a("EngineCoreRequest"))
                to_p1(service, bridge)
            else:
                # Heartbeats, too: the echo engine numbers them with its outputs.
                bridge = Bridge(mischief, is_a("StepOutput", "Heartbeat"))
                from_p1(service, bridge)
            assert await ask_all(service) == expected
            assert bridge.is_done
            assert service.supervisor.num_restarts == int(is_fatal)
            assert service.client.num_requests == 0


@pytest.mark.parametrize("direction", ["requests", "outputs"])
async def test_a_loss_is_noticed_though_nothing_comes_after_it(
    input_processor: InputProcessor, direction: str
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        config = echo_config(input_processor.model_config, "slow")
        async with serving(config, input_processor, main=ECHO_MAIN) as service:
            expected = await service.ask("red", LONG)
            if direction == "requests":
                bridge = Bridge(lambda messages: [], is_a("EngineCoreRequest"), count=1)
                to_p1(service, bridge)
            else:
                bridge = Bridge(lambda messages: [], is_a("finish_reason"), count=1)
                from_p1(service, bridge)
            assert await service.ask("red", LONG) == expected
            assert bridge.is_done
            assert service.supervisor.num_restarts == 1


def resend(frames: list[Any], header: bytes) -> list[Any]:
    """Return a message with another header, which has its checksum."""
    end, number, _ = _NUMBER.unpack(frames[0])
    return [_NUMBER.pack(end, number, zlib.crc32(header)), header, *frames[2:]]


def make_unfit(frames: list[Any]) -> list[Any]:
    """Give a field of a request, or of one request's output, a value that it cannot have."""
    fields = msgspec.msgpack.decode(frames[1][1:])
    if "deltas" in fields:
        fields["deltas"][-1]["new_token_ids"] = "none"
    else:
        fields["prompt_token_ids"] = "none"
    return resend(frames, frames[1][:1] + msgspec.msgpack.encode(fields))


UNREADABLE: dict[str, Callable[[list[Any]], list[Any]]] = {
    "whose request is known": make_unfit,
    "of nobody": lambda frames: resend(frames, frames[1][:1] + b"\xc1"),
}


@pytest.mark.parametrize(
    ("direction", "name"),
    [
        ("requests", "whose request is known"),
        ("outputs", "of nobody"),
        pytest.param("requests", "of nobody", marks=SLOW),
        pytest.param("outputs", "whose request is known", marks=SLOW),
    ],
)
async def test_a_message_that_came_whole_but_cannot_be_decoded(
    input_processor: InputProcessor, name: str, direction: str
) -> None:
    """Fails its request alone; if that is not known, P1 is replaced, and nothing is lost."""
    async with asyncio.timeout(DEADLINE_S):
        config = echo_config(input_processor.model_config, "slow")
        async with serving(config, input_processor, main=ECHO_MAIN) as service:
            expected = await ask_all(service)
            kind, place = ("EngineCoreRequest", to_p1), ("deltas", from_p1)
            of, put = kind if direction == "requests" else place
            bridge = Bridge(lambda messages: [UNREADABLE[name](messages[0])], is_a(of), count=1)
            put(service, bridge)
            texts = [f"red {number} circle" for number in range(4)]
            asked = (service.ask(text, LONG) for text in texts)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert bridge.is_done
            failed = [one for one in answers if isinstance(one, BaseException)]
            assert [type(one) for one in failed] == [InternalError] * (name != "of nobody")
            assert [one for one in answers if one not in failed] == [
                one for one, answer in zip(expected, answers, strict=True) if answer not in failed
            ]
            assert service.supervisor.num_restarts == int(name == "of nobody")
            assert service.client.num_requests == 0
