"""`--enable-log-requests`: a line for each request, and one for each answer."""

from mmjax.config.engine_config import ServerConfig
from mmjax.frontend.engine_client.observer import EndReason, FinishedSequence, NewTokens
from mmjax.frontend.engine_client.requests import ProcessedRequest
from mmjax.system.logger import get_logger

logger = get_logger(__name__)


class RequestLog:
    """Logs requests as they come and end; a `RequestObserver`."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_chars = config.max_log_len
        self._logs_outputs = config.enable_log_outputs

    def on_added(self, request: ProcessedRequest) -> None:
        """Log what is asked."""
        logger.info(
            "received request %s: %d prompt tokens, %d items, %s, prompt %r",
            request.request_id,
            len(request.prompt_token_ids),
            len(request.items),
            request.messages[0].sampling_params,
            self._cut(request.prompt),
        )

    def on_tokens(self, tokens: NewTokens) -> None:
        """Log nothing."""

    def on_finished(self, sequence: FinishedSequence) -> None:
        """Log what an answer took, and, if asked for, its text."""
        times = sequence.request.times
        logger.info(
            "finished request %s: %d tokens (%s), first token after %.3f s, %.3f s in all%s",
            sequence.request_id,
            sequence.num_tokens,
            sequence.finish_reason,
            sequence.first_token_at - times.arrived_at,
            sequence.last_token_at - times.arrived_at,
            f", text {self._cut(sequence.text)!r}" if self._logs_outputs else "",
        )

    def on_broken_off(self, request: ProcessedRequest, reason: EndReason) -> None:
        """Log that there is no answer."""
        logger.info("ended request %s: %s", request.request_id, reason)

    def _cut(self, text: str | None) -> str | None:
        return None if text is None else text[: self._max_chars]
