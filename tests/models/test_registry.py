"""The table of models: the halves are where it says, and an unknown name gets the nearest."""

from pathlib import Path

import pytest
from transformers import configuration_utils

from mmjax.errors import CheckpointError
from mmjax.models.registry import (
    MODELS,
    MULTIMODAL_REGISTRY,
    ProcessorFactories,
    create_processor,
    get_processor_factories,
    load_model_class,
    require_model,
)
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import FAMILIES, gemma3
from tests.families.directories import get_placeholder_str
from tests.families.ultravox import ULTRAVOX


@pytest.mark.parametrize("architecture", MODELS)
def test_every_architecture_has_a_processor(architecture: str):
    assert isinstance(get_processor_factories(architecture), ProcessorFactories)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_directory_alone_gives_a_processor(name: str):
    processor = create_processor(FAMILIES[name].path())
    inputs = MultiModalProfiler(processor).get_dummy_mm_inputs(
        {"image": 1}, max_num_batched_tokens=1024
    )
    maximum = MultiModalProfiler(processor).get_mm_max_tokens_per_item()["image"]
    assert inputs.mm_placeholders["image"][0].get_num_embeds() == maximum
    assert MULTIMODAL_REGISTRY.supports_multimodal_inputs(processor.info.ctx.model_config)


def test_transformers_does_not_warn_of_a_type_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
):
    told: list[str] = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(configuration_utils.logger, name, lambda text, *_: told.append(text))
    create_processor(ULTRAVOX.path())
    assert told == []


@pytest.mark.parametrize("architecture", MODELS)
def test_a_served_architecture_has_a_model(architecture: str):
    require_model(architecture)
    assert load_model_class(architecture).__name__ == architecture


def test_an_unknown_architecture_gets_the_nearest_name():
    for refuse in (require_model, get_processor_factories, load_model_class):
        with pytest.raises(CheckpointError, match="`Gemma4ForGeneration` is not") as caught:
            refuse("Gemma4ForGeneration")
        assert "the nearest supported one is `Gemma4ForConditionalGeneration`" in str(caught.value)
    with pytest.raises(CheckpointError, match="nearest"):
        get_placeholder_str("", "image", 1)


def test_placeholders():
    assert get_placeholder_str(gemma3.ARCHITECTURE, "image", 1) == "<start_of_image>"
    assert get_placeholder_str(gemma3.ARCHITECTURE, "audio", 1) is None


def test_a_directory_without_tokenizer_is_named(tmp_path: Path):
    config = gemma3.model_config()
    broken = type(config)(
        model="broken",
        path=tmp_path,
        hf_config=config.hf_config,
        architecture=config.architecture,
        max_model_len=10,
    )
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; is the directory complete"):
        create_processor(broken)
