"""Programs that are compiled while others serve, or when a call first needs them."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmjax.engine.device.compilation import Program, compile_programs, forget_traces
from mmjax.engine.scheduling.buckets import NO_SIZES, Buckets, Sizes
from mmjax.system.logger import get_logger

logger = get_logger(__name__)


class Stage(NamedTuple):
    """Programs, and the buckets that may be used once they and all before them are compiled."""

    buckets: Buckets
    programs: Sequence[Program]


class _Closed(Exception):
    """Nobody wants the programs any more."""


class StagedPrograms:
    """Compiles stages in order; any thread may read what is `ready`, and how many are left."""

    def __init__(self, stages: Sequence[Stage], *, num_threads: int | None, use_tqdm: bool) -> None:
        self._stages = stages
        self._num_threads = num_threads
        self._use_tqdm = use_tqdm
        self._later = [
            (number, program)
            for number, stage in enumerate(stages[1:], 1)
            for program in stage.programs
        ]
        self._num_open = [len(stage.programs) for stage in stages]
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mmjax-programs", daemon=True)
        self.ready = stages[0].buckets
        """Valid once `compile_first` has returned."""

    @property
    def num_programs(self) -> int:
        """Programs of all stages."""
        return sum(len(stage.programs) for stage in self._stages)

    @property
    def num_left(self) -> int:
        """Programs that are not compiled yet."""
        return sum(self._num_open)

    def compile_first(self) -> None:
        """Compile the first stage."""
        programs = self._stages[0].programs
        compile_programs(programs, num_threads=self._num_threads, use_tqdm=self._use_tqdm)
        forget_traces(programs)
        self._num_open[0] = 0

    def start_others(self) -> None:
        """Compile the other stages in a thread, if there are any."""
        if self._later:
            self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until another stage is ready."""
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
        programs = [program for _, program in self._later]
        try:
            compile_programs(programs, num_threads=self._num_threads, when_compiled=self._note)
        except _Closed:
            return
        except BaseException as error:
            self._error = error  # raised by `check`, in the engine's thread
            return
        forget_traces(programs)
        logger.info("all %d programs are compiled", self.num_programs)

    def _note(self, number: int) -> None:
        if self._is_closed:
            raise _Closed
        with self._changed:
            self._num_open[self._later[number][0]] -= 1
            closed = next((n for n, left in enumerate(self._num_open) if left), len(self._stages))
            ready = self._stages[closed - 1].buckets
            if ready != self.ready:
                self.ready = ready
                self._changed.notify_all()


class ProgramsWhenNeeded(StagedPrograms):
    """Compiles nothing at first, and then each program before the first call that needs it."""

    def __init__(
        self,
        buckets: Buckets,
        make_programs: Callable[[Sizes], Sequence[Program]],
        *,
        num_threads: int | None,
        use_tqdm: bool,
    ) -> None:
        super().__init__([Stage(buckets, [])], num_threads=num_threads, use_tqdm=use_tqdm)
        self._make_programs = make_programs
        self._compiled = NO_SIZES

    @property
    def num_programs(self) -> int:
        """Programs that calls may need."""
        return self.ready.num_programs

    @property
    def num_left(self) -> int:
        """Programs that no call has needed yet."""
        return self.num_programs - sum(map(len, self._compiled))

    def compile(self, sizes: Sizes) -> None:
        """Compile the programs of `sizes` that are not compiled yet."""
        new = sizes.but_not(self._compiled)
        if new == NO_SIZES:
            return
        programs = self._make_programs(new)
        compile_programs(programs, num_threads=self._num_threads, use_tqdm=self._use_tqdm)
        forget_traces(programs)
        self._compiled |= new
