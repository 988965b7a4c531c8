"""What one request changes in its logits: tokens that may come, may not come, or are biased.

Knows nothing of the device: token ids in, bits and pairs of ids out.
"""

from collections.abc import Sequence

import numpy as np

from mmjax.engine.scheduling.grammar import Grammar
from mmjax.engine.scheduling.token_bits import pack_token_ids
from mmjax.requests.sampling_params import SamplingParams


class LogitRules:
    """The allowed tokens, bad words, biases and grammar of one request."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int = 0,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """`vocab_size`: tokens that have a logit; those that `params` allow are among them.

        `grammar`: of these tokens alone.
        """
        self.grammar = grammar
        """What the answer must match; it, and nothing else, says where the answer may end."""
        self.biases = params.logit_bias or {}
        self.has_edits = bool(bad_words_token_ids or self.biases)
        """Whether single logits are changed."""
        self._bad_words_token_ids = bad_words_token_ids
        self._listed_bits = None
        if params.allowed_token_ids is not None:
            self._listed_bits = pack_token_ids(params.allowed_token_ids, vocab_size)

    @property
    def has_grammar(self) -> bool:
        """Whether what may come next depends on the token before."""
        return self.grammar is not None

    def is_ready_by(self, deadline: float) -> bool:
        """Wait until `allowed_bits` are those of the next token; False: they are not in time."""
        return self.grammar is None or self.grammar.is_ready_by(deadline)

    @property
    def has_mask(self) -> bool:
        """Whether not every token may come."""
        return self.grammar is not None or self._listed_bits is not None

    @property
    def allowed_bits(self) -> np.ndarray | None:
        """int32[words]: a bit for each token that may be the next; None: any may."""
        return self._listed_bits if self.grammar is None else self.grammar.allowed_bits

    def find_bans(self, output: Sequence[int], *, is_last_known: bool) -> list[tuple[int, int]]:
        """Return which tokens would complete bad words: (token before or -1, banned token).

        If the last token is in flight, and so not in `output`, it is to be compared with the first
        of a pair; -1 stands for any. Of bad words 5 6 7 and 8, behind 5 and a token in flight:
        (6, 7), (-1, 8).
        """
        num_output = len(output) + (not is_last_known)
        bans = []
        for word in self._bad_words_token_ids:
            *before, last = word
            if len(before) > num_output:
                continue
            awaited = -1 if is_last_known or not before else before.pop()
            if not before or list(output[-len(before) :]) == before:
                bans.append((awaited, last))
        return bans
