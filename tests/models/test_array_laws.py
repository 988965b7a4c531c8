"""Laws that every family's arrays obey: a new family adds a row to `tests/families`.

One model alone against HF's, live; then the engine, whose answers are those of one pass over each
whole prompt, whatever it does at once and over however many devices.
"""

import re
from functools import cache
from itertools import combinations
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mmjax.engine.core import EngineCore
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.registry import MODELS
from mmjax.parity.arrays import Sample
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import calls_by_modality, generate_reference, run_reference
from mmjax.rounding import cdiv
from tests.engine.tiny import answer_all, check_idle
from tests.families import ALL_FAMILIES, TINY_FAMILIES, served_model
from tests.families.default_run import (
    ASKED,
    HELD_ELSEWHERE,
    LEAST_ALIKE,
    NAMED_AS_MODULES,
    NEAR,
    READ_ELSEWHERE,
    VARIANTS,
    rows,
    slow_unless,
)
from tests.families.tiny import Parts, TinyFamily, TinyModel
from tests.kit import is_slow_run
from tests.models.served import cramp, make_request, start_engine
from tests.oracle import TOLERANCE, assert_close

WITH_GOLDEN_MODELS = {"deepseek_vl2", "molmo", "qwen_vl"}
"""Transformers has no class of them: their own tests compare with what the published code gave."""
MAX_TOKENS = 16
"""So many that requests which begin together grow out of few blocks."""
NEVER = np.finfo(np.float32).min
"""The logit of a token that is never sampled."""


def is_asked(row: str, number: int, variant: str) -> bool:
    """Return whether the default run compares a row's variant, of a number and a name."""
    return variant in VARIANTS.get(row, ()) if number else row not in HELD_ELSEWHERE


ROWS = [
    pytest.param(
        family,
        name,
        id=f"{family.name}-{name}",
        marks=slow_unless(is_asked(row, number, name)),
    )
    for row, family in TINY_FAMILIES.items()
    for number, name in enumerate(family.variants)
]


def test_every_architecture_is_under_the_laws():
    under = {family.folder for family in ALL_FAMILIES.values() if family.tiny is not None}
    assert under | WITH_GOLDEN_MODELS == {row.folder for row in MODELS.values()}


def test_the_default_runs_tables_name_families_and_later_variants():
    tables = (NEAR, NEAR.values(), LEAST_ALIKE, VARIANTS, HELD_ELSEWHERE, NAMED_AS_MODULES)
    for table in (*tables, READ_ELSEWHERE, *ASKED.values()):
        assert set(table) <= ALL_FAMILIES.keys()
        assert table
    for row, names in VARIANTS.items():
        assert set(names) <= {*list(TINY_FAMILIES[row].variants)[1:]}


# Graphs are equal or not by the layers that they are of: rows that differ most have all kinds.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=slow_unless(name in LEAST_ALIKE)) for name in TINY_FAMILIES],
)
def test_models_of_one_configuration_are_equal(name: str):
    """Their blocks too, which are traced and lowered once where they are alike (`call_block`)."""
    family = TINY_FAMILIES[name]
    first = next(iter(family.variants.values()))
    config = family.make_config(**first.settings)
    graph, again = (
        build_abstract(family.model_class, config, dtype=jnp.float32)[0] for _ in range(2)
    )
    assert graph == again


# ---- one model alone -----------------------------------------------------------------------------


def list_prompts(family: TinyFamily, name: str) -> dict[str, Parts]:
    """Return a variant's prompts: of the first one those of every kind, unless it names some.

    Each number and size of pictures is a program of a tower: the slow run has all of them.
    """
    is_first = name == next(iter(family.variants))
    if not is_first or family.variants[name].prompts:
        return family.variant_prompts(name)
    return family.prompts if is_slow_run() else family.richest_prompts


