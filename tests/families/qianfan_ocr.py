"""Tiny Qianfan-OCRs: InternVL's tiles and tower, whose files have the original layout's names."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import QianfanOCRConfig, QianfanOCRForConditionalGeneration
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qianfan_ocr.processing_qianfan_ocr import QianfanOCRProcessor

from mmjax.models.internvl import model as ours
from tests.families import internvl
from tests.families.directories import edit_golden, made_once
from tests.families.family import CHATML, Family, written
from tests.families.published import MODULE, Published
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import Variant
from tests.models.original_internvl import to_original

QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 16}


def tiny_config(*, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, **settings: Any) -> Any:
    """Return HF's config: tiles of 4 x 4 patches, 4 embeddings each, before Qwen3's decoder."""
    settings = {"image_seq_length": 4, **settings}
    return QianfanOCRConfig(
        text_config={**internvl.TEXT, **QWEN3, **text},
        vision_config={**internvl.VISION, **vision},
        image_token_id=internvl.CONTEXT,
        **settings,
    )


TINY = replace(
    internvl.TINY,
    name="qianfan_ocr",
    model_class=ours.QianfanOCRForConditionalGeneration,
    reference_class=QianfanOCRForConditionalGeneration,
    make_config=tiny_config,
    served={},
    max_embeds={"image": 12},
    variants={
        "plain": Variant({}, 8),
        "tied, a norm behind the tower": Variant(
            {
                "tie_word_embeddings": True,
                "vision": {
                    "attention_bias": False,
                    "norm_type": "rms_norm",
                    "use_mean_pooling": False,
                    "use_qk_norm": True,
                },
            },
            9,
        ),
        "state before the last": Variant(
            {
                "vision_feature_layer": -2,
                "vision": {"use_mean_pooling": False, "use_mask_token": True},
            },
            7,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


def write_files(folder: Path) -> Path:
    config = {
        "architectures": ["QianfanOCRForConditionalGeneration"],
        "model_type": "qianfan_ocr",
        "text_config.model_type": "qwen3",
        "text_config.head_dim": 16,
        "text_config.num_attention_heads": 4,
        "vision_config.model_type": "qianfan_ocr_vision",
        "vision_config.attention_bias": True,
    }
    parts = {"processor_class": "QianfanOCRProcessor", "video_processor": None}
    path = edit_golden("internvl", folder, config=config, processor_config=parts)
    (path / "chat_template.jinja").unlink()
    return path


def list_shapes(config: Any) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes of the published files."""
    import torch

    with torch.device("meta"):
        module = QianfanOCRForConditionalGeneration(config)
    tensors = {
        name.replace("vision_tower.layers.", "vision_tower.encoder.layer."): tensor
        for name, tensor in module.state_dict().items()
    }
    original = to_original(config, tensors, is_internlm2=False)
    return {name: tuple(tensor.shape) for name, tensor in original.items()}


path = made_once(write_files)
QIANFAN_OCR = Family(
    **written(TINY, write_files, QianfanOCRProcessor, GotOcr2ImageProcessorPil, image_seq_length=4),
    needless_files=frozenset({"tokenizer_config.json"}),
    probed=("vision_tower.encoder.layers.1", "multi_modal_projector"),
    published=Published(list_shapes=list_shapes, layouts={"files": MODULE}),
    rendered=CHATML.format(image="<image>\n"),
    with_system=("", "<|im_start|>system\nbe short<|im_end|>\n"),
    placeholder="<image>",
    lowering_kwargs={"images_kwargs": {"max_patches": 2}},
    extra_kwargs=({}, internvl.FEWER, {"crop_to_patches": False}),
    operator_kwargs=({"max_patches": 11}, {"crop_to_patches": False}),
)
