"""A checkpoint that lacks a file: an error that names it, for every family."""

from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from mmjax.errors import CheckpointError
from mmjax.models.registry import create_processor
from tests.processing.families import FAMILIES
from tests.processing.families.family import golden_path

NOT_OF_A_PROCESSOR = {"expected.json", "generation_config.json", "config_longctx.json"}
NEEDLESS = {
    # The family's own template, or an error of the request that would need one.
    ("gemma3", "chat_template.jinja"),
    ("internvl", "chat_template.jinja"),
    ("llava", "chat_template.jinja"),
    ("qwen2_vl", "chat_template.jinja"),
    # What is in them is also the default.
    ("blip2", "tokenizer_config.json"),
    ("deepseek_vl2", "processor_config.json"),
    ("deepseek_vl2", "tokenizer_config.json"),
    ("florence2", "tokenizer_config.json"),
    ("fuyu", "tokenizer_config.json"),
    ("internvl", "tokenizer_config.json"),
    ("llava", "tokenizer_config.json"),
    ("molmo", "processor_config.json"),
    ("qwen2_vl", "tokenizer_config.json"),
    ("qwen_vl", "tokenizer_config.json"),
    # Either of the two is enough.
    ("qwen_vl", "qwen.tiktoken"),
    ("qwen_vl", "tokenizer.json"),
}
CASES = [
    (family, file.name)
    for family in FAMILIES
    for file in sorted(golden_path(family).iterdir())
    if file.suffix in (".json", ".jinja", ".tiktoken") and file.name not in NOT_OF_A_PROCESSOR
]


def process_without(family: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    unread = ignore_patterns(name, "*.safetensors", "expected.json")
    copytree(golden_path(family), path, ignore=unread)
    processor = create_processor(str(path))
    inputs = processor.dummy_inputs.get_dummy_processor_inputs(64, {"image": 1})
    processor.apply(inputs.prompt, inputs.mm_data)


@pytest.mark.parametrize(("family", "name"), [case for case in CASES if case not in NEEDLESS])
def test_the_file_that_is_missing_is_named(family: str, name: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{name}[^\n]*$"):
        process_without(family, name, tmp_path)


@pytest.mark.parametrize(("family", "name"), sorted(NEEDLESS))
def test_what_is_not_needed_may_be_missing(family: str, name: str, tmp_path: Path):
    assert (family, name) in CASES
    process_without(family, name, tmp_path)


def test_a_directory_without_any_file_of_a_processor_says_so(tmp_path: Path):
    path = tmp_path / "checkpoint"
    copytree(golden_path("llava"), path)
    for file in ("processor_config.json", "tokenizer_config.json"):
        (path / file).unlink()
    words = "has no preprocessor_config.json, no processor_config.json, no tokenizer_config.json"
    with pytest.raises(CheckpointError, match=words):
        create_processor(str(path)).info.get_hf_processor()
