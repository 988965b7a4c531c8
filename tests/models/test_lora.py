"""Adapters of every kind that is served, against PEFT on torch; and engines with many of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mmjax.config.engine_config import LoRAConfig
from mmjax.engine.core import EngineCore
from mmjax.errors import ConfigError
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import calls_by_modality, generate_reference, run_reference
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import answer_all
from tests.families import TINY_FAMILIES, served_model
from tests.families.default_run import mark
from tests.families.tiny import TinyModel
from tests.models.adapters import EMBEDDINGS, HEAD, TEXT, TOWERS, make_adapter
from tests.models.served import cramp, make_request, start_engine
from tests.oracle import assert_close

pytestmark = [
    pytest.mark.filterwarnings(one)
    for one in (
        # PEFT asks HF's models for it.
        "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
        # What PEFT says of adapters of heads and embeddings, and of biases, that are merged.
        "ignore:Setting `save_embedding_layers`:UserWarning",
        "ignore:Model has `tie_word_embeddings=True`:UserWarning",
        "ignore:`lora_bias=True` was passed:UserWarning",
        # It expects matrices alone, and writes the bias of B beside them.
        "ignore:Adapter 'default'.*invalid shape:UserWarning",
    )
]
NAMES = [name for name in TINY_FAMILIES if name not in ("blip2_t5", "florence2", "whisper")]
"""An encoder-decoder's adapters are refused."""
IN_ONE_PASS = ("mllama",)
"""An engine refuses those of cross-attention to pictures, too."""
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    # Scaled as the others are; eight times as loud (states of Qwen2-VL reach 300), it magnifies
    # rounding beyond 1e-4.
    "rank-1": {"r": 1, "lora_alpha": 2},
    "rank-64": {"r": 64, "use_rslora": True},
    "patterns": {
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "down_proj": 5},
        "alpha_pattern": {"v_proj": 40},
    },
    "towers": {"parts": (TEXT, TOWERS)},
    "towers-alone": {"parts": (TOWERS,)},
    "bias": {"bias": "lora_only", "parts": (TEXT, TOWERS)},
    "bias-of-b": {"lora_bias": True},
    "embeddings": {"parts": (TEXT, EMBEDDINGS)},
    "head": {"parts": (TEXT, HEAD)},
}
OF_EVERY_FAMILY = ("bias", "embeddings", "head")
"""Which layers there are, and under which names; the others are of rules that no family changes."""
LEAST_ALIKE = ("llava", "gemma3", "molmo2", "qwen2_vl", "qwen3_vl", "internvl")
LAWS = {"towers": "PEFT's towers", "rank-1": "PEFT's rank 1"}
"""Of the default run, by kind."""
CASES = [
    pytest.param(name, kind, marks=mark(LAWS[kind], name) if kind in LAWS else pytest.mark.slow)
    for name in NAMES
    for kind in (KINDS if name in LEAST_ALIKE else OF_EVERY_FAMILY)
    # HF has one table, whose adapters have rows for the tokens behind the vocabulary, too.
    if (name, kind) != ("molmo2", "embeddings")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_and_tokens_are_pefts(name: str, kind: str, tmp_path: Path):
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.served)
    adapter = make_adapter(model, tmp_path, **KINDS[kind])
    model.paged.load_adapter(tmp_path)
    for parts in family.variant_prompts(next(iter(family.variants))).values():
        sample = model.draw_sample(parts)
        module, inputs = family.torch_call(adapter.reference, sample)
        expected = run_reference(module, inputs, model.rules)
        found = model.paged.run(sample, by_modality=calls_by_modality(inputs))
        assert_close(found, expected, 1e-4)
        tokens = model.paged.generate(sample, 32)
        assert tokens == generate_reference(module, inputs, 32)
        plain = generate_reference(*family.torch_call(model.reference, sample), 32)
        assert tokens != plain, "the adapter changes nothing"


ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"r": 1},
    "eight": {"r": 8, "seed": 1},
    "sixty-four": {"r": 64, "use_rslora": True, "seed": 2},
    "towers": {**KINDS["towers"], "seed": 3},
}
MAX_TOKENS = 16
ENGINES: dict[str, dict[str, Any]] = {
    "together": {"max_num_seqs": 5},
    "two slots": {"max_num_seqs": 5, "max_loras": 2},
    "chunked, preempted": {"max_num_seqs": 5, "max_num_batched_tokens": 24, "is_cramped": True},
    "two devices": {"max_num_seqs": 5, "size": 2},
}


