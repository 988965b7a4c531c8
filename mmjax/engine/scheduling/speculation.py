"""Tokens that are guessed ahead: who guesses them, for whom, how many, and whether it pays.

Token ids in, token ids out: knows neither blocks nor the device. A guess changes what is computed
in a step, never an answer: each of its tokens is compared with the one that is sampled there.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mmjax.config.speculative_config import SpeculativeConfig
from mmjax.engine.scheduling.outputs import Draft, WantedGuess
from mmjax.engine.scheduling.request import Forecast

ROW_COST = 0.08
"""What a further row adds to a step, of what a step of no rows would take, until it is measured
(docs/notes/log.md)."""
FORGOTTEN = 0.003
"""How much of what was measured is forgotten in each step of other rows: it may have been
disturbed, and is then tried again."""
MARGIN = 1.5
"""How many times its cost a guess must promise: what is promised is known less well."""
DECAY = 0.5
"""How much what was found of a guess counts when the next one has ended."""
DRAFT_DECAY = 0.8
"""The same of a draft model's guesses, each of which is made anew."""
FIRST_CHANCE, FIRST_ASKED = 0.75, 4.0
"""How likely a draft model's token is right before anything is known, and as of how many tokens."""
MAX_STEPS_UNASKED = 64
"""After so many steps without guesses a draft model makes one of one token, whether or not it
would pay: else nobody would know when it does."""
MAX_STEPS_UNCOUNTED = 16
"""After so many steps without guesses what they would cost is found anew."""
MAX_UNREAD = 3
"""Tokens that pass at most between two looks for an n-gram that find none: one more each time."""
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
        tokens, size = self._tokens, self._shortest
        tokens += token_ids[len(tokens) :].tolist()
        for last in range(len(self._earlier), len(tokens)):
            ngram = tuple(tokens[last + 1 - size : last + 1])
            self._earlier.append(self._last.get(ngram, -1))
            self._last[ngram] = last

    def _count_agreeing(self, place: int) -> int:
        """Return how many tokens up to index `place` are the last ones, at most `longest`."""
        end, tokens, number = len(self._tokens) - 1, self._tokens, self._shortest
        most = min(self._longest, place + 1)
        while number < most and tokens[place - number] == tokens[end - number]:
            number += 1
        return number


class LookupForecast:
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
        self._num_unread, self._most_unread = 0, 0
        """Tokens since the last look that found nothing, and how many pass before the next."""

    @property
    def chance(self) -> float:
        """How likely the next token of the guess is right, if all before it are; 0 without one."""
        if not self._guess:
            return 0.0
        return (self._sum_right + self._num_right) / (self._sum_asked + self._num_right)

    def note(self, token_ids: np.ndarray, num_guessed: int, num_new: int) -> None:
        """Compare a request's last tokens with the guess; make another where that has ended.

        As `Forecast.note`; guesses that were not verified are compared, too.
        """
        del num_guessed
        if not self._guess and self._num_unread + num_new <= self._most_unread:
            self._num_known, self._num_unread = len(token_ids), self._num_unread + num_new
            return
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
        self._num_right = self._num_unread = 0
        self._most_unread = 0 if self._guess else min(self._most_unread + 1, MAX_UNREAD)


class DraftForecast:
    """How often a draft model's guesses of one request were right."""

    def __init__(self, chance: float = FIRST_CHANCE) -> None:
        """`chance`: what guesses of other requests have shown."""
        self._sum_right, self._sum_asked = FIRST_ASKED * chance, FIRST_ASKED

    @property
    def chance(self) -> float:
        """How likely the next token of a guess is right, if all before it are."""
        return self._sum_right / self._sum_asked

    def note(self, token_ids: np.ndarray, num_guessed: int, num_new: int) -> None:
        """Take in how many tokens of a guess were right: the new ones but for the last.

        As `Forecast.note`.
        """
        del token_ids
        if num_guessed:
            num_right = num_new - 1
            self._sum_right = DRAFT_DECAY * self._sum_right + num_right
            num_asked = min(num_right + 1, num_guessed)
            self._sum_asked = DRAFT_DECAY * self._sum_asked + num_asked


