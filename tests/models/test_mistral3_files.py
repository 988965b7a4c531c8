"""Mistral 3's checkpoints with the files that are published beside their weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmjax.errors import CheckpointError
from mmjax.frontend.prompt.chat_template import ChatTemplate
from mmjax.models.registry import create_processor
from mmjax.processing import BaseMultiModalProcessor
from tests.families.directories import edit_json
from tests.families.mistral3 import EDGE, MERGE, PATCH, mistral3_path
from tests.families.voxtral import PATTERN, make_tekken

WRONG = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
"""An expression as tokenizer.json of Mistral Small 3.1 has it: words are not cut at capitals."""
IMG, BREAK, END = 10, 12, 13


def write_tekken(path: Path, *left_out: str) -> Path:
    """Write a checkpoint as Mistral Small 3.2's: no tokenizer.json, and no settings for images."""
    shutil.copytree(mistral3_path(), path)
    for file in path.glob("*.json"):
        if file.name != "config.json":
            file.unlink()
    tekken = {key: value for key, value in make_tekken().items() if key not in left_out}
    (path / "tekken.json").write_text(json.dumps(tekken))
    edit_json(path / "config.json", {"image_token_id": IMG, "text_config.vocab_size": 1024})
    return path


def render(processor: BaseMultiModalProcessor[Any], *messages: tuple[str, Any]) -> str:
    info: Any = processor.info
    template = ChatTemplate.from_config(
        info.ctx.model_config, info.get_tokenizer(), family_source=info.chat_template
    )
    texts = [{"role": role, "content": content} for role, content in messages]
    return template.render(texts)


def test_mistrals_own_tokenizer_file_is_enough(tmp_path: Path):
    processor: Any = create_processor(str(write_tekken(tmp_path / "model")))
    image = Image.new("RGB", (EDGE, EDGE // 2), "red")
    found = processor.apply("[INST]what is it[IMG]?[/INST]", {"image": [image]})
    ids = found.prompt_token_ids
    assert ids[:2] == [1, 3], "BOS, and the start of a turn"
    side = EDGE // (PATCH * MERGE)
    counts = [ids.count(token) for token in (IMG, BREAK, END)]
    assert counts == [side * side // 2, side // 2 - 1, 1]


def test_a_system_message_has_its_own_marks(tmp_path: Path):
    processor = create_processor(str(write_tekken(tmp_path / "model")))
    question: Any = [{"type": "image"}, {"type": "text", "text": "what?"}]
    found = render(
        processor,
        ("system", [{"type": "text", "text": "be short"}]),
        ("user", question),
        ("assistant", [{"type": "text", "text": "a car"}]),
        ("user", [{"type": "text", "text": "which color?"}]),
    )
    assert found == (
        "[SYSTEM_PROMPT]be short[/SYSTEM_PROMPT][INST][IMG]what?[/INST]a car</s>"
        "[INST]which color?[/INST]"
    )


def test_a_vocabulary_without_special_tokens_is_refused(tmp_path: Path):
    path = write_tekken(tmp_path / "model", "special_tokens")
    with pytest.raises(CheckpointError, match="with its `special_tokens`"):
        create_processor(str(path))


def test_tokenizer_json_cuts_texts_as_the_model_was_trained(tmp_path: Path):
    """HF's looks for the expression in tokenizers of more than 100,000 tokens alone."""
    path = Path(shutil.copytree(mistral3_path(), tmp_path / "model"))
    file = path / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocab = whole["model"]["vocab"]
    vocab |= {f"\x00{number}": 1000 + number for number in range(100_000)}
    whole["model"]["merges"].append(["a", "R"])
    vocab["aR"] = 999
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    whole["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {**split, "pattern": {"Regex": WRONG}},
            {**whole["pre_tokenizer"], "use_regex": False},
        ],
    }
    file.write_text(json.dumps(whole))
    edit_json(path / "config.json", {"transformers_version": "4.50.0.dev0"})
    tokenizer = create_processor(str(path)).info.get_tokenizer()
    assert PATTERN in repr(tokenizer.backend_tokenizer.pre_tokenizer).replace("\\\\", "\\")
    assert 999 not in tokenizer.encode("aRed")
