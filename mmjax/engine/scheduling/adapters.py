"""The adapters that requests may name, and their host copies; files are read in a thread."""

import secrets
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from pathlib import Path

from mmjax.errors import (
    CheckpointError,
    InternalError,
    ModelNotFoundError,
    RequestError,
    RequestRuntimeError,
    RequestValueError,
)
from mmjax.system.logger import get_logger
from mmjax.weights.adapter import Adapter

logger = get_logger(__name__)


_PROCESS = secrets.token_hex(8)


class RegisteredAdapter:
    """An adapter under its name; the same name, loaded again, is another adapter."""

    num_users = 0
    """Unfinished requests that name it."""
    is_removed = False
    """Whether its name stands for it no more."""

    def __init__(
        self,
        lora_name: str,
        path: Path,
        version: int,
        read: "Callable[[bytes | None], Future[Adapter]]",
    ) -> None:
        """`read` begins to read the files, of a digest if it is known."""
        self.lora_name = lora_name
        self.path = path
        """Its directory."""
        self.lora_version = f"{version}@{_PROCESS}"
        """Differs from that of all other adapters, also of other processes."""
        self._read = read
        self._digest: bytes | None = None
        self._job: Future[Adapter] | None = read(None)

    @property
    def is_ready(self) -> bool:
        """Whether there is a host copy."""
        return self._job is not None and self._job.done() and self._job.exception() is None

    @property
    def error(self) -> RequestError | None:
        """Why it could not be read; None while it is not known to fail."""
        error = self._job.exception() if self._job is not None and self._job.done() else None
        if error is None or isinstance(error, RequestError):
            return error
        if isinstance(error, CheckpointError):
            return RequestValueError(f"adapter `{self.lora_name}`: {error}", param="lora_path")
        logger.error("adapter `%s` could not be read", self.lora_name, exc_info=error)
        return InternalError("internal error in an adapter")

    @property
    def is_idle(self) -> bool:
        """Whether its host copy, or what failed to become one, may be dropped."""
        is_done = self._job is None or self._job.done()
        return is_done and not self.num_users

    @property
    def host_copy(self) -> Adapter:
        """The arrays of one that `is_ready`."""
        assert self._job is not None, f"{self.lora_name=} has no host copy"
        return self._job.result()

    def fetch(self) -> None:
        """Begin to make a host copy, if there is none; again, if that has failed."""
        if self._job is None or (self._job.done() and not self.is_ready):
            self._job = self._read(self._digest)

    def drop_host_copy(self) -> None:
        """Forget the arrays; `fetch` reads them again."""
        if self.is_ready:
            self._digest = self.host_copy.digest
        self._job = None