class AdaptedModel:
    """A family's tiny model, four adapters of it, and what PEFT answers with each, and without."""

    def __init__(self, name: str, path: Path) -> None:
        family = TINY_FAMILIES[name]
        self.model = TinyModel(family, **family.served)
        self.samples = [self.model.draw_sample(parts) for parts in family.workload[:3]]
        references: dict[str | None, Any] = {None: self.model.reference}
        self.paths = {one: path / one for one in ADAPTERS}
        for one, settings in ADAPTERS.items():
            references[one] = make_adapter(self.model, self.paths[one], **settings).reference
        self.answers = {
            (one, place): generate_reference(*family.torch_call(module, sample), MAX_TOKENS)
            for one, module in references.items()
            for place, sample in enumerate(self.samples)
        }

    def start(self, *, max_loras: int = 4, is_cramped: bool = False, **settings: Any) -> EngineCore:
        """Start an engine with all adapters."""
        lora = LoRAConfig(
            enable_lora=True,
            max_loras=max_loras,
            max_lora_rank=64,
            enable_tower_connector_lora=True,
        )
        if "max_num_batched_tokens" in settings:
            chunk = max(settings["max_num_batched_tokens"], self.model.family.longest_run)
            settings["max_num_batched_tokens"] = chunk
        if is_cramped:
            settings |= cramp(self.model, self.samples, MAX_TOKENS)
        core = start_engine(self.model, lora=lora, **settings)
        for one, path in self.paths.items():
            core.load_adapter(one, path)
        core.wait_loaded()
        return core


@pytest.mark.parametrize("name", [*IN_ONE_PASS, "florence2"])
def test_an_engine_refuses_adapters_of_cross_attention(name: str) -> None:
    with pytest.raises(ConfigError, match=r"`enable_lora` is set, but .* cross-attention"):
        start_engine(served_model(name), lora=LoRAConfig(enable_lora=True))


def make_adapted_request(name: str | None, place: int, sample: Sample) -> EngineCoreRequest:
    """Return a request as P0 sends it: an image is another one for each adapter."""
    request = make_request(f"{name} {place}", sample, max_tokens=MAX_TOKENS)
    if name is None:
        return request
    features = [replace(one, identifier=f"{name}:{one.mm_hash}") for one in request.mm_features]
    return msgspec.structs.replace(request, lora_name=name, mm_features=features)


@pytest.fixture(scope="module")
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AdaptedModel(request.param, tmp_path_factory.mktemp("adapters"))


# By default `tests/engine/test_adapters.py` compares a batch of five with each alone, and
# `test_adapter_machine.py` there with adapters that come and go; alone they are PEFT's above.
BATCHES = [
    pytest.param(name, engine, marks=pytest.mark.slow)
    for name in NAMES
    if name not in IN_ONE_PASS
    for engine in (ENGINES if name in LEAST_ALIKE else ("chunked, preempted", "two devices"))
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("adapted", "engine"), BATCHES, indirect=["adapted"])
def test_one_batch_has_pefts_answers_of_four_adapters_and_of_none(
    adapted: AdaptedModel, engine: str
) -> None:
    core = adapted.start(**ENGINES[engine])
    names = [*adapted.paths, None]
    keys = [(one, place) for place in range(len(adapted.samples)) for one in names]
    batch = [make_adapted_request(one, place, adapted.samples[place]) for one, place in keys]
    expected = [list(adapted.answers[key]) for key in keys]
    assert len(set(map(tuple, expected[: len(names)]))) == len(names)
    assert answer_all(core, batch) == expected
    assert answer_all(core, batch) == expected, "out of the cache"
    if engine == "chunked, preempted":  # in so few blocks that none keeps a prefix
        assert core.stats().num_preemptions > 0
    elif core._scheduler.state_slots is None:  # else prompts are too short for states to be kept
        assert core.stats().prefix_cache_hits > 0
    assert core._scheduler.adapter_slots.num_running == 0
    core.close()
