"""What tests of guessed tokens share: an engine that guesses much, and often wrongly."""

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np

from mmjax.config.speculative_config import SpeculativeConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.speculation import LookupForecast, Speculation
from mmjax.transport.messages import EngineCoreRequest

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}


class KnownAnswers:
    """A proposer that knows what comes, and says something else now and then."""

    def __init__(self, rng: random.Random, wrong: float) -> None:
        self._rng, self._wrong = rng, wrong
        self._sequences: list[list[int]] = []

    def learn(self, request: EngineCoreRequest, answer: Sequence[int]) -> None:
        self._sequences.append([*request.prompt_token_ids, *answer])

    def propose(self, token_ids: np.ndarray, most: int) -> list[int]:
        known, number = token_ids.tolist(), len(token_ids)
        fitting = [one for one in self._sequences if one[:number] == known and len(one) > number]
        guess = self._rng.choice(fitting)[number : number + most] if fitting else [7] * most
        chance = self._wrong
        return [self._rng.randrange(2, 90) if self._rng.random() < chance else i for i in guess]


class Eager(Speculation):
    """Guesses for any requests, whether it pays or not."""

    def __init__(self, rng: random.Random, *, wrong: float = 0.15) -> None:
        super().__init__(SpeculativeConfig.parse(NGRAM))  # type: ignore[arg-type]
        self._rng = rng
        self.answers = KnownAnswers(rng, wrong)

    def watch(self) -> LookupForecast:
        return LookupForecast(self.answers, self._most)

    def share_out(self, chances: Sequence[float], num_rows: int) -> Counter[int]:
        shares: Counter[int] = Counter()
        for place in self._rng.sample(range(len(chances)), len(chances)):
            number = min(self._rng.randint(0, self._most), max(0, num_rows - shares.total()))
            if number:
                shares[place] = number
        return shares


def make_eager(core: EngineCore, rng: random.Random, *, wrong: float = 0.15) -> Eager:
    """Let an engine that was started with `NGRAM` guess so."""
    assert core.config.scheduler.speculation is not None, "it has no programs for it"
    eager = core._scheduler.speculation = Eager(rng, wrong=wrong)
    return eager