class Adapters:
    """All adapters of one engine. Only the engine's thread calls it."""

    def __init__(self, read: Callable[[Path], Adapter], *, max_cpu_loras: int) -> None:
        """`read` returns a directory's adapter, in another thread.

        `max_cpu_loras`: host copies that are kept, of adapters that no request names.
        """
        self._read = read
        self._max_cpu_loras = max_cpu_loras
        self._versions = count(1)
        self._registered: dict[str, RegisteredAdapter] = {}
        self._kept: OrderedDict[str, RegisteredAdapter] = OrderedDict()
        """Those with a host copy, or a job that makes one, the least recently used first."""
        self._pending: set[Future[Adapter]] = set()
        self._loading: list[RegisteredAdapter] = []
        """Those that nobody was told of yet."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mmjax-adapter")

    @property
    def is_loading(self) -> bool:
        """Whether there are adapters that `pop_loaded` has not returned."""
        return bool(self._loading)

    def load(self, lora_name: str, path: Path) -> RegisteredAdapter:
        """Register an adapter, and begin to read it; requests may name it from now on."""
        if lora_name in self._registered:
            raise RequestValueError(
                f"adapter `{lora_name}` is loaded already; unload it first, or give this one "
                "another name",
                param="lora_name",
            )
        submit = partial(self._submit, lora_name, path)
        adapter = RegisteredAdapter(lora_name, path, next(self._versions), submit)
        self._registered[lora_name] = adapter
        self._loading.append(adapter)
        self._keep(adapter)
        return adapter

    def replace(self, lora_name: str, arrays: Adapter) -> RegisteredAdapter:
        """Let a name stand for other arrays, which are kept, and take over its requests."""
        old = self.unload(lora_name)
        known: Future[Adapter] = Future()
        known.set_result(arrays)
        first = iter([known])

        def read(_: bytes | None) -> "Future[Adapter]":
            if arrays.read_again is None:
                return known
            return next(first, None) or self._start(arrays.read_again)

        adapter = RegisteredAdapter(lora_name, old.path, next(self._versions), read)
        # Before any host copy is dropped: that of an adapter in use is not.
        adapter.num_users, old.num_users = old.num_users, 0
        self._registered[lora_name] = adapter
        self._keep(adapter)
        return adapter

    def unload(self, lora_name: str) -> RegisteredAdapter:
        """Forget a name; requests that have it go on."""
        adapter = self.find(lora_name)
        del self._registered[lora_name]
        adapter.is_removed = True
        self._evict()
        return adapter

    def find(self, lora_name: str) -> RegisteredAdapter:
        """Return the adapter of a name; ModelNotFoundError if there is none."""
        if lora_name not in self._registered:
            raise ModelNotFoundError(
                f"this engine has no adapter `{lora_name[:128]}`; load it first", param="model"
            )
        return self._registered[lora_name]

    def use(self, adapter: RegisteredAdapter) -> None:
        """See to the host copy of an adapter that a request names."""
        adapter.fetch()
        self._keep(adapter)

    def pop_loaded(self) -> list[tuple[str, RequestError | None]]:
        """Return the names whose adapters were read since, or could not be, and why.

        A name whose adapter could not be read is free again.
        """
        # Before any is evicted, which forgets why it could not be read.
        errors = {one: one.error for one in self._loading if one.is_ready or one.error is not None}
        for adapter, error in errors.items():
            self._loading.remove(adapter)
            if error is not None and not adapter.is_removed:
                self.unload(adapter.lora_name)
        self._evict()
        return [(adapter.lora_name, error) for adapter, error in errors.items()]

    def read_again(self) -> None:
        """Forget host copies that depend on the model's own weights, and read those in use.

        Call it after these have changed. Those that nobody was told of yet are read again, too.
        """
        for adapter in self._kept.values():
            if adapter.is_ready and not adapter.host_copy.reads_base:
                continue
            adapter.drop_host_copy()
            if adapter.num_users or adapter in self._loading:
                adapter.fetch()

    @property
    def pending(self) -> list["Future[Adapter]"]:
        """What reads files now."""
        return list(self._pending)

    def wait(self) -> None:
        """Wait until all files are read."""
        while self._pending:
            wait(self.pending)

    def close(self) -> None:
        """Read no more, without waiting. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, lora_name: str, path: Path, digest: bytes | None) -> "Future[Adapter]":
        return self._start(partial(self._read_same, lora_name, path, digest))

    def _start(self, read: Callable[[], Adapter]) -> "Future[Adapter]":
        future = self._pool.submit(read)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _read_same(self, lora_name: str, path: Path, digest: bytes | None) -> Adapter:
        adapter = self._read(path)
        if digest not in (None, adapter.digest):
            raise RequestRuntimeError(
                f"the files of adapter `{lora_name}` are not those that were loaded; unload it, "
                "and load it again",
                param="model",
            )
        return adapter

    def _keep(self, adapter: RegisteredAdapter) -> None:
        self._kept[adapter.lora_version] = adapter
        self._kept.move_to_end(adapter.lora_version)
        self._evict()

    def _evict(self) -> None:
        """Drop host copies that are too many, of adapters that no request names.

        One that nobody was told of yet keeps what is to be told: that it was read, or why not.
        """
        kept = self._kept.values()
        idle = [one for one in kept if one.is_idle and one not in self._loading]
        num_more = max(0, len(self._kept) - self._max_cpu_loras)
        for number, adapter in enumerate(idle):
            if adapter.is_removed or number < num_more:
                del self._kept[adapter.lora_version]
                adapter.drop_host_copy()
