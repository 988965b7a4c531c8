"""The tokenizer: words whole, everything else spelled, nothing lost."""

import random
from pathlib import Path
from typing import Any

import pytest
from build_checkpoint import NEWLINES, SPACE, SPECIAL_TOKENS, build_tokenizer, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from questions import ONE_KINDS, ask
from scenes import EVALUATION, sample_number, sample_scene
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tests.checkpoints.conftest import TINY_SCENES

TOKENIZER = build_tokenizer()


def encode(text: str) -> list[str]:
    return TOKENIZER.encode(text, add_special_tokens=False).tokens


def test_the_committed_files_are_the_scripts(tmp_path: Path):
    write_checkpoint(tmp_path)
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(written) == 7
    for name, content in written.items():
        assert (TINY_SCENES / "model" / name).read_bytes() == content, name


def test_questions_are_words():
    rng = random.Random(0)
    for _ in range(300):
        scene = sample_scene(rng, EVALUATION, sample_number(rng))
        question = ask(rng.choice(ONE_KINDS), scene, rng)
        if question is not None:
            text = question.text.replace("'s", "")
            assert len(encode(text)) <= len(text.split()) + 6, encode(text)
            spelled = [piece for piece in encode(text) if len(piece.strip(SPACE)) == 1]
            assert {piece.strip(SPACE) for piece in spelled} <= set("a?.,:!"), spelled


def test_pieces():
    assert encode("What color is the circle?") == [
        *("what", "▁color", "▁is", "▁the", "▁circle", "?")
    ]
    assert encode("a red circle, a blue star 407") == [
        *("a", "▁red", "▁circle", ",", "▁a", "▁blue", "▁star", "▁", "4", "0", "7")
    ]
    assert encode("user\n\n\n<start_of_image>") == ["user", "\n\n\n", "<start_of_image>"]
    assert encode("\n" * 5) == ["\n\n\n\n", "\n"]
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(9))
    assert all(encode(newlines) == [newlines] for newlines in NEWLINES)


@given(st.text())
def test_any_text_comes_back_in_lower_case(text: str):
    for special in SPECIAL_TOKENS:
        text = text.replace(special, "")
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    back = TOKENIZER.decode(ids, skip_special_tokens=True)
    normal = TOKENIZER.normalizer.normalize_str(text).replace(SPACE, " ")
    assert back == normal.replace(SPACE, " ")
    assert TOKENIZER.token_to_id("<unk>") not in ids


@pytest.mark.parametrize("text", ["a red circle, a blue star", "none", "47", "user\n\n\n\nhi ♥"])
def test_transformers_reads_it_alike(text: str):
    tokenizer: Any = AutoTokenizer.from_pretrained(TINY_SCENES / "model")
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id == 2
    assert ids[1:] == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert isinstance(tokenizer.backend_tokenizer, Tokenizer)
    assert tokenizer.image_token_id == 8
    assert (tokenizer.boi_token, tokenizer.eoi_token) == ("<start_of_image>", "<end_of_image>")
