"""HTTP servers under test, each in processes of its own: mmjax, and its peers where they are."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_START_S = 1800.0
_END_S = 120.0


class Server:
    """Starts a command, and waits until it answers `GET ready_path` with 200."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        ready_path: str,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port
        self.log = log
        start = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                # A group of its own, which `end` can end as a whole.
                start_new_session=True,
            )
        try:
            self._wait(f"http://127.0.0.1:{port}{ready_path}")
        except BaseException:
            self.end()
            raise
        self.start_s = time.monotonic() - start

    def _wait(self, url: str) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise SystemExit(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                if urllib.request.urlopen(url, timeout=5.0).status == 200:
                    return
            time.sleep(0.1)
        raise SystemExit(f"{url} did not answer with 200 in {_START_S:.0f} s; see {self.log}")

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the process that was started, without its children."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(found[0]) * 1024 if found else 0

    @property
    def peak_memory_bytes(self) -> int:
        """The largest resident memory of each of its processes that lives, added."""
        return sum(_peak_bytes(pid) for pid in _group(self.process.pid))

    @property
    def log_bytes(self) -> int:
        """How long the log is."""
        return self.log.stat().st_size

    def end(self) -> float:
        """Send SIGTERM; return the seconds until the process is gone."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        seconds = time.monotonic() - start
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return seconds


def start_mmjax(
    arguments: Sequence[str],
    log: Path,
    *,
    model: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Server:
    """Start this checkout's server with all programs; without `model`, of the embedded default."""
    port = _free_port()
    chosen = [] if model is None else [model]
    # Else it would be measured while it compiles.
    settings = ["--port", str(port), "--precompile", "all", *arguments]
    command = [sys.executable, "-m", "mmjax.serve", *chosen, *settings]
    return Server(command, port=port, ready_path="/ready", log=log, env=env)


def start_vllm(peer: Path, arguments: Sequence[str], log: Path, *, model: str) -> Server:
    """Start vLLM; `peer`: a virtual environment that has it, or that one's interpreter."""
    port = _free_port()
    # Not resolved: an environment's interpreter is a link out of it.
    folder = peer.parent if peer.is_file() else peer / "bin"
    command = [str(folder / "vllm"), "serve", model, "--port", str(port), *arguments]
    env = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "PATH": f"{folder.absolute()}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    address = ["--host", "127.0.0.1"]
    return Server([*command, *address], port=port, ready_path="/health", log=log, env=env)


def start_llamacpp(program: Path, gguf: Path, kind: str, log: Path, *, num_at_once: int) -> Server:
    """Start llama.cpp's `llama-server` with the text of `kind` and the projector in `gguf`.

    A sequence of 2,048 tokens for each of `num_at_once` slots; no prompt is kept for a later
    request; an image's tokens, which attend to each other, are in one batch.
    """
    port = _free_port()
    files = ["-m", str(gguf / f"text-{kind}.gguf"), "--mmproj", str(gguf / "mmproj.gguf")]
    sizes = ["--parallel", str(num_at_once), "-c", str(2048 * num_at_once), "-b", "2048"]
    options = ["-ub", "2048", "-fa", "on", "--no-cache-prompt", "--cache-ram", "0", "--no-warmup"]
    threads = ["-t", str(len(os.sched_getaffinity(0)))]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [str(program), *files, *sizes, *options, *threads, *address]
    return Server(command, port=port, ready_path="/health", log=log)


def _group(leader: int) -> list[int]:
    """Return the processes of a group."""
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    found = []
    for pid in pids:
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                found.append(pid)
    return found


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else 0


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
