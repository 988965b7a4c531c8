"""The end of the server's process, whatever became of what it writes to."""

import os
import signal
import subprocess
import sys

SERVER = """
import contextlib, time
from mmjax.server.shutdown import Shutdown

shutdown = Shutdown()
shutdown.install()
shutdown.timeout_s = 3000.0
shutdown.drain_with(lambda: print("drains", flush=True))
print("serves", flush=True)
while True:
    # A server goes on after an error that some callback raises.
    with contextlib.suppress(Exception):
        time.sleep(0.01)
"""


def test_a_second_signal_ends_at_once_though_nobody_reads_stderr() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=writing, text=True
    )
    os.close(writing)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "serves\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "drains\n"
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(60.0) == 128 + signal.SIGTERM
        finally:
            process.kill()
