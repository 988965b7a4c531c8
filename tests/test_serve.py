"""`python -m mmjax.serve`, as an operator runs it: a process, a port, signals."""

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
from openai import OpenAI
from PIL import Image, ImageDraw
from safetensors.numpy import save

from mmjax import LLM, SamplingParams
from mmjax.config.engine_config import ServerConfig
from mmjax.serve import _listen
from tests.kit import IMAGE_START, draw

ROOT = Path(__file__).parents[1]
START_S = 240.0
FEW = ("--max-model-len", "256", "--max-num-seqs", "2", "--max-num-batched-tokens", "64")
"""Few programs to compile."""
SMALL = ("--served-model-name", "tiny", *FEW, "--precompile", "none")
"""Only those that a test needs; the second start finds them in the compile cache."""


class Served:
    """A running server: its address, its output."""

    def __init__(
        self,
        *argv: str,
        module: str = "mmjax.serve",
        is_group: bool = False,
        has_standby: bool = False,
        port: int = 0,
    ) -> None:
        """Start one.

        With `is_group`: in a process group of its own, as a terminal has it. With `has_standby`:
        with the engine process that waits for the other's death, which takes seconds to start.
        """
        self.lines: list[str] = []
        standby = () if has_standby else ("--no-enable-standby-engine",)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *argv, *standby, "--port", str(port)],
            start_new_session=is_group,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + START_S
        while (found := re.search(pattern, self.output)) is None:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def served(tiny_gemma3: Path) -> Iterator[Served]:
    mode = ("--logprobs-mode", "processed_logprobs")
    server = Served(str(tiny_gemma3), *SMALL, "--enable-mm-embeds", *mode, has_standby=True)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture
def url(served: Served) -> str:
    found = served.wait_for(r"mmjax serving tiny at (http://127\.0\.0\.1:\d+)\n")
    return found.group(1)


def message_about(picture: Image.Image, question: str) -> Any:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    encoded = base64.b64encode(buffer.getvalue()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    return {"role": "user", "content": [image, {"type": "text", "text": question}]}


def image_message(seed: int) -> Any:
    return message_about(draw(30 + seed, 20, seed), "What color?")


def ask(url: str, seed: int, **fields: Any) -> Any:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 8, **fields}
    with client:
        return client.chat.completions.create(**fields, messages=[image_message(seed)])


def ask_about(url: str, picture: Image.Image) -> Any:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client:
        return client.chat.completions.create(
            model="tiny_scenes",
            temperature=0,
            messages=[message_about(picture, "What color is the circle?")],
        )


def test_questions_about_pictures(url: str) -> None:
    alone = [ask(url, seed).choices[0].message.content for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda seed: ask(url, seed), range(6)))
    assert [answer.choices[0].message.content for answer in together] == alone
    assert {
        answer.usage.prompt_tokens_details.to_dict()["image_tokens"] for answer in together
    } == {4}


def test_embeddings_give_their_pictures_answers(url: str, tiny_gemma3: Path) -> None:
    """They are computed here, by the model's own tower, and answered for there."""
    settings = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    pictures = [draw(30 + seed, 20, seed) for seed in range(3)]
    with LLM(str(tiny_gemma3), use_tqdm_on_load=False, **settings) as llm:
        rows = [encode(llm, picture) for picture in pictures]
    reports: dict[str, list[Any]] = {"picture": [], "embeds": []}
    for picture, one in zip(pictures, rows, strict=True):
        file = base64.b64encode(save({"image": one})).decode()
        message = message_about(picture, "What color?")
        reports["picture"].append(ask_for_logprobs(url, message))
        message["content"][0] = {"type": "image_embeds", "image_embeds": file}
        reports["embeds"].append(ask_for_logprobs(url, message))
    assert reports["embeds"] == reports["picture"]
    assert len({str(answer) for answer in reports["picture"]}) > 1


