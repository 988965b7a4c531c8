"""Tokens that are guessed ahead: who guesses them, for whom, how many, and whether it pays.

Token ids in, token ids out: knows neither blocks nor the device. A guess changes what is computed
in a step, never an answer: each of its tokens is compared with the one that is sampled there.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmjax.config.speculative_config import SpeculativeConfig

ROW_COST = 0.08
"""What a further row adds to a step, of what a step of no rows would take (docs/notes/log.md)."""
MARGIN = 1.5
"""How many times its cost a guess must promise: what is promised is known less well."""
DECAY = 0.5
"""How much what was found of a guess counts when the next one has ended."""
MAX_PLACES = 32
"""How many places of an n-gram are looked at, the last ones: in a text of few different tokens one
has thousands."""


class Proposer(Protocol):
    """Guesses how one request goes on."""

    def propose(self, token_ids: np.ndarray, most: int) -> list[int]:
        """Return `most` tokens that may follow int32[tokens], or none.

        The tokens of each call begin with those of the one before.
        """
        ...


class NgramProposer:
    """Guesses what followed a request's last tokens where they stood before, the last time.

    Prompt lookup, as vLLM's `NgramProposer`; that one takes the first of several places. Places of
    the shortest n-gram are kept, not searched for: a look takes microseconds behind any prompt.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """Prefer a place where more tokens agree than `shortest`, up to `longest`."""
        self._longest, self._shortest = longest, shortest
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        """n-gram of the shortest size -> the index of its last token, where it stood last."""
        self._earlier = [-1] * (shortest - 1)
        """By the index of an n-gram's last token: that of its place before; -1: there is none."""

    def propose(self, token_ids: np.ndarray, most: int) -> list[int]:
        """Return `most` tokens that may follow int32[tokens], or none.

        7 8 9 5 7 8 gives 9 5 7, and 4 4 4 gives 4 4 4.

        A guess that reaches the end goes on with itself, as what repeats does.
        """
        self._read(token_ids)
        best, most_agreeing = -1, 0
        place = self._earlier[len(self._tokens) - 1]
        for _ in range(MAX_PLACES):
            if place < 0 or most_agreeing == self._longest:
                break
            agreeing = self._count_agreeing(place)
            if agreeing > most_agreeing:
                best, most_agreeing = place, agreeing
            place = self._earlier[place]
        if best < 0:
            return []
        return (self._tokens[best + 1 : best + 1 + most] * most)[:most]

    def _read(self, token_ids: np.ndarray) -> None:
        """Take in the tokens that came since the last call."""
        self._tokens += token_ids[len(self._tokens) :].tolist()
        first = len(self._earlier) - self._shortest + 1
        for ngram in zip(*(self._tokens[first + i :] for i in range(self._shortest)), strict=False):
            self._earlier.append(self._last.get(ngram, -1))
            self._last[ngram] = len(self._earlier) - 1

    def _count_agreeing(self, place: int) -> int:
        """Return how many tokens up to index `place` are the last ones, at most `longest`."""
        end, tokens, number = len(self._tokens) - 1, self._tokens, self._shortest
        most = min(self._longest, place + 1)
        while number < most and tokens[place - number] == tokens[end - number]:
            number += 1
        return number


class Forecast:
    """What is guessed of one request, and how often that was right.

    Also of requests that compute a token at a time: their guesses are compared with what they are
    given, which costs the device nothing.
    """

    def __init__(self, proposer: Proposer, most: int) -> None:
        self._proposer, self._most = proposer, most
        self._guess: list[int] = []
        self._num_right = 0
        # As if two tokens had been wrong: some must be right before a guess is worth anything.
        self._sum_right, self._sum_asked = 0.0, 2.0
        self._num_known = 0
        """How many tokens it was told of; behind a guess there may be others (`can_pay`)."""

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
        if self._num_known != len(token_ids) - num_new:
            self._guess = []
        self._num_known = len(token_ids)
        news = token_ids[len(token_ids) - num_new :].tolist() if self._guess else ()
        for token_id in news:
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
        if self._num_right or self._num_known != len(token_ids):
            # The rest of a guess is shorter than a new one.
            self._num_known = len(token_ids)
            self._begin(token_ids)
        self._guess = self._guess[:most]
        return self._guess

    def _begin(self, token_ids: np.ndarray) -> None:
        self._guess = self._proposer.propose(token_ids, self._most)
        self._num_right = 0


class Speculation:
    """Decides which requests of a step are given guesses; counts these and what became of them."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._most = config.num_speculative_tokens
        self._read_cost = 0.2
        """The share of a step that the host takes, while the device waits if it has guesses."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        """Guesses that were verified, their tokens, and the right ones among these."""
        self.can_pay = True
        """Whether guesses that are all right would pay; else nobody looks for any."""

    def watch(self) -> Forecast:
        """Return the forecast of a new request."""
        config = self._config
        proposer = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_min)
        return Forecast(proposer, self._most)

    def note_tokens(
        self, forecast: Forecast | None, token_ids: np.ndarray, num_guessed: int, num_new: int
    ) -> None:
        """Take in what a request was given.

        Args:
            forecast: Of the request; None: nothing is guessed of it.
            token_ids: int32[tokens]: all that are known.
            num_guessed: How many guessed tokens were verified.
            num_new: How many tokens are new: the right ones of these, and one more.
        """
        if num_guessed:
            self.num_drafts += 1
            self.num_draft_tokens += num_guessed
            self.num_accepted_tokens += num_new - 1
        if forecast is not None and self.can_pay:
            forecast.note(token_ids, num_new)

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
        number = max(len(chances), 1)
        row_cost = MARGIN * ROW_COST / (1 + ROW_COST * number)
        wait_cost = MARGIN * self._read_cost
        most_rows = max(0, min(num_rows, self._most * number))
        self.can_pay = most_rows * (1 / number - row_cost) > wait_cost
        if most_rows * (max(chances, default=0.0) / number - row_cost) <= wait_cost:
            return Counter()
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
        cost = wait_cost + row_cost * len(used)
        if sum(gain for gain, _ in used) <= cost:
            return Counter()
        return Counter(request for _, request in used)
