"""Fuyu's tiny golden directory, and HF's processor as the oracle."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer
from transformers.models.fuyu.image_processing_pil_fuyu import FuyuImageProcessorPil
from transformers.models.fuyu.processing_fuyu import FuyuProcessor

from tests.processing.families.family import GOLDEN, Family, HFInputs, golden_processor


class TorchPatches(FuyuImageProcessorPil):
    """HF's `FuyuProcessor` hands its PIL image processor torch pixels, and wants a torch batch."""

    def patchify_image(self, image: Any, patch_size: Any = None) -> Any:
        return torch.from_numpy(super().patchify_image(np.asarray(image), patch_size))[None]


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    path = GOLDEN / "fuyu"
    return FuyuProcessor(TorchPatches.from_pretrained(path), AutoTokenizer.from_pretrained(path))


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    outputs = hf_processor()(text=prompt, images=images or None, return_tensors="np", **kwargs)
    tensors = {key: np.asarray(value) for key, value in outputs.items()}
    return HFInputs(tensors["input_ids"].reshape(-1).tolist(), tensors)


def takes_size(width: int, height: int) -> bool:
    """A side must have a pixel left when the picture is scaled to fit 90x60."""
    scale = min(1, 90 / width, 60 / height)
    return int(width * scale) > 0 and int(height * scale) > 0


FAMILY = Family(
    name="fuyu",
    make_processor=partial(golden_processor, "fuyu"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: [processor.info.get_hf_config().image_token_id],
    max_images=1,
    tensors={"image_patches": 1e-6},
    colours_last=True,
    takes_size=takes_size,
    lowering_kwargs={"size": {"height": 30, "width": 40}},
    words=(*Family.words, *("<s>", "</s>", "|ENDOFTEXT|", "|NEWLINE|", "<box>1, 2, 3, 4</box>")),
)
