"""Reasoning and answer told apart: every format, whole and in pieces, opened by whom."""

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.config.server_config import ReasoningParserName
from mmjax.frontend.output.reasoning import REASONING_FORMATS, ReasoningReader

ASKED = "<|im_start|>assistant\n"
SAID: list[tuple[str, str, str, tuple[str, str]]] = [
    # Qwen3-VL-Thinking's template opens the reasoning; another one closes it, or says nothing.
    ("qwen3", f"{ASKED}<think>\n", "a ring?\n</think>\n\nRed.", ("a ring?\n", "\n\nRed.")),
    ("qwen3", f"{ASKED}<think>\n", "a ring, but", ("a ring, but", "")),
    ("qwen3", f"{ASKED}<think>\n\n</think>\n\n", "Red </think>.", ("", "Red </think>.")),
    ("qwen3", ASKED, "Red.", ("", "Red.")),
    ("qwen3", ASKED, "\n<think>so</think>Red", ("so", "Red")),
    ("qwen3", ASKED, "It is <think>so</think>", ("", "It is <think>so</think>")),
    ("qwen3", ASKED, "\n<thi", ("", "\n<thi")),
    ("qwen3", ASKED, " " * 300, ("", " " * 300)),
    ("glm45", "<|assistant|>\n", "<think>a < b</think>\n<|begin_of_box|>7<|end_of_box|>",
     ("a < b", "\n<|begin_of_box|>7<|end_of_box|>")),
    ("glm45", "<|assistant|>\n<think></think>\n", "7", ("", "7")),
    ("glm45", "<|assistant|>\n", "<think>a</thin", ("a</thin", "")),
    ("gemma4", "<|turn>model\n", "<|channel>thought\na ring<channel|>Red.", ("a ring", "Red.")),
    ("gemma4", "<|turn>model\n", "<|channel>thought\n<channel|>Red.", ("", "Red.")),
    ("gemma4", "<|turn>model\n", "<|channel>thou", ("thou", "")),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "Red.", ("", "Red.")),
    ("mistral", "[/INST]", "[THINK]a ring[/THINK]Red.", ("a ring", "Red.")),
]  # fmt: skip


def read(name: str, prompt: str, said: str, seed: int | None = None) -> tuple[str, str]:
    """Return reasoning and text of an answer that comes whole, or in pieces by `seed`."""
    form = REASONING_FORMATS[name]
    reader, chooser = ReasoningReader(form, is_open=form.is_open(prompt)), random.Random(seed)
    parts, place = [], 0
    while place < len(said):
        size = len(said) if seed is None else chooser.choice([1, 1, 2, 3, 7])
        parts.append(reader.push(said[place : place + size]))
        place += size
    parts.append(reader.finish())
    return "".join(one.reasoning for one in parts), "".join(one.text for one in parts)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(("name", "prompt", "said", "expected"), SAID)
def test_formats(name: str, prompt: str, said: str, expected: tuple[str, str], seed: int | None):
    assert read(name, prompt, said, seed) == expected


def test_every_format_can_be_set():
    assert set(get_args(ReasoningParserName)) == REASONING_FORMATS.keys()


MARKS = ["<think>", "</think>", "<|channel>", "<channel|>", "thought\n", "[THINK]", "[/THINK]"]


@given(
    name=st.sampled_from(sorted(REASONING_FORMATS)),
    said=st.lists(st.sampled_from([*MARKS, *"<th/]| \n"]), max_size=12).map("".join),
    prompt=st.sampled_from(["", *MARKS]),
    seed=st.integers(0, 10**6),
)
def test_pieces_are_read_as_the_whole_is(name: str, said: str, prompt: str, seed: int):
    whole = read(name, prompt, said)
    assert read(name, prompt, said, seed) == whole
    if not whole[0] and REASONING_FORMATS[name].start not in said and not prompt:
        assert whole[1] == said, "nothing is lost of an answer without reasoning"


def test_reasoning_comes_out_as_it_goes_in():
    reader = ReasoningReader(REASONING_FORMATS["qwen3"], is_open=True)
    assert [reader.push(piece) for piece in ("a", "b </", "c</think", ">d", "e")] == [
        ("a", ""),
        ("b ", ""),
        ("</c", ""),
        ("", "d"),
        ("", "e"),
    ]