@pytest.mark.parametrize(("family", "name"), ROWS)
def test_states_logits_and_tokens_are_hfs(family: TinyFamily, name: str):
    variant = family.variants[name]
    model = TinyModel(family, **variant.settings)
    is_first = name == next(iter(family.variants))
    prompts = list_prompts(family, name)
    for kind, parts in prompts.items():
        # Decoding is the same code in each variant and behind each prompt; the slow run has the
        # tokens of all.
        is_decoded = is_first and kind == list(prompts)[-1]
        num_states = check_prompt(model, parts, num_tokens=32 if is_decoded else 0)
        more = family.num_clip_states if kind == "clips" else 0
        assert kind == "text" or num_states == variant.num_states + more, kind


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), ROWS)
def test_tokens_of_every_variant_are_hfs(family: TinyFamily, name: str):
    model = TinyModel(family, **family.variants[name].settings)
    for parts in list_prompts(family, name).values():
        check_prompt(model, parts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", TINY_FAMILIES.values(), ids=TINY_FAMILIES)
def test_a_wide_model_with_published_heads_says_what_hf_says(family: TinyFamily):
    head_dim = family.published_head_dim
    num_heads = cdiv(1024, head_dim)
    model = TinyModel(family, **family.resize(num_heads * head_dim, head_dim, num_heads))
    for parts in family.variant_prompts(next(iter(family.variants))).values():
        check_prompt(model, parts, atol=1e-4)


def check_prompt(
    model: TinyModel, parts: Parts, *, atol: float = TOLERANCE, num_tokens: int = 32
) -> int:
    """Compare states, logits and greedy tokens of a prompt; return how many states."""
    sample = model.draw_sample(parts)
    module, inputs = model.family.torch_call(model.reference, sample)
    expected = run_reference(module, inputs, model.rules)
    got = model.paged.run(sample, by_modality=calls_by_modality(inputs))
    is_never = (expected[LOGITS] == NEVER).all(0)
    assert (got[LOGITS][:, is_never] == NEVER).all()
    for states in (expected, got):
        states[LOGITS] = states[LOGITS][:, ~is_never]
    assert_close(got, expected, atol)
    if num_tokens:
        tokens = generate_reference(module, inputs, num_tokens)
        assert model.paged.generate(sample, num_tokens) == tokens
    return len(expected)


# ---- the engine ----------------------------------------------------------------------------------


@cache
def make_workload(name: str) -> tuple[list[Sample], list[list[int]]]:
    """Return an engine's prompts, and the greedy answers of one pass over each, without it."""
    model = served_model(name)
    samples = [model.draw_sample(parts) for parts in model.family.workload]
    return samples, [list(model.paged.generate(sample, MAX_TOKENS)) for sample in samples]


NAMES = rows("answers of one pass", TINY_FAMILIES)
SETTLED = {"llava_next", "qwen3_asr"}
"""Whose tiny weights answer two of the prompts alike, whatever is read: their logits differ."""


@pytest.mark.parametrize("name", NAMES)
def test_answers_depend_on_all_that_is_read(name: str):
    """The oracle would not see what neither side obeys."""
    samples, answers = make_workload(name)
    if name in SETTLED:
        first = [served_model(name).paged.decode(sample, 1)[0] for sample in samples]
        near = [np.abs(one - other).max() < 1e-2 for one, other in combinations(first, 2)]
        assert not any(near)
    else:
        assert len({tuple(answer) for answer in answers}) == len(answers)


CRAMPED = {"max_num_batched_tokens": 7, "is_cramped": True}
ENGINES = [
    pytest.param({**CRAMPED, "size": 4}, id="chunks, preempted, four devices"),
    pytest.param(CRAMPED, id="chunks, preempted", marks=pytest.mark.slow),
    pytest.param({"is_cramped": True}, id="whole prompts, preempted", marks=pytest.mark.slow),
    pytest.param({"size": 2}, id="two devices", marks=pytest.mark.slow),
    pytest.param({"size": 4, "max_num_seqs": 1}, id="four devices", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("settings", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_one_pass(name: str, settings: dict[str, Any]):
    model, settings = served_model(name), dict(settings)
    samples, expected = make_workload(name)
    is_cramped = settings.pop("is_cramped", False)
    if is_cramped:
        settings |= cramp(model, samples, MAX_TOKENS)
    if "max_num_batched_tokens" in settings:
        chunk = max(settings["max_num_batched_tokens"], model.family.longest_run)
        settings["max_num_batched_tokens"] = chunk
    core = start_engine(model, **settings)
    batch = [make_request(f"{n}", one, max_tokens=MAX_TOKENS) for n, one in enumerate(samples)]
    assert answer_all(core, batch) == expected
    for request, answer in zip(batch, expected, strict=True):
        assert answer_all(core, [request]) == [answer], "its beginning is in the cache"
    # Prompts here are too short for a recurrent layer's states to be found again.
    has_prefixes = model.paged.shares_prefixes
    # Prompts that see all of themselves share no part, and a pool for one request keeps no other's.
    if model.paged.sees != "prompt" or not (is_cramped or "max_num_seqs" in settings):
        assert (core.stats().prefix_cache_hits > 0) == has_prefixes
    assert (core.num_preemptions > 0) == is_cramped
    check_idle(core)
    if "size" in settings:
        check_is_cut(core, settings["size"])


def check_is_cut(core: EngineCore, size: int) -> None:
    """Each device holds its part of every product's weights in every block of the decoder.

    But for routers of experts: each device chooses for all tokens; and latents, which heads share.
    """
    whole = {
        name
        for name, leaf in flatten_params(core.params).items()
        if leaf.ndim == 2 and re.match(r"language_model\..*layers\.\d+\.", name)
        if leaf.sharding.shard_shape(leaf.shape) == leaf.shape
        # A bias behind a product whose sums are over the devices is whole.
        and not name.endswith(
            (
                *(".gate.weight", ".router.weight", ".shared_expert_gate.weight"),
                *(".down_proj_bias", ".q_a_proj.weight", ".kv_a_proj_with_mqa.weight"),
            )
        )
    }
    assert whole == set(), f"not cut over {size} devices"
