"""An engine's side of `mmjax encode-worker`: who is asked for which item, and what is believed.

A thread has the sockets, so that no step waits for them. What a worker does not answer is asked
of another one; an answer that is not of what was asked is not used, and its worker left alone.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from blake3 import blake3

from mmjax.cache.stored_rows import make_row_key
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import ConfigError, EncoderUnavailableError, InternalError
from mmjax.system.logger import get_logger
from mmjax.transport.codec import WireError
from mmjax.transport.encoder_link import (
    HELLO_INTERVAL_S,
    MAX_OUTSTANDING,
    SPARE_BYTES,
    EncodedItem,
    EncodeItem,
    Hello,
    NotEncoded,
    ToEngine,
    Welcome,
    connect,
    digest_rows,
    find_endpoint,
    pack,
    read_key,
    unpack_to_engine,
)

logger = get_logger(__name__)

_POLL_S = 0.1
_SILENT_S = 5.0
"""After which a worker that says nothing counts as lost."""
_PATIENCE_S = 1.0
"""For which an item waits for any worker, before the engine's own encoder has it."""
_AGAIN_S, _FOREIGN_S, _LIAR_S = 1.0, 5.0, 30.0
"""After which a worker is asked again that was lost; that was another model's; that lied."""
_MAX_BEHIND = 4
"""Items that an item's worker may wait for more than another one, which is then asked."""
_MAX_FAILURES = 3
"""Workers that may be lost with an item, or refuse it, before its request fails."""
_MAX_ASKED = 3
"""How often an item that is not answered is asked for in its time."""


@dataclass(eq=False, slots=True)
class _Job:
    """An item that is asked for."""

    item: EncoderItem
    rows: "Future[np.ndarray | None]"
    asked_at: float
    key: bytes = b""
    sent_at: float = 0.0
    num_failures: int = 0
    tried: set[str] = field(default_factory=set)


