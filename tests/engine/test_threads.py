"""A step that waits is told from one that works, whatever other threads of the process do."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from jax._src import compiler

from mmjax.engine.device import threads
from mmjax.engine.device.threads import DeviceThreads, StepThreads


def run_states(kind: str) -> dict[str, list[bool]]:
    command = [sys.executable, "-m", "tests.engine.step_states", kind]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env, timeout=200)
    looks: dict[str, list[bool]] = json.loads(result.stdout)
    return looks


def test_a_step_that_waits_is_seen_to_wait_while_programs_compile() -> None:
    # The last looks may be at the thread that has waited, and needs the interpreter to say so.
    waits = {name: looks.count(False) for name, looks in run_states("waits").items()}
    assert len(waits) == 4
    assert min(waits.values()) >= 2, waits


def test_a_step_that_works_is_seen_to_work() -> None:
    works = run_states("works")
    assert len(works) == 6
    assert all(looks and all(looks) for looks in works.values()), works


def test_looks_survive_collections_that_let_other_threads_go_on() -> None:
    """A look must not make objects of frames: they may be gone when a collection has ended."""
    code = """
import gc, os, sys, threading, time
from mmjax.engine.device.threads import DeviceThreads, StepThreads

def call(depth):
    files = [open(os.devnull) for _ in range(3)]
    if depth:
        call(depth - 1)

def work():
    while True:
        call(5)

threads = StepThreads(DeviceThreads())
gc.callbacks.append(lambda *_: time.sleep(1e-5))
gc.set_threshold(20)
sys.setswitchinterval(1e-5)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
end = time.monotonic() + 4
while time.monotonic() < end:
    threads.look()
os._exit(0)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, check=False, stderr=subprocess.PIPE, env=env, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_step_that_has_just_come_out_of_its_compiler_was_seen_to_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()

    def compile_beside() -> None:
        while not is_over.is_set():
            sum(range(1000))

    looked, ident = StepThreads(DeviceThreads()), threading.get_ident()
    codes: Iterator[dict[int, list[str]]] = iter([{ident: [compiler.__file__]}, {}, {}])
    monkeypatch.setattr(threads, "_find_files", lambda: next(codes))
    beside = threading.Thread(target=compile_beside)
    beside.start()
    looks = []
    for _ in range(3):
        time.sleep(0.3)
        looks.append(looked.look())
    is_over.set()
    beside.join()
    assert looks == [True, True, False]


def test_a_system_that_does_not_tell_of_threads_tells_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]
) -> None:
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    looked = StepThreads(DeviceThreads())
    sum(range(10**6))
    assert looked.look()
