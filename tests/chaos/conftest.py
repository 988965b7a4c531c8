"""A tiny model's input processor, for engines without a model."""

from pathlib import Path

import pytest

from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config


@pytest.fixture(scope="session")
def input_processor(tiny_gemma3: Path) -> InputProcessor:
    """Its prompts may have 128 tokens; keep nothing in it."""
    return InputProcessor(load_model_config(str(tiny_gemma3), max_model_len=128))