class _Link:
    """One worker, as the thread sees it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket: Any = None
        self.monitor: Any = None
        self.is_welcome = False
        self.heard_at = self.hello_at = self.open_at = 0.0
        self.jobs: dict[int, _Job] = {}
        self.late: dict[int, _Job] = {}
        """What it has not answered in time, and still may, by number."""
        self.refusal = ""
        """Why it is not used."""

    @property
    def has_room(self) -> bool:
        """Whether it takes an item: one that is late is still with it."""
        return self.is_welcome and len(self.jobs) + len(self.late) < MAX_OUTSTANDING

    def close(self) -> None:
        if self.socket is not None:
            self.socket.disable_monitor()
            self.monitor.close(linger=0)
            self.socket.close(linger=0)
        self.socket = self.monitor = None
        self.is_welcome = False
        self.late.clear()


class EncoderWorkers:
    """Gets rows of workers."""

    def __init__(
        self,
        addresses: Sequence[str],
        parts: Mapping[str, str],
        *,
        key_file: Path | None,
        timeout_s: float,
        has_own: bool,
        width: int,
        dtype: np.dtype,
        max_rows: int,
    ) -> None:
        """Connect; ConfigError for addresses that are none.

        `parts`: what a worker must be of; `has_own`: whether the engine can encode; `max_rows`, of
        `width` numbers of `dtype`: an item's.
        """
        self._parts, self._timeout_s, self._has_own = dict(parts), timeout_s, has_own
        self._width, self._dtype = width, dtype
        self._key = None if key_file is None else read_key(key_file)
        self._max_bytes = max_rows * width * dtype.itemsize + SPARE_BYTES
        for address in addresses:
            find_endpoint(address, has_key=self._key is not None)
        self._links = [_Link(address) for address in dict.fromkeys(addresses)]
        self._given: deque[_Job] = deque()
        self._queue: deque[_Job] = deque()
        """What no worker was asked for yet, or no more."""
        self._number = 0
        self._counts = dict.fromkeys(("items", "bytes", "retries", "refused", "fallbacks"), 0)
        self._wait_s = 0.0
        self.welcomes: dict[str, Welcome] = {}
        """What each worker has said of itself last, by address."""
        self._is_closed = False
        self._context = zmq.Context()
        self._wake = self._context.socket(zmq.PAIR)
        self._wake.bind("inproc://wake")
        self._thread = threading.Thread(target=self._run, name="mmjax-encoders", daemon=True)
        self._thread.start()

    def fetch(self, item: EncoderItem) -> "Future[np.ndarray | None]":
        """Ask for an item's rows, `[rows, D]`; None: the engine must encode it.

        Fails with EncoderUnavailableError where no worker answers in time.
        """
        job = _Job(item, Future(), time.monotonic())
        self._given.append(job)
        if self._is_closed:  # seen behind the append: the thread may end in this moment
            self._refuse_given()
        else:
            self._rouse()
        return job.rows

    def _refuse_given(self) -> None:
        """Fail what the thread has not taken, and will not."""
        with suppress(IndexError):
            while True:
                job = self._given.popleft()
                job.rows.set_exception(InternalError("workers are not asked any more"))

    def _rouse(self) -> None:
        # Where nothing can be sent, the thread has not read what was sent before.
        with suppress(zmq.Again):
            self._wake.send(b"", zmq.NOBLOCK)

    def stats(self) -> dict[str, Any]:
        """Return the heartbeat's fields. Thread-safe."""
        stats: dict[str, Any] = {f"encoder_workers_{k}": n for k, n in self._counts.items()}
        alive = sum(link.is_welcome for link in self._links)
        return stats | {
            "encoder_workers_alive": alive,
            "encoder_workers_wait_s": self._wait_s,
        }

    def close(self) -> None:
        """Ask no more. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._rouse()
        if not self._wake.closed:
            self._thread.join()
            self._wake.close(linger=0)
            self._context.term()

    # ---- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.connect("inproc://wake")
        try:
            while not self._is_closed:
                self._turn(wake)
        except Exception as error:
            logger.exception("encode-workers cannot be asked any more")
            self._is_closed = True
            for job in [*self._queue, *(j for o in self._links for j in o.jobs.values())]:
                job.rows.set_exception(InternalError(f"internal error: {type(error).__name__}"))
            self._refuse_given()
        finally:
            for link in self._links:
                link.close()
            wake.close(linger=0)

    def _turn(self, wake: Any) -> None:
        now = time.monotonic()
        for link in self._links:
            self._tend(link, now)
        poller = zmq.Poller()
        poller.register(wake, zmq.POLLIN)
        for link in self._links:
            for socket in (link.socket, link.monitor):
                if socket is not None:
                    poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(int(_POLL_S * 1000)))
        while wake.poll(0):
            wake.recv()
        for link in self._links:
            # What came before the end counts.
            while link.socket is not None and link.socket in ready and link.socket.poll(0):
                self._hear(link)
            if link.monitor is not None and link.monitor in ready:
                self._lose(link, "its connection has ended", _AGAIN_S)
        while self._given:
            job = self._given.popleft()
            self._queue.append(job)
            job.key = make_row_key(job.item.identifier, job.item.units, job.item.rows)
        self._expire(time.monotonic())
        self._assign(time.monotonic())

    def _tend(self, link: _Link, now: float) -> None:
        """Open a link, say hello, and see whether it is answered."""
        if link.socket is None:
            if now < link.open_at:
                return
            try:
                link.socket = connect(
                    self._context, link.address, self._key, max_bytes=self._max_bytes
                )
            except ConfigError as error:
                self._refuse(link, str(error))
                link.open_at = now + _FOREIGN_S
                return
            link.monitor = link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            link.heard_at, link.hello_at = now, 0.0
        if link.is_welcome and now - link.heard_at > _SILENT_S:
            self._lose(link, f"it has said nothing for {_SILENT_S:g} s", _AGAIN_S)
        elif now - link.hello_at > HELLO_INTERVAL_S and self._send(link, Hello(self._parts)):
            link.hello_at = now

    def _send(self, link: _Link, message: Hello | EncodeItem) -> bool:
        try:
            link.socket.send_multipart(pack(message), copy=False, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _hear(self, link: _Link) -> None:
        frames = [frame.buffer for frame in link.socket.recv_multipart(copy=False)]
        link.heard_at = time.monotonic()
        try:
            self._take(link, unpack_to_engine(frames))
        except WireError as error:
            self._counts["refused"] += 1
            self._lose(link, f"what it says is not to be believed: {error}", _LIAR_S)

    def _take(self, link: _Link, message: ToEngine) -> None:
        """Take what a worker says; WireError for what was not asked."""
        if isinstance(message, Welcome):
            self._welcome(link, message)
            return
        if not link.is_welcome:
            raise WireError("it answers before it has said whose it is")
        is_late = message.number in link.late
        asked = link.late if is_late else link.jobs
        job = asked.get(message.number)
        if job is None:
            raise WireError(f"nobody has asked for answer {message.number}")
        if isinstance(message, NotEncoded):
            logger.warning("%s refuses an item: %s", link.address, message.reason[:200])
            del asked[message.number]
            if not is_late:
                self._retry(job, link)
        elif job.rows.done():
            del asked[message.number]
        else:
            self._check(job, message)
            del asked[message.number]
            self._finish(job, message.rows)

    def _finish(self, job: _Job, rows: np.ndarray) -> None:
        """Give a job its rows; whoever else was asked for them may answer, and need not."""
        self._counts["items"] += 1
        self._counts["bytes"] += rows.nbytes
        self._wait_s += time.monotonic() - job.asked_at
        job.rows.set_result(rows)
        if job.tried:
            self._queue = deque(one for one in self._queue if one is not job)
            for link in self._links:
                others = [number for number, one in link.jobs.items() if one is job]
                link.late |= {number: link.jobs.pop(number) for number in others}

    def _check(self, job: _Job, answer: EncodedItem) -> None:
        rows, expected = answer.rows, (job.item.num_kept, self._width)
        if answer.key != job.key:
            raise WireError("the rows are another item's")
        if rows.shape != expected or rows.dtype != self._dtype:
            raise WireError(
                f"the rows are {rows.dtype}{list(rows.shape)}, not {self._dtype}{list(expected)}"
            )
        if digest_rows(job.key, rows) != answer.digest:
            raise WireError("the rows have another digest than is said")

    def _welcome(self, link: _Link, message: Welcome) -> None:
        self.welcomes[link.address] = message
        differing = [
            name
            for name in {**self._parts, **message.parts}
            if self._parts.get(name) != message.parts.get(name)
        ]
        if differing:
            why = f"it has another {', '.join(differing[:9])[:200]}"
            self._refuse(link, why)
            self._lose(link, why, _FOREIGN_S)
        elif not link.is_welcome:
            link.is_welcome, link.refusal = True, ""
            logger.info("%s encodes for this engine", link.address)

    def _refuse(self, link: _Link, why: str) -> None:
        if why != link.refusal:
            logger.error("%s is not used: %s", link.address, why)
        link.refusal = why

    def _lose(self, link: _Link, why: str, pause_s: float) -> None:
        """Close a link for a while; what it was asked for is asked of others."""
        if link.is_welcome:
            logger.warning("%s is left alone for %g s: %s", link.address, pause_s, why)
        link.close()
        link.open_at = time.monotonic() + pause_s
        jobs, link.jobs = link.jobs, {}
        for job in jobs.values():
            self._retry(job, link)

    def _retry(self, job: _Job, link: _Link) -> None:
        job.num_failures += 1
        job.tried.add(link.address)
        self._counts["retries"] += 1
        if job.num_failures < _MAX_FAILURES:
            self._queue.appendleft(job)
            return
        job.rows.set_exception(
            EncoderUnavailableError(
                f"an item was given up: {_MAX_FAILURES} times a worker was lost with it, or "
                "refused it; its log says why"
            )
        )

    def _expire(self, now: float) -> None:
        """Give up what waits for too long, and ask others for what one does not answer."""
        for link in self._links:
            for number, job in list(link.jobs.items()):
                if now - job.sent_at > self._timeout_s / _MAX_ASKED:
                    link.late[number] = link.jobs.pop(number)
                    job.tried.add(link.address)
                    self._counts["retries"] += 1
                    self._queue.appendleft(job)
        is_alone = not any(link.is_welcome for link in self._links)
        # One that is alive may be silent about items.
        own_s = _PATIENCE_S if is_alone else self._timeout_s
        for job in list(self._queue):
            if self._has_own and now - job.asked_at > own_s:
                self._queue.remove(job)
                self._counts["fallbacks"] += 1
                job.rows.set_result(None)
            elif now - job.asked_at > self._timeout_s:
                self._queue.remove(job)
                job.rows.set_exception(self._explain())

    def _explain(self) -> EncoderUnavailableError:
        states = (
            f"{link.address} ({link.refusal or ('busy' if link.is_welcome else 'silent')})"
            for link in self._links
        )
        return EncoderUnavailableError(
            f"no worker has encoded an item within {self._timeout_s:g} s: {', '.join(states)}; "
            "start one by `mmjax encode-worker`, or raise `--encoder-workers-timeout`",
            retry_after_s=self._timeout_s,
        )

    def _assign(self, now: float) -> None:
        """Ask for what waits, each item of one worker."""
        while self._queue:
            job = self._queue[0]
            free = [link for link in self._links if link.has_room]
            links = [link for link in free if link.address not in job.tried] or free
            if not links:
                return
            # The same worker for the same item, of whichever engine, while it is alive.
            chosen = max(links, key=partial(_weigh, job.key))
            least = min(links, key=lambda link: len(link.jobs))
            if len(chosen.jobs) - len(least.jobs) > _MAX_BEHIND:
                chosen = least
            self._queue.popleft()
            self._number += 1
            item = job.item
            message = EncodeItem(
                number=self._number,
                key=job.key,
                identifier=item.identifier,
                units=dict(item.units),
                rows=item.rows,
            )
            job.sent_at = now
            chosen.jobs[self._number] = job
            if not self._send(chosen, message):
                self._lose(chosen, "it takes nothing", _AGAIN_S)


def _weigh(key: bytes, link: _Link) -> bytes:
    return blake3(key + link.address.encode()).digest()
