"""The tiny Qwen-VL checkpoint; the oracle follows the published processor's description.

transformers has no class of it, and the published one is remote code.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from tests.families.directories import GOLDEN_MODELS, golden_path
from tests.families.family import CHATML, Family, HFInputs
from tests.families.published import Published
from tests.families.published_names import list_qwen_vl, read_qwen_vl

PATH = golden_path("qwen_vl")
SIDE, NUM_QUERIES = 128, 256
START, END, PAD = 504, 505, 506
MEAN = np.array([0.48145466, 0.4578275, 0.40821073])
STD = np.array([0.26862954, 0.26130258, 0.27577711])


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PATH / "tokenizer.json"))


def to_pixels(image: Image.Image) -> np.ndarray:
    resized = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return ((np.asarray(resized) / 255 - MEAN) / STD).transpose(2, 0, 1)


def call_published(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Tokenize the texts around the images; a path between the marks is dropped."""
    pieces = re.split(r"<img>.*?</img>", prompt, flags=re.DOTALL)
    assert len(pieces) == len(images) + 1
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        ids += [START, *[PAD] * NUM_QUERIES, END] if number else []
        ids += tokenizer().encode(piece).ids
    return HFInputs(ids, {"pixel_values": np.array([to_pixels(image) for image in images])})


def write(folder: Path) -> Path:
    return Path(copytree(GOLDEN_MODELS / "qwen_vl_chat", folder / "qwen_vl"))


QWEN_VL = Family(
    name="qwen_vl",
    architecture="QWenLMHeadModel",
    has_reference=False,
    path=lambda: PATH,
    write=write,
    needless_files=frozenset({"tokenizer_config.json", "qwen.tiktoken", "tokenizer.json"}),
    published=Published(make_config=read_qwen_vl, list_shapes=list_qwen_vl),
    rendered="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    + CHATML.format(image="Picture 1: <img></img>\n"),
    with_system=("You are a helpful assistant.", "be short"),
    call_hf=call_published,
    embed_token_ids=lambda processor: [PAD],
    placeholder="<img></img>",
    tensors={"pixel_values": 1e-6},
    words=(*Family.words, "<|im_start|>", "Picture 1: ", "<ref>the car</ref>"),
)
