"""A draft model guesses what the engine's model says: fewer steps, and not a bit of an answer else.

A model that guesses for itself is always right, if it sees the same pictures and has its own keys
of all that came before: any that it lacks show as a wrong guess.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import pytest

from mmjax import LLM, SamplingParams
from mmjax.config.engine_config import EngineConfig, MultiModalConfig, ParallelConfig
from mmjax.config.speculative_config import SpeculativeConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.outputs import WantedGuess
from mmjax.engine.scheduling.speculation import (
    MAX_STEPS_UNASKED,
    ROW_COST,
    DraftForecast,
    Speculation,
    StepTimes,
)
from mmjax.errors import CheckpointError, ConfigError
from mmjax.models.model_source import load_engine_config, resolve_model
from mmjax.transport.messages import MEMORY_CAUSES, EngineCoreRequest
from tests.engine.bench import choose_max_model_len
from tests.engine.grammars import install_tokenizer
from tests.engine.test_mixed_fields import NUM_REQUESTS, draw_request, serve
from tests.engine.tiny import (
    answer,
    answer_all,
    drain,
    drain_through_failures,
    engine_config,
    loud_params,
    message,
    start_tiny,
    tiny_config,
    tiny_engine,
    tiny_params,
    tokens_of,
)
from tests.families import served_model
from tests.families.tiny import TinyModel
from tests.kit import draw
from tests.models.served import count_least_blocks, make_config

DRAFT: dict[str, Any] = {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 4},
    {"temperature": 1.3, "seed": 9, "top_k": 20, "top_p": 0.9},
)


class Eager(Speculation):
    """Guesses for any requests, whether it pays or not."""

    def __init__(self, core: EngineCore, rng: random.Random | None = None) -> None:
        """`rng` None: as many tokens as there may be, of each request."""
        config = core.config.scheduler.speculation
        assert config is not None, "the engine guesses nothing"
        super().__init__(config, None if core._draft is None else core._draft.runner)
        self.is_on, self._rng = True, rng
        core._scheduler.speculation = self

    def share_out(self, chances: Sequence[float], num_rows: int) -> Counter[int]:
        shares: Counter[int] = Counter()
        if self.is_on and self._draft is not None and self._draft.is_ready:
            for place in range(len(chances)):
                most = self._most if self._rng is None else self._rng.randint(0, self._most)
                shares[place] = min(most, max(0, num_rows - shares.total()))
        return +shares


def draft_config(*, size: int = 1, **settings: Any) -> EngineConfig:
    """Return an engine's configuration with a draft model of the same config.json."""
    settings = {"speculative_config": DRAFT, "precompile": "none", **settings}
    config = engine_config(**settings)
    parallel = ParallelConfig(tensor_parallel_size=size)
    return replace(config, draft=replace(config.model, model="small"), parallel=parallel)


def start(config: EngineConfig, draft_params: Any = None) -> EngineCore:
    """Start an engine of the tiny model; its draft has the same weights, or those given."""
    _, params = tiny_params()
    return start_tiny(config, draft_params=params if draft_params is None else draft_params)


@pytest.fixture(scope="module")
def plain() -> EngineCore:
    return tiny_engine(precompile="none")


@pytest.fixture(scope="module")
def served() -> EngineCore:
    return start(draft_config())


@pytest.fixture
def core(served: EngineCore) -> EngineCore:
    served.reset_prefix_cache()
    return served


