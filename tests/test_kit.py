"""The kit itself: what it builds loads in HF, and its pictures matter to what its models say."""

from pathlib import Path
from typing import Any

import pytest

from tests.kit import ByteTokenizer, draw, gemma_tokenizer, random_image_prompt


def test_bytes_and_special_tokens_come_back():
    tokenizer = ByteTokenizer()
    text = "Zürich <image_soft_token>日"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["what color is it?", "a\n\n\nb", "日本 naïve", "  two  spaces "])
def test_the_tokenizer_gives_back_its_text(text: str):
    tokenizer = gemma_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_newlines_merge_into_the_longest_run():
    tokenizer = gemma_tokenizer()
    assert tokenizer.tokenize("a\n\n\n\nb") == ["a", "\n\n\n\n", "b"]


def test_the_checkpoint_answers_in_torch_and_the_picture_matters(tiny_gemma3: Path):
    import torch
    from transformers import Gemma3ForConditionalGeneration, Gemma3Processor

    processor: Any = Gemma3Processor.from_pretrained(tiny_gemma3)
    model = Gemma3ForConditionalGeneration.from_pretrained(tiny_gemma3)
    logits = []
    for seed in (0, 1):
        batch = processor(
            text=random_image_prompt(0, 1), images=[draw(50, 30, seed)], return_tensors="pt"
        )
        with torch.no_grad():
            logits.append(model(**batch).logits[0, -1])
    assert logits[0].std() > 0.1
    assert (logits[0] - logits[1]).abs().max() > 1e-3