def encode(llm: LLM, picture: Image.Image) -> np.ndarray:
    """Return the rows of a picture, as they lie in the pool of the encoder's outputs."""
    prompt: Any = {"prompt": IMAGE_START, "multi_modal_data": {"image": picture}}
    llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    runner = llm.engine._runner
    rows = runner.rows.get(llm.explain(prompt).items[0].identifier)
    return np.asarray(runner._pool)[rows]


def ask_for_logprobs(url: str, message: Any) -> Any:
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 8, "logprobs": True}
    body = {**fields, "messages": [message], "top_logprobs": 5}
    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_processed_log_probabilities_are_of_the_tokens_that_may_come(url: str) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 1, "max_tokens": 3}
    many = ask(url, 1, **fields)
    assert all(entry.logprob < 0 for entry in many.choices[0].logprobs.content)
    one = ask(url, 1, **fields, extra_body={"top_k": 1})
    shown = [[top.logprob for top in at.top_logprobs] for at in one.choices[0].logprobs.content]
    assert shown == [[0.0, -9999.0]] * 3


def test_a_stream(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client:
        chunks = list(
            client.chat.completions.create(
                model="tiny",
                messages=[image_message(1)],
                temperature=0,
                max_tokens=8,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ask(url, 1).choices[0].message.content
    assert chunks[-1].usage is not None


def test_a_crash_of_the_engine_is_survived(url: str, served: Served) -> None:
    pid = int(served.wait_for(r"started the engine process \(pid (\d+)\)").group(1))
    before = ask(url, 2).choices[0].message.content
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + START_S
    while httpx2.get(f"{url}/ready").status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while httpx2.get(f"{url}/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ask(url, 2).choices[0].message.content == before


def test_every_line_is_a_whole_record(url: str, served: Served) -> None:
    ask(url, 3)
    form = re.compile(r"[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[P[01] [\w.]+\] \S|mmjax serving tiny at ")
    wrong = [line for line in served.lines if not form.match(line)]
    assert wrong == []
    assert not [line for line in served.lines if "\\n" in line]
    assert sum("memory of a device: " in line for line in served.lines) > 4


def test_who_computes_on_the_cores_of_the_server_gives_way_to_it(url: str, served: Served) -> None:
    ask(url, 3)  # the decoding processes have begun, too
    server = psutil.Process(served.process.pid)
    engine = int(served.output.rpartition("started the engine process (pid ")[2].split(")")[0])
    names = {child.pid: " ".join(child.cmdline()) for child in server.children(recursive=True)}
    workers = [pid for pid, name in names.items() if pid == engine or "decoders.worker" in name]
    assert len(workers) >= 2
    lowest = 19  # of all systems, as where the tests themselves give way
    expected = min(server.nice() + 5, lowest)
    for pid in workers:
        threads = [thread.id for thread in psutil.Process(pid).threads()]
        assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {expected}


def test_no_process_of_the_server_has_torch(url: str, served: Served) -> None:
    """It takes 190 MB of each process, and nothing here needs it; the tests' own has it."""
    server = psutil.Process(served.process.pid)
    for process in (server, *server.children(recursive=True)):
        assert not [mapped.path for mapped in process.memory_maps() if "torch" in mapped.path]


def test_accepted_connections_have_no_delay() -> None:
    async def nodelay_of_accepted(listener: socket.socket) -> int:
        options: asyncio.Queue[int] = asyncio.Queue()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            options.put_nowait(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        server = await asyncio.start_server(accept, sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            option = await options.get()
            writer.close()
            await writer.wait_closed()
        return option

    for host in ("127.0.0.1", "::1"):
        with contextlib.closing(_listen(ServerConfig(host=host, port=0))) as listener:
            assert asyncio.run(nodelay_of_accepted(listener)) == 1


NUM_STREAMS, MAX_TOKENS = 32, 32


def count_streamed(address: str) -> int:
    """Stream an answer to its end; return the tokens that it is said to have."""
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "red"}],
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage = list(chunks)[-1].usage
    assert usage is not None
    return usage.completion_tokens


def unfinished(address: str) -> tuple[int, int]:
    """Return how many requests run, and how many wait."""
    state = httpx2.get(f"{address}/ready").json()
    return state["num_running"], state["num_waiting"]


def is_listening(address: str) -> bool:
    """Return whether the server takes a new connection."""
    try:
        httpx2.get(f"{address}/health")
    except httpx2.TransportError:
        return False
    return True


def test_sigterm_drains_also_where_all_processes_get_it(tiny_gemma3: Path) -> None:
    """Service managers send it to all; P1 goes on until P0 is done with every stream."""
    # Time enough for a slow machine; a second signal would end it.
    flags = (*SMALL, "--shutdown-timeout", "200")
    server = Served(str(tiny_gemma3), *flags, is_group=True, has_standby=True)
    try:
        address = server.wait_for(r"mmjax serving tiny at (\S+)\n").group(1)
        pid = int(server.wait_for(r"engine process \(pid (\d+)\)").group(1))
        with ThreadPoolExecutor(NUM_STREAMS) as clients:
            counts = [clients.submit(count_streamed, address) for _ in range(NUM_STREAMS)]
            deadline = time.monotonic() + START_S
            while sum(unfinished(address)) + sum(map(Future.done, counts)) < NUM_STREAMS:
                assert time.monotonic() < deadline
            os.killpg(server.process.pid, signal.SIGTERM)
            while is_listening(address):
                assert time.monotonic() < deadline
            assert [count.result() for count in counts] == [MAX_TOKENS] * NUM_STREAMS
        assert server.process.wait(30) == 0
        assert not Path(f"/proc/{pid}").exists()
        for mark in ("ERROR", "Traceback", "leaked", "Warning"):
            assert mark not in server.output
    finally:
        server.end()


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["./no/such/model"], "does not exist"),
        (["--kv-cache-dtype", "fp8"], "flag of vLLM's"),
    ],
)
def test_starts_that_fail_say_why(argv: list[str], match: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.serve", *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert match in done.stderr
    assert "Traceback" not in done.stderr


def start_in_vain(*argv: str) -> list[str]:
    """Return the lines of a start that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.serve", *argv, "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()


def test_weights_that_are_missing_end_the_start(tiny_gemma3: Path, tmp_path: Path) -> None:
    for file in tiny_gemma3.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    lines = start_in_vain(str(tmp_path))
    assert f"`{tmp_path}` holds its weights as pickles (pytorch_model.bin)" in lines[-1]
    assert not any("tokenizer" in line for line in lines), "found before anything is loaded"


def test_the_last_line_says_why_the_engine_cannot_start(tiny_gemma3: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_gemma3, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"]["layer_types"].append("full_attention")
    file.write_text(json.dumps(config))
    lines = start_in_vain(str(tmp_path))
    (line,) = (n for n, one in enumerate(lines) if "does not fit the model: 13 missing" in one)
    assert lines[line].startswith("mmjax.serve: ")
    assert all(one.startswith(("missing:", "  ")) for one in lines[line + 1 :])


def test_a_port_in_use_is_said_at_once(url: str, tiny_gemma3: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mmjax.serve", str(tiny_gemma3), "--port", url.rpartition(":")[2]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "in use" in done.stderr
    assert "engine process" not in done.stderr


@pytest.mark.slow  # as the page asks it in tests/server/page/test_page_of_the_default.py
def test_the_embedded_default_reads_a_picture() -> None:
    picture = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(picture).ellipse((90, 60, 210, 180), fill="red")
    server = Served(*FEW, "--precompile", "none")
    try:
        address = server.wait_for(r"mmjax serving tiny_scenes at (\S+)\n").group(1)
        answer = ask_about(address, picture)
        assert answer.choices[0].message.content == "red"
        assert answer.choices[0].finish_reason == "stop"
    finally:
        server.end()