def requests_of(fields: dict[str, Any], **more: Any) -> list[EngineCoreRequest]:
    parts = [([2, 5, 9], (1, 1), [7, 8]), ([2, 5, 9], (3, 2), [7, 8, 11]), ([4, 4, 6, 50],)]
    return [message(f"{n}", one, **{**fields, **more}) for n, one in enumerate(parts)]


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", SAMPLINGS, ids=str)
def test_a_model_that_guesses_for_itself_is_always_right(
    core: EngineCore, plain: EngineCore, fields: dict[str, Any]
) -> None:
    """Sampled tokens, too: they are drawn by the requests' own seeds."""
    requests = requests_of(fields, max_tokens=24)
    eager = Eager(core)
    for again in (False, True):  # the second time behind a prefix that is found
        for request in requests:
            core.add_request(request)
        found, num_steps = {}, 0
        while core.has_unfinished():
            num_steps += 1
            for delta in core.step():
                found.setdefault(delta.request_id, []).append(delta)
        for request in requests:
            news = found[request.request_id]
            assert tokens_of(news) == answer(plain, request)
            assert (news[0].num_cached_tokens > 0) == (again and request.request_id != "2")
        assert num_steps < 12
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 100


def test_what_was_decoded_without_guesses_is_computed_before_the_next(
    core: EngineCore, plain: EngineCore
) -> None:
    """More tokens than a step of decoding has rows."""
    requests = requests_of({}, max_tokens=40)
    eager = Eager(core)
    eager.is_on = False
    for request in requests:
        core.add_request(request)
    found: dict[str, list[int]] = {one.request_id: [] for one in requests}
    while core.has_unfinished():
        for delta in core.step():
            found[delta.request_id] += delta.new_token_ids
        eager.is_on = len(found["2"]) > 20
    assert found == {one.request_id: answer(plain, one) for one in requests}
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 30


def test_other_weights_guess_wrongly_and_change_nothing(plain: EngineCore) -> None:
    _, others = loud_params(tiny_config(), 7)
    core = start(draft_config(), others)
    eager = Eager(core)
    for fields in SAMPLINGS[:2]:
        requests = requests_of(fields, max_tokens=24)
        assert answer_all(core, requests) == [answer(plain, one) for one in requests]
    assert eager.num_draft_tokens > 200 > 2 * eager.num_accepted_tokens


