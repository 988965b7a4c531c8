"""Workers that encode for engines: what engines answer with them is what they answer alone."""

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from mmjax.cache.stored_rows import make_row_key
from mmjax.config.engine_config import EngineConfig, LoRAConfig, ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.encode_worker import EncodeWorker, _Asked
from mmjax.engine.start import start_encoder
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.module import flatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.transport.encoder_link import (
    EncodedItem,
    EncodeItem,
    Hello,
    NotEncoded,
    connect,
    pack,
    unpack_to_engine,
)
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import (
    AFFINE,
    answer_all,
    drain,
    engine_config,
    message,
    picture,
    report,
    serve_all,
    start_tiny,
    tiny_engine,
    tiny_params,
    tokens_of,
)
from tests.families import TINY_FAMILIES, served_model
from tests.families.default_run import rows
from tests.families.tiny import Media, Words
from tests.models.served import make_config, make_request, start_engine

PICTURES = [(0, 1), (1, 2), (2, 9), (3, 1)]
"""Seeds and crops."""
SIZES: dict[str, Any] = {
    "encoder_cache_size": 40,
    "max_num_encoder_input_tokens": 64,
    "max_num_batched_tokens": 16,
}
"""Of all engines of the tiny model, so that they have the same few programs. There is little room
for encoder outputs: what an engine has is evicted, and asked for again."""


@contextmanager
def working(
    address: str,
    config: EngineConfig | None = None,
    *,
    model_class: Any = Gemma3ForConditionalGeneration,
    params: Any = None,
    max_bytes: int = 2**20,
) -> Iterator[EncodeWorker]:
    """Run a worker in a thread, of the tiny model unless told otherwise."""
    parts = start_encoder(
        config or engine_config(), model_class=model_class, params=params or tiny_params()[1]
    )
    worker = EncodeWorker(parts, address, None, max_bytes=max_bytes)
    worker.start()
    thread = Thread(target=worker.run)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join()


def start(addresses: Sequence[str], *, params: Any = None, **settings: Any) -> EngineCore:
    """Start an engine of the tiny model that has workers."""
    config = engine_config(**SIZES, encoder_workers=tuple(addresses), **settings)
    return start_tiny(config, params)


def ask(number: int, picture: tuple[int, int], **sampling: Any) -> EngineCoreRequest:
    parts = [[2, 10 + number % 7], picture, [40]]
    sampling = {"logprobs": 1, "max_tokens": 3, **sampling}
    return message(f"{number}", parts, **sampling)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncodeWorker]:
    with working(f"unix://{tmp_path_factory.mktemp('encoder')}/socket") as one:
        yield one


@pytest.fixture(scope="module")
def core(worker: EncodeWorker) -> Iterator[EngineCore]:
    with closing(start([worker.address])) as one:
        yield one


def test_an_engine_with_a_worker_answers_as_one_alone(core: EngineCore, worker: EncodeWorker):
    """Over evictions, pictures that are shared, and chunks of prompts."""
    rng, plain, before = random.Random(0), tiny_engine(**SIZES), worker.num_encoded
    num_given = core.stats().encoder_workers_items
    for _ in range(4):
        requests = [ask(n, rng.choice(PICTURES)) for n in range(rng.randint(1, 4))]
        assert report(core, requests) == report(plain, requests)
    requests = [
        message(f"{n}", [[2], PICTURES[1], [3 + n], PICTURES[2], [5]], max_tokens=3)
        for n in range(3)
    ]
    assert report(core, requests) == report(plain, requests)
    stats = core.stats()
    assert worker.num_encoded - before <= len(PICTURES)
    assert stats.encoder_workers_items - num_given > len(PICTURES)
    assert stats.encoder_workers_refused == core.compilations == 0


def test_neither_has_what_the_other_computes_with(core: EngineCore, worker: EncodeWorker):
    ours, theirs = (flatten_params(one) for one in (core.params, worker.params))
    assert not [name for name in ours if "vision" in name or "projector" in name]
    assert not [name for name in theirs if "language_model" in name]
    assert {*ours, *theirs} == set(flatten_params(tiny_params()[1]))


