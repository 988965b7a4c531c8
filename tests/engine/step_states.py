"""A process whose main thread waits, or works, in every way in which a step may.

`python -m tests.engine.step_states waits|works` prints a JSON object: for each state whether its
looks saw work. Beside the waits programs compile, which no step needs.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.engine.device.compilation import Program, compile_programs
from mmjax.engine.device.threads import StepThreads, open_devices

STATE_S = 1.5
LOOK_S = 0.2
_NUMBERS = count()


def new_program(depth: int) -> Program:
    """Return a program that was never compiled."""
    number = next(_NUMBERS)

    def compute(x: jax.Array) -> jax.Array:
        for power in range(depth):
            x = jnp.tanh(x @ x + number) * jnp.exp(x - power)
        return x

    return Program(str(number), jax.jit(compute), {"x": jax.ShapeDtypeStruct((32, 32), "float32")})


def compile_for_ever() -> None:
    while True:
        compile_programs([new_program(20) for _ in range(4)])


def until_over(work: Callable[[], Any]) -> None:
    end = time.monotonic() + STATE_S
    while time.monotonic() < end:
        work()


def call_back(work: Callable[[], Any], *, is_alone: bool = True) -> Callable[[], Any]:
    """Return a call of a program that calls the host; of one that waits for another if not alone.

    The caller's thread runs the first kind, one of the device's the second.
    """

    def host(x: np.ndarray) -> np.ndarray:
        work()
        return x

    x = jnp.ones((512, 512))
    program = jax.jit(lambda x: jax.pure_callback(host, x, x))
    program.lower(x).compile()
    before = make_product(x)
    return lambda: jax.block_until_ready(program(x if is_alone else before(x)))


def make_product(x: jax.Array) -> Callable[[jax.Array], jax.Array]:
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x))
    product.lower(x).compile()
    return product


def make_waits() -> dict[str, Callable[[], Any]]:
    """Return states of a step that would never end of itself."""
    lock = threading.Lock()
    lock.acquire()
    return {
        "a sleep": lambda: time.sleep(STATE_S),
        "a lock": lambda: lock.acquire(timeout=STATE_S),
        "a callback that sleeps": call_back(lambda: time.sleep(STATE_S)),
        "a device's callback that sleeps": call_back(lambda: time.sleep(STATE_S), is_alone=False),
    }


def make_works() -> dict[str, Callable[[], Any]]:
    """Return states of a step that takes long."""
    matrix = jnp.ones((1024, 1024))
    product = make_product(matrix)
    small = jnp.ones((32, 32))
    return {
        "Python": lambda: until_over(lambda: sum(range(1000))),
        "the device": lambda: until_over(lambda: jax.block_until_ready(product(matrix))),
        "a callback": call_back(lambda: until_over(lambda: sum(range(1000)))),
        "a device's callback": call_back(
            lambda: until_over(lambda: sum(range(1000))), is_alone=False
        ),
        "programs that are compiled": lambda: until_over(
            lambda: compile_programs([new_program(8)])
        ),
        "a call that compiles": lambda: until_over(lambda: new_program(8).jitted(small)),
    }


def look_at(state: Callable[[], Any], threads: StepThreads) -> list[bool]:
    """Return what looks see while the state lasts."""
    looks, is_over = [], threading.Event()

    def look() -> None:
        threads.look()
        while not is_over.wait(LOOK_S):
            looks.append(threads.look())

    looker = threading.Thread(target=look)
    looker.start()
    state()
    is_over.set()
    looker.join()
    # The first may reach back before the state, and the last beyond it.
    return looks[1:-1]


def main() -> None:
    threads = StepThreads(open_devices())
    states = {"waits": make_waits, "works": make_works}[sys.argv[1]]()
    if sys.argv[1] == "waits":
        threading.Thread(target=compile_for_ever, daemon=True).start()
    seen = {name: look_at(state, threads) for name, state in states.items()}
    print(json.dumps(seen), flush=True)
    os._exit(0)  # programs still compile


if __name__ == "__main__":
    main()
