"""The tiny DeepSeek-VL2 checkpoint, and the published processor's rules as the oracle.

transformers has no class of it: the rules are written down here once more, plainly.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from mmjax.models.model_source import load_model_config
from tests.families.directories import GOLDEN_MODELS, golden_path
from tests.families.family import Family, HFInputs
from tests.families.published import Published
from tests.families.published_names import list_deepseek_vl2, read_deepseek_vl2

PATH = golden_path("deepseek_vl2")
BOS, IMAGE = 0, 333
SIDE, ROWS = 76, 3
"""Pixels of a tile's side, and rows of its embeddings."""


@cache
def tokenizer() -> Tokenizer:
    """Return the tokenizer as the library reads it, past transformers."""
    return Tokenizer.from_file(str(PATH / "tokenizer.json"))


@cache
def candidates() -> list[tuple[int, int]]:
    return [tuple(one) for one in load_model_config(str(PATH)).hf_config.candidate_resolutions]


def choose(width: int, height: int, *, cropping: bool) -> tuple[int, int]:
    """Return the canvas that keeps most of an image; of equals, the one that wastes least."""
    best, most_kept, least_wasted = (SIDE, SIDE), 0, 0
    for canvas in candidates() if cropping else [(SIDE, SIDE)]:
        scale = min(canvas[0] / width, canvas[1] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas[0] * canvas[1] - kept
        if kept > most_kept or (kept == most_kept and wasted < least_wasted):
            best, most_kept, least_wasted = canvas, kept, wasted
    return best


def pad(image: Image.Image, canvas: tuple[int, int]) -> Image.Image:
    """Return the image in the middle of a grey canvas, as large as fits."""
    width, height = canvas
    if image.width / image.height > width / height:
        height = round(image.height / image.width * width)
    elif image.width / image.height < width / height:
        width = round(image.width / image.height * height)
    out = Image.new("RGB", canvas, (127, 127, 127))
    place = (round((canvas[0] - width) * 0.5), round((canvas[1] - height) * 0.5))
    out.paste(image.resize((width, height), Image.Resampling.BICUBIC), place)
    return out


def to_array(tile: Image.Image) -> np.ndarray:
    pixels = np.asarray(tile, np.float32).transpose(2, 0, 1)
    return (pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Tokenize the texts around the images, and cut up to two images into tiles."""
    cropping = len(images) <= 2 and kwargs.get("cropping", True)
    texts = [tokenizer().encode(text).ids for text in prompt.split("<image>")]
    ids, tiles, crops = [BOS, *texts[0]], [], []
    for image, text in zip(images, texts[1:], strict=True):
        canvas = choose(*image.size, cropping=cropping)
        columns, rows = canvas[0] // SIDE, canvas[1] // SIDE
        tiles.append(to_array(pad(image, (SIDE, SIDE))))
        whole = to_array(pad(image, canvas))
        tiles += [
            whole[:, y * SIDE :, x * SIDE :][:, :SIDE, :SIDE]
            for y in range(rows)
            for x in range(columns)
        ]
        crops.append((columns, rows))
        num_tokens = ROWS * (ROWS + 1) + 1 + rows * ROWS * (columns * ROWS + 1)
        ids += [*[IMAGE] * num_tokens, *text]
    tensors = {"pixel_values": np.array(tiles), "images_spatial_crop": np.array(crops)}
    return HFInputs(ids, tensors)


def takes_size(width: int, height: int) -> bool:
    """A side must have a pixel left in the view of the whole."""
    return round(min(width, height) / max(width, height) * SIDE) > 0


def write(folder: Path) -> Path:
    return Path(copytree(GOLDEN_MODELS / "deepseek_vl2_base", folder / "deepseek_vl2"))


DEEPSEEK_VL2 = Family(
    name="deepseek_vl2",
    architecture="DeepseekVLV2ForCausalLM",
    has_reference=False,
    path=lambda: PATH,
    write=write,
    needless_files=frozenset({"processor_config.json", "tokenizer_config.json"}),
    published=Published(
        make_config=read_deepseek_vl2,
        list_shapes=lambda config: list_deepseek_vl2(
            config, {"width": 1152, "patch_size": 14, "image_size": 384, "layers": 27}
        ),
    ),
    rendered=(
        "<|User|>: <image>\n"
        "what is it\n"
        "\n"
        "<|Assistant|>:a car<｜end▁of▁sentence｜><|User|>: which color\n"
        "\n"
        "<|Assistant|>:"
    ),
    with_system=("", "be short\n\n"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [IMAGE],
    placeholder="<image>",
    max_images=2,  # of more, tests/models/test_deepseek_vl2.py: none is held by a cache
    # No `lowering_kwargs`: `cropping` is a switch, above which a request can ask for nothing.
    extra_kwargs=({}, {"cropping": False}),
    operator_kwargs=({"cropping": False},),
    tensors={"pixel_values": 1e-6, "images_spatial_crop": 0.0},
    takes_size=takes_size,
    words=(*Family.words, "<|User|>", "<|ref|>a<|/ref|>", "<|grounding|>"),
)
