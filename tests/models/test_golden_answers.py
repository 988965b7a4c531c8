"""The greedy tokens that HF's models gave for the golden prompts and images, from ours.

HF's weights are no file here: they follow from the parameters' names, by the formula below.
"""

import hashlib
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoConfig

from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.training.samples import make_sample
from tests.families.directories import GOLDEN
from tests.processing.test_golden import EXPECTED

NEAR_TIES = {("chameleon", "two"): 0.02}
"""Where our pixels (Pillow's, not torchvision's) choose other codes: the margin that they turn."""
NUM_TOKENS = 16
ASKED_LIVE = {"blip2", "chameleon", "florence2", "fuyu", "internvl", "llava", "qwen2_vl"}
"""By default HF itself is asked about these, with other weights: in `test_hf_answers.py`,
`test_florence2_llm.py` and `test_array_laws.py`."""
CASES = [
    pytest.param(
        name,
        case_name,
        id=f"{name}-{case_name}",
        marks=() if case_name == "sq" and name not in ASKED_LIVE else pytest.mark.slow,
    )
    for name in EXPECTED
    for case_name in EXPECTED[name]["generation"]
    if case_name != "vga"  # its image is a copy with losses
]


def fill(model: torch.nn.Module) -> None:
    """Fill a torch model as the one that gave the tokens was."""
    is_gemma = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = hashlib.sha256(f"0:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key[:6], "little"))
            value = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale(name.lower(), value, parameter, is_gemma=is_gemma))


def scale(name: str, value: Any, parameter: Any, *, is_gemma: bool) -> Any:
    is_table = any(part in name for part in ("embed", "position", "query_tokens"))
    is_table = is_table and not any(part in name for part in ("patch_embed", "proj"))
    if value.ndim >= 2 and is_table:
        width = value.shape[-1]
        return value * (0.1 if "vision" in name else 0.35 / (width**0.5 if is_gemma else 1.0))
    if value.ndim >= 2:
        return value / parameter[0].numel() ** 0.5
    if "norm" in name and name.endswith("weight"):
        return (0.0 if is_gemma and "vision" not in name else 1.0) + 0.05 * value
    return 0.02 * value if name.endswith("bias") else parameter + 0.05 * value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@cache
def load(name: str, folder: Path) -> tuple[Any, PagedModel]:
    """Return a family's processor and its model."""
    path = Path(copytree(GOLDEN / name, folder / name))
    config: Any = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)  # LLaVA's class token begins with what HF draws
    model = getattr(transformers, config.architectures[0])(config)
    fill(model)
    model.save_pretrained(path)
    settings = load_model_config(str(path))
    model_class: Any = load_model_class(settings.architecture)
    ours = PagedModel.from_directory(path, model_class, settings.hf_config, max_len=576)
    return create_processor(settings), ours


@pytest.mark.parametrize(("name", "case_name"), CASES)
def test_answers_are_hfs(folder: Path, name: str, case_name: str):
    case = EXPECTED[name]["generation"][case_name]
    processor, model = load(name, folder)
    images = [Image.open(GOLDEN / image) for image in case["images"]]
    sample = make_sample(processor.apply(case["prompt"], {"image": images} if images else {}))
    found = list(model.generate(sample, NUM_TOKENS))
    expected = case["greedy_token_ids"]
    assert len(expected) == NUM_TOKENS
    if name == "florence2":  # whose last token HF forces to be the end
        found, expected = found[:-1], expected[:-1]
    if (name, case_name) in NEAR_TIES:
        turned = next(i for i in range(NUM_TOKENS) if found[i] != expected[i])
        assert case["margin"][turned] < NEAR_TIES[name, case_name]
        found, expected = found[:turned], expected[:turned]
    assert found == expected
