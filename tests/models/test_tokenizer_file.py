"""Tokenizers whose tokenizer_config.json names a class that would cut texts otherwise."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mmjax.models.model_source import load_model_config
from mmjax.models.registry import MULTIMODAL_REGISTRY
from tests.families.directories import edit_json
from tests.families.idefics3 import IDEFICS3

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
"""SmolLM2's, which SmolVLM's files have."""
SPLIT = {
    "type": "Split",
    "pattern": {"Regex": r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]"},
    "behavior": "Isolated",
    "invert": False,
}
"""As GPT-4's, which Granite-Docling's have."""
TEXT = "the 1212 red cars<end_of_utterance>"


def write_checkpoint(path: Path, first: dict[str, Any], *, uses_regex: bool) -> Path:
    """Write a checkpoint with a pair of digits in its vocabulary, and GPT-2's class."""
    shutil.copytree(IDEFICS3.path(), path)
    file = path / "tokenizer.json"
    whole = json.loads(file.read_text())
    for pair in ("12", "1212"):
        half = pair[: len(pair) // 2]
        whole["model"]["merges"].append([half, half if pair != "12" else "2"])
        whole["model"]["vocab"][pair] = 900 + len(pair)
    parts = [first, {**BYTES, "use_regex": uses_regex}]
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    file.write_text(json.dumps(whole))
    edit_json(path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    return path


@pytest.mark.parametrize(
    ("first", "uses_regex"), [(DIGITS, True), (SPLIT, False)], ids=["digits", "split"]
)
def test_a_text_is_cut_as_tokenizer_json_has_it(
    tmp_path: Path, first: dict[str, Any], uses_regex: bool
):
    path = write_checkpoint(tmp_path / "model", first, uses_regex=uses_regex)
    tokenizer = MULTIMODAL_REGISTRY.load_tokenizer(load_model_config(str(path)))
    written = Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = tokenizer.encode(TEXT)
    assert ids == written.encode(TEXT).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_class_that_cuts_as_the_file_is_kept(tmp_path: Path):
    path = Path(shutil.copytree(IDEFICS3.path(), tmp_path / "model"))
    edit_json(path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    tokenizer = MULTIMODAL_REGISTRY.load_tokenizer(load_model_config(str(path)))
    assert type(tokenizer).__name__ == "GPT2Tokenizer"
