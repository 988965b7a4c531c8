"""Compilation: in parallel, while others serve or when a call first needs it; counted meanwhile."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial, wraps
from itertools import count, takewhile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

from mmjax.engine.scheduling.buckets import Buckets, ProgramKey, SampleBucket, StepBucket
from mmjax.system.allocator import return_free_pages
from mmjax.system.logger import get_logger, reporting
from mmjax.system.progress import has_bars
from mmjax.system.threads import DeepStackPool

logger = get_logger(__name__)

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_FETCH_EVENT = "/jax/compilation_cache/cache_hits"
_STACK_BYTES = 64 * 2**20
"""The stack of a compiling thread: XLA's passes recurse deeper than the usual 8 MiB."""
MAX_COMPILE_THREADS = 8
_SHORT_FUNCTIONS: tuple[str, ...] = ("step", "sample", "write", "pool")
"""Those whose programs may be run before they are needed."""
_MAX_FIRST_RUN_S = 0.5
"""Of a program that is run before it is needed: behind it larger ones are left."""
_PAUSE_S = 1.0
"""After a call, in which no program is run ahead: who has an answer may ask again at once."""
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


def with_exact_products(function: Any, platform: str, dtype: Any) -> Any:
    """Return a function whose products of float32 are not rounded, as torch's are not.

    By default XLA rounds their factors to tensorfloat32 on GPUs, and to bfloat16 on TPUs. There a
    model in bfloat16 keeps the default: Mosaic refuses its kernels another.
    """
    if platform == "cpu" or (platform == "tpu" and dtype != jnp.float32):
        return function

    @wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    # Programs are named by it, in profiles and in the compile cache.
    exact.__name__ = getattr(function, "func", function).__name__
    return exact


def default_num_threads() -> int:
    """Return how many programs compile at once."""
    return max(1, min(len(os.sched_getaffinity(0)), MAX_COMPILE_THREADS))


def compile_programs(
    programs: Sequence[Program],
    *,
    num_threads: int | None = None,
    use_tqdm: bool = False,
) -> list[int]:
    """Compile all programs; return the bytes that each takes on a device, besides its arguments.

    A later call of the jitted function with such arguments compiles nothing, until `forget_traces`:
    JAX keeps a program by what it was lowered from. Functions are traced here, and compiled in
    threads, which call each program's `keep`; what it raises ends the compilation.
    """
    futures: list[Future[int]] = []
    num_done = count(1)
    has_bar = use_tqdm and has_bars()  # elsewhere each program has its line
    with (
        tqdm(total=len(programs), desc="Compiling", unit="program", disable=not has_bar) as bar,
        reporting(logger, partial(_describe, futures, programs)),
        DeepStackPool(
            num_threads or default_num_threads(),
            stack_bytes=_STACK_BYTES,
            thread_name_prefix="mmjax-compile",
        ) as pool,
    ):

        def compile_one(number: int, lowered: Any) -> int:
            compiled, line = _compile(programs[number], lowered)
            logger.info("%s (%d of %d)", line, next(num_done), len(programs))
            bar.set_postfix_str(programs[number].label, refresh=False)
            bar.update()
            bar.refresh()  # the log line erased it
            programs[number].keep(compiled)
            return program_bytes(compiled)

        try:
            for number, program in enumerate(programs):
                lowered = program.jitted.lower(**program.arguments)
                futures.append(pool.submit(compile_one, number, lowered))
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def own_process() -> None:
    """Let `forget_traces` drop what others in this process traced, too: it runs engines alone."""
    global _owns_process
    _owns_process = True


_owns_process = False


def forget_traces(programs: Sequence[Program]) -> None:
    """Drop what programs were traced and lowered to, and return its memory to the system.

    One without `keep` would be compiled again. Takes a tenth of a second. What functions that they
    call were traced to is known to JAX alone, which drops all of a process or none of it.
    """
    if _owns_process:
        jax.clear_caches()
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


def _compile(program: Program, lowered: Any) -> tuple[Any, str]:
    events = _Events.listening()
    num_before, start = events.num_fetched, time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    verb = "compiled" if events.num_fetched == num_before else "fetched"
    return compiled, f"{verb} {program.label} in {seconds:.2f} s"


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


class _Closed(Exception):
    """Nobody wants the programs any more."""


