"""`mmjax run-batch`: answer a file of requests, each as the server would, into another file.

What is answered is not done again: the same command goes on where a process was ended.
"""

import argparse
import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mmjax.config.engine_config import EngineConfig, ServerConfig
from mmjax.errors import ConfigError
from mmjax.server.batches.endpoints import Endpoints
from mmjax.server.batches.journal import Journal
from mmjax.server.batches.lines import InputLine, read_lines, summarize
from mmjax.server.batches.runner import run_lines
from mmjax.server.flags import parse_flags, to_engine_config, to_server_config
from mmjax.server.shutdown import Interrupted, Shutdown
from mmjax.server.start import make_app
from mmjax.system.allocator import return_large_blocks
from mmjax.system.logger import configure_logging, get_logger
from mmjax.system.progress import has_bars

logger = get_logger(__name__)

_LINES_PER_SEQ = 4
"""Lines in work for each sequence that runs: the others' media are fetched and processed."""

_TELL_S = 10.0
_RATE_S = 60.0
"""The time left is told by what was done so lately."""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Answer every line that has no answer yet; return the exit status."""
    shutdown = Shutdown()
    shutdown.install()
    try:
        options, rest = _parse(argv, prog)
        flags = parse_flags(rest, prog=prog)
        configure_logging(flags.log_level, process="P0", log_format=flags.log_format)
        return_large_blocks()
        server = to_server_config(flags)
        summary = summarize(options.input, server.max_request_bytes)
        journal = Journal(options.output, options.errors, summary)
        try:
            if journal.num_done < summary.num_requests:
                engine = to_engine_config(flags)
                _answer(engine, server, options.input, journal, summary.num_requests, shutdown)
        finally:
            journal.close()
    except Interrupted as interrupted:
        print(f"{prog}: ended by a signal; the same command goes on from here")
        return interrupted.exit_status
    print(
        f"{summary.num_requests} lines: {journal.num_completed} answered in {options.output}, "
        f"{journal.num_failed} failed" + (f" in {options.errors}" if journal.num_failed else "")
    )
    return 0


def _answer(
    engine: EngineConfig,
    server: ServerConfig,
    path: Path,
    journal: Journal,
    total: int,
    shutdown: Shutdown,
) -> None:
    app, supervisor = make_app(engine, server)
    lines = read_lines(path, max_line_bytes=server.max_request_bytes, is_done=journal.is_done)
    max_in_work = _LINES_PER_SEQ * engine.scheduler.max_num_seqs

    async def work() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def stop() -> None:
            loop.call_soon_threadsafe(task.cancel)

        shutdown.drain_with(stop)
        async with app.router.lifespan_context(app):
            await supervisor.wait_ready()
            serve = partial(_serve, app.state.endpoints)
            with _telling(journal, total) as tell:
                await run_lines(lines, journal, serve, max_in_work=max_in_work, on_done=tell)

    try:
        asyncio.run(work())
    except asyncio.CancelledError:
        raise Interrupted(shutdown.number) from None


def _serve(endpoints: Endpoints, line: InputLine) -> Any:
    return endpoints.answer(line.url, line.body)


@contextmanager
def _telling(journal: Journal, total: int) -> Iterator[Any]:
    """Yield what is called with each result: a bar on a terminal, lines of the log elsewhere."""
    if has_bars():
        with tqdm(
            total=total, initial=journal.num_done, desc="lines", smoothing=0.05, mininterval=0.5
        ) as bar:
            yield bar.update
    else:
        yield ProgressLog(journal, total).update


class ProgressLog:
    """A line from time to time: what is done, how fast it goes now, and what that means."""

    def __init__(self, journal: Journal, total: int) -> None:
        self._journal = journal
        self._total = total
        self._told_at = time.monotonic()
        self._seen = deque([(self._told_at, journal.num_done)])
        """When so many were done."""

    def update(self) -> None:
        """Note that a line has its result."""
        now, num_done = time.monotonic(), self._journal.num_done
        if now - self._told_at < _TELL_S:
            return
        self._told_at = now
        then, num_then = self._seen[0]
        self._seen.append((now, num_done))
        while self._seen[1][0] < now - _RATE_S:
            self._seen.popleft()
        rate = (num_done - num_then) / max(now - then, 1e-9)
        logger.info(
            "%d of %d lines, %d of them failed; %.1f/s, about %.0f s left",
            num_done,
            self._total,
            self._journal.num_failed,
            rate,
            (self._total - num_done) / rate,
        )


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    """Return the files, and the arguments that are the server's."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        usage="%(prog)s INPUT OUTPUT [MODEL] [--FLAG VALUE ...]",
        epilog="All other flags are those of `mmjax serve --help`; those of its port mean nothing.",
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("-i", "--input-file", type=Path, help="lines of JSON, in OpenAI's form; or first argument")
    add("-o", "--output-file", type=Path, help="where the answers go; or second argument")
    add("--error-file", type=Path, help="where the errors go (default: OUTPUT.errors.jsonl)")
    places = list(takewhile(lambda one: not one.startswith("-"), argv))[:2]
    options, rest = parser.parse_known_args(argv[len(places) :])
    named = [options.input_file, options.output_file]
    paths = [one for one in named if one is not None]
    if len(paths) + len(places) != 2:
        parser.error("give the input and the output, as in `mmjax run-batch in.jsonl out.jsonl`")
    given = iter(map(Path, places))
    source, output = (next(given) if one is None else one for one in named)
    errors = options.error_file or output.with_name(f"{output.stem}.errors.jsonl")
    if len({source.absolute(), output.absolute(), errors.absolute()}) < 3:
        raise ConfigError("the input, the output and the errors are not three files; name each")
    return argparse.Namespace(input=source, output=output, errors=errors), rest
