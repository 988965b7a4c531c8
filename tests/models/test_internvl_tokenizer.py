"""Tokenizers of InternVL's original layout that have `tokenizer.model` alone, as published."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.convert_slow_tokenizer import import_protobuf

from mmjax.errors import CheckpointError
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import MULTIMODAL_REGISTRY
from tests.families.internvl import INTERNVL_ORIGINAL

PAIRS = "▁h he ll ▁he llo ▁hello ▁w or ld ▁wor ▁world ▁t ▁th ▁the at ▁cat".split()
LETTERS = "▁abcdehilnortuw?."
UNUSED = "[UNUSED_TOKEN_1]"
"""InternLM2's marks of turns have the places of such pieces."""
MARKS = ("<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>")
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6

TEXT = "hello world<img><IMG_CONTEXT></img>the  cat\né?<|im_end|>"
_SECOND = (275, 275, 278, 273, 13, 198, 172, 290, 292)
IDS = {
    # With the dummy prefix or without, in each part: recorded of sentencepiece 0.2.3, which the
    # published code calls for the text between the marks.
    (False, True): [1, 260, 263, 269, 293, 295, 294, 287, 260, *_SECOND],
    (True, True): [1, 264, 269, 293, 295, 294, 272, *_SECOND],
    # The first part alone has it where `legacy` of tokenizer_config.json is false.
    (True, False): [1, 264, 269, 293, 295, 294, 287, 260, *_SECOND],
}
"""By `has_prefix` and `is_legacy`."""


def write_model(path: Path, *, has_prefix: bool, model_type: int = 2) -> int:
    """Write a small model as SentencePiece's, and return the number of its pieces."""
    messages: Any = import_protobuf()
    proto = messages.ModelProto()
    pieces = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0, BYTE) for byte in range(256)]
    pieces += [(pair, -number, NORMAL) for number, pair in enumerate(PAIRS)]
    pieces += [(letter, -100 - number, NORMAL) for number, letter in enumerate(LETTERS)]
    for piece, score, kind in [*pieces, (UNUSED, -1000, NORMAL)]:
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback = model_type, True
    proto.normalizer_spec.add_dummy_prefix = has_prefix
    proto.normalizer_spec.remove_extra_whitespaces = False
    path.write_bytes(proto.SerializeToString())
    return len(proto.pieces)


def write_checkpoint(path: Path, *, is_legacy: bool = True, **options: Any) -> Path:
    """Write a checkpoint with the files of a tokenizer that are published."""
    shutil.copytree(INTERNVL_ORIGINAL.checkpoint, path)
    for file in (*path.glob("tokenizer*"), *path.glob("*.jinja")):
        file.unlink()
    number = write_model(path / "tokenizer.model", **options) - 1
    special = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {
        str(number + place): {"content": mark, "special": True, **special}
        for place, mark in enumerate(MARKS)
    }
    settings = {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(MARKS),
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "legacy": is_legacy,
        "tokenizer_class": "InternLM2Tokenizer",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def load(path: Path) -> Any:
    return MULTIMODAL_REGISTRY.load_tokenizer(load_model_config(str(path)))


@pytest.mark.parametrize(("has_prefix", "is_legacy"), IDS)
def test_a_text_has_the_ids_of_sentencepiece(tmp_path: Path, has_prefix: bool, is_legacy: bool):
    path = write_checkpoint(tmp_path / "model", has_prefix=has_prefix, is_legacy=is_legacy)
    tokenizer = load(path)
    assert tokenizer.encode(TEXT) == IDS[has_prefix, is_legacy]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert set(MARKS) <= set(tokenizer.all_special_tokens)
    if not has_prefix:
        assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT


def test_a_file_that_is_no_model_of_pairs(tmp_path: Path):
    path = write_checkpoint(tmp_path / "model", has_prefix=False)
    write_model(path / "tokenizer.model", has_prefix=False, model_type=1)
    with pytest.raises(CheckpointError, match=r"`model_type` of .*tokenizer\.model` is 1"):
        load(path)
    (path / "tokenizer.model").write_bytes(b"\x0a\xff nonsense")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model` is no model of SentencePiece"):
        load(path)
    (path / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        load(path)


def test_a_token_without_a_place(tmp_path: Path):
    path = write_checkpoint(tmp_path / "model", has_prefix=False)
    file = path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["added_tokens_decoder"]["293"]
    file.write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=r"`</img>` is token 294 .* is 293: one is missing"):
        load(path)
