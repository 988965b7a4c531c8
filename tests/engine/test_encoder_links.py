"""What an engine believes of its workers, with workers that are none: no model, no device."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from mmjax.engine import encoder_workers
from mmjax.engine.encoder_workers import EncoderWorkers
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import ConfigError, EncoderUnavailableError
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.transport.codec import Buffer, WireError
from mmjax.transport.encoder_link import (
    EncodedItem,
    EncodeItem,
    Hello,
    NotEncoded,
    Welcome,
    digest_rows,
    find_endpoint,
    listening,
    make_key,
    pack,
    read_key,
    unpack_to_engine,
    unpack_to_worker,
)

PARTS = {"model": "m", "weights": "w"}
WIDTH, NUM_ROWS = 8, 4
Answer = Callable[[EncodeItem], list[list[Buffer]]]


def make_item(seed: int = 0) -> EncoderItem:
    return EncoderItem(
        identifier=f"picture {seed}",
        mm_position=PlaceholderRange(offset=0, length=NUM_ROWS),
        units={"pixel_values": np.full((1, 3), seed, np.float32)},
    )


def rows_of(ask: EncodeItem) -> np.ndarray:
    """What an honest worker makes of an item."""
    value = float(ask.units["pixel_values"].sum())
    return np.full((NUM_ROWS, WIDTH), value, np.float32)


def honest(ask: EncodeItem, **other: Any) -> EncodedItem:
    rows = other.pop("rows") if "rows" in other else rows_of(ask)
    answer = EncodedItem(
        number=ask.number, key=ask.key, digest=digest_rows(ask.key, rows), rows=rows
    )
    return msgspec.structs.replace(answer, **other)


@dataclass
class Worker:
    """A worker that answers as it is told."""

    answer: Answer = lambda ask: [pack(honest(ask))]
    parts: dict[str, str] = field(default_factory=lambda: dict(PARTS))
    asked: list[EncodeItem] = field(default_factory=list)
    hears: threading.Event = field(default_factory=threading.Event)
    """Set while it says anything at all."""

    def serve(self, address: str, key: Any, stop: threading.Event) -> None:
        context = zmq.Context()
        with listening(context, address, key, max_bytes=2**20) as socket:
            while not stop.is_set():
                if not socket.poll(20):
                    continue
                peer, *frames = socket.recv_multipart()
                message = unpack_to_worker(frames)
                if not self.hears.is_set():
                    continue
                if isinstance(message, Hello):
                    socket.send_multipart([peer, *pack(Welcome(parts=self.parts))])
                    continue
                self.asked.append(message)
                for answer in self.answer(message):
                    socket.send_multipart([peer, *answer])
        context.term()


@contextmanager
def serving(worker: Worker, address: str, key: Any = None) -> Iterator[Worker]:
    stop = threading.Event()
    worker.hears.set()
    thread = threading.Thread(target=worker.serve, args=(address, key, stop))
    thread.start()
    try:
        yield worker
    finally:
        stop.set()
        thread.join()


def asking(*addresses: str, **settings: Any) -> EncoderWorkers:
    options: dict[str, Any] = {
        "key_file": None,
        "timeout_s": 20.0,
        "has_own": False,
        "width": WIDTH,
        "dtype": np.dtype(np.float32),
        "max_rows": NUM_ROWS,
    }
    return EncoderWorkers(addresses, PARTS, **(options | settings))


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix://{tmp_path}/one"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_workers, "_SILENT_S", 1.0)


def value_of(workers: EncoderWorkers, item: EncoderItem) -> float:
    return first_of(workers.fetch(item))


def first_of(coming: "Future[np.ndarray | None]") -> float:
    rows = coming.result(timeout=20)
    assert rows is not None
    assert rows.shape == (NUM_ROWS, WIDTH)
    return float(rows[0, 0])


def test_rows_come_and_their_source_is_counted(address: str):
    with serving(Worker(), address) as worker, closing(asking(address)) as workers:
        assert value_of(workers, make_item(2)) == 6
        assert worker.asked[0].identifier == "picture 2"
        stats = workers.stats()
    assert (stats["encoder_workers_items"], stats["encoder_workers_alive"]) == (1, 1)
    assert stats["encoder_workers_bytes"] == NUM_ROWS * WIDTH * 4
    assert stats["encoder_workers_wait_s"] > 0


def _two(ask: EncodeItem) -> np.ndarray:
    return np.zeros((NUM_ROWS, WIDTH, 1), np.float32)


LIES: dict[str, Answer] = {
    "another item's": lambda ask: [pack(honest(ask, key=b"other"))],
    "other rows than the digest's": lambda ask: [pack(honest(ask, digest=b"0" * 32))],
    "too many": lambda ask: [pack(honest(ask, rows=np.zeros((5, WIDTH), np.float32)))],
    "three axes": lambda ask: [pack(honest(ask, rows=_two(ask)))],
    "doubles": lambda ask: [pack(honest(ask, rows=rows_of(ask).astype(np.float64)))],
    "not asked for": lambda ask: [pack(honest(ask, number=ask.number + 1))],
    "garbage": lambda ask: [[b"\xff\x00garbage"]],
    "no frame": lambda ask: [pack(honest(ask))[:1]],
    "cut short": lambda ask: [[pack(honest(ask))[0], b"abc"]],
    "an engine's message": lambda ask: [pack(Hello(parts={}))],
}


@pytest.mark.parametrize("lie", LIES)
def test_encoder_worker_lies_are_no_answers(lie: str, address: str, tmp_path: Path):
    """The item is asked of another worker; the one that lied is asked nothing more."""
    other = f"unix://{tmp_path}/two"
    with (
        serving(Worker(LIES[lie]), address) as liar,
        closing(asking(address, other)) as workers,
    ):
        rows = workers.fetch(make_item(3))
        wait_for(lambda: workers.stats()["encoder_workers_refused"] == 1)
        assert not rows.done()
        with serving(Worker(), other):
            assert first_of(rows) == 9
            assert value_of(workers, make_item(4)) == 12
        assert len(liar.asked) == 1


def test_encoder_worker_lies_in_frames_that_are_too_large_end_the_connection(
    address: str, tmp_path: Path
):
    other = f"unix://{tmp_path}/two"

    def flood(ask: EncodeItem) -> list[list[Buffer]]:
        return [pack(honest(ask, rows=np.zeros((2**20, WIDTH), np.float32)))]

    with serving(Worker(flood), address), closing(asking(address, other)) as workers:
        rows = workers.fetch(make_item(3))
        wait_for(lambda: workers.stats()["encoder_workers_retries"] == 1)
        with serving(Worker(), other):
            assert first_of(rows) == 9


def test_a_worker_of_another_model_is_named_and_never_asked(
    address: str, caplog: pytest.LogCaptureFixture
):
    foreign = Worker(parts={**PARTS, "weights": "others"})
    with serving(foreign, address), closing(asking(address, timeout_s=1.0)) as workers:
        error = workers.fetch(make_item()).exception(timeout=20)
        assert isinstance(error, EncoderUnavailableError)
        assert f"{address} (it has another weights)" in error.message
        assert workers.stats()["encoder_workers_alive"] == 0
    assert foreign.asked == []
    assert any(f"{address} is not used: it has another weights" in m for m in caplog.messages)


def test_an_answer_before_a_welcome_is_none(address: str):
    """Who has not said whose it is gives nothing, also where it is first to speak."""
    context = zmq.Context()
    with (
        listening(context, address, None, max_bytes=2**20) as socket,
        closing(asking(address)) as workers,
    ):
        rows = workers.fetch(make_item())
        peer, *_ = socket.recv_multipart()
        ask = EncodeItem(number=1, key=b"", identifier="", units={})
        zeros = np.zeros((NUM_ROWS, WIDTH), np.float32)
        socket.send_multipart([peer, *pack(honest(ask, rows=zeros))])
        wait_for(lambda: workers.stats()["encoder_workers_refused"] == 1)
        assert not rows.done()
    context.term()


def test_what_a_silent_worker_was_asked_is_asked_of_another(address: str, tmp_path: Path):
    other = f"unix://{tmp_path}/two"
    silent = Worker(lambda ask: silent.hears.clear() or [])
    with serving(silent, address), closing(asking(address, other)) as workers:
        rows = workers.fetch(make_item(1))
        wait_for(lambda: bool(silent.asked))
        with serving(Worker(), other):
            assert first_of(rows) == 3
        assert workers.stats()["encoder_workers_retries"] == 1


def test_an_item_that_no_worker_survives_is_given_up(address: str):
    refusing = Worker(lambda ask: [pack(NotEncoded(number=ask.number, reason="no"))])
    with serving(refusing, address), closing(asking(address)) as workers:
        error = workers.fetch(make_item(1)).exception(timeout=20)
        assert isinstance(error, EncoderUnavailableError)
        assert len(refusing.asked) == 3


def test_a_slow_answer_that_comes_after_another_one_s_is_no_lie(address: str):
    late: list[EncodeItem] = []

    def dawdle(ask: EncodeItem) -> list[list[Buffer]]:
        late.append(ask)
        answers = [] if ask.number == 1 else [pack(honest(one)) for one in late]
        late[: len(answers)] = []
        return answers

    with serving(Worker(dawdle), address), closing(asking(address, timeout_s=3.0)) as workers:
        assert value_of(workers, make_item(2)) == 6
        assert value_of(workers, make_item(2)) == 6
        assert workers.stats()["encoder_workers_refused"] == 0


def test_what_a_slow_worker_has_in_the_items_time_is_taken(address: str):
    def dawdle(ask: EncodeItem) -> list[list[Buffer]]:
        time.sleep(0.3)
        return [pack(honest(ask))]

    with serving(Worker(dawdle), address), closing(asking(address, timeout_s=5.4)) as workers:
        wait_for(lambda: workers.stats()["encoder_workers_alive"] == 1)
        # The last comes after 3.6 s, behind those before it; it is asked for again after 1.8.
        coming = [workers.fetch(make_item(seed)) for seed in range(12)]
        assert [first_of(rows) for rows in coming] == [3 * seed for seed in range(12)]
        assert workers.stats()["encoder_workers_items"] == 12


def test_a_worker_is_asked_for_no_more_than_it_takes_of_what_it_is_late_with(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(encoder_workers, "MAX_OUTSTANDING", 4)
    monkeypatch.setattr(encoder_workers, "_SILENT_S", 20.0)
    busy = Worker(lambda ask: [])
    with serving(busy, address), closing(asking(address, timeout_s=1.5)) as workers:
        wait_for(lambda: workers.stats()["encoder_workers_alive"] == 1)
        coming = [workers.fetch(make_item(seed)) for seed in range(4)]
        errors = [str(rows.exception(timeout=20)) for rows in coming]
        assert all(f"within 1.5 s: {address} (busy)" in error for error in errors)
        assert len(busy.asked) == 4


def test_an_engine_with_an_encoder_has_it_encode_where_no_worker_answers(address: str):
    with closing(asking(address, has_own=True)) as workers:
        assert workers.fetch(make_item()).result(timeout=20) is None
        assert workers.stats()["encoder_workers_fallbacks"] == 1


def test_an_engine_with_an_encoder_has_it_encode_what_a_living_worker_is_silent_about(address: str):
    mute = Worker(lambda ask: [])
    with serving(mute, address), closing(asking(address, has_own=True, timeout_s=1.5)) as workers:
        wait_for(lambda: workers.stats()["encoder_workers_alive"] == 1)
        assert workers.fetch(make_item()).result(timeout=20) is None
        stats = workers.stats()
    assert mute.asked
    assert (stats["encoder_workers_fallbacks"], stats["encoder_workers_alive"]) == (1, 1)


def test_an_item_goes_to_its_worker_unless_that_is_behind(address: str, tmp_path: Path):
    places = [address, f"unix://{tmp_path}/two"]
    with serving(Worker(), places[0]) as one, serving(Worker(), places[1]) as two:
        with closing(asking(*places)) as first, closing(asking(*reversed(places))) as second:
            for workers in (first, second):
                wait_for(lambda own=workers: own.stats()["encoder_workers_alive"] == 2)
                for seed in range(24):
                    value_of(workers, make_item(seed))
        # Each picture is known to one of them, whichever engine asks.
        seen = [{ask.identifier for ask in worker.asked} for worker in (one, two)]
        assert not seen[0] & seen[1]
        assert min(map(len, seen)) > 4
    with (
        serving(Worker(lambda ask: []), places[0]) as one,
        serving(Worker(lambda ask: []), places[1]) as two,
        closing(asking(*places)) as workers,
    ):
        wait_for(lambda: workers.stats()["encoder_workers_alive"] == 2)
        for _ in range(40):
            workers.fetch(make_item(1))
        wait_for(lambda: len(one.asked) + len(two.asked) == 40)
        assert abs(len(one.asked) - len(two.asked)) <= 6


# ---- who is let in -------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        return socket.bind_to_random_port("tcp://127.0.0.1")


def test_encoder_worker_access_by_tcp_takes_the_key(port: int, tmp_path: Path):
    place = f"tcp://127.0.0.1:{port}"
    files = [tmp_path / "key", tmp_path / "other"]
    for file in files:
        make_key(file)
    with serving(Worker(), place, read_key(files[0])):
        with closing(asking(place, key_file=files[0])) as workers:
            assert value_of(workers, make_item(2)) == 6
        for given in (files[1], None):
            with closing(asking(place, key_file=given, timeout_s=1.5)) as workers:
                error = workers.fetch(make_item()).exception(timeout=20)
                assert isinstance(error, EncoderUnavailableError)
                assert f"{place} (silent)" in error.message


def test_encoder_worker_access_by_a_socket_is_this_user_s_alone(address: str):
    with serving(Worker(), address), closing(asking(address)) as workers:
        assert value_of(workers, make_item(1)) == 3
        file = Path(address.removeprefix("unix://"))
        assert file.stat().st_mode & 0o777 == 0o600
    assert not file.exists()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("tcp://10.0.0.7:7000", "there is no key"),
        ("tcp://0.0.0.0:7000", "there is no key"),
        ("tcp://encoders:7000", "there is no key"),
        ("tcp://127.0.0.1", "no address"),
        ("tcp://127.0.0.1:0", "no address"),
        ("unix://relative", "no address"),
        (f"unix:///{'a' * 107}", "a path of 108 bytes, and a socket's has at most 107"),
        ("http://127.0.0.1:7000", "no address"),
        ("ipc:///tmp/x", "no address"),
    ],
)
def test_encoder_worker_access_without_a_key_is_this_host_s(place: str, words: str):
    with pytest.raises(ConfigError, match=words):
        find_endpoint(place, has_key=False)
    with pytest.raises(ConfigError, match=words):
        asking(place)


def test_addresses_of_this_host_and_with_a_key():
    for place in ("tcp://127.0.0.1:7000", "tcp://localhost:7000", "tcp://[::1]:7000"):
        assert find_endpoint(place, has_key=False) == place
    assert find_endpoint("tcp://encoders:7000", has_key=True) == "tcp://encoders:7000"


def test_no_item_waits_for_a_thread_that_has_ended(address: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever ended it, and however near to its end the item came."""

    def fail(*_: Any) -> None:
        raise MemoryError

    with closing(asking(address)) as workers:
        monkeypatch.setattr(encoder_workers, "make_row_key", fail)
        error = workers.fetch(make_item(1)).exception(timeout=20)
        assert str(error) == "internal error: MemoryError"
        error = workers.fetch(make_item(2)).exception(timeout=20)
        assert str(error) == "workers are not asked any more"


