"""A worker process: reads a job's input from shared memory, writes its result there.

`python -m mmjax.decoders.worker KIND SOCKET MEMORY NUM_BYTES`, started by
`mmjax.decoders.worker_pool`. A fault in a decoder, in what reads a grammar or in a chat template
ends this process, which has no secrets, no connections, and limited memory.
"""

import json
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from mmjax.decoders.shared_memory import SharedMemory
from mmjax.errors import MediaError, RequestError
from mmjax.system.niceness import give_way

JobKind = Literal["media", "grammar", "template"]
"""What a process does: it loads nothing for other jobs."""

MAX_MESSAGE_BYTES = 128 * 2**10
"""The places of a video's frames are in one."""

_MAX_OPEN_FILES = 64
_MAX_ERROR_CHARS = 1000
_PAGES_OF_DATA = 5
"""Place in /proc/self/statm."""

_Operation = Callable[..., dict[str, Any]]
"""Called with a job's input, the shared memory, and the job's options."""


def main(argv: list[str]) -> None:
    """Do one job after another until the server closes the socket."""
    # A service manager sends it to all processes: the server ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    give_way()
    operations = _load(argv[0])
    channel, memory = socket.socket(fileno=int(argv[1])), SharedMemory(int(argv[2]))
    limit_resources(int(argv[3]))
    channel.send(b"{}")
    while job := channel.recv(MAX_MESSAGE_BYTES):
        reply = _answer(operations, json.loads(job), memory)
        channel.send(json.dumps(reply).encode())
        if reply.get("error") == "memory":
            return


def limit_resources(num_bytes: int) -> None:
    """Allow `num_bytes` of memory beyond what is used now, few files, and no core dump."""
    statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
    data = int(statm[_PAGES_OF_DATA]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))


def _load(kind: str) -> Mapping[str, _Operation]:
    match kind:
        case "media":
            from mmjax.decoders.media_jobs import OPERATIONS

            return OPERATIONS
        case "grammar":
            from mmjax.params.structured_outputs import read_grammar, warm_up

            warm_up()
            return {kind: _text_operation(read_grammar)}
        case _:
            from mmjax.decoders.template import render_job

            return {kind: _text_operation(render_job)}


def _text_operation(function: Callable[[bytes], bytes]) -> _Operation:
    def operate(data: bytes, memory: SharedMemory) -> dict[str, Any]:
        result = function(data)
        memory.write(result)
        return {"num_bytes": len(result)}

    return operate


def _answer(
    operations: Mapping[str, _Operation], job: Mapping[str, Any], memory: SharedMemory
) -> dict[str, Any]:
    try:
        # Nothing here takes the timer's signal: it ends the process.
        signal.setitimer(signal.ITIMER_PROF, job["cpu_seconds"])
        data = memory.read(job["num_bytes"])
        return operations[job["operation"]](data, memory, **job["options"])
    except MemoryError:
        return {"error": "memory"}
    except RequestError as error:
        kind = "media" if isinstance(error, MediaError) else "value"
        if isinstance(error.__cause__, MemoryError):
            return {"error": "memory"}
        return {"error": kind, "message": str(error)[:_MAX_ERROR_CHARS]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
