"""What changes a running engine as a whole, between two steps: weights, sleep, a pause.

Messages about requests are held meanwhile, and taken in their order afterwards.
"""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, ConfigError, RequestError, RequestValueError
from mmjax.system.logger import get_logger
from mmjax.transport.codec import Message, Remainder
from mmjax.transport.messages import (
    AbortRequests,
    ControlEngine,
    EngineChanged,
    RequestFailed,
    RequestOutputDelta,
)

logger = get_logger(__name__)


class EngineControl:
    """Applies control messages one after the other, each when requests in work allow it."""

    def __init__(
        self,
        core: EngineCore,
        send_outputs: Callable[[list[RequestOutputDelta]], None],
        answer: Callable[[EngineChanged], None],
    ) -> None:
        """Change `core`; tell what steps and aborts gave, and what became of each message."""
        self._core, self._send_outputs, self._answer = core, send_outputs, answer
        self._queue: deque[ControlEngine] = deque()
        self._held: deque[Message | Remainder] = deque()
        self._is_paused = False

    @property
    def is_halted(self) -> bool:
        """Whether no step is computed."""
        return self._is_paused or self._core.is_sleeping

    def add(self, message: ControlEngine) -> None:
        """Queue a message."""
        self._queue.append(message)

    def hold(self, message: Message | Remainder) -> bool:
        """Keep a message about requests for later, and return True; False: take it now."""
        if not (self._queue or self.is_halted):
            return False
        self._held.append(message)
        if isinstance(message, AbortRequests):
            # Of what is in work; one that is held is aborted in its turn.
            self._core.abort(message.request_ids)
        return True

    def apply(self) -> Iterator[Message | Remainder]:
        """Apply what can be applied now; yield the messages that are no longer held."""
        while self._queue and not self._must_wait(self._queue[0]):
            self._apply(self._queue.popleft())
        while self._held and not self._queue and not self.is_halted:
            yield self._held.popleft()

    def _must_wait(self, message: ControlEngine) -> bool:
        is_patient = message.mode == "wait" and message.action in ("sleep", "pause", "load_weights")
        return is_patient and self._core.has_unfinished() and not self.is_halted

    def _apply(self, message: ControlEngine) -> None:
        error = None
        try:
            self._change(message)
        except RequestError as refusal:
            error = refusal
        except (CheckpointError, ConfigError) as refusal:
            if not self._core.has_weights and not self._core.is_sleeping:
                # Another process starts, with weights that are whole.
                raise
            error = RequestValueError(str(refusal), param="path")
        if error is not None:
            logger.error("`%s` is refused: %s", message.action, error)
        core = self._core
        self._answer(
            EngineChanged(
                number=message.number,
                error=None if error is None else RequestFailed.from_error("", error),
                weights_version=core.weights_version,
                is_sleeping=core.is_sleeping,
                is_paused=self._is_paused,
            )
        )

    def _change(self, message: ControlEngine) -> None:
        core = self._core
        match message.action:
            case "pause":
                self._settle(message)
                self._is_paused = True
            case "resume":
                self._is_paused = False
            case "sleep":
                self._settle(message)
                core.sleep(message.level)
            case "wake_up":
                core.wake_up()
            case "load_weights":
                assert message.path is not None, "weights are loaded from a directory"
                # What is wrong with it ends no request.
                leaves = core.open_weights(Path(message.path))
                self._settle(message)
                core.load_weights(leaves, version=message.weights_version)

    def _settle(self, message: ControlEngine) -> None:
        """Read the step on the device, and abort what is in work, if that is wanted."""
        if message.mode == "wait" and self._core.has_unfinished():
            raise RequestValueError(
                "requests are held by a pause or by sleep, so that they cannot be finished first; "
                "give another `mode`, or resume before",
                param="mode",
            )
        deltas = self._core.drain()
        if message.mode == "abort":
            deltas += self._core.abort_all()
        self._send_outputs(deltas)
