"""Admission control of P0, by number of sequences, before any work is done."""

from mmjax.errors import CapacityError, RequestValueError


class Capacity:
    """Counts the requests that are being processed; its caller counts those after that."""

    def __init__(self, max_num_seqs: int, max_num_queued_tokens: int | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self.num_requests = 0
        """Requests that are being processed."""
        self.num_seqs = 0
        """Their sequences."""

    def check_size(self, num_prompts: int, n: int) -> None:
        """Raise for a request that would not fit even alone."""
        limit = (
            f"this server takes {self._max_num_seqs} sequences at once (`--max-num-seqs` and "
            "`--max-num-queued-reqs`)"
        )
        if n > self._max_num_seqs:
            raise RequestValueError(f"`n` is {n}, but {limit}; lower it", param="n")
        if num_prompts * n > self._max_num_seqs:
            raise RequestValueError(
                f"`prompt` holds {num_prompts} prompts with `n`={n} answers each, but {limit}; "
                "send fewer together",
                param="prompt",
            )

    def enter(self, num_seqs: int, *, num_others: int) -> None:
        """Add a request, or raise CapacityError; `num_others`: sequences past processing.

        P1 never holds more than is counted here, so an admitted request has room there.
        """
        self.check_size(1, num_seqs)
        num_held = self.num_seqs + num_others
        if num_held + num_seqs > self._max_num_seqs:
            raise CapacityError(
                f"the server holds {num_held} sequences and takes {self._max_num_seqs}; "
                "try again in a moment"
            )
        self.num_requests += 1
        self.num_seqs += num_seqs

    def check_queue(self, num_tokens: int, *, num_queued_tokens: int) -> None:
        """Raise CapacityError for a prompt that is too long behind `num_queued_tokens` others."""
        limit = self._max_num_queued_tokens
        if limit is not None and num_queued_tokens and num_queued_tokens + num_tokens > limit:
            raise CapacityError(
                f"the prompt has {num_tokens} tokens, {num_queued_tokens} of others wait, and the "
                f"server takes {limit} (`--max-num-queued-tokens`); try again in a moment"
            )

    def leave(self, num_seqs: int) -> None:
        """Remove a request."""
        self.num_requests -= 1
        self.num_seqs -= num_seqs
