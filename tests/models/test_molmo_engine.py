"""Molmo through the engine and `LLM`: chunks, warm prefixes, preemption, devices change nothing."""

from typing import Any

import pytest

from mmjax import LLM, SamplingParams
from mmjax.engine.core import EngineCore
from mmjax.layers.module import flatten_params
from mmjax.models.model_source import load_model_config
from mmjax.models.molmo.model import MolmoForCausalLM
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.training.samples import make_sample
from tests.engine.tiny import answer_all, check_idle
from tests.families.directories import GOLDEN_MODELS
from tests.families.golden_models import NUM_STEPS, GoldenModel
from tests.models.served import make_request, start_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
MAX_MODEL_LEN = 120
LARGEST = 72
"""Embeddings of the largest image, of 1x6 crops."""
MODELS = {name: GoldenModel(name, GOLDEN_MODELS / name) for name in ("molmo_7b_d", "molmo_7b_o")}
CASES = ("square", "text_only", "photo", "tiny", "wide")


def start(hf_config: Any, params: Any, **settings: Any) -> EngineCore:
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": 64, **settings}
    return start_model(MolmoForCausalLM, hf_config, params, max_embeds={"image": LARGEST}, **sizes)


def sample_of(golden: GoldenModel, name: str) -> Sample:
    case = golden.cases[name]
    return make_sample(golden.processor.apply(case["prompt"], golden.images(case)))


def answer(core: EngineCore, samples: list[Sample], prefix: str) -> list[list[int]]:
    requests = [
        make_request(f"{prefix} {number}", sample, max_tokens=NUM_STEPS)
        for number, sample in enumerate(samples)
    ]
    return answer_all(core, requests)


@pytest.mark.slow  # 18 s of compiling; by default an engine answers a conversation below
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("molmo_7b_d", {"max_num_batched_tokens": 7, "num_blocks": 15, "size": 2}),
        ("molmo_7b_o", {}),
    ],
    ids=["chunks, preempted, two devices", "7b-o"],
)
def test_the_engine_answers_as_published(name: str, settings: dict[str, Any]):
    golden = MODELS[name]
    samples = [sample_of(golden, case) for case in CASES]
    expected = [golden.cases[case]["greedy_token_ids"] for case in CASES]
    core = start(golden.processor.info.get_hf_config(), golden.model.params, **settings)
    assert answer(core, samples, "cold") == expected
    assert (core.num_preemptions > 0) == ("num_blocks" in settings)
    assert answer(core, samples, "again") == expected
    # Where blocks are few, the last prompt's alone are still there.
    assert answer(core, samples[-1:], "warm") == expected[-1:]
    assert core.stats().prefix_cache_hits > 0
    check_idle(core)


@pytest.mark.slow  # 13 s of compiling
def test_four_devices_norm_queries_over_all_heads():
    """The published numbers' weights, cut into eight heads."""
    hf_config = load_model_config(str(GOLDEN_MODELS / "molmo_7b_o")).hf_config
    hf_config.num_attention_heads, params = 8, MODELS["molmo_7b_o"].model.params
    samples = [sample_of(MODELS["molmo_7b_o"], case) for case in CASES[:3]]
    alone = PagedModel(MolmoForCausalLM, hf_config, params, 128)
    expected = [list(alone.generate(sample, NUM_STEPS)) for sample in samples]
    assert len({tuple(answer) for answer in expected}) == len(samples)
    core = start(hf_config, params, size=4, max_num_seqs=1)
    assert answer(core, samples, "") == expected
    assert core.compilations == 0
    held = flatten_params(core.params)
    cut = {name for name, leaf in held.items() if not leaf.sharding.is_fully_replicated}
    assert {name.split(".")[0] for name in cut} == {"language_model"}
    # The table, the head, and of each block four products of attention and three of the MLP.
    assert len(cut) == 2 + 7 * hf_config.num_hidden_layers


def test_llm_answers_a_conversation_as_published():
    golden = MODELS["molmo_7b_d"]
    case = golden.cases["square"]
    image = golden.images(case)["image"][0]
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    parts = [
        {"type": "image_pil", "image_pil": image},
        {"type": "text", "text": case["user_text"]},
    ]
    with LLM(str(golden.path), use_tqdm_on_load=False, **sizes) as llm:
        chats = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
        prompt = {"prompt": case["user_text"], "multi_modal_data": {"image": image}}
        texts = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert llm.engine.compilations == 0
    for output in (*chats, *texts):
        assert list(output.prompt_token_ids) == case["prompt_token_ids"]
        assert list(output.outputs[0].token_ids) == case["greedy_token_ids"]