def test_what_one_engine_has_seen_is_not_encoded_for_another(
    core: EngineCore, worker: EncodeWorker
):
    requests = [ask(0, (17, 2))]
    expected, before = report(core, requests), worker.num_encoded
    with closing(start([worker.address])) as other:
        assert report(other, requests) == expected
    assert worker.num_encoded == before


def test_news_say_where_outputs_are_from(core: EngineCore):
    core.add_request(ask(0, (18, 1)))
    news = drain(core)["0"]
    assert (news[0].encoded, news[0].encoded_apart) == ([], ["picture-18-1"])


def test_weights_that_workers_encode_with_are_not_replaced(core: EngineCore):
    leaves = flatten_params(tiny_params()[1])
    text = {name: leaf for name, leaf in leaves.items() if "language_model" in name}
    core.replace_weights(core.match_weights(text))
    with pytest.raises(CheckpointError, match="those that `encoder_workers` encode with"):
        core.match_weights(leaves)
    with pytest.raises(CheckpointError, match="start workers and engine again"):
        core.open_weights(Path("/elsewhere"))


def test_a_request_waits_for_a_worker_while_others_go_on(tmp_path: Path):
    address = f"unix://{tmp_path}/encoder"
    with closing(start([address], encoder_workers_timeout=60.0)) as core:
        core.add_request(ask(0, PICTURES[0]))
        core.add_request(message("text", [[2, 5, 7]]))
        told: list[str] = []
        while "text" not in told or core.stats().num_running:
            told += [delta.request_id for delta in core.step()]
        assert "0" not in told
        with working(address):
            news = drain(core)["0"]
        assert tokens_of(news) == report(tiny_engine(**SIZES), [ask(0, PICTURES[0])])[0][0]


def test_a_request_that_no_worker_answers_fails_alone(tmp_path: Path):
    address = f"unix://{tmp_path}/nobody"
    with closing(start([address], encoder_workers_timeout=0.5)) as core:
        core.add_request(ask(0, PICTURES[0]))
        failed: list[Any] = []
        while not failed:
            core.step()
            failed = core.pop_failed()
        (((request_id, error),)) = failed
        assert (request_id, error.status, error.code) == ("0", 503, "encoder_unavailable")
        assert f"{address} (silent)" in error.message
        assert tokens_of(report_text(core)) != []
        assert not core.has_unfinished()


def report_text(core: EngineCore) -> Any:
    core.add_request(message("text", [[2, 5, 7]]))
    return drain(core)["text"]


def test_an_engine_that_keeps_its_encoder_needs_nobody(tmp_path: Path):
    address = f"unix://{tmp_path}/nobody"
    requests = [ask(n, PICTURES[n]) for n in range(2)]
    with closing(start([address], keep_encoder=True)) as core:
        assert report(core, requests) == report(tiny_engine(**SIZES), requests)
        assert core.stats().encoder_workers_fallbacks == 2


def test_what_cannot_go_with_workers_is_refused(tmp_path: Path):
    config = engine_config(encoder_workers=("unix:///nobody",))
    lora = LoRAConfig(enable_lora=True, enable_tower_connector_lora=True)
    with pytest.raises(ConfigError, match="enable_tower_connector_lora"):
        replace(config, lora=lora)
    with pytest.raises(ConfigError, match="encoder_cache_dir"):
        replace(config.cache, encoder_cache_dir=tmp_path)
    parallel = ParallelConfig(
        tensor_parallel_size=2, num_processes=2, process_id=0, coordinator_address="localhost:1"
    )
    with pytest.raises(ConfigError, match="encoder_workers"):
        EngineCore(replace(config, parallel=parallel), params=tiny_params()[1])


def test_a_later_worker_finds_outputs_on_disk(tmp_path: Path):
    address, config = f"unix://{tmp_path}/encoder", engine_config(encoder_cache_dir=tmp_path / "d")
    requests = [ask(0, PICTURES[2])]
    expected = report(tiny_engine(**SIZES), requests)
    counts = []
    for _ in range(2):
        with working(address, config) as worker, closing(start([address])) as core:
            assert report(core, requests) == expected
        counts.append((worker.num_encoded, worker.num_found))
    assert counts == [(1, 0), (0, 1)]