class Speculation:
    """Decides which requests of a step are given guesses; counts these and what became of them."""

    def __init__(self, config: SpeculativeConfig, draft: Draft | None = None) -> None:
        """`draft`: the model that guesses; None: n-grams are looked up."""
        self._config, self._draft = config, draft
        self._most = config.num_speculative_tokens
        self._read_cost = 0.2
        """The share of a step that the host takes, while the device waits if it has guesses."""
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        """Guesses that were verified, their tokens, and the right ones among these."""
        self.can_pay = True
        """Whether guesses that are all right would pay; else nobody looks for any."""
        self._costs: Sequence[float] = ()
        self._costs_of = (0, 0)
        """What `_find_costs` has returned, and of how many requests and rows."""
        self._drafts = DraftForecast()
        """What the draft model's guesses of all requests have shown."""
        self._times = StepTimes()
        self._draft_s = 0.0
        """Seconds of a token of the draft model's; 0: unknown."""
        self._num_unasked = 0
        """Steps since the last guess."""

    def watch(self) -> Forecast:
        """Return the forecast of a new request."""
        if self._draft is not None:
            return DraftForecast(self._drafts.chance)
        config = self._config
        proposer = NgramProposer(config.prompt_lookup_max, config.prompt_lookup_min)
        return LookupForecast(proposer, self._most)

    def note_tokens(
        self,
        forecast: Forecast | None,
        token_ids: np.ndarray,
        num_guessed: int,
        num_new: int,
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
            self._num_unasked = 0
        if self._draft is not None:
            self._drafts.note(token_ids, num_guessed, num_new)
        if forecast is not None and self.can_pay:
            forecast.note(token_ids, num_guessed, num_new)

    def note_step(self, num_rows: int, step_s: float, host_s: float | None) -> None:
        """Take in how long a step took that decoded, guesses included, so many tokens.

        `host_s`: what the host took meanwhile; None: it has waited, since there were guesses.
        """
        if self._draft is not None:
            self._times.note(num_rows, step_s)
        if host_s is not None:
            self._read_cost += 0.05 * (min(1.0, host_s / max(step_s, 1e-9)) - self._read_cost)
            self._num_unasked += 1

    def guess(self, wanted: Sequence[WantedGuess]) -> dict[str, int]:
        """Place tokens behind the known ones of requests, at most as many as each wants.

        Returns:
            Request id -> number of tokens.
        """
        guesses = (
            [self._look_up(one) for one in wanted] if self._draft is None else self._ask(wanted)
        )
        for (request, _, _), token_ids in zip(wanted, guesses, strict=True):
            request.place_guess(token_ids)
        return {
            one.request.request_id: len(token_ids)
            for one, token_ids in zip(wanted, guesses, strict=True)
        }

    def _ask(self, wanted: Sequence[WantedGuess]) -> list[list[int]]:
        if self._draft is None or not wanted:
            return []
        start = time.monotonic()
        guesses = self._draft.guess(wanted)
        seconds = (time.monotonic() - start) / max(one.num_tokens for one in wanted)
        self._draft_s = _average(self._draft_s, seconds)
        return guesses

    @staticmethod
    def _look_up(wanted: WantedGuess) -> list[int]:
        forecast = wanted.request.forecast
        assert isinstance(forecast, LookupForecast), f"{forecast=} has no n-grams"
        return forecast.guess(wanted.request.known_token_ids, wanted.num_tokens)

    def share_out(self, chances: Sequence[float], num_rows: int) -> Counter[int]:
        """Return how many guessed tokens each of a step's requests gets; empty: it does not pay.

        A step takes longer the more rows it has, and by the host's share if it has guesses, since
        the one before is read first. Those rows are used whose tokens are likeliest: the n-th of a
        guess with the chance c is right with c ** n.

        Args:
            chances: Of each request that the step computes a token of, `Forecast.chance`.
            num_rows: Rows that the step has left.

        Returns:
            Place in `chances` -> number of tokens.
        """
        if self._draft is not None and not self._draft.is_ready:
            return Counter()
        number = max(len(chances), 1)
        most = max(0, min(num_rows, self._most * number))
        if self._draft is not None:
            most = min(most, self._times.find_widest(number) - number)
        costs = self._find_costs(number, most)
        best_chance = max(chances, default=0.0)
        if not best_chance or not most:
            return Counter()
        found = Counter[int]()
        # No token is likelier than the best.
        if any(rows * best_chance / number > cost for rows, cost in enumerate(costs, 1)):
            found = self._choose(chances, costs)
        is_due = self._draft is not None and self._num_unasked >= MAX_STEPS_UNASKED
        return Counter({chances.index(best_chance): 1}) if not found and is_due else found

    def _find_costs(self, number: int, most: int) -> Sequence[float]:
        """Return what a step of so many requests takes longer with one row more, two, ... `most`.

        Of n-grams these change slowly, by what the host takes.
        """
        is_known = self._costs_of == (number, most) and self._num_unasked % MAX_STEPS_UNCOUNTED
        if self._draft is not None or not is_known:
            self._costs = [self._find_cost(number, rows) for rows in range(1, most + 1)]
            self._costs_of = (number, most)
            self.can_pay = any(rows / number > cost for rows, cost in enumerate(self._costs, 1))
        return self._costs

    def _find_cost(self, number: int, num_more: int) -> float:
        """Return how much longer a step takes with so many rows more, of what it takes.

        Measured where a draft model waits for the device in any case. Where n-grams are looked up
        a host may take most of a step, whose time says little of the device's: rows cost what is
        usual.
        """
        if self._draft is None:
            ratio = _usual(number + num_more) / _usual(number)
        else:
            ratio = self._times.find(number + num_more) / self._times.find(number)
        return MARGIN * (ratio - 1 + self._read_cost)

    def _choose(self, chances: Sequence[float], costs: Sequence[float]) -> Counter[int]:
        """Return the guesses with which most tokens come in a time; empty: none.

        A draft model takes as long for a token of many requests as for one's, so that the longest
        guess counts. `costs`: of so many guessed tokens, from 1 on.
        """
        number = len(chances)
        likeliest = sorted(
            (
                (chance**place / number, request, place)
                for request, chance in enumerate(chances)
                for place in range(1, self._most + 1)
                if chance
            ),
            reverse=True,
        )
        draft_cost = self._draft_s / self._times.find(number)
        best, best_rate = Counter[int](), 1.0
        for depth in (self._most,) if self._draft is None else range(1, self._most + 1):
            kept = [(gain, request) for gain, request, place in likeliest if place <= depth]
            tokens, time_s = 1.0, 1.0 + draft_cost * depth
            for rows, (gain, _) in enumerate(kept[: len(costs)], 1):
                tokens += gain
                rate = tokens / (time_s + costs[rows - 1])
                if rate > best_rate:
                    best, best_rate = Counter(request for _, request in kept[:rows]), rate
        return best


class StepTimes:
    """How long steps of decoding take, by their rows: as those that ran, or as is usual."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def note(self, num_rows: int, seconds: float) -> None:
        """Take in a step; what is known of others is trusted a little less.

        None of fewer rows takes longer: where it did, it was disturbed, by a prompt before it, say.
        """
        own = _round_rows(num_rows)
        self._seconds[own] = _average(self._seconds.get(own, 0.0), seconds)
        for rows in self._seconds.keys() - {own}:
            usual = self._seconds[own] * _usual(rows) / _usual(own)
            self._seconds[rows] += FORGOTTEN * (usual - self._seconds[rows])
            if rows < own:
                self._seconds[rows] = min(self._seconds[rows], self._seconds[own])

    def find(self, num_rows: int) -> float:
        """Return the seconds of a step; where none ran, as its neighbours tell.

        Between two that ran: on the line through both. Beyond the widest: on the line through it
        and the next narrower, or as is usual, whichever takes longer.
        """
        own = _round_rows(num_rows)
        if own in self._seconds or not self._seconds:
            return self._seconds.get(own, _usual(num_rows))
        below = max((rows for rows in self._seconds if rows < own), default=0)
        above = min((rows for rows in self._seconds if rows > own), default=0)
        near = below or above
        usual = self._seconds[near] * _usual(own) / _usual(near)
        if not below:
            return usual
        other = above or max((rows for rows in self._seconds if rows < below), default=0)
        if not other:
            return usual
        a_row = (self._seconds[other] - self._seconds[below]) / (other - below)
        straight = self._seconds[below] + a_row * (own - below)
        return straight if above else max(straight, usual)

    def find_widest(self, num_rows: int) -> int:
        """Return how many rows a step may have where one of so many is known: twice what ran.

        So that few steps tell what rows cost here, and none of them takes much longer than any.
        """
        return 2 * max((rows for rows in self._seconds if rows >= num_rows), default=num_rows)


def _round_rows(num_rows: int) -> int:
    """Return the rows of the program that computes so many, or nearly."""
    return num_rows if num_rows <= 8 else 1 << (num_rows - 1).bit_length()


def _usual(num_rows: int) -> float:
    return 1 + ROW_COST * num_rows


def _average(before: float, seconds: float) -> float:
    return (before + seconds) / 2 if before else seconds
