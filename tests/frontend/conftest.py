"""A tiny model's input processor, for tests of the frontend and the server."""

from pathlib import Path

import pytest

from mmjax.config.engine_config import ModelConfig
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config


@pytest.fixture(scope="session")
def model_config(tiny_gemma3: Path) -> ModelConfig:
    """The tiny checkpoint's configuration, short enough to overflow."""
    return load_model_config(str(tiny_gemma3), max_model_len=128, served_model_name="tiny")


@pytest.fixture(scope="session")
def input_processor(model_config: ModelConfig) -> InputProcessor:
    """Its input processor; keep nothing in it."""
    return InputProcessor(model_config)
