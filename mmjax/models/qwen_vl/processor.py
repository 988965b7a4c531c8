"""Qwen-VL's processor: what stands between `<img>` and `</img>` becomes 256 embeddings.

Before: `Picture 1: <img>cat.png</img>`. After: `Picture 1: <img><imgpad>*256</img>`, where the
`<imgpad>` take embeddings. The path is dropped: it names an image to people alone.

Qwen's tokenizer from `qwen.tiktoken`: ranks of byte strings, as the `tokenizers` library's.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError
from mmjax.models.family import FamilyInfo, FamilyProcessor, Target, make_factories
from mmjax.models.qwen_vl.host_inputs import QwenVLHostInputs
from mmjax.processing.answers import REF_AND_BOX
from mmjax.processing.chat_turns import QWEN_SYSTEM, write_chatml
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.image_processors.image import to_pixels
from mmjax.processing.image_processors.parts import ProcessorOfParts
from mmjax.processing.items.parse import MultiModalDataItems
from mmjax.processing.tokenizer_file import build_ranked, read_ranks

IMG_START, IMG_END, IMG_PAD = "<img>", "</img>", "<imgpad>"
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = (
    *(END_OF_TEXT, IM_START, IM_END),
    *(f"<|extra_{number}|>" for number in range(205)),
    *("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", IMG_START, IMG_END, IMG_PAD),
)
"""In the order of their ids, which begin behind the last rank."""
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What a text is cut into before pairs are merged (tokenization_qwen.py, PAT_STR)."""


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory: of tokenizer.json, or qwen.tiktoken.

    `CheckpointError` where it has neither, or a line that is no rank.
    """
    # On use only: it brings an installed torch along.
    from transformers import PreTrainedTokenizerFast

    fast: dict[str, Any] = {"tokenizer_file": str(path / "tokenizer.json")}
    if not (path / "tokenizer.json").is_file():
        file = path / "qwen.tiktoken"
        if not file.is_file():
            raise CheckpointError(f"`{path}` has neither tokenizer.json nor qwen.tiktoken")
        fast = {"tokenizer_object": _build(file, file.stat().st_mtime_ns)}
    return PreTrainedTokenizerFast(
        **fast, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


@lru_cache(maxsize=2)
def _build(file: Path, modified: int) -> Any:
    # `modified` names the file's content.
    from tokenizers import normalizers

    others = [(token, True) for token in _SPECIAL_TOKENS]
    tokenizer = build_ranked(read_ranks(file), _PATTERN, others)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


_AFFINE = make_affine(
    rescale_factor=1 / 255,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
"""CLIP's, of red, green and blue (visual.py of the published code)."""
_PATH = re.compile(r"<img>.*?</img>", re.DOTALL)

CHAT_TEMPLATE = write_chatml("message.content", QWEN_SYSTEM)
"""ChatML, as `chat` of the published code writes it (qwen_generation_utils.py)."""


class QwenVLImageProcessor:
    """Scales images to a square, whatever their shape; takes no kwargs."""

    valid_kwargs = frozenset[str]()

    def __init__(self, side: int) -> None:
        self.side = side

    def __call__(
        self, images: Sequence[Image.Image], *, return_tensors: str = "np"
    ) -> dict[str, np.ndarray]:
        """Return `pixel_values`, uint8[images, 3, side, side], and `image_affine`."""
        pixels = np.stack([self._process(image) for image in images])
        return {"pixel_values": pixels, "image_affine": _AFFINE}

    def _process(self, image: Image.Image) -> np.ndarray:
        square = image.convert("RGB").resize((self.side, self.side), Image.Resampling.BICUBIC)
        return to_pixels(square)


class QwenVLProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Caption with boxes": "Generate the caption in English with grounding:",
    }
    host_inputs = QwenVLHostInputs
    answer_form = REF_AND_BOX
    embed_token = IMG_PAD
    reserves_embed_token = True
    placeholders: ClassVar = {"image": f"Picture {{i}}: {IMG_START}{IMG_END}"}

    def get_counted_placeholder(self, modality: str) -> str | None:
        return f"{IMG_START}{IMG_END}" if modality == "image" else None

    def get_ending_token_ids(self) -> Sequence[int]:
        return (self.get_token_id(IM_END),)

    def load_hf_processor(self) -> ProcessorOfParts:
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=QwenVLImageProcessor(self.get_largest_image().width),
        )

    def get_target(self, modality: str) -> Target:
        return [self.get_token_id(IMG_START), self.get_token_id(IMG_END)]

    def write_item(self, modality: str, size: int) -> list[int]:
        start, end = self.get_token_id(IMG_START), self.get_token_id(IMG_END)
        return [start, *super().write_item(modality, size), end]


class QwenVLMultiModalProcessor(FamilyProcessor[QwenVLProcessingInfo]):
    def _create_prompts(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        decoder_prompt: str | list[int] | None,
    ) -> tuple[str | list[int], str | list[int] | None]:
        """Drop what stands between `<img>` and `</img>`: a path, or its bytes and padding."""
        prompt, decoders = super()._create_prompts(prompt, mm_items, decoder_prompt)
        if isinstance(prompt, str):
            # Behind the last end no path is closed, and looking for one would be quadratic.
            stop = prompt.rfind(IMG_END) + len(IMG_END) if IMG_END in prompt else 0
            return _PATH.sub(f"{IMG_START}{IMG_END}", prompt[:stop]) + prompt[stop:], decoders
        start, end = (self.info.get_token_id(token) for token in (IMG_START, IMG_END))
        return _drop_between(prompt, start, end), decoders


def _drop_between(token_ids: list[int], start: int, end: int) -> list[int]:
    """Return the tokens without those that stand between a `start` and the next `end`."""
    ends = [place for place, token_id in enumerate(token_ids) if token_id == end]
    last_end = ends[-1] if ends else -1
    kept, is_inside = [], False
    for place, token_id in enumerate(token_ids):
        if is_inside and token_id != end:
            continue
        is_inside = token_id == start and place < last_end
        kept.append(token_id)
    return kept


FACTORIES = make_factories(
    QwenVLProcessingInfo, QwenVLMultiModalProcessor, load_tokenizer=load_tokenizer
)
