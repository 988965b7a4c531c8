"""Compilation: in parallel, and counted while serving."""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from mmjax.system.allocator import return_free_pages
from mmjax.system.logger import get_logger, reporting
from mmjax.system.progress import has_bars

logger = get_logger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_FETCH_EVENT = "/jax/compilation_cache/cache_hits"
_STACK_BYTES = 64 * 2**20
"""Of a compiling thread: XLA's passes recurse deeper than the usual 8 MiB."""
MAX_COMPILE_THREADS = 8
_ONE_ORDER = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
"""Leaves only products to XLA's CPU library (YNNPACK). By default it also computes sums of 4,096
numbers and more, in another order than XLA's own loops compute shorter ones."""


class Program(NamedTuple):
    """One jitted function over one set of shapes."""

    label: str
    jitted: Any
    arguments: Mapping[str, Any]
    """Keyword arguments of the call; arrays may be `jax.ShapeDtypeStruct`."""
    keep: Callable[[Any], None] = lambda compiled: None
    """Called with what it was compiled to."""


class CompiledFunction:
    """A jitted function that is called as it was compiled, by a key.

    It holds its programs itself, so that JAX need not hold what they were traced and lowered to.
    """

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self._compiled: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, **arguments: Any) -> Any:
        """Call the program of `key`; `arguments` are without the static ones."""
        return self._compiled[key](**arguments)

    def program(self, label: str, key: Hashable, arguments: Mapping[str, Any]) -> Program:
        """Return a program that can be called once it is compiled."""
        return Program(label, self._jitted, arguments, partial(self._compiled.__setitem__, key))


@cache
def compiler_options(platform: str) -> dict[str, str]:
    """Return XLA options that make a row's sums independent of the number of rows.

    See docs/determinism.md. Options that this XLA does not know are left out, with a warning.
    """
    if platform != "cpu":
        return {}
    try:
        jax.jit(lambda x: x, compiler_options=_ONE_ORDER).lower(0).compile()
    except jax.errors.JaxRuntimeError as error:
        logger.warning("answers may depend on the batch in their last bits: %s", error)
        return {}
    return _ONE_ORDER


def default_num_threads() -> int:
    """Return how many programs compile at once."""
    return max(1, min(len(os.sched_getaffinity(0)), MAX_COMPILE_THREADS))


def compile_programs(
    programs: Sequence[Program],
    *,
    num_threads: int | None = None,
    use_tqdm: bool = False,
    when_compiled: Callable[[int], None] = lambda number: None,
) -> list[int]:
    """Compile all programs; return the bytes that each takes on a device, besides its arguments.

    A later call of the jitted function with such arguments compiles nothing, until `forget_traces`:
    JAX keeps a program by what it was lowered from. Functions are traced here, and compiled in
    threads, which call `when_compiled` with the program's place in the list; what it raises ends
    the compilation.
    """
    compiled: list[Future[int]] = []
    num_done = count(1)
    has_bar = use_tqdm and has_bars()  # elsewhere each program has its line
    with (
        tqdm(total=len(programs), desc="Compiling", unit="program", disable=not has_bar) as bar,
        reporting(logger, partial(_describe, compiled, programs)),
        _compiling_threads(num_threads or default_num_threads()) as pool,
    ):

        def compile_one(number: int, lowered: Any) -> int:
            size, line = _compile(programs[number], lowered)
            logger.info("%s (%d of %d)", line, next(num_done), len(programs))
            bar.set_postfix_str(programs[number].label, refresh=False)
            bar.update()
            bar.refresh()  # the log line erased it
            when_compiled(number)
            return size

        try:
            for number, program in enumerate(programs):
                lowered = program.jitted.lower(**program.arguments)
                compiled.append(pool.submit(compile_one, number, lowered))
            return [future.result() for future in compiled]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def forget_traces(programs: Sequence[Program]) -> None:
    """Drop what programs were traced and lowered to, and return its memory to the system.

    One without `keep` would be compiled again. Takes a tenth of a second.
    """
    for jitted in {program.jitted for program in programs}:
        jitted.clear_cache()
    return_free_pages()


def _describe(compiled: Sequence["Future[int]"], programs: Sequence[Program]) -> str:
    """Return what is compiled now, or else traced, and how much there is to do."""
    states = zip([*compiled], programs, strict=False)
    running = [program.label for future, program in states if future.running()]
    num_done = sum(future.done() for future in compiled)
    traced = programs[min(len(compiled), len(programs) - 1)].label
    doing = f"compiling {', '.join(running)}" if running else f"tracing {traced}"
    return f"{doing} ({num_done} of {len(programs)} done)"


def program_bytes(compiled: Any) -> int:
    """Return the bytes that a program takes on a device, besides its arguments; 0 if unknown."""
    stats = compiled.memory_analysis()
    if stats is None:
        return 0
    new_outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.temp_size_in_bytes + stats.generated_code_size_in_bytes + max(0, new_outputs)


class _Events(threading.local):
    """Counts of this thread's compilations, by JAX's monitoring events (internal names)."""

    num_compiled = 0
    """Compiled, or read from the persistent cache."""
    num_fetched = 0
    """Read from the persistent cache."""

    @classmethod
    @cache
    def listening(cls) -> "_Events":
        """Return the instance that listens to JAX; there is one, as listeners cannot be removed."""
        events = cls()

        def listen(event: str, **_: str | int) -> None:
            events.num_fetched += event == _FETCH_EVENT

        def listen_to_durations(event: str, duration_secs: float, **_: str | int) -> None:
            del duration_secs
            events.num_compiled += event == _COMPILE_EVENT

        jax.monitoring.register_event_listener(listen)
        jax.monitoring.register_event_duration_secs_listener(listen_to_durations)
        return events


def _compile(program: Program, lowered: Any) -> tuple[int, str]:
    events = _Events.listening()
    num_before, start = events.num_fetched, time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    verb = "compiled" if events.num_fetched == num_before else "fetched"
    program.keep(compiled)
    return program_bytes(compiled), f"{verb} {program.label} in {seconds:.2f} s"


@contextmanager
def _compiling_threads(number: int) -> Iterator[ThreadPoolExecutor]:
    before = threading.stack_size(_STACK_BYTES)
    try:
        with ThreadPoolExecutor(number, thread_name_prefix="mmjax-compile") as pool:
            yield pool
    finally:
        threading.stack_size(before)


class CompilationCounter:
    """Counts programs compiled, or read from the persistent cache, in blocks of `watching`.

    Only those of its own thread: the process may use JAX in others.
    """

    def __init__(self) -> None:
        self._events = _Events.listening()
        self._count = 0
        self._thread: int | None = None
        self._start = 0

    @property
    def count(self) -> int:
        """Programs so far; those of an unfinished block are included in its own thread only."""
        if self._thread != threading.get_ident():
            return self._count
        return self._count + self._events.num_compiled - self._start

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count this thread's compilations inside the block."""
        self._start, self._thread = self._events.num_compiled, threading.get_ident()
        try:
            yield
        finally:
            self._count, self._thread = self.count, None
