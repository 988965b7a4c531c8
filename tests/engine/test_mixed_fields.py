"""All sampling fields beside each other: every answer is the lone one, whatever the schedule.

To the last bit of its log-probabilities: in chunks, from caches, preempted, in any batch.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from mmjax.engine.core import EngineCore
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.params.structured_outputs import make_grammar
from mmjax.transport.messages import EngineCoreRequest, RequestOutputDelta, TokenLogprobs
from tests.engine.bench import choose_max_model_len, random_parts
from tests.engine.grammars import choice, install_tokenizer, prompt, regex
from tests.engine.tiny import EOS
from tests.families import TINY_FAMILIES, served_model
from tests.families.tiny import TinyModel
from tests.models.served import count_least_blocks, make_request, start_engine

NUM_REQUESTS = 30
STRUCTURES = (
    regex("[a-f]{20}"),
    regex("(xy|z){2,9}"),
    choice("red", "green", "greenish"),
    StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'),
    StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
)


@dataclass
class Answer:
    """All that a client is told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    ending: Any = None
    """Reason and stop token, or the error."""

    def add(self, delta: RequestOutputDelta) -> None:
        self.token_ids += delta.new_token_ids
        self.logprobs += delta.new_logprobs or []
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            self.ending = delta.finish_reason, delta.stop_reason


def draw_fields(rng: random.Random) -> dict[str, Any]:
    """Return any mixture of sampling fields."""
    max_tokens = rng.randint(1, 24)
    ids = range(2, 93)
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.3, 0.9, 1.5]),
        "top_p": rng.choice([0.5, 0.9, 0.999]),
        "top_k": rng.choice([1, 3, 20, 96]),
        "min_p": rng.choice([0.01, 0.2]),
        "presence_penalty": rng.choice([-2.0, 0.4, 2.0]),
        "frequency_penalty": rng.choice([-0.7, 0.3, 2.0]),
        "repetition_penalty": rng.choice([0.7, 1.2, 3.0]),
        "no_repeat_ngram_size": rng.choice([1, 2, 3]),
        "no_repeat_ngram_window_size": rng.choice([1, 2, 8]),
        "logit_bias": {token_id: rng.uniform(-9, 9) for token_id in rng.sample(ids, 12)},
        "bad_words": ["x"],
        "allowed_token_ids": rng.sample(ids, rng.choice([2, 30, 80])),
        "min_tokens": rng.randint(0, max_tokens),
        "stop_token_ids": rng.sample(ids, 12),
        "logprobs": rng.choice([0, 1, 5, 20]),
        "prompt_logprobs": rng.choice([0, 2, 20]),
        "ignore_eos": True,
        "structured_outputs": rng.choice(STRUCTURES),
    }
    chosen = {name: value for name, value in fields.items() if rng.random() < 0.25}
    return {**chosen, "max_tokens": max_tokens, "seed": rng.randrange(-(2**63), 2**63)}


def draw_request(rng: random.Random, number: int, model: TinyModel) -> EngineCoreRequest:
    """Return a request as P0 sends it; beginnings and pictures are shared with others."""
    sample = model.draw_sample(random_parts(rng, model.family))
    request = make_request(f"{number}", sample, eos=[EOS, 40, 41], **draw_fields(rng))
    structure = request.sampling_params.structured_outputs
    words = [prompt(rng.randrange(99), size) for size in rng.choices([1, 1, 2, 3], k=20)]
    return msgspec.structs.replace(
        request,
        grammar=None if structure is None else make_grammar(structure),
        bad_words_token_ids=words if request.sampling_params.bad_words else [],
        priority=rng.choice([0, 0, 0, 1]),
    )


def serve(
    core: EngineCore, batch: Sequence[EngineCoreRequest], rng: random.Random
) -> dict[str, Answer]:
    """Serve requests that arrive between steps."""
    answers = {request.request_id: Answer() for request in batch}
    to_come = list(reversed(batch))
    while to_come or core.has_unfinished():
        while to_come and rng.random() < 0.7:
            core.add_request(to_come.pop())
        for request_id, error in core.pop_failed():
            answers[request_id].ending = type(error), error.param
        for delta in core.step():
            answers[delta.request_id].add(delta)
    assert core.compilations == 0
    return answers


def start(model: TinyModel, **settings: Any) -> EngineCore:
    core = start_engine(model, max_model_len=choose_max_model_len(model), **settings)
    return install_tokenizer(core)


class Pair:
    """An engine that serves one request at a time and keeps nothing, and a cramped one."""

    def __init__(self, name: str, max_num_seqs: int = 4) -> None:
        self.model = model = served_model(name)
        largest = max(*model.family.max_embeds.values(), model.paged.max_encoder_len)
        settings: dict[str, Any] = {"async_scheduling": False, "enable_prefix_caching": False}
        sizes = {"encoder_cache_size": 4 * largest, "max_num_encoder_input_tokens": 2 * largest}
        whole = max(64, model.family.longest_run)
        has_states = bool(model.paged.cache_spec.states)
        self.in_order = start(
            model, max_num_batched_tokens=whole, max_num_seqs=1, **sizes, **settings
        )
        self.cramped = start(
            model,
            max_num_seqs=max_num_seqs,
            # Chunks of 21 tokens, and whole ones of recurrent layers.
            max_num_batched_tokens=max(21, model.family.longest_run * has_states),
            num_blocks=count_least_blocks(model, choose_max_model_len(model)) * 5 // 4,
            scheduling_policy="priority",
            **sizes,
        )

    def find_differences(self, seed: int) -> Iterator[tuple[EngineCoreRequest, Answer, Answer]]:
        """Serve a batch; yield the requests with another answer than alone, and both."""
        rng = random.Random(seed)
        batch = [draw_request(rng, number, self.model) for number in range(NUM_REQUESTS)]
        together = serve(self.cramped, batch, rng)
        for request in batch:
            alone = serve(self.in_order, [request], rng)[request.request_id]
            if together[request.request_id] != alone:
                yield request, together[request.request_id], alone


@pytest.mark.slow  # beside guesses, such requests are in `test_draft.py`
@pytest.mark.parametrize("name", ["gemma3", "blip2"])
def test_every_answer_is_the_lone_one(name: str) -> None:
    """BLIP-2's longest request has fewer keys than a tile attends to at once."""
    pair = Pair(name)
    for seed in range(4):
        assert [*pair.find_differences(seed)] == [], f"{seed=}"
    assert pair.cramped.num_preemptions > 0
    assert pair.cramped.stats().prefix_cache_hits > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TINY_FAMILIES)
def test_every_answer_of_a_family_is_the_lone_one(name: str) -> None:
    pair = Pair(name, max_num_seqs=8)
    for seed in range(20):
        assert [*pair.find_differences(seed)] == [], f"{seed=}"
    # Answers of 24 tokens do not grow out of a pool for its prompts of 1,700.
    assert pair.cramped.num_preemptions > 0 or name == "deepseek_ocr2"
