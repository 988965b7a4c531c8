"""Channels deliver messages in order, in a private directory."""

import asyncio
import copy
import os
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from mmjax.errors import ConfigError
from mmjax.transport import channel
from mmjax.transport.channel import (
    _NUMBER,
    AsyncReceiver,
    AsyncSender,
    IpcDirectory,
    MessagesLostError,
    Receiver,
    Sender,
    _Reader,
)
from mmjax.transport.codec import VERSION, Remainder, encode
from mmjax.transport.messages import AbortRequests, RequestOutputDelta, Shutdown, StepOutput


@pytest.fixture
def directory() -> Iterator[IpcDirectory]:
    with IpcDirectory() as made:
        yield made


def test_messages_arrive_in_order(directory: IpcDirectory) -> None:
    address = directory.address("in")
    receiver, sender = Receiver(address, bind=True), Sender(address)
    try:
        for i in range(100):
            sender.send(AbortRequests(request_ids=[str(i)]))
        received = [receiver.receive(5.0) for _ in range(100)]
        assert received == [AbortRequests(request_ids=[str(i)]) for i in range(100)]
    finally:
        sender.close()
        receiver.close()


def test_of_a_message_that_cannot_be_decoded_its_requests_are_told() -> None:
    good = RequestOutputDelta(request_id="good", new_token_ids=[1])
    output = {"type": "StepOutput", "deltas": [good, {"request_id": "bad"}]}
    for wire, remainder in (
        ({"type": "EngineCoreRequest", "request_id": "a"}, Remainder(["a"], StepOutput(deltas=[]))),
        (output, Remainder(["bad"], StepOutput(deltas=[good]))),
    ):
        header = bytes([VERSION]) + msgspec.msgpack.encode(wire)
        assert _Reader().read(framed(header)) == remainder
    for wire in ({"type": "AbortRequests"}, {"type": "StepOutput", "deltas": [{}]}, [7]):
        header = bytes([VERSION]) + msgspec.msgpack.encode(wire)
        with pytest.raises(MessagesLostError, match="message 1: the message cannot be decoded"):
            _Reader().read(framed(header))


def framed(header: bytes) -> list[zmq.Frame]:
    number = _NUMBER.pack(b"12345678", 1, zlib.crc32(header))
    return [zmq.Frame(frame) for frame in (number, header)]


def test_receive_waits_no_longer_than_told(directory: IpcDirectory) -> None:
    receiver = Receiver(directory.address("in"), bind=True)
    try:
        start = time.monotonic()
        assert receiver.receive(0.0) is None
        assert receiver.receive(0.05) is None
        assert time.monotonic() - start < 2.0
    finally:
        receiver.close()


def test_a_malformed_message_is_dropped(
    directory: IpcDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    address = directory.address("in")
    receiver = Receiver(address, bind=True)
    raw = zmq.Context.instance().socket(zmq.PUSH)
    sender = Sender(address)
    try:
        raw.connect(address)
        for junk in ([b""], [b"\x80\x04."], [b"\x01", b"x", b"y"]):
            raw.send_multipart(junk)
        # Nothing good comes from `raw`: what is received is what `sender` says.
        time.sleep(0.05)
        sender.send(Shutdown())
        assert receiver.receive(5.0) == Shutdown()
    finally:
        raw.close(linger=0)
        sender.close()
        receiver.close()


def numbered(*numbers: int, end: bytes = b"12345678") -> list[list[bytes]]:
    """Return frames as a sending end numbers them."""
    header = bytes(encode(AbortRequests(request_ids=[]))[0])
    return [[_NUMBER.pack(end, number, zlib.crc32(header)), header] for number in numbers]


def read_all(messages: Sequence[list[bytes]]) -> int:
    """Return how many messages are read, one after the other."""
    reader = _Reader()
    found = [reader.read([zmq.Frame(frame) for frame in frames]) for frames in messages]
    assert reader.num_received == sum(one is not None for one in found)
    return reader.num_received


def test_what_comes_twice_is_read_once() -> None:
    assert read_all(numbered(1, 1, 2, 3, 2, 3, 4)) == 4


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (1, 2, 4, 3)])
def test_a_loss_and_another_order_are_noticed(numbers: tuple[int, ...]) -> None:
    with pytest.raises(MessagesLostError):
        read_all(numbered(*numbers))


def test_ends_are_numbered_apart() -> None:
    one, other = numbered(1, 2, end=b"1" * 8), numbered(1, 2, end=b"2" * 8)
    assert read_all([one[0], other[0], one[1], other[1]]) == 4


def test_a_corrupt_header_counts_as_lost() -> None:
    first, second, third = numbered(1, 2, 3)
    second[1] = bytes([second[1][0], second[1][1] ^ 1]) + second[1][2:]
    with pytest.raises(MessagesLostError):
        read_all([first, second, third])


def test_asyncio_twins(directory: IpcDirectory) -> None:
    async def talk() -> list[object]:
        address = directory.address("out")
        receiver, sender = AsyncReceiver(address, bind=True), AsyncSender(address)
        try:
            for i in range(3):
                await sender.send(AbortRequests(request_ids=[str(i)]))
            return [await asyncio.wait_for(receiver.receive(), 5.0) for _ in range(3)]
        finally:
            sender.close()
            receiver.close()

    assert asyncio.run(talk()) == [AbortRequests(request_ids=[str(i)]) for i in range(3)]


async def test_closing_an_end_frees_who_sends(directory: IpcDirectory) -> None:
    """A P1 that dies leaves nobody to send to: whoever waits for it must go on."""
    sender = AsyncSender(directory.address("in"), bind=True)
    waiting = sender.send(Shutdown())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    sender.close()
    done, _ = await asyncio.wait([waiting], timeout=5.0)
    assert done
    await sender.send(Shutdown())


def test_the_directory_is_private_and_goes() -> None:
    with IpcDirectory() as directory:
        path = directory.path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert directory.address("in") == f"ipc://{path}/in"
    assert not path.exists()


def test_a_path_too_long_is_named(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path_factory.mktemp("x" * 100)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(ConfigError, match="TMPDIR"):
        IpcDirectory()
    assert list(long.iterdir()) == []


OWNER = """
import sys, time
from mmjax.transport import channel
channel._MAX_IPC_PATH = 1000
directory = channel.IpcDirectory()
print(directory.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_processes_directory_goes_with_the_next_one_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(channel, "_MAX_IPC_PATH", 1000)
    strangers = [tmp_path / "mmjax-ipc-file", tmp_path / "mmjax-0", tmp_path / "other"]
    strangers[0].write_text("no directory")
    for path in strangers[1:]:
        path.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        made_at = time.time() - 2 * channel._MIN_AGE_S
        for one in (path, *strangers):
            os.utime(one, (made_at, made_at))
        IpcDirectory().close()
        assert path.is_dir(), "its owner lives"
        owner.kill()
        owner.wait()
        os.utime(path)
        IpcDirectory().close()
        assert path.is_dir(), "it may have been made just now"
        os.utime(path, (made_at, made_at))
        IpcDirectory().close()
        assert not path.exists()
    assert sorted(tmp_path.iterdir()) == sorted(strangers)


def test_a_copy_in_another_process_holds_no_lock(directory: IpcDirectory) -> None:
    copy_of_it = copy.copy(directory)
    assert copy_of_it.path == directory.path
    assert copy_of_it._lock is None
