"""Tokens that are guessed ahead: who guesses them, for whom, how many, and whether it pays.

Token ids in, token ids out: knows neither blocks nor the device. A guess changes what is computed
in a step, never an answer: each of its tokens is compared with the one that is sampled there.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmjax.config.speculative_config import SpeculativeConfig

ROW_COST = 0.08
"""What a further row adds to a step, of what a step of no rows would take (docs/notes/log.md)."""
MARGIN = 1.5
"""How many times its cost a guess must promise: what is promised is known less well."""
DECAY = 0.5
"""How much what was found of a guess counts when the next one has ended."""
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Guesses what followed the last tokens where they stood before, the last time.

    Prompt lookup, as vLLM's `NgramProposer`; that one takes the first of several places.
    """

    longest: int
    """Tokens of the longest n-gram; a place where more tokens agree is preferred up to these."""
    shortest: int

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return int32[guessed] that may follow int32[tokens]: `most`, or none.

        7 8 9 5 7 8 gives 9 5 7, and 4 4 4 gives 4 4 4.

        A guess that reaches the end goes on with itself, as what repeats does.
        """
        if len(token_ids) <= self.shortest:
            return _NO_TOKENS
        # The places of each n-gram's last token.
        places = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        for back in range(1, min(self.longest, len(token_ids))):
            nearer = places[places >= back]
            agreeing = nearer[token_ids[nearer - back] == token_ids[-1 - back]]
            if not len(agreeing) and back >= self.shortest:
                break
            places = agreeing
        if not len(places):
            return _NO_TOKENS
        return np.resize(token_ids[places[-1] + 1 :], most)


class Forecast:
    """What is guessed of one request, and how often that was right.

    Also of requests that compute a token at a time: their guesses are compared with what they are
    given, which costs the device nothing.
    """

    def __init__(self, proposer: NgramProposer, most: int) -> None:
        self._proposer, self._most = proposer, most
        self._guess: list[int] = []
        self._num_right = 0
        # As if two tokens had been wrong: some must be right before a guess is worth anything.
        self._sum_right, self._sum_asked = 0.0, 2.0

    @property
    def chance(self) -> float:
        """How likely the next token of the guess is right, if all before it are; 0 without one."""
        if not self._guess:
            return 0.0
        return (self._sum_right + self._num_right) / (self._sum_asked + self._num_right)

    def note(self, token_ids: np.ndarray, num_new: int) -> None:
        """Compare a request's last tokens with the guess; make another where that has ended.

        Args:
            token_ids: int32[tokens]: all that are known.
            num_new: How many of them came since the last call.
        """
        for token_id in token_ids[len(token_ids) - num_new :].tolist():
            if not self._guess:
                break
            is_right = token_id == self._guess[self._num_right]
            self._num_right += is_right
            if not is_right or self._num_right == len(self._guess):
                self._sum_right = DECAY * self._sum_right + self._num_right
                self._sum_asked = DECAY * self._sum_asked + self._num_right + (not is_right)
                self._guess = []
        if not self._guess:
            self._begin(token_ids)

    def guess(self, token_ids: np.ndarray, most: int) -> list[int]:
        """Return at most `most` tokens that follow int32[tokens], which `note` will be told of."""
        if self._num_right:
            # The rest of a guess is shorter than a new one.
            self._begin(token_ids)
        self._guess = self._guess[:most]
        return self._guess

    def _begin(self, token_ids: np.ndarray) -> None:
        self._guess = self._proposer.propose(token_ids, self._most).tolist()
        self._num_right = 0


class Speculation:
    """Decides which requests of a step are given guesses; counts these and what became of them."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._proposer = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_min)
        self._read_cost = 0.2
        """The share of a step that the host takes, while the device waits if it has guesses."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        """Guesses that were verified, their tokens, and the right ones among these."""

    def watch(self) -> Forecast:
        """Return the forecast of a new request."""
        return Forecast(self._proposer, self._most)

    def note_guess(self, num_guessed: int, num_right: int) -> None:
        """Count a guess that was verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_guessed
        self.num_accepted_tokens += num_right

    def note_step(self, host_s: float, step_s: float) -> None:
        """Take in how long a step without guesses took, and the host for it meanwhile."""
        self._read_cost += 0.05 * (min(1.0, host_s / max(step_s, 1e-9)) - self._read_cost)

    def share_out(self, chances: Sequence[float], num_rows: int) -> Counter[int]:
        """Return how many guessed tokens each of a step's requests gets; empty: it does not pay.

        A step of R rows takes 1 + R * `ROW_COST`, and longer by the host's share if it has guesses,
        since the one before is read first. Those rows are used whose tokens are likeliest: the n-th
        of a guess with the chance c is right with c ** n.

        Args:
            chances: Of each request that the step computes a token of, `Forecast.chance`.
            num_rows: Rows that the step has left.

        Returns:
            Place in `chances` -> number of tokens.
        """
        if not any(chances) or num_rows <= 0:
            return Counter()
        number = len(chances)
        row_cost = MARGIN * ROW_COST / (1 + ROW_COST * number)
        gains = sorted(
            (
                (chance**place / number, request)
                for request, chance in enumerate(chances)
                for place in range(1, self._most + 1)
                if chance
            ),
            reverse=True,
        )
        used = [(gain, request) for gain, request in gains[:num_rows] if gain > row_cost]
        cost = MARGIN * self._read_cost + row_cost * len(used)
        if sum(gain for gain, _ in used) <= cost:
            return Counter()
        return Counter(request for _, request in used)
