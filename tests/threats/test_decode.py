"""Files that are no pictures, or too much of one: the request is refused, and nothing else."""

import errno
import fcntl
import importlib
import io
import os
import pkgutil
import random
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmjax.models
from mmjax.config.engine_config import MultiModalConfig
from mmjax.decoders import worker_pool
from mmjax.decoders.decode_workers import DecodeWorkers
from mmjax.decoders.image_file import IMAGE_FORMATS, decode_image, read_image_header
from mmjax.decoders.limits import MediaLimits
from mmjax.decoders.shared_memory import create_shared_memory
from mmjax.errors import MediaError, RequestError, RequestValueError
from mmjax.frontend.media.connector import MediaConnector
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.processing.media.encoded import EncodedImage
from tests.kit import draw
from tests.processing.test_media import as_url, encode, png_header
from tests.server.conftest import MakeServer, Server
from tests.server.test_bad_input import SECRETS, error_of

LIMITS = MediaLimits(max_image_bytes=2_000_000, max_image_pixels=4_000_000)
PICTURE = encode(draw(16, 12))
PLACE = "messages[0].content[0].image_url.url"
KNOWN_ERRORS = re.compile(
    r"`messages\[0\]\.content\[0\]\.image_url\.url`"
    r"( holds no image that can be decoded; send a whole file, .*"
    r"|: image (is \d+x\d+ = \d+ pixels, at most|is too large \(|is \d+x\d+ pixels; it).*)"
)
"""All that a client is told of a picture; `.` holds fixed words and numbers alone."""


def message_with(data: bytes) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": as_url(data)}}
    return {"role": "user", "content": [part, {"type": "text", "text": "what?"}]}


def pids_of(workers: DecodeWorkers) -> list[int]:
    """Return the processes that run."""
    return [one.process.pid for one in workers._pool._workers if one.process is not None]


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size",
    [(1, 1), (1, 50), (50, 1), (27, 27), (1, 201), (201, 1), (65535, 1), (1, 65535), (2, 3000)],
    ids=lambda size: f"{size[0]}x{size[1]}",
)
def test_CVE_2026_22773_odd_sizes(server: Server, size: tuple[int, int]) -> None:
    response = server.chat(messages=[message_with(encode(Image.new("RGB", size)))])
    assert response.status_code in (200, 400), response.text
    assert not SECRETS.search(response.text)
    assert server.chat().status_code == 200


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_CVE_2026_22773_sizes_that_only_a_header_has(server: Server, size: tuple[int, int]) -> None:
    for stream in (False, True):
        response = server.chat(messages=[message_with(png_header(*size))], stream=stream)
        assert response.status_code in (400, 422)
        assert KNOWN_ERRORS.fullmatch(response.json()["error"]["message"]), response.text


# ---- what errors say -----------------------------------------------------------------------------


