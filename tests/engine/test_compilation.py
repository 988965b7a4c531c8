"""How programs are compiled, where they are kept, and who counts them."""

import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mmjax.engine.device import compilation
from mmjax.engine.device.compilation import (
    CompilationCounter,
    CompiledPrograms,
    Program,
    compile_programs,
    default_num_threads,
)
from mmjax.engine.device.compile_cache import enable_persistent_cache
from mmjax.engine.scheduling.buckets import Buckets
from tests.engine.conftest import CACHE_DIR

pytestmark = pytest.mark.usefixtures("restored_options")


def compile_something(size: int) -> None:
    # Each call makes a function of its own: nothing is cached from call to call.
    jax.jit(lambda x: x * 3 + size)(jnp.zeros(size, jnp.int32))


def test_jax_tells_of_each_compilation_and_of_each_fetch(tmp_path: Path) -> None:
    """The names of its events are no interface: without them nothing here would fail, but count."""
    jax.config.update(CACHE_DIR, None)
    enable_persistent_cache(tmp_path / "xla")
    compilation_cache.reset_cache()
    events = compilation._Events.listening()
    seen = []
    x = jnp.zeros(19, jnp.float32)
    for _ in range(2):
        compiled, fetched = events.num_compiled, events.num_fetched
        jax.jit(lambda x: x * 19.75)(x)
        seen.append((events.num_compiled - compiled, events.num_fetched - fetched))
    compilation_cache.reset_cache()
    assert seen == [(1, 0), (1, 1)], (
        f"jax {jax.__version__} names its events otherwise: look up what replaces "
        "`_COMPILE_EVENT` and `_FETCH_EVENT` of mmjax/engine/device/compilation.py"
    )


def test_compilations_count_while_watched_in_this_thread() -> None:
    counter = CompilationCounter()
    compile_something(3)
    assert counter.count == 0
    with counter.watching():
        compile_something(5)
        seen = counter.count
        other = threading.Thread(target=compile_something, args=(7,))
        other.start()
        other.join()
    assert seen >= 1
    assert counter.count == seen


# ---- several at once -----------------------------------------------------------------------------


def make_program(size: int) -> Program:
    def double(x: jax.Array, *, times: int) -> jax.Array:
        for _ in range(times):
            x = jnp.tanh(x @ x)
        return x

    jitted = jax.jit(double, static_argnames="times")
    described = jax.ShapeDtypeStruct((size, size), jnp.float32)
    return Program(f"double {size}", jitted, {"x": described, "times": 3})


def test_a_compiled_program_is_the_one_that_is_called() -> None:
    programs = [make_program(size) for size in (8, 9, 10)]
    sizes = compile_programs(programs, num_threads=2)
    assert all(size > 0 for size in sizes)
    arrays = [jnp.ones((size, size)) for size in (8, 9, 10)]
    counter = CompilationCounter()
    with counter.watching():
        for program, array in zip(programs, arrays, strict=True):
            program.jitted(x=array, times=3)
    assert counter.count == 0


def test_a_program_is_called_without_what_it_was_traced_to() -> None:
    jitted = make_program(8).jitted
    program = make_program(8)._replace(jitted=jitted)
    compile_programs([program])
    trace = weakref.ref(jitted.trace(**program.arguments).jaxpr)
    assert trace() is not None, "JAX keeps it for another call of `jitted`"
    buckets = Buckets.create(max_num_seqs=1, max_num_batched_tokens=64)
    programs = CompiledPrograms(buckets, lambda keys: [program for _ in keys])
    np.testing.assert_array_equal(programs("step", 8, x=jnp.zeros((8, 8))), np.zeros((8, 8)))
    assert trace() is None
    counter, x = CompilationCounter(), jnp.full((8, 8), 0.1)
    with counter.watching():
        found = programs("step", 8, x=x)
    assert counter.count == 0
    np.testing.assert_array_equal(found, jitted(x=x, times=3))


def test_programs_compile_in_threads_of_their_own() -> None:
    threads: set[str] = set()

    class Lowered:
        def lower(self, **_: object) -> "Lowered":
            return self

        def compile(self) -> "Lowered":
            threads.add(threading.current_thread().name)
            barrier.wait(timeout=30)
            return self

        def memory_analysis(self) -> None:
            return None

    barrier = threading.Barrier(3)
    programs = [Program(str(n), Lowered(), {}) for n in range(3)]
    assert compile_programs(programs, num_threads=3) == [0, 0, 0]
    assert len(threads) == 3
    assert all(name.startswith("mmjax-compile") for name in threads)


def test_a_program_that_cannot_be_compiled_ends_the_start() -> None:
    def fails(x: jax.Array) -> jax.Array:
        raise ValueError("no such thing")

    described = jax.ShapeDtypeStruct((2,), jnp.float32)
    programs = [make_program(4), Program("fails", jax.jit(fails), {"x": described})]
    with pytest.raises(ValueError, match="no such thing"):
        compile_programs(programs, num_threads=1)


def test_there_is_a_thread_for_each_core_and_not_too_many() -> None:
    assert 1 <= default_num_threads() <= 8


def test_the_log_tells_what_was_compiled_from_what_was_fetched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.engine.device.compilation.logger.propagate", True)
    caplog.set_level("INFO")
    jax.config.update(CACHE_DIR, None)
    enable_persistent_cache(tmp_path / "xla")
    compilation_cache.reset_cache()
    verbs = []
    for _ in range(2):
        caplog.clear()
        arguments = {"x": jax.ShapeDtypeStruct((17,), jnp.float32)}
        compile_programs([Program("odd", jax.jit(lambda x: x * 17.25), arguments)])
        (line,) = (record.message for record in caplog.records if " odd in " in record.message)
        verbs.append(line.split()[0])
    compilation_cache.reset_cache()
    assert verbs == ["compiled", "fetched"]


def test_a_softmax_adds_alike_for_any_number_of_rows() -> None:
    """Without the options XLA gives 32 rows of 128 to a library, and 16 not."""
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    softmax = jax.jit(jax.nn.softmax, compiler_options=compilation.compiler_options("cpu"))
    expected = np.asarray(softmax(x))
    for rows in (1, 2, 16, 31, 32):
        np.testing.assert_array_equal(softmax(x[:rows]), expected[:rows])


def test_options_that_xla_does_not_know_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "_ONE_ORDER", {"xla_of_another_year": "1"})
    compilation.compiler_options.cache_clear()
    try:
        assert compilation.compiler_options("cpu") == {}
        assert compilation.compiler_options("gpu") == {}
    finally:
        compilation.compiler_options.cache_clear()
    assert "xla_of_another_year" in caplog.text