class CompiledPrograms:
    """An engine's programs, compiled in the order of their use, the last in a thread.

    Without an order each is compiled before the first call that needs it. Any thread may read what
    is `ready`, and how many are left.
    """

    def __init__(
        self,
        buckets: Buckets,
        make: Callable[[Sequence[ProgramKey]], Sequence[Program]],
        order: Sequence[ProgramKey] = (),
        num_first: int = 0,
        *,
        num_threads: int | None = None,
        use_tqdm: bool = False,
    ) -> None:
        """`make` returns the programs of keys; the first `num_first` of the order suffice."""
        self.num_programs = buckets.num_programs
        self.ready = buckets
        """Those that calls may use; once `compile_first` has returned."""
        self._buckets, self._make = buckets, make
        self._order, self._num_first = order, num_first
        self._num_threads, self._use_tqdm = num_threads, use_tqdm
        self._compiled: dict[ProgramKey, Any] = {}
        self._uncalled: set[ProgramKey] = set()
        """Those that were compiled and never called."""
        self._slow_widths: dict[str, int] = dict.fromkeys(_SHORT_FUNCTIONS, sys.maxsize)
        """Of functions, from which width on programs are not called before they are needed."""
        self._last_call = -math.inf
        self._changed = threading.Condition()
        self._is_closed = False
        self._after: CompiledPrograms | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mmjax-programs", daemon=True)

    def __call__(self, function: str, size: Any, **arguments: Any) -> Any:
        """Call a program; `arguments` are without the static ones.

        What is called was compiled before, so that JAX need not hold what it was traced from.
        """
        key = ProgramKey(function, size)
        compiled = self._compiled.get(key)
        if compiled is None:
            assert not self._order, f"{key=} is called before it is compiled"
            self._compile([key], use_tqdm=self._use_tqdm)
            compiled = self._compiled[key]
        self._uncalled.discard(key)
        self._last_call = time.perf_counter()
        return compiled(**arguments)

    def run_ahead(self, run: Callable[[ProgramKey], None]) -> bool:
        """`run` a program for the first time, if none was called a moment ago; False: none is left.

        Encoders are not worth it, nor what is larger than a program whose own time is long beside
        what a first run prepares.
        """
        key = self._find_uncalled()
        last_call = self._last_call
        if key is not None and (start := time.perf_counter()) >= last_call + _PAUSE_S:
            run(key)
            self._last_call = last_call
            if time.perf_counter() - start > _MAX_FIRST_RUN_S:
                self._slow_widths[key.function] = _width(key)
        return key is not None

    def _find_uncalled(self) -> ProgramKey | None:
        with self._changed:
            uncalled = list(self._uncalled)
        slow = self._slow_widths
        left = [key for key in uncalled if _width(key) < slow.get(key.function, 0)]
        return min(left, key=_width, default=None)

    @property
    def num_left(self) -> int:
        """Programs that are not compiled yet."""
        return self.num_programs - len(self._compiled)

    @property
    def is_complete(self) -> bool:
        """Whether any program may be called."""
        return not self._order or not self.num_left

    def compile_first(self) -> None:
        """Compile the programs that suffice to serve."""
        self._compile(self._order[: self._num_first], use_tqdm=self._use_tqdm)

    def start_others(self, after: "CompiledPrograms | None" = None) -> None:
        """Compile the others in a thread, if there are any; `after`: once its are compiled."""
        self._after = after
        if self._num_first < len(self._order):
            self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until more buckets are ready."""
        with self._changed:
            self._changed.wait(timeout_s)

    def check(self) -> None:
        """Raise what the thread raised: an engine must not wait for programs that never come."""
        if self._error is not None:
            raise RuntimeError("the programs that were left could not be compiled") from self._error

    def close(self, *, wait: bool = True) -> None:
        """Compile no more; `wait` for the programs that compile now. Idempotent."""
        self._is_closed = True
        if wait and self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._after is not None and self._after._thread.ident is not None:
                self._after._thread.join()
            if self._is_closed:
                return
            self._compile(self._order[self._num_first :])
            logger.info("all %d programs are compiled", self.num_programs)
        except _Closed:
            return
        except BaseException as error:
            self._error = error  # raised by `check`, in the engine's thread

    def _compile(self, keys: Sequence[ProgramKey], *, use_tqdm: bool = False) -> None:
        programs = [
            program._replace(keep=partial(self._keep, key))
            for key, program in zip(keys, self._make(keys), strict=True)
        ]
        compile_programs(programs, num_threads=self._num_threads, use_tqdm=use_tqdm)
        forget_traces(programs)

    def _keep(self, key: ProgramKey, compiled: Any) -> None:
        if self._is_closed:
            raise _Closed
        with self._changed:
            self._compiled[key] = compiled
            self._uncalled.add(key)
            if self._order:
                done = set(takewhile(self._compiled.__contains__, self._order))
                ready = self._buckets.among(done)
                if ready != self.ready:
                    self.ready = ready
                    self._changed.notify_all()


def _width(key: ProgramKey) -> int:
    """Return the tokens, rows or units of a program."""
    if isinstance(key.size, StepBucket):
        return key.size.num_tokens
    return key.size.num_rows if isinstance(key.size, SampleBucket) else key.size