def compare_mixed(
    model: TinyModel,
    num_seeds: int,
    speculation: Mapping[str, Any] = DRAFT,
    draft_params: Any = None,
    *,
    least_accepted: int = 10,
    num_caches: float = 2,
    **draft: Any,
) -> EngineCore:
    """Serve mixed requests in a cramped engine with guesses, and alone without any.

    `draft_params` None: a draft model guesses, which has the model's own. `draft`: of the
    ModelConfig of what guesses from a checkpoint of its own. `num_caches`: how much larger a block
    is than the model's own.
    """
    family, max_model_len = model.family, choose_max_model_len(model)
    largest = max(family.max_embeds.values())
    sizes: dict[str, Any] = {
        "max_embeds": family.max_embeds,
        "max_model_len": max_model_len,
        "encoder_cache_size": 4 * largest,
        "max_num_encoder_input_tokens": 2 * largest,
    }
    options: dict[str, Any] = {"model_class": family.model_class, "params": model.params}
    whole = max(64, family.longest_run)
    lone = make_config(
        family.model_class, model.config, max_num_batched_tokens=whole, max_num_seqs=1, **sizes
    )
    cramped = make_config(
        family.model_class,
        model.config,
        max_num_seqs=4,
        max_num_batched_tokens=max(21, family.longest_run),
        num_blocks=int(num_caches * (count_least_blocks(model, max_model_len) * 5 // 4)),
        scheduling_policy="priority",
        speculative_config=speculation,
        **sizes,
    )
    if draft_params is None:
        draft, draft_params = {"architecture": family.model_class.__name__}, model.params
    if draft:
        cramped = replace(cramped, draft=replace(cramped.model, **draft))
    plain = install_tokenizer(EngineCore(lone, **options))
    core = install_tokenizer(EngineCore(cramped, draft_params=draft_params, **options))
    for seed in range(num_seeds):
        rng = random.Random(seed)
        eager = Eager(core, rng)
        batch = [draw_request(rng, number, model) for number in range(NUM_REQUESTS)]
        found = serve(core, batch, rng)
        for request in batch:
            alone = serve(plain, [request], rng)[request.request_id]
            assert found[request.request_id] == alone, f"{seed=}"
        assert eager.num_draft_tokens > eager.num_accepted_tokens > least_accepted
    assert core.num_preemptions > 0
    return core


@pytest.mark.timeout(600)
def test_mixed_requests_are_answered_as_alone() -> None:
    """With penalties, bad words, log-probabilities, priorities, preemption and grammars."""
    compare_mixed(served_model("gemma3"), 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "mistral3", "gemma4"])
def test_mixed_requests_of_a_family_are_answered_as_alone(name: str) -> None:
    compare_mixed(served_model(name), 4)


@pytest.mark.slow  # devices that share heads are in `test_parallel.py`, guesses above
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices; CPUs have virtual ones")
def test_over_two_devices(plain: EngineCore) -> None:
    core = start(draft_config(size=2))
    eager = Eager(core)
    requests = requests_of({}, max_tokens=16)
    assert answer_all(core, requests) == [answer(plain, one) for one in requests]
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 20


@pytest.mark.slow  # 40 s of compiling; `test_mtp.py` has an LLM that guesses
def test_the_embedded_default_guesses_for_itself() -> None:
    """From its directory, with real pictures and texts."""
    path = str(resolve_model(None))
    question = [{"type": "text", "text": "Describe the picture."}]
    chats: Any = [
        [
            {
                "role": "user",
                "content": [{"type": "image_pil", "image_pil": draw(96, 128, seed=n)}, *question],
            }
        ]
        for n in range(4)
    ]
    params = SamplingParams(temperature=0.6, seed=3, max_tokens=24, min_tokens=20)
    answers = []
    for given in ({}, {"model": path, "num_speculative_tokens": 3}):
        options: dict[str, Any] = {"speculative_config": given, "use_tqdm_on_load": False}
        with LLM(max_model_len=512, max_num_seqs=4, **options) as llm:
            eager = Eager(llm.engine) if given else None
            outputs = llm.chat(chats, params, use_tqdm=False)
            answers.append([output.outputs for output in outputs])
            if eager is not None:
                # But where `min_tokens` forbids an end, of which it knows nothing.
                assert eager.num_draft_tokens > eager.num_accepted_tokens > 40
    assert answers[0] == answers[1]


# ---- what happens to an engine -------------------------------------------------------------------


def test_a_failed_step_and_sleep_leave_nothing_behind(
    core: EngineCore, plain: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of({}, max_tokens=16)
    expected = {one.request_id: answer(plain, one) for one in requests}
    eager = Eager(core)
    for request in requests:
        core.add_request(request)
    draft, num_failures = core._draft, 0
    assert draft is not None
    guess = draft.runner.guess

    def fail(wanted: Sequence[WantedGuess]) -> list[list[int]]:
        nonlocal num_failures
        num_failures += 1
        if num_failures == 2:
            raise RuntimeError("the device fails")
        return guess(wanted)

    monkeypatch.setattr(draft.runner, "guess", fail)
    assert drain_through_failures(core) == expected
    core.sleep()
    core.wake_up()
    assert answer_all(core, requests) == list(expected.values())
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 50


def test_rows_of_the_draft_model_s_encoder_go_when_the_engine_s_do(core: EngineCore) -> None:
    Eager(core)
    for number in range(24):
        core.add_request(message(f"{number}", ([2], (100 + number, 2), [5]), max_tokens=2))
    drain(core)
    draft = core._draft
    assert draft is not None
    for number in range(24):
        name = f"picture-{100 + number}-2"
        assert (name in draft.runner.rows) == (name in core._runner.rows)
    assert "picture-123-2" in draft.runner.rows


def test_nothing_is_guessed_before_all_programs_are_compiled(plain: EngineCore) -> None:
    core = start(draft_config(precompile="smallest"))
    draft, request = core._draft, requests_of({}, max_tokens=30)[0]
    assert draft is not None
    Eager(core)
    assert answer(core, request) == answer(plain, request)
    for compiled in (core._programs, draft.compiled):
        while compiled.num_left:
            compiled.wait(0.1)
            compiled.check()
    core.reset_prefix_cache()
    eager = Eager(core)
    assert answer(core, request) == answer(plain, request)
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 10
    assert core.compilations == 0
    core.close()


def test_blocks_have_room_for_both_models() -> None:
    without = tiny_engine(num_blocks=40, precompile="none")
    core = start(draft_config(num_blocks=40))
    assert (without.num_kv_blocks, core.num_kv_blocks) == (40, 20)
    told, known = core.stats().memory_bytes, without.stats().memory_bytes
    assert told["draft_model"] > known["weights"] == told["weights"]
    assert told.keys() <= set(MEMORY_CAUSES)


# ---- when it pays --------------------------------------------------------------------------------


class FakeDraft:
    is_ready = True

    def guess(self, wanted: Sequence[WantedGuess]) -> list[list[int]]:
        return [[3] * one.num_tokens for one in wanted]


def speculate(
    draft_s: float, *, step_s: float = 0.1, ran: Sequence[int] = (1, 4, 8, 16)
) -> Speculation:
    """`ran`: rows of the steps that are known, which took what is usual."""
    config = SpeculativeConfig.parse(DRAFT)
    assert config is not None
    speculation = Speculation(config, FakeDraft())
    for _ in range(50):
        for rows in ran:
            usual_s = step_s * (1 + ROW_COST * rows) / (1 + ROW_COST)
            speculation.note_step(rows, usual_s, host_s=0.0)
    speculation._draft_s, speculation._num_unasked = draft_s, 0
    return speculation


def test_a_cheap_draft_model_is_asked_for_more_tokens() -> None:
    assert speculate(0.001).share_out([0.9], 15) == {0: 4}
    assert speculate(0.03).share_out([0.9], 15) == {0: 4}
    assert speculate(0.05).share_out([0.7], 15) == {0: 1}
    assert speculate(0.09).share_out([0.9], 15) == {}
    # Its tokens cost the same for any number of requests.
    assert speculate(0.09).share_out([0.9] * 4, 15) == {}
    assert speculate(0.03).share_out([0.9] * 4, 16).total() > 8
    not_ready = speculate(0.001)
    not_ready._draft.is_ready = False  # type: ignore[union-attr]
    assert not_ready.share_out([0.9], 15) == {}


def test_rows_that_were_slow_are_left_and_tried_again() -> None:
    """As of kernels that multiply 8 rows as they do one, and 16 in four times that."""
    decides = speculate(0.0)
    assert decides.share_out([0.95] * 4, 12).total() == 12
    for _ in range(8):
        for num_rows, step_s in ((4, 0.1), (8, 0.12), (16, 0.4)):
            decides.note_step(num_rows, step_s, host_s=0.0)
    assert decides.share_out([0.95] * 4, 12).total() == 4
    for _ in range(1200):
        decides.note_step(4, 0.1, host_s=0.0)
    assert decides.share_out([0.95] * 4, 12).total() == 12


def test_rows_that_nobody_knows_are_tried_by_twice_as_many() -> None:
    decides = speculate(0.0, ran=[4])
    assert decides.share_out([0.95] * 4, 12).total() == 4
    decides.note_step(8, 0.12, host_s=0.0)
    assert decides.share_out([0.95] * 4, 12).total() == 12
    # The line through 4 and 8 tells of 5, 6, 7 and of 16.
    slow = speculate(0.0, ran=[4])
    slow.note_step(8, 0.2, host_s=0.0)
    assert slow.share_out([0.95] * 4, 12) == {}


def test_steps_between_those_that_ran_lie_on_a_line() -> None:
    times = StepTimes()
    assert times.find(4) / times.find(1) == (1 + 4 * ROW_COST) / (1 + ROW_COST)
    for rows, seconds in ((2, 0.1), (8, 0.4)):
        times.note(rows, seconds)
    assert times.find(5) == pytest.approx(0.25, rel=0.02)
    assert times.find(16) == pytest.approx(0.8, rel=0.02)
    assert times.find(1) == pytest.approx(0.1 * (1 + ROW_COST) / (1 + 2 * ROW_COST), rel=0.02)
    assert [times.find_widest(rows) for rows in (1, 2, 8, 9)] == [16, 16, 16, 18]


def test_a_step_that_was_disturbed_makes_no_guess_pay() -> None:
    """As the first of a request, which waits for what its prompt left on the device."""
    decides = speculate(0.0, ran=[])
    decides.note_step(1, 0.18, host_s=0.01)
    decides.note_step(2, 0.06, host_s=None)
    assert decides.share_out([0.05], 4) == {}
    assert decides.share_out([0.9], 4).total() > 0


def test_what_does_not_pay_is_tried_again_now_and_then() -> None:
    speculation = speculate(0.3)
    found = []
    for _ in range(2 * MAX_STEPS_UNASKED + 2):
        found.append(speculation.share_out([0.2, 0.6], 15))
        if found[-1]:
            speculation.note_tokens(None, None, 1, 1)  # type: ignore[arg-type]
        else:
            speculation.note_step(1, 0.1, host_s=0.0)
    assert [one for one in found if one] == [{1: 1}] * 2


def test_a_new_request_begins_with_what_others_have_shown() -> None:
    speculation = speculate(0.01)
    right, wrong = speculation.watch(), speculation.watch()
    for _ in range(8):
        speculation.note_tokens(right, None, 4, 5)  # type: ignore[arg-type]
    assert right.chance > 0.9
    assert speculation.watch().chance > 0.9
    for _ in range(16):
        speculation.note_tokens(wrong, None, 4, 1)  # type: ignore[arg-type]
    assert wrong.chance < 0.2 < 0.9 < right.chance
    assert speculation.watch().chance < 0.3
    assert DraftForecast().chance == 0.75


# ---- which models may guess ----------------------------------------------------------------------


def test_a_draft_model_is_read_as_the_model_is() -> None:
    path = resolve_model(None)
    speculative = {"model": str(path), "num_speculative_tokens": 2}
    values = {"speculative_config": speculative, "max_model_len": 128, "quantization": "int8"}
    config = load_engine_config(values)
    assert config.draft is not None
    assert (config.draft.path, config.draft.quantization) == (path, "int8")
    assert config.draft.max_model_len == 128
    assert load_engine_config({}).draft is None
    with pytest.raises(CheckpointError, match="/nowhere"):
        load_engine_config({"speculative_config": speculative | {"model": "/nowhere"}})


@pytest.mark.usefixtures("all_sizes")
def test_a_model_that_does_not_fit_is_refused() -> None:
    def refuse(said: str, config: EngineConfig) -> None:
        with pytest.raises(ConfigError, match=said):
            start(config, params)

    other = tiny_config().to_dict()
    other["text_config"] |= {"vocab_size": 100}
    config = draft_config()
    assert config.draft is not None
    hf_config = type(tiny_config())(**other)
    _, params = loud_params(hf_config)
    refuse(
        "logits of 100 tokens", replace(config, draft=replace(config.draft, hf_config=hf_config))
    )
    other = tiny_config().to_dict()
    other["vision_config"] |= {"image_size": 56}
    hf_config = type(tiny_config())(**other)
    _, params = loud_params(hf_config)
    refuse("other units", replace(config, draft=replace(config.draft, hf_config=hf_config)))
    refuse("enable_mm_embeds", config.with_mm(MultiModalConfig(enable_mm_embeds=True)))
    cache = replace(config.cache, encoder_workers=("unix:///run/none",))
    refuse("encoder_workers", replace(config, cache=cache))
