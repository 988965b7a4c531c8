"""How much of the steps' rows was padding: what a bucket costs beyond the tokens in it."""

from collections import Counter

from mmjax.engine.scheduling.buckets import StepBucket


class PaddingCounter:
    """Counts steps and their tokens, by bucket."""

    def __init__(self) -> None:
        self._num_steps: Counter[StepBucket] = Counter()
        self._num_tokens: Counter[StepBucket] = Counter()

    def add(self, bucket: StepBucket, num_tokens: int) -> None:
        """Count a step of `num_tokens` tokens, in its bucket."""
        self._num_steps[bucket] += 1
        self._num_tokens[bucket] += num_tokens

    def share(self, bucket: StepBucket) -> float:
        """Return the share of padding in the rows of a bucket's steps; 0 if there were none."""
        num_rows = self._num_steps[bucket] * bucket.num_tokens
        return 1 - self._num_tokens[bucket] / num_rows if num_rows else 0.0

    def describe(self) -> list[str]:
        """Return a line for each bucket that was used, the smallest first."""
        return [
            f"steps of {bucket.num_tokens} tokens x {bucket.num_requests} requests: "
            f"{self._num_steps[bucket]}, {self.share(bucket):.0%} padding"
            for bucket in sorted(self._num_steps)
        ]
