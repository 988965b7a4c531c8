"""The table of models: both halves are where it says, and an unknown name gets the nearest."""

import pytest

from mmjax.errors import CheckpointError
from mmjax.models.registry import (
    MODELS,
    create_processor,
    find_model,
    get_placeholder_str,
    load_model_class,
)
from tests.processing.families import gemma3


@pytest.mark.parametrize("architecture", MODELS)
def test_both_halves_exist(architecture: str):
    assert load_model_class(architecture).__name__ == architecture


def test_an_unknown_architecture_gets_the_nearest_name():
    with pytest.raises(CheckpointError, match="`Gemma3ForCausalLM` is not supported") as caught:
        find_model("Gemma3ForCausalLM")
    assert "the nearest supported one is `Gemma3ForConditionalGeneration`" in str(caught.value)
    with pytest.raises(CheckpointError, match="nearest"):
        get_placeholder_str("", "image", 1)


def test_placeholders():
    assert get_placeholder_str(gemma3.ARCHITECTURE, "image", 1) == "<start_of_image>"
    assert get_placeholder_str(gemma3.ARCHITECTURE, "audio", 1) is None


def test_a_directory_without_tokenizer_is_named(tmp_path):
    config = gemma3.model_config()
    broken = type(config)(
        model="broken",
        path=tmp_path,
        hf_config=config.hf_config,
        architecture=config.architecture,
        max_model_len=10,
    )
    with pytest.raises(CheckpointError, match="the tokenizer of `broken` cannot be loaded"):
        create_processor(broken)