def _mutants(count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged files of every format."""
    rng = random.Random(seed)
    image = draw(40, 30)
    files = [encode(image, kind) for kind in IMAGE_FORMATS]
    files += [
        encode(image.convert("RGBA")),
        encode(image.quantize(16)),
        encode(image, "WEBP", lossless=True),
        encode(image, "JPEG", progressive=True),
        encode(image, "TIFF", compression="tiff_lzw"),
        encode(image, "GIF", save_all=True, append_images=[draw(40, 30, 1)]),
    ]
    for _ in range(count):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(data))
            match rng.randrange(5):
                case 0:
                    data[place] ^= 1 << rng.randrange(8)
                case 1:
                    data[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
                case 2:
                    del data[place:]
                case 3:
                    data[place:place] = rng.randbytes(rng.randrange(1, 9))
                case _:
                    data[place : place + 4] = rng.choice([b"\xff" * 4, b"\x00" * 4, b"\x7f" * 4])
            if not data:
                break
        yield bytes(data)


def _try_mutants(count: int, workers: DecodeWorkers) -> None:
    """Each decodes, in a process and in a thread to the same pixels, or is refused."""
    num_decoded = 0
    for data in _mutants(count, seed=3):
        outcomes: list[Any] = []
        for decode in (workers.decode_image, decode_image):
            try:
                image, header = decode(data, LIMITS, param="x")
                outcomes.append((header, image.size, np.asarray(image).tobytes()))
            except RequestError as error:
                outcomes.append((type(error), error.status))
        assert outcomes[0] == outcomes[1]
        num_decoded += len(outcomes[0]) == 3
        assert len(outcomes[0]) == 3 or outcomes[0][1] in (400, 422)
    assert count / 20 < num_decoded < count


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, over damaged metadata
def test_CVE_2026_40192_hundreds_of_damaged_files(workers: DecodeWorkers) -> None:
    _try_mutants(300, workers)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_CVE_2026_40192_thousands_of_damaged_files(workers: DecodeWorkers) -> None:
    _try_mutants(20_000, workers)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_CVE_2026_22778_no_error_of_a_decoder_reaches_a_client(
    server: Server,
) -> None:
    for number, data in enumerate(_mutants(60, seed=4)):
        response = server.chat(messages=[message_with(data)], stream=number % 2 == 1)
        assert response.status_code in (200, 400, 422), response.text
        assert not SECRETS.search(response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["param"] == PLACE
            assert KNOWN_ERRORS.fullmatch(error["message"]), error


def test_CVE_2026_54236_not_on_any_route_nor_in_a_stream(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MediaError("cannot identify <_io.BytesIO object at 0x7f1234567890> in /tmp/secret")

    monkeypatch.setattr("mmjax.processing.media.encoded.read_image_header", fail)
    body = {"messages": [message_with(PICTURE)]}
    posts = [path for path in _post_routes(server) if "chat" in path]
    assert {"/v1/chat/completions", "/v1/chat/completions/render"} <= set(posts)
    for path in posts:
        for stream in (False, True):
            response = server.http.post(path, json={**body, "stream": stream})
            error = error_of(response, 422)
            assert KNOWN_ERRORS.fullmatch(error["message"])


def _post_routes(server: Server) -> list[str]:
    return [
        route.path  # type: ignore[attr-defined]
        for route in server.app.routes
        if "POST" in (getattr(route, "methods", None) or ())
    ]


# ---- Pillow --------------------------------------------------------------------------------------


def test_CVE_2026_109229_no_import_changes_pillows_own_limit() -> None:
    before = Image.MAX_IMAGE_PIXELS
    for found in pkgutil.walk_packages(mmjax.models.__path__, "mmjax.models."):
        if found.name.endswith(".processor"):
            importlib.import_module(found.name)
    assert before == Image.MAX_IMAGE_PIXELS is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # formats that Pillow is to lose
def test_CVE_2026_40192_other_formats_are_refused_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """EPS starts a program, FITS unpacks without a limit, and so on: none of them is asked."""
    Image.init()
    others = sorted(Image.OPEN.keys() - set(IMAGE_FORMATS))
    assert len(others) > 30
    for kind in others:
        _, accept = Image.OPEN[kind]

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a decoder that is not allowed was asked")

        monkeypatch.setitem(Image.OPEN, kind, (refuse, accept))
    refused = []
    for kind in others:
        if kind in Image.SAVE:
            buffer = io.BytesIO()
            try:
                draw(16, 16).save(buffer, kind)
            except (OSError, ValueError, KeyError):
                continue
            try:
                decode_image(buffer.getvalue(), LIMITS)
            except MediaError:
                refused.append(kind)
                continue
            # MPO is a JPEG to every reader.
            assert Image.open(io.BytesIO(buffer.getvalue())).format in IMAGE_FORMATS
    assert len(refused) > 10
    starts = [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"SIMPLE  =                    T", b"gd2\x00", b"8BPS"]
    for start in starts:
        with pytest.raises(MediaError):
            decode_image(start + bytes(3000), LIMITS)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_CVE_2026_5497_only_the_first_frame_is_decoded(kind: str, workers: DecodeWorkers) -> None:
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:] * 50, **options)
    for decode in (workers.decode_image, decode_image):
        image, _ = decode(data, LIMITS, param=None)
        assert image.size == (8, 6)
        assert image.getpixel((3, 3)) == (255, 0, 0)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,AAAA"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
    ids=[
        "CVE_2026_34755_frames",
        "CVE_2026_34755_video",
        "CVE_2026_54233_audio_url",
        "CVE_2026_54233_input_audio",
    ],
)
def test_CVE_2026_5497_and_other_media_are_refused_where_no_model_takes_them(
    server: Server, part: dict[str, Any]
) -> None:
    error = error_of(server.chat(messages=[{"role": "user", "content": [part]}]))
    assert error["param"] == "messages[0].content[0].type"


# ---- decoding processes -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*IMAGE_FORMATS, "RGBA", "P", "I;16", "turned"])
def test_CVE_2026_40192_a_process_decodes_to_the_same_pixels(
    kind: str, workers: DecodeWorkers
) -> None:
    image = draw(33, 17)
    if kind in IMAGE_FORMATS:
        data = encode(image, kind)
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        data = encode(image, "JPEG", exif=exif)
    elif kind == "I;16":
        data = encode(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100))
    else:
        data = encode(image.convert(kind))
    image, header = workers.decode_image(data, LIMITS, param=None)
    expected, expected_header = decode_image(data, LIMITS)
    assert (header, image.size, image.mode) == (expected_header, expected.size, "RGB")
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    assert workers.read_header(data, LIMITS, param=None) == read_image_header(data, LIMITS)


def test_CVE_2026_40192_a_process_that_dies_costs_one_request() -> None:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    try:
        pool.decode_image(PICTURE, LIMITS, param=None)
        (first,) = pids_of(pool)
        os.kill(first, signal.SIGSEGV)
        with pytest.raises(MediaError) as caught:
            pool.decode_image(PICTURE, LIMITS, param="here")
        assert caught.value.param == "here"
        image, _ = pool.decode_image(PICTURE, LIMITS, param=None)
        assert image.size == (16, 12)
        (second,) = pids_of(pool)
        assert second != first
    finally:
        pool.close()
    assert pids_of(pool) == []
    with pytest.raises(MediaError):
        pool.decode_image(PICTURE, LIMITS, param=None)


def test_a_process_that_is_killed_from_outside_costs_nothing() -> None:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    try:
        for _ in range(2):
            pool.decode_image(PICTURE, LIMITS, param=None)
            (pid,) = pids_of(pool)
            os.kill(pid, signal.SIGKILL)
            image, _ = pool.decode_image(PICTURE, LIMITS, param=None)
            assert image.size == (16, 12)
            assert pids_of(pool) != [pid]
    finally:
        pool.close()


def test_CVE_2026_40192_a_process_that_takes_too_long_is_ended() -> None:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    try:
        pool.decode_image(PICTURE, LIMITS, param=None)
        (pid,) = pids_of(pool)
        pool._pool._timeout_s = 0.2
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(MediaError, match="too long"):
            pool.decode_image(PICTURE, LIMITS, param=None)
        assert pids_of(pool) == []
        pool._pool._timeout_s = 120.0
        pool.decode_image(PICTURE, LIMITS, param=None)
    finally:
        pool.close()


def test_CVE_2026_40192_a_process_has_so_much_memory_and_no_more() -> None:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=16 * 2**20)
    try:
        large = encode(Image.new("RGBA", (2400, 2000)))  # 19 MB, and as much again and again
        limits = MediaLimits(max_image_pixels=10_000_000)
        with pytest.raises(MediaError):
            pool.decode_image(large, limits, param=None)
        image, _ = pool.decode_image(PICTURE, limits, param=None)
        assert image.size == (16, 12)
    finally:
        pool.close()
    roomy = DecodeWorkers(
        1,
        timeout_s=120.0,
        memory_bytes=MultiModalConfig(max_image_pixels=4_800_000).decode_memory_bytes,
    )
    try:
        image, _ = roomy.decode_image(large, limits, param=None)
        assert image.size == (2400, 2000)
    finally:
        roomy.close()


@pytest.mark.parametrize(
    "reply",
    [
        {"header": [10**6, 10**6, 0], "size": [16, 12]},
        {"header": [16, 12, 0], "size": [10**6, 10**6]},
        {"header": [16, 12, 0], "size": [-16, -12]},
        {"header": ["16", 12, 0], "size": [16, 12]},
        {"header": [16, 12, 0], "size": [16]},
    ],
    ids=range(5),
)
def test_CVE_2026_40192_what_a_process_says_is_not_trusted(
    reply: dict[str, Any], workers: DecodeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worker_pool._Worker, "call", lambda *args: reply)
        with pytest.raises(RequestValueError):
            workers.decode_image(PICTURE, LIMITS, param=None)
    image, _ = workers.decode_image(PICTURE, LIMITS, param=None)
    assert image.size == (16, 12)


def test_CVE_2026_40192_a_process_that_gives_too_few_pixels_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    try:
        with monkeypatch.context() as patch:
            reply = {"header": [16, 12, 0], "size": [16, 12]}
            patch.setattr(worker_pool._Worker, "call", lambda *args: reply)
            with pytest.raises(MediaError):
                pool.decode_image(PICTURE, LIMITS, param=None)
        image, _ = pool.decode_image(PICTURE, LIMITS, param=None)
        assert image.size == (16, 12)
    finally:
        pool.close()


def test_CVE_2026_40192_what_a_process_shares_cannot_shrink_while_it_is_read() -> None:
    """Whoever reads where a file has ended gets SIGBUS."""
    memory = create_shared_memory()
    memory.grow(4096)
    with memory.view(4096) as view:
        with pytest.raises(PermissionError):
            os.truncate(memory.descriptor, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        assert bytes(view) == bytes(4096)
    with pytest.raises(ValueError, match="length"):
        memory.view(8192)
    memory.close()


def test_a_large_picture_leaves_no_memory_behind() -> None:
    limits = MediaLimits(max_image_pixels=10_000_000)
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    memory = pool._pool._workers[0].memory
    try:
        for side in (3000, 3100):
            image, _ = pool.decode_image(
                encode(Image.new("RGB", (side, side), "red")), limits, param=None
            )
            assert image.getpixel((side - 1, side - 1)) == (255, 0, 0)
            assert memory.num_used_bytes < 2**20
    finally:
        pool.close()


def test_a_process_that_cannot_be_started_again_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor its place: later requests would wait for it for ever."""
    pool = worker_pool.WorkerPool("media", 1, timeout_s=120.0, memory_bytes=2**28, is_fresh=True)
    start, started = subprocess.Popen, list[Any]()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(start(*args, **kwargs))
        return started[0]

    def read() -> Any:
        with pool.run("read_image_header", PICTURE, **asdict(LIMITS)) as (reply, _):
            return reply["header"]

    try:
        with monkeypatch.context() as patch:
            patch.setattr("mmjax.decoders.worker_pool.subprocess.Popen", refuse)
            assert read() == [16, 12, False, False]
            with pytest.raises(worker_pool.WorkerError, match="start"):
                read()
        assert read() == [16, 12, False, False]
    finally:
        pool.close()


def test_CVE_2026_40192_a_process_has_no_keys(workers: DecodeWorkers) -> None:
    workers.decode_image(PICTURE, LIMITS, param=None)
    (pid,) = pids_of(workers)
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    names = {entry.partition(b"=")[0].decode() for entry in environment.split(b"\0") if entry}
    assert names <= {
        *worker_pool._PASSED_ON,
        "PYTHONPATH",
        "OPENBLAS_NUM_THREADS",
        "OMP_NUM_THREADS",
    }


def test_CVE_2026_40192_threads_share_the_processes() -> None:
    pool = DecodeWorkers(2, timeout_s=120.0, memory_bytes=2**28)
    pictures = [draw(20 + seed, 10, seed) for seed in range(12)]
    found: dict[int, bool] = {}

    def decode(seed: int) -> None:
        image = EncodedImage(encode(pictures[seed]), LIMITS, workers=pool)
        same = np.array_equal(np.asarray(image.decode().media), np.asarray(pictures[seed]))
        found[seed] = same and image.read_header()[:2] == pictures[seed].size

    threads = [threading.Thread(target=decode, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert found == dict.fromkeys(range(12), True)


def test_CVE_2026_40192_the_server_decodes_in_processes(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    processor: InputProcessor = server.engine_client.input_processor
    pool = DecodeWorkers(1, timeout_s=120.0, memory_bytes=2**28)
    try:
        monkeypatch.setattr(processor.connector, "_workers", pool)
        monkeypatch.setattr(Image, "open", None)  # nothing is opened in this process
        data = encode(draw(31, 7, seed=99))
        response = server.chat(messages=[message_with(data)])
        assert response.status_code == 200, response.text
        error_of(server.chat(messages=[message_with(b"GIF89a")]), 422)
    finally:
        pool.close()


def test_CVE_2026_40192_processes_are_the_servers_default() -> None:
    connector = MediaConnector.with_workers(MultiModalConfig(), num_cores=2)
    assert connector._workers is not None
    assert len(pids_of(connector._workers)) == 2
    connector.close()
    assert (
        MediaConnector.with_workers(MultiModalConfig(media_decode_workers=0), num_cores=2)._workers
        is None
    )
