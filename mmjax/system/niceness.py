"""Which processes give way to P0 on the cores that they share: who answers clients goes first."""

import contextlib
import os
from pathlib import Path

_NICENESS = 5
"""Added to that of the process that started this one."""


def give_way() -> None:
    """Raise the niceness of this process: on Linux each thread has its own."""
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS, 19)
    tasks = Path("/proc/self/task")
    threads = [int(task.name) for task in tasks.iterdir()] if tasks.is_dir() else [0]
    for thread in threads:
        # One may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
