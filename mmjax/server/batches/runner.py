"""Answer the lines of an input, many at a time, in a memory that does not grow with them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack

from mmjax.server.batches.journal import Journal, LineError, LineResponse
from mmjax.server.batches.lines import InputLine
from mmjax.server.openai.transcripts.room import Room

MAX_BYTES_IN_WORK = 128 * 2**20
"""Of the bodies of the lines in work; a larger one is alone."""

_LINES_AT_ONCE, _BYTES_AT_ONCE = 16, 2**20
"""That are read at a time, in a thread."""

_WRITE_INTERVAL_S = 0.02
"""Results of so long are written together: each turn in a thread costs as much as a few tokens."""


async def run_lines(
    lines: Iterator[InputLine],
    journal: Journal,
    answer: Callable[[InputLine], Awaitable[LineResponse]],
    *,
    max_in_work: int,
    on_done: Callable[[], object] = lambda: None,
) -> None:
    """Write the result of each line to the journal, in the order in which they are there.

    A line is in work from before its media are fetched until its result is written. If `answer` or
    the journal raises, the others are broken off, and it is raised here.
    """
    room = Room(MAX_BYTES_IN_WORK)
    places = asyncio.Semaphore(max_in_work)
    results: list[tuple[InputLine, LineResponse | LineError]] = []
    holds: list[ExitStack] = []
    """Of the lines that have their result, which is not written yet."""
    has_results = asyncio.Event()

    async def serve(line: InputLine, hold: ExitStack) -> None:
        results.append((line, LineError(line.error) if line.error else await answer(line)))
        holds.append(hold)
        has_results.set()

    async def write() -> None:
        while await has_results.wait():
            has_results.clear()
            written, let_go = results[:], holds[:]
            results.clear()
            holds.clear()
            await asyncio.to_thread(journal.write, written)
            for hold in let_go:
                hold.close()
                places.release()
                on_done()
            await asyncio.sleep(_WRITE_INTERVAL_S)

    try:
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            while few := await asyncio.to_thread(_read_few, lines):
                for line in few:
                    await places.acquire()
                    group.create_task(serve(line, await room.take(len(line.body))))
            for _ in range(max_in_work):
                # Once all are free, every result is written.
                await places.acquire()
            writing.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _read_few(lines: Iterator[InputLine]) -> list[InputLine]:
    """Return the next few lines; [] at the end."""
    few: list[InputLine] = []
    num_bytes = 0
    for line in lines:
        few.append(line)
        num_bytes += len(line.body)
        if len(few) == _LINES_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
            break
    return few
