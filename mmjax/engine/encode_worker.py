"""A process that encodes items for engines, and does nothing else: towers and connectors alone.

One thread has the socket; the other computes, whatever waits in one go, each item once.
"""

import queue
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq

from mmjax.cache.media.lru import LRUCache
from mmjax.cache.stored_rows import make_row_key
from mmjax.engine.scheduling.admission import check_shapes
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.engine.start import EncoderParts
from mmjax.errors import RequestError, RequestValueError
from mmjax.layers.module import Params
from mmjax.models.host_inputs import PackedEncoderSpec
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.system.logger import get_logger
from mmjax.transport.codec import Buffer, WireError
from mmjax.transport.encoder_link import (
    MAX_OUTSTANDING,
    SPARE_BYTES,
    EncodedItem,
    EncodeItem,
    Hello,
    Key,
    NotEncoded,
    Welcome,
    digest_rows,
    listening,
    pack,
    unpack_to_worker,
)

logger = get_logger(__name__)

_POLL_S = 0.25


class _Asked(NamedTuple):
    """An item, and who wants it."""

    peer: bytes
    message: EncodeItem


class EncodeWorker:
    """Answers engines with rows; see `transport/encoder_link.py`."""

    def __init__(self, parts: EncoderParts, address: str, key: Key | None, *, max_bytes: int):
        """`max_bytes`: of the rows that are kept in memory; the least recently used go first."""
        self.address = address
        self._parts, self._key = parts, key
        self._kept: LRUCache[bytes, np.ndarray] = LRUCache(max_bytes, lambda rows: rows.nbytes)
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self.num_encoded = self.num_found = 0
        self._is_stopped = threading.Event()
        self._is_listening = threading.Event()
        self._error: BaseException | None = None
        self._context = zmq.Context()
        self._answers = self._context.socket(zmq.PAIR)
        self._answers.set_hwm(0)
        self._answers.bind("inproc://answers")
        self._thread = threading.Thread(target=self._talk, name="mmjax-engines", daemon=True)

    @property
    def params(self) -> Params:
        """The parameters that it holds."""
        return self._parts.runner.params

    def start(self) -> None:
        """Listen; ConfigError where that cannot be."""
        self._thread.start()
        self._is_listening.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let `run` return."""
        self._is_stopped.set()

    def run(self) -> None:
        """Encode what engines ask for, until `stop`."""
        try:
            while not self._is_stopped.is_set() and self._error is None:
                try:
                    asked = [self._asked.get(timeout=_POLL_S)]
                except queue.Empty:
                    continue
                while not self._asked.empty():
                    asked.append(self._asked.get())
                self._answer(asked)
        finally:
            self._is_stopped.set()
            self._thread.join()
            self._answers.close(linger=0)
            self._context.term()
            if self._parts.stored_rows is not None:
                self._parts.stored_rows.close()
        if self._error is not None:
            raise self._error

    # ---- the thread that computes --------------------------------------------------------------

    def _answer(self, asked: Sequence[_Asked]) -> None:
        """Answer all that is asked, each item encoded once, those that are kept first."""
        wanted: dict[bytes, list[_Asked]] = {}
        items: dict[bytes, EncoderItem] = {}
        for one in asked:
            try:
                item = self._make_item(one.message)
            except RequestError as error:
                self._refuse([one], str(error))
                continue
            key = one.message.key
            wanted.setdefault(key, []).append(one)
            rows = self._find(key, item)
            if rows is None:
                items[key] = item
            else:
                self._give(wanted.pop(key), rows)
        self.num_found += sum(len(wanted[key]) - 1 for key in items)
        while items:
            self._encode(self._take_group(items), wanted)

    def _encode(
        self, group: dict[bytes, EncoderItem], wanted: Mapping[bytes, Sequence[_Asked]]
    ) -> None:
        """Encode items in one go, and answer; where that fails one by one, to find which does."""
        try:
            encoded = self._parts.runner.encode_apart(group)
        except Exception:
            # The engine must not wait for it; what else waits goes on.
            logger.exception("%d items could not be encoded", len(group))
            self._parts.runner.reset()
            if len(group) > 1:
                for key, item in group.items():
                    self._encode({key: item}, wanted)
            else:
                (key,) = group
                self._refuse(wanted[key], "internal error in the worker")
            return
        for key, rows in encoded.items():
            self._keep(key, rows)
            self._give(wanted[key], rows.view(self._dtype))
        self.num_encoded += len(encoded)

    @property
    def _dtype(self) -> np.dtype:
        return np.dtype(self._parts.programs.dtype)

    def _take_group(self, items: dict[bytes, EncoderItem]) -> dict[bytes, EncoderItem]:
        """Take as many items as are encoded at once, at least one."""
        group: dict[bytes, EncoderItem] = {}
        left = self._parts.budget
        for key, item in list(items.items()):
            if group and self._count_outputs(item) > left:
                break
            left -= self._count_outputs(item)
            group[key] = items.pop(key)
        return group

    def _count_outputs(self, item: EncoderItem) -> int:
        return sum(one.count_outputs(item) for one in self._parts.programs.encoders.of(item))

    def _find(self, key: bytes, item: EncoderItem) -> np.ndarray | None:
        rows = self._kept.get(key)
        stored = self._parts.stored_rows
        if rows is None and stored is not None:
            rows = stored.load(key, item.num_kept)
            if rows is not None and self._kept.fits(rows):
                self._kept[key] = rows
        if rows is not None:
            self.num_found += 1
            rows = rows.view(self._dtype)
        return rows

    def _keep(self, key: bytes, rows: np.ndarray) -> None:
        if self._kept.fits(rows):
            self._kept[key] = rows
        if self._parts.stored_rows is not None:
            self._parts.stored_rows.save(key, rows)

    def _give(self, asked: Sequence[_Asked], rows: np.ndarray) -> None:
        key = asked[0].message.key
        digest = digest_rows(key, rows)
        for peer, message in asked:
            answer = EncodedItem(number=message.number, key=key, digest=digest, rows=rows)
            self._send(peer, pack(answer))

    def _refuse(self, asked: Sequence[_Asked], reason: str) -> None:
        for peer, message in asked:
            self._send(peer, pack(NotEncoded(number=message.number, reason=reason)))

    def _send(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        self._answers.send_multipart([peer, *frames], copy=False)

    def _make_item(self, message: EncodeItem) -> EncoderItem:
        """Return the item; `RequestError` for what would fail in a call, which has others, too."""
        units, rows = message.units, message.rows
        host_inputs = self._parts.programs.host_inputs
        specs = host_inputs.find_specs(units)
        inputs = {name: one for spec in specs for name, one in spec.inputs.items()}
        found = {name: array.dtype.name for name, array in units.items()}
        expected = {name: np.dtype(dtype).name for name, (_, dtype) in inputs.items()}
        if found != expected:
            raise RequestValueError(f"the item has {found}; the encoder takes {expected}")
        num_outputs = 0
        for spec in specs:
            num_outputs += check_shapes(message.identifier, units, spec)
            if isinstance(spec, PackedEncoderSpec):
                is_heard = spec is host_inputs.clip_spec
                sizes = self._parts.sizes["encode clips" if is_heard else "encode"]
                num_patches = len(units[next(iter(spec.inputs))])
                if num_patches > max(sizes, default=0):
                    raise RequestValueError(f"the item has {num_patches} patches; of {list(sizes)}")
        # Of units an item may keep some of the rows alone, and the others have no place anywhere.
        num_kept = num_outputs if rows is None else min(num_outputs, len(rows))
        if not (num_outputs and num_kept <= max(self._parts.budget, self._max_outputs)):
            raise RequestValueError(
                f"the item has {num_outputs} outputs; expected 1 to {self._parts.budget}"
            )
        if rows is not None and not _are_rows(rows, num_outputs, host_inputs.num_extra_rows):
            raise RequestValueError(f"`rows` are none of the item's {num_outputs} outputs")
        if message.key != make_row_key(message.identifier, units, rows):
            raise RequestValueError("the key is another item's")
        return EncoderItem(
            identifier=message.key.hex(),
            mm_position=PlaceholderRange(
                offset=0, length=num_outputs if rows is None else len(rows)
            ),
            units=units,
            rows=rows,
        )

    @property
    def _max_outputs(self) -> int:
        """Outputs of the largest item: where embeddings are some of them, more than the budget."""
        specs = self._parts.programs.encoders.by_function
        return max(
            (
                sizes[-1] // spec.patches_per_token
                for function, sizes in self._parts.sizes.items()
                if sizes and isinstance((spec := specs[function].spec), PackedEncoderSpec)
            ),
            default=0,
        )

    # ---- the thread that has the socket --------------------------------------------------------

    def _talk(self) -> None:
        answers = self._context.socket(zmq.PAIR)
        answers.set_hwm(0)
        answers.connect("inproc://answers")
        try:
            with listening(
                self._context, self.address, self._key, max_bytes=self._find_max_bytes()
            ) as engines:
                self._is_listening.set()
                outstanding: Counter[bytes] = Counter()
                poller = zmq.Poller()
                poller.register(engines, zmq.POLLIN)
                poller.register(answers, zmq.POLLIN)
                while not self._is_stopped.is_set():
                    ready = dict(poller.poll(int(_POLL_S * 1000)))
                    if answers in ready:
                        frames = answers.recv_multipart(copy=False)
                        outstanding -= Counter([frames[0].bytes])
                        engines.send_multipart(frames, copy=False)
                    if engines in ready:
                        self._hear(engines, outstanding)
        except BaseException as error:
            self._error = error
        finally:
            self._is_listening.set()
            answers.close(linger=0)

    def _hear(self, engines: Any, outstanding: Counter[bytes]) -> None:
        first, *rest = engines.recv_multipart(copy=False)
        peer = first.bytes
        try:
            message = unpack_to_worker([frame.buffer for frame in rest])
        except WireError as error:
            logger.error("dropped a malformed message: %s", error)
            return
        if isinstance(message, Hello):
            counts = {"num_encoded": self.num_encoded, "num_found": self.num_found}
            answer = Welcome(parts=dict(self._parts.identity.parts), **counts)
            engines.send_multipart([peer, *pack(answer)])
        elif outstanding[peer] >= MAX_OUTSTANDING:
            refusal = NotEncoded(number=message.number, reason="too many items at once")
            engines.send_multipart([peer, *pack(refusal)])
        else:
            outstanding[peer] += 1
            self._asked.put(_Asked(peer, message))

    def _find_max_bytes(self) -> int:
        """Return the size of the largest array that an item may have, and some room."""
        largest = 0
        for function, calls in self._parts.programs.encoders.by_function.items():
            sizes = self._parts.sizes[function]
            spec = calls.spec
            if isinstance(spec, PackedEncoderSpec):
                number = sizes[-1] if sizes else 0
            else:
                number = max(1, self._parts.budget // spec.tokens_per_unit)
            largest = max([largest, *(number * _count_bytes(*i) for i in spec.inputs.values())])
        return largest + SPARE_BYTES


def _count_bytes(shape: Sequence[int], dtype: str) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _are_rows(rows: np.ndarray, num_outputs: int, num_extra_rows: int) -> bool:
    """Return whether `rows` may be an `EncoderItem`'s."""
    is_list = rows.dtype == np.int32 and rows.ndim == 1 and rows.size > 0
    return bool(
        is_list and rows.max() >= 0 and rows.max() < num_outputs and rows.min() >= -num_extra_rows
    )
