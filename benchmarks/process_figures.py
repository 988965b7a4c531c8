"""What a server's processes hold: memory, descriptors, threads, shared memory."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

Role = Literal["P0", "P1", "decoders", "others"]
ROLES: tuple[Role, ...] = ("P0", "P1", "decoders", "others")


class ProcessFigures(NamedTuple):
    """Sums over the processes of one role."""

    num_processes: int = 0
    rss_bytes: int = 0
    pss_bytes: int = 0
    """As RSS; what several processes share is divided among them."""
    num_fds: int = 0
    num_threads: int = 0

    def plus(self, process: psutil.Process) -> "ProcessFigures":
        """Return the sums with one more process."""
        with process.oneshot():
            memory = process.memory_full_info()
            more = (1, memory.rss, memory.pss, process.num_fds(), process.num_threads())
        return ProcessFigures(*map(sum, zip(self, more, strict=True)))


class SegmentFigures(NamedTuple):
    """The directories of items in shared memory of one server."""

    num_files: int
    num_bytes: int


def measure_processes(pid: int) -> Mapping[Role, ProcessFigures]:
    """Return the figures of a server, by role; `pid` is P0's."""
    figures: dict[Role, ProcessFigures] = dict.fromkeys(ROLES, ProcessFigures())
    for role, process in _processes(pid):
        # It may end meanwhile.
        with suppress(psutil.Error, FileNotFoundError):
            figures[role] = figures[role].plus(process)
    return figures


def find_engine(pid: int) -> int | None:
    """Return the process id of the server's P1; of several the one that holds most."""
    sizes: dict[int, int] = {}
    for role, process in _processes(pid):
        with suppress(psutil.Error):
            if role == "P1":
                sizes[process.pid] = process.memory_info().rss
    return max(sizes, key=lambda found: sizes[found], default=None)


def measure_segments(pid: int) -> SegmentFigures:
    """Return what a server has in /dev/shm; its directory's name begins with P0's `pid`."""
    sizes = []
    for path in Path(f"/dev/shm/mmjax-{os.geteuid()}").glob(f"{pid}-*"):
        with suppress(FileNotFoundError):
            sizes.append(sum(item.stat().st_blocks * 512 for item in path.iterdir()))
    return SegmentFigures(len(sizes), sum(sizes))


def _processes(pid: int) -> Iterator[tuple[Role, psutil.Process]]:
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(pid)
        yield "P0", server
        for child in server.children(recursive=True):
            with suppress(psutil.Error):
                yield _role_of(child.cmdline()), child


def _role_of(command: list[str]) -> Role:
    line = " ".join(command)
    if "multiprocessing.spawn" in line:
        return "P1"
    return "decoders" if "mmjax.decoders.worker" in line else "others"