def test_keys_that_others_may_read_and_files_that_are_none(tmp_path: Path):
    file = tmp_path / "key"
    make_key(file)
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="not there"):
        make_key(file)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 640"):
        read_key(file)
    file.chmod(0o600)
    public, secret = read_key(file)
    file.write_bytes(secret + b"\n" + public)
    with pytest.raises(ConfigError, match="no key"):
        read_key(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key(tmp_path / "missing")


@pytest.mark.parametrize("unpack", [unpack_to_worker, unpack_to_engine])
def test_damaged_messages_raise_one_error(unpack: Callable[[Sequence[Buffer]], Any]):
    rng = np.random.default_rng(0)
    ask = EncodeItem(
        number=1, key=b"k", identifier="a", units={"x": np.zeros((2, 2))}, rows=np.arange(3)
    )
    messages = [ask, honest(ask, rows=np.zeros((2, 2))), Hello(parts=PARTS), Welcome(parts=PARTS)]
    for _ in range(2000):
        frames = [bytearray(one) for one in pack(messages[rng.integers(len(messages))])]
        frame = frames[rng.integers(len(frames))]
        place = rng.integers(len(frame))
        if rng.integers(2):
            frame[place] ^= 1 << rng.integers(8)
        else:
            del frame[place:]
        try:
            unpack([bytes(one) for one in frames])
        except WireError:
            continue
