"""What a wrong configuration raises."""

import pytest

from mmjax.processing import InputProcessingContext
from tests.processing.families import gemma3


def test_a_wrong_config_type_is_named():
    context = InputProcessingContext(model_config=gemma3.model_config(), tokenizer=None)
    assert context.get_hf_config() is context.model_config.hf_config
    with pytest.raises(TypeError, match="is a `Gemma3Config`, expected `int`"):
        context.get_hf_config(int)
