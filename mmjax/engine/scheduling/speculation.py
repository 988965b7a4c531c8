"""Tokens that are guessed ahead: who guesses them, for whom, how many, and whether it pays.

Token ids in, token ids out: knows neither blocks nor the device. A guess changes what is computed
in a step, never an answer: each of its tokens is compared with the one that is sampled there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from mmjax.config.speculative_config import SpeculativeConfig

ROW_COST = 0.07
"""What a further row adds to a step, of what a step of no rows would take (docs/notes/log.md)."""
READ_COST = 0.1
"""What a step takes longer that is dispatched when the one before was read, in the same unit."""
_NO_TOKENS = np.zeros(0, np.int32)


class Proposer(Protocol):
    """Guesses the next tokens of a request."""

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return int32[guessed], at most `most` tokens that may follow int32[tokens].

        Empty: it has no guess.
        """
        ...


@dataclass(frozen=True, slots=True)
class NgramProposer:
    """Guesses what followed the last tokens where they stood before, the last time.

    Prompt lookup, as vLLM's `NgramProposer`; that one takes the first of several places.
    """

    longest: int
    """Tokens of the longest n-gram; a place where more tokens agree is preferred up to these."""
    shortest: int

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        """Return `most` tokens, or none: 7 8 9 5 7 8 gives 9 5 7, and 4 4 4 gives 4 4 4.

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

    def __init__(self, proposer: Proposer, most: int) -> None:
        self._proposer, self._most = proposer, most
        self._guess: list[int] = []
        self._num_right = 0
        self._expected = 0.0
        """Right tokens of a guess, on average; the last guess counts as much as all before."""

    @property
    def expected(self) -> float:
        """How many tokens of the present guess are likely right; 0 without one."""
        if len(self._guess) <= self._num_right:
            return 0.0
        return max(self._expected, (self._expected + self._num_right) / 2)

    def note(self, token_ids: np.ndarray, num_new: int) -> None:
        """Compare a request's last tokens with the guess; make another where that has ended.

        Args:
            token_ids: int32[tokens]: all that are known.
            num_new: How many of them came since the last call.
        """
        for token_id in token_ids[len(token_ids) - num_new :].tolist():
            if not self._guess:
                break
            if token_id == self._guess[self._num_right]:
                self._num_right += 1
            else:
                self._end(self._num_right)
                break
            if self._num_right == len(self._guess):
                # It would have gone on.
                self._end(self._most)
        if not self._guess:
            self._begin(self._proposer.propose(token_ids, self._most).tolist())

    def guess(self, token_ids: np.ndarray, most: int) -> list[int]:
        """Return at most `most` tokens that follow int32[tokens], which `note` will be told of."""
        if self._num_right:
            # The rest of a guess is shorter than a new one.
            self._begin(self._proposer.propose(token_ids, self._most).tolist())
        self._guess = self._guess[:most]
        return self._guess

    def _begin(self, guess: list[int]) -> None:
        self._guess, self._num_right = guess, 0

    def _end(self, num_right: int) -> None:
        self._expected = (self._expected + num_right) / 2
        self._begin([])


class Guess(NamedTuple):
    """What one of a step's requests gets."""

    request: int
    """Its place among them."""
    num_tokens: int


class Speculation:
    """Decides which requests of a step are given guesses; counts these and what became of them."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._proposer = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_min)
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        """Guesses that were verified, their tokens, and the right ones among these."""

    def watch(self) -> Forecast:
        """Return the forecast of a new request."""
        return Forecast(self._proposer, self._most)

    def count(self, num_guessed: int, num_right: int) -> None:
        """Count a guess that was verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_guessed
        self.num_accepted_tokens += num_right

    def share_out(self, expected: Sequence[float], num_rows: int) -> list[Guess]:
        """Return which requests of a step get how many guessed tokens; empty: it does not pay.

        A step takes 1, and `ROW_COST` for each row; waiting for the one before takes `READ_COST`.
        Four requests of which one expects 3 right tokens get 3 more for 4 rows: 1.75 times the
        tokens for 1.3 times the time.

        Args:
            expected: Of each request that the step computes a token of, `Forecast.expected`.
            num_rows: Rows that the step has left.
        """
        guesses, gain, cost = [], 0.0, READ_COST
        step = 1 + ROW_COST * len(expected)
        ranked = sorted(range(len(expected)), key=lambda index: -expected[index])
        for index in ranked:
            most = min(self._most, int(2 * expected[index]) + 1, num_rows)
            right = min(expected[index], most)
            if not right or right / len(expected) <= most * ROW_COST / step:
                break
            guesses.append(Guess(index, most))
            num_rows -= most
            gain += right / len(expected)
            cost += most * ROW_COST
        return guesses if gain > cost / step else []
