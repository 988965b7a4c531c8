"""How many sequences P0 lets in: the one place that decides it, before any work is done."""

from mmjax.errors import CapacityError, RequestValueError


class Capacity:
    """Counts what is processed; what is processed already, its caller counts."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self.num_requests = 0
        """That are processed."""
        self.num_seqs = 0
        """Of those requests."""

    def check_size(self, num_prompts: int, n: int) -> None:
        """Refuse what would not fit if nothing else were here: it would never."""
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
        """Count a request as processed, or refuse it; `num_others` sequences are beyond that.

        P1 holds no more than is counted here, so that what passes finds room there.
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

    def leave(self, num_seqs: int) -> None:
        """Count a request as processed no longer."""
        self.num_requests -= 1
        self.num_seqs -= num_seqs