@contextmanager
def processes(*addresses: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Run workers that can be killed."""
    command = [sys.executable, "-m", "tests.engine.tiny_encode_worker"]
    started = [
        subprocess.Popen([*command, address], stdout=subprocess.PIPE, text=True)
        for address in addresses
    ]
    try:
        for one in started:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        yield started
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.parametrize("num_kills", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_no_request(num_kills: int, tmp_path: Path, worker: EncodeWorker):
    """16 streams, each about pictures that nobody has seen, and a worker dies among them.

    Where one alone is killed, the other is this module's: a process takes seconds to start.
    """
    addresses = [f"unix://{tmp_path}/{name}" for name in ("one", "two")]
    if num_kills == 1:
        addresses[1] = worker.address
    requests = [
        message(f"{n}", [[2, n], (100 + n, 1 + n % 3), [5], (200 + n, 2), [9]], max_tokens=6)
        for n in range(16)
    ]
    expected = [tokens_of(one) for one in serve_all(tiny_engine(**SIZES), requests)]
    with ExitStack() as opened:
        core = opened.enter_context(closing(start(addresses)))
        workers = [*opened.enter_context(processes(*addresses[: min(num_kills, 2)]))]
        for kill in range(num_kills):
            before = core.stats().encoder_workers_items
            for request in requests:
                renamed = rename_items(request, f"{kill}")
                core.add_request(renamed)
            news: dict[str, list[Any]] = {}
            while core.stats().encoder_workers_items < before + 4:
                collect(core, news)
            workers[kill % 2].kill()
            while core.has_unfinished():
                collect(core, news)
            assert [tokens_of(news[request.request_id]) for request in requests] == expected
            if kill + 1 < num_kills:
                again = opened.enter_context(processes(addresses[kill % 2]))
                workers[kill % 2] = again[0]
        assert core.stats().encoder_workers_refused == 0


def collect(core: EngineCore, news: dict[str, list[Any]]) -> None:
    for delta in core.step():
        news.setdefault(delta.request_id, []).append(delta)
    assert core.pop_failed() == []


def rename_items(request: EngineCoreRequest, name: str) -> EngineCoreRequest:
    """Return the request about pictures that no cache knows."""
    features = [
        replace(one, identifier=f"{one.identifier} {name}", mm_hash=f"{one.mm_hash} {name}")
        for one in request.mm_features
    ]
    return msgspec.structs.replace(request, mm_features=features)


# ---- what a worker takes -------------------------------------------------------------------------


@contextmanager
def calling(worker: EncodeWorker) -> Iterator[Any]:
    context = zmq.Context()
    socket = connect(context, worker.address, None, max_bytes=2**20)

    def call(*frames: Any, before: Sequence[Any] = ()) -> Any:
        if before:
            socket.send_multipart(before)
        socket.send_multipart(frames)
        return unpack_to_engine(socket.recv_multipart()) if socket.poll(20_000) else None

    try:
        yield call
    finally:
        socket.close()
        context.term()


def make_ask(**other: Any) -> EncodeItem:
    units = {"pixel_values": picture(5), "affine": AFFINE.reshape(1, 3, 3, 1)}
    ask = EncodeItem(number=3, key=b"", identifier="one", units=units)
    ask = msgspec.structs.replace(ask, **other)
    return ask if ask.key else msgspec.structs.replace(ask, key=key_of(ask))


def key_of(ask: EncodeItem) -> bytes:
    return make_row_key(ask.identifier, ask.units, ask.rows)


def bad_asks() -> dict[str, tuple[EncodeItem, str]]:
    units = make_ask().units
    pixels, affine = units["pixel_values"], units["affine"]
    return {
        "key": (make_ask(key=b"another"), "another item's"),
        "names": (make_ask(units={"pixels": pixels}), "the encoder takes"),
        "dtype": (make_ask(units={**units, "pixel_values": pixels.astype("f4")}), "takes"),
        "shape": (make_ask(units={**units, "pixel_values": pixels[..., :-1]}), "shape"),
        "counts": (make_ask(units={**units, "affine": np.repeat(affine, 2, 0)}), "as many"),
        "none": (make_ask(units={k: v[:0] for k, v in units.items()}), "0 outputs"),
        "many": (make_ask(units={k: np.repeat(v, 99, 0) for k, v in units.items()}), "396"),
        "rows": (make_ask(rows=np.array([4], np.int32)), "`rows`"),
        "rows' dtype": (make_ask(rows=np.array([0], np.int64)), "`rows`"),
        "no rows": (make_ask(rows=np.array([], np.int32)), "`rows`"),
    }


def test_encoder_worker_lies_of_engines_are_refused_and_the_worker_goes_on(worker: EncodeWorker):
    before = worker.num_encoded
    with calling(worker) as call:
        call(*pack(Hello(parts={})))
        for name, (ask, words) in bad_asks().items():
            answer = call(*pack(ask))
            assert isinstance(answer, NotEncoded), name
            assert words in answer.reason, name
        assert worker.num_encoded == before
        answer = call(*pack(make_ask()))
        assert isinstance(answer, EncodedItem)
        assert answer.rows.shape == (4, 32)


def test_encoder_worker_lies_in_frames_of_engines_reach_nobody(worker: EncodeWorker):
    with calling(worker) as call:
        call(*pack(Hello(parts={})))
        rng = np.random.default_rng(0)
        frames = [[rng.bytes(9)], [b""], [bytes([9]) + rng.bytes(50), rng.bytes(5)]]
        for number, one in enumerate(frames):
            # Of each nothing comes but the answer to the next.
            answer = call(*pack(make_ask(number=number)), before=one)
            assert isinstance(answer, EncodedItem)
            assert answer.number == number


def test_an_item_that_cannot_be_encoded_is_refused_alone(
    worker: EncodeWorker, monkeypatch: pytest.MonkeyPatch
):
    good, bad = make_ask(identifier="good"), make_ask(identifier="bad")
    runner, told = worker._parts.runner, dict[bytes, Any]()
    encode = runner.encode_apart

    def encode_others(items: Any) -> Any:
        if any(item.identifier == bad.key.hex() for item in items.values()):
            raise MemoryError
        return encode(items)

    monkeypatch.setattr(runner, "encode_apart", encode_others)
    monkeypatch.setattr(worker, "_send", lambda peer, frames: told.update({peer: frames}))
    # As the thread that computes, which has nothing to do meanwhile.
    worker._answer([_Asked(b"good", good), _Asked(b"bad", bad)])
    assert isinstance(unpack_to_engine([*told[b"good"]]), EncodedItem)
    assert isinstance(unpack_to_engine([*told[b"bad"]]), NotEncoded)


@pytest.mark.parametrize("name", rows("encoder workers", TINY_FAMILIES))
def test_other_families(name: str, tmp_path: Path):
    model, address = served_model(name), f"unix://{tmp_path}/encoder"
    family = model.family
    sizes: dict[str, Any] = {"max_num_batched_tokens": max(16, family.longest_run)}
    sizes |= {"max_embeds": family.max_embeds, "max_model_len": family.max_model_len}
    config = make_config(family.model_class, model.config, **sizes)
    apart = make_config(family.model_class, model.config, **sizes, encoder_workers=(address,))
    (modality, *_) = family.max_embeds
    requests = [
        make_request(str(n), model.draw_sample((Words(1, 3), Media(n, modality), Words(2, 5))))
        for n in range(2)
    ]
    plain = start_engine(model, max_num_batched_tokens=max(16, family.longest_run))
    expected = answer_all(plain, requests)
    given = {"model_class": family.model_class, "params": model.params}
    with (
        working(address, config, **given) as worker,
        closing(EngineCore(apart, **given)) as core,
    ):
        assert answer_all(core, requests) == expected
        assert worker.num_encoded == len(requests)
        read = flatten_params(worker.params)
        held = flatten_params(core.params)
    # Of what encodes the engine has learned vectors at most, what makes marks of them, and tables
    # that its decoder reads.
    shared = read.keys() & held.keys()
    of_marks = family.model_class.read_by_extra
    inside = [name for name in shared if "." in name and name.partition(".")[0] not in of_marks]
    assert all("embed_tokens" in name for name in inside)
