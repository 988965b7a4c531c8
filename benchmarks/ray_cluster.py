"""Ray Serve on this machine, in processes of its own, for benchmarks and tests.

`python -m benchmarks.ray_cluster PORT` deploys what each line of its input says, as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

_READY = "deployed"
_DEPLOY_S = 600.0
_REPLICA_TITLE = "ray::ServeReplica:default:Replica"
_FRONT_TITLE = "ray::ServeReplica:default:Front"
_ENVIRONMENT = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mmjax.deploy.plain_errors:ray_middlewares",
}
_NUM_CPUS = 16
"""What Ray is told that it has: it only counts them."""


class ReplicaProcesses(NamedTuple):
    """A replica's two processes."""

    p0: psutil.Process
    p1: psutil.Process


class RayCluster:
    """Starts Ray, and deploys; ends all of its processes."""

    def __init__(self, args: Mapping[str, Any], *, port: int, log: Path) -> None:
        """`args`: of `mmjax.deploy.ray_serve.build_app`."""
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._file = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ray_cluster", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            env={**os.environ, **_ENVIRONMENT},
            text=True,
            start_new_session=True,
        )
        try:
            self.deploy(args)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "RayCluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin_deploy(self, args: Mapping[str, Any]) -> None:
        """Deploy, without waiting for `wait_deployed`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(args)) + "\n")
        self._process.stdin.flush()

    def wait_deployed(self) -> None:
        """Wait until all replicas are of the last deployment."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == _READY:
                return
        raise SystemExit(f"Ray Serve did not deploy:\n{self.log.read_text()[-6000:]}")

    def deploy(self, args: Mapping[str, Any]) -> None:
        """Deploy, and wait."""
        self.begin_deploy(args)
        self.wait_deployed()

    def processes(self) -> list[psutil.Process]:
        """Return the processes that Ray has started, those of replicas too."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def _titled(self, title: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if "".join(process.cmdline()[:1]).startswith(title):
                    found.append(process)
        return found

    def fronts(self) -> list[psutil.Process]:
        """Return the fronts."""
        return self._titled(_FRONT_TITLE)

    def replicas(self) -> list[ReplicaProcesses]:
        """Return the replicas whose engine runs."""
        found: list[ReplicaProcesses] = []
        for process in self._titled(_REPLICA_TITLE):
            with suppress(psutil.NoSuchProcess):
                spawned = [
                    child
                    for child in process.children()
                    if "multiprocessing.spawn" in " ".join(child.cmdline())
                ]
                # P1 is the one that loads most; the others decode pictures.
                if spawned:
                    p1 = max(spawned, key=lambda child: child.memory_info().rss)
                    found.append(ReplicaProcesses(process, p1))
        return found

    def wait_for_replicas(self, number: int, *, timeout_s: float = _DEPLOY_S) -> None:
        """Wait until there are so many."""
        wait_until(lambda: len(self.replicas()) == number, timeout_s=timeout_s)

    def end(self) -> None:
        """End Ray, and whatever of it is left."""
        started = self.processes()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60.0)
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._file):
            if file is not None:
                # What was not written yet has no reader any more.
                with suppress(BrokenPipeError):
                    file.close()


def wait_until(
    is_true: Callable[[], bool], *, timeout_s: float = _DEPLOY_S, interval_s: float = 0.2
) -> None:
    """Wait until a condition holds; TimeoutError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"not true after {timeout_s:g} s")
        time.sleep(interval_s)


def answers(url: str) -> bool:
    """Whether a server answers with 200."""
    with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
        return urllib.request.urlopen(url, timeout=5.0).status == 200
    return False


def main() -> None:
    """Deploy what comes on stdin, until SIGTERM."""
    # Imported here: the class above runs without Ray.
    import ray
    from ray import serve

    from mmjax.deploy.ray_serve import build_app

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    ray.init(num_cpus=_NUM_CPUS, include_dashboard=False, log_to_driver=True)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
        for line in sys.stdin:
            serve.run(build_app(json.loads(line)), blocking=False)
            print(_READY, file=out, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
