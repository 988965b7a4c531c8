"""Adapters of every kind that is served, against PEFT on torch; and engines with many of them."""

from pathlib import Path
from typing import Any

import pytest

from mmjax.parity.reference import generate_reference, run_reference
from tests.models.adapters import TEXT, TOWERS, make_adapter
from tests.models.families import TINY_FAMILIES
from tests.models.families.family import TinyModel
from tests.oracle import assert_close

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks HF's models for it.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
NAMES = ("llava", "gemma3", "qwen2_vl", "internvl")
KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "rank-1": {"r": 1},
    "rank-64": {"r": 64, "use_rslora": True},
    "patterns": {
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 3, "down_proj": 5},
        "alpha_pattern": {"v_proj": 40},
    },
    "towers": {"target_modules": f"({TEXT})|({TOWERS})", "exclude_modules": r".*patch_embed.*"},
    "towers-alone": {"target_modules": TOWERS, "exclude_modules": r".*patch_embed.*"},
    "bias": {"bias": "lora_only", "target_modules": f"({TEXT})|({TOWERS})"},
    "bias-of-b": {"lora_bias": True},
    "embeddings": {"target_modules": r".*language_model.*(q_proj|embed_tokens)"},
    "head": {"target_modules": r".*(q_proj|lm_head)"},
}
DEFAULT = {("llava", "text"), ("gemma3", "towers"), ("qwen2_vl", "towers"), ("internvl", "rank-1")}
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in DEFAULT else pytest.mark.slow)
    for name in NAMES
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_and_tokens_are_pefts(name: str, kind: str, tmp_path: Path):
    family = TINY_FAMILIES[name]
    model = TinyModel(family, **family.served)
    plain = model.make_paged(model.params)
    adapter = make_adapter(model.reference, tmp_path, **KINDS[kind])
    model.paged.load_adapter(tmp_path)
    for parts in family.variant_prompts.values():
        sample = model.draw_sample(parts)
        module, inputs = family.torch_call(adapter.reference, sample)
        expected = run_reference(module, inputs, model.rules)
        if "video" in family.max_embeds:
            expected = {key: value for key, value in expected.items() if "visual" not in key}
        assert_close(model.paged.run(sample), expected, 1e-4)
        tokens = model.paged.generate(sample, 32)
        assert tokens == generate_reference(module, inputs, 32)
        assert tokens != plain.generate(sample, 32), "the adapter changes nothing"
