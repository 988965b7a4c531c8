"""The client of benchmarks/serving.py against a scripted server, and its reports."""

import asyncio
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator

import pytest

from benchmarks import http_load, serving
from benchmarks.http_load import Load, Sample

STEP_S = 0.1


def _event(**fields: object) -> bytes:
    data = b"data: " + json.dumps({"choices": [], **fields}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send the role, wait, send two tokens with a pause between them; or refuse."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(head.split(b"Content-Length: ")[1].split(b"\r")[0]))
    if body == b"wrong":
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nnot so\n")
    else:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(_event(choices=[{"delta": {"role": "assistant", "content": ""}}]))
        for text in ("a", ""):
            await asyncio.sleep(STEP_S)
            writer.write(_event(choices=[{"delta": {"content": text}}]))
        writer.write(_event(usage={"completion_tokens": 2}) + b"0\r\n\r\n")
    await writer.drain()
    writer.close()


@pytest.fixture
def port() -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(
        asyncio.start_server(_answer, "127.0.0.1", 0), loop
    ).result()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_closed_loop_keeps_its_number_at_once(port: int) -> None:
    samples = http_load.run(Load(port, [b"{}"] * 4, num_at_once=2))
    assert len(samples) == 4
    for sample in samples:
        assert sample.sent_s <= sample.first_chunk_s < sample.first_token_s
        assert sample.ttft_s >= STEP_S
        assert sample.tpot_s >= STEP_S / 2
        assert sample.num_tokens == 2
    # Two clients: the third request leaves when one of the first two is answered.
    answered = min(sample.last_token_s for sample in samples)
    assert sum(sample.sent_s < answered for sample in samples) == 2


def test_an_open_loop_waits_for_no_answer(port: int) -> None:
    samples = http_load.run(Load(port, [b"{}"] * 3, arrivals_s=[0.01, 0.02, 0.03]))
    assert all(one.sent_s >= at for one, at in zip(samples, (0.01, 0.02, 0.03), strict=True))
    assert max(sample.sent_s for sample in samples) < min(one.last_token_s for one in samples)


def test_a_refusal_ends_the_run(port: int) -> None:
    with pytest.raises(RuntimeError, match=r"answered 400: .*not so"):
        http_load.run(Load(port, [b"wrong"], num_at_once=1))


def test_reports() -> None:
    fast, slow = Sample(0, 0.1, 0.1, 0.4, 4), Sample(0, 0.2, 0.2, 0.8, 4)
    case = serving.Case("new", num_at_once=1)
    by_server = {
        "mmjax float32": serving.Rounds([[fast]]),
        "vLLM float32": serving.Rounds([[slow]]),
    }
    text = serving.table({case: by_server})
    assert "| mmjax float32 | 100.0, 100.0 | 100.0, 100.0 | 400.0, 400.0 | 2.50 |" in text
    assert "TTFT 2.00x, TPOT 2.00x, E2E 2.00x, answers/s 2.00x" in text
    assert text.count("2.00x") == 4, "a peer has no ratio"
    plot = ET.fromstring(serving.plot({case: by_server}, "a < b"))
    assert len(plot.findall(".//{*}rect")) == 1 + 2 + 8  # background, legend, bars
