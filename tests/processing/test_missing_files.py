"""A checkpoint that lacks a file: an error that names it, for every family."""

from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from mmjax.errors import CheckpointError
from mmjax.models.registry import create_processor
from tests.families import FAMILIES
from tests.families.directories import golden_path
from tests.families.family import Family

NOT_OF_A_PROCESSOR = {"expected.json", "generation_config.json", "config_longctx.json"}
"""Or of what is needed to answer."""


def find_cases(*, is_needed: bool) -> list[Any]:
    return [
        pytest.param(family, file.name, id=f"{family.name}-{file.name}")
        for family in FAMILIES.values()
        for file in sorted(family.path().iterdir())
        if file.suffix in (".json", ".jinja", ".tiktoken") and file.name not in NOT_OF_A_PROCESSOR
        if (file.name not in family.needless_files) == is_needed
    ]


def process_without(family: Family, name: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    unread = ignore_patterns(name, "*.safetensors", "expected.json")
    copytree(family.path(), path, ignore=unread)
    processor = create_processor(str(path))
    inputs = processor.dummy_inputs.get_dummy_processor_inputs(64, {"image": 1})
    processor.apply(inputs.prompt, inputs.mm_data)


@pytest.mark.parametrize(("family", "name"), find_cases(is_needed=True))
def test_the_file_that_is_missing_is_named(family: Family, name: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{name}[^\n]*$"):
        process_without(family, name, tmp_path)


@pytest.mark.parametrize(("family", "name"), find_cases(is_needed=False))
def test_what_is_not_needed_may_be_missing(family: Family, name: str, tmp_path: Path):
    process_without(family, name, tmp_path)


def test_a_directory_without_any_file_of_a_processor_says_so(tmp_path: Path):
    path = tmp_path / "checkpoint"
    copytree(golden_path("llava"), path)
    for file in ("processor_config.json", "tokenizer_config.json"):
        (path / file).unlink()
    words = "has no preprocessor_config.json, no processor_config.json, no tokenizer_config.json"
    with pytest.raises(CheckpointError, match=words):
        create_processor(str(path)).info.get_hf_processor()
