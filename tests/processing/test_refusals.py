"""What a family's processor does not take, as rows: told by its name, as the client's error.

Whether text or token ids, with a cache or without; and checkpoints whose files contradict each
other, as the operator's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import CheckpointError, RequestError
from tests.families import FAMILIES
from tests.families.directories import edit_golden, golden_processor
from tests.families.qwen2_vl import IMAGE as QWEN_IMAGE
from tests.families.qwen2_vl import VIDEO as QWEN_VIDEO
from tests.kit import draw

BOI = "<start_of_image>"
Size = tuple[int, int]
SMALL: Size = (4, 4)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A request, and what is said of it."""

    family: str
    prompt: str | list[int]
    match: str
    images: Sequence[Size] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    """Other media, or embeddings."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The request's, of HF's processor."""
    mm: Mapping[str, Any] = field(default_factory=dict)
    """The operator's settings."""
    param: str | None = None

    def __str__(self) -> str:
        return f"{self.family}: {self.match}"


def row(family: str, prompt: Any, match: str, *images: Size, **more: Any) -> Refused:
    return Refused(family=family, prompt=prompt, match=match, images=images, **more)


def video(num_frames: int, width: int, height: int) -> np.ndarray:
    return np.stack([np.asarray(draw(width, height, seed)) for seed in range(num_frames)])


KWARGS, TRUSTED, EMBEDS = (
    "mm_processor_kwargs",
    {"trust_request_mm_kwargs": True},
    {"enable_mm_embeds": True},
)
COUNTS = [
    # As many placeholders as images, in words that name both.
    row("gemma3", "look", f"0 `{BOI}` placeholders but 1 image was given; write `{BOI}`", SMALL),
    row("gemma3", BOI, f"prompt has 1 `{BOI}` placeholder but 0 images were given; pass one image"),
    row("gemma3", f"{BOI} {BOI}", f"2 `{BOI}` placeholders but 1 image was given", SMALL),
    row("gemma3", BOI, f"1 `{BOI}` placeholder but 2 images were given", SMALL, SMALL),
    row("llava", "look", "prompt has 0 `<image>` placeholders but 1 image was given", SMALL),
    row("llava", "<image>", "prompt has 1 `<image>` placeholder but 0 images were given"),
    row("llava", "<image> <image>", "has 2 `<image>` placeholders but 1 image was given", SMALL),
    row("chameleon", "a <image>", "1 `<image>` placeholder but 0"),
    row("chameleon", "a <image>", "1 `<image>` placeholder but 2", SMALL, SMALL),
    row("pixtral", "a [IMG]", r"prompt has 1 `\[IMG\]` placeholder but"),
    row("pixtral", "a [IMG]", r"prompt has 1 `\[IMG\]` placeholder but", (20, 20), (20, 20)),
    row("internvl original", "<image> <image>", "2 `<image>` placeholders but 1 image was", (9, 9)),
    row("internvl original", "look", "0 `<image>` placeholders but 1 image was", (9, 9)),
    row("internvl original", "<image>", "1 `<image>` placeholder but 0 images were"),
    row("qwen2_vl", "a", r"placeholders but 1 image was given; write `<\|vision_start", (56, 56)),
    row("qwen2_vl", f"<|image_pad|>{QWEN_IMAGE}", r"pad\|>` placeholders but 1 image", (56, 56)),
    row(
        "qwen2_vl",
        QWEN_VIDEO + QWEN_IMAGE,
        r"1 `<\|video_pad\|>` placeholder but 0 videos",
        (56, 56),
    ),
    # Families of one image.
    row("blip2", "what", r"At most 1 image\(s\) may be provided", (9, 9), (9, 9)),
    row("fuyu", "what", r"At most 1 image\(s\) may be provided", (9, 9), (9, 9)),
    row("florence2", "<OD>", r"At most 1 image\(s\)", (9, 9), (9, 9)),
    row("molmo", "what", "At most 1 image", (9, 9), (9, 9)),
    row("florence2", "<OD>", "Unsupported modality: video", data={"video": [draw(9, 9)]}),
]
RESERVED = [
    # Tokens that stand for embeddings are not for clients.
    row("gemma3", "a <image_soft_token>", r"has `<image_soft_token>` at .*reserved.*write `<start"),
    row("gemma3", f"{BOI} <image_soft_token>", r"has `<image_soft_token>` at .*reserved", SMALL),
    row("blip2", "a <image>", r"has `<image>` at .*reserved.*; leave it out"),
    row("blip2", "a <image>", r"has `<image>` at .*reserved.*; leave it out", (9, 9)),
    row("fuyu", "a |SPEAKER|", r"has `\|SPEAKER\|` at .*reserved"),
    row("fuyu", "a |SPEAKER|", r"has `\|SPEAKER\|` at .*reserved", (9, 9)),
    row("florence2", "a <image>", r"`<image>` at .* reserved", (9, 9)),
    row("florence2", [5, 979], r"`<image>` at .* reserved", (9, 9)),
    row("internvl original", "<image> <IMG_CONTEXT>", r"`<IMG_CONTEXT>` at .* reserved", (9, 9)),
    row("molmo", [384 + 128], "512"),
]
SIZES = [
    # Pixels that no tower takes, and slivers that scaling would make nothing, or a bomb, of.
    row(
        "blip2",
        "a",
        r"became 28x42 pixels .* takes 56x56; leave",
        (90, 70),
        kwargs={"size": {"height": 28, "width": 42}},
        mm=TRUSTED,
    ),
    row(
        "llava",
        "<image>",
        r"became 42x42 pixels .* takes 56x56; leave",
        (90, 70),
        kwargs={"crop_size": {"height": 42, "width": 42}},
        mm=TRUSTED,
        param=KWARGS,
    ),
    row(
        "chameleon",
        "<image>",
        r"became 32x32 pixels .* takes 64x64; leave",
        (90, 70),
        kwargs={"crop_size": {"height": 32, "width": 32}},
        mm=TRUSTED,
    ),
    row(
        "florence2",
        "<OD>",
        "became 64x64 pixels",
        (9, 9),
        kwargs={"size": {"height": 64, "width": 64}},
    ),
    row("llava", "<image>", r"100000x1 pixels; .* it has 313600000, .* crop it", (100_000, 1)),
    row("chameleon", "<image>", r"1x100000 pixels; .* it has 409600000, .* crop it", (1, 100_000)),
    row("fuyu", "a", r"image is 400x1 pixels: .* scaled to fit 90x60; crop", (400, 1)),
    row("pixtral", "[IMG]", r"500x1 pixels; .* the shorter has none: crop it", (500, 1)),
    row("molmo", "what", r"1x500 pixels.*short side", (1, 500), param="multi_modal_data"),
    *(
        refused
        for size in ((201, 1), (1, 201), (1000, 4))
        for refused in (
            row("qwen2_vl", QWEN_IMAGE, "at most 200 times the shorter", size),
            row(
                "qwen2_vl",
                QWEN_VIDEO,
                "at most 200 times the shorter",
                data={"video": video(2, *size)},
            ),
        )
    ),
]
FUYU_KWARGS: list[tuple[dict[str, Any], str]] = [
    ({"size": "huge"}, "processing fails with `size`, and not without"),
    ({"images_kwargs": {"do_resize": False}}, "has `images_kwargs.do_resize`, which this model"),
    ({"patch_size": {"height": 5, "width": 5}}, "`patch_size` in mm_proc.* must be the model's"),
    ({"size": {"height": 0, "width": 9}}, "its short side would have none"),
]
PIXTRAL_KWARGS: list[tuple[dict[str, Any], str]] = [
    ({"size": {"longest_edge": 57}}, "`size.longest_edge` is 57 .* at most 56"),
    ({"size": {"height": 28, "width": 28}}, "must be an object of a positive `longest_edge`"),
    ({"patch_size": 7}, "`patch_size`, which this model's processor does not know"),
    ({"do_resize": False}, "`do_resize`, which this model's processor does not know"),
]
QWEN_KWARGS: list[tuple[dict[str, Any], str]] = [
    ({"patch_size": 7}, "`patch_size` is 7 in mm_processor_kwargs, but the model has 14"),
    ({"merge_size": 4}, "`merge_size` is 4 .*the model has 2"),
    ({"temporal_patch_size": 1}, "`temporal_patch_size` is 1"),
    ({"max_pixels": 0}, "`max_pixels` is 0 .*positive"),
    ({"max_pixels": "many"}, "`max_pixels` is 'many'"),
    ({"min_pixels": 60_000}, "`min_pixels` is 60000 .*at most max_pixels, which is 50176"),
    ({"min_pixels": 10**9, "max_pixels": 10**10}, "`min_pixels` .*at most 50000000"),
    ({"size": 448}, "`size` is 448"),
    ({"images": []}, "`images`, which the server sets itself"),
]
ORIGINAL_KWARGS: list[tuple[dict[str, Any], str]] = [
    ({"max_dynamic_patch": 0}, "`max_dynamic_patch` is 0 .* from 1 to 128"),
    ({"max_dynamic_patch": 10**9}, "`max_dynamic_patch` is 1000000000"),
    ({"min_dynamic_patch": 2.5}, "`min_dynamic_patch` is 2.5"),
    ({"min_dynamic_patch": 9}, "`min_dynamic_patch` is 9 .*at most `max_dynamic_patch`.* 6"),
    ({"dynamic_image_size": "no"}, "`dynamic_image_size` is 'no' .*true or false"),
]
INTERNVL_KWARGS: list[tuple[dict[str, Any], str]] = [
    ({"max_patches": 500}, "`max_patches` is 500 .* from 1 to 128"),
    ({"min_patches": 7}, "`min_patches` is 7 .*at most `max_patches`, which is 6"),
    ({"size": {"height": 28, "width": 28}}, "tiles became 28x28 .*takes 56x56"),
]
GEMMA_KWARGS: list[tuple[dict[str, Any], str]] = [
    ({"pan_and_scan_min_crop_size": 0}, r"processing fails with .*, and not without"),
    ({"size": "huge"}, r"processing fails with .*, and not without"),
]


def asked_with(
    cases: Sequence[tuple[dict[str, Any], str]],
    family: str,
    prompt: str,
    *images: Size,
    always: Mapping[str, Any] | None = None,
    **more: Any,
) -> list[Refused]:
    """Return a request of each kwargs."""
    return [
        row(family, prompt, match, *images, kwargs={**(always or {}), **kwargs}, **more)
        for kwargs, match in cases
    ]


OPTIONS = [
    *asked_with(
        GEMMA_KWARGS, "gemma3", BOI, (900, 300), always={"do_pan_and_scan": True}, param=KWARGS
    ),
    *asked_with(FUYU_KWARGS, "fuyu", "a", (99, 99)),
    *asked_with(PIXTRAL_KWARGS, "pixtral", "[IMG]", (60, 60), mm=TRUSTED),
    *asked_with(QWEN_KWARGS, "qwen2_vl", QWEN_IMAGE, (60, 60), param=KWARGS),
    *asked_with(
        QWEN_KWARGS, "qwen2_vl", QWEN_VIDEO, data={"video": video(1, 60, 60)}, param=KWARGS
    ),
    *asked_with(ORIGINAL_KWARGS, "internvl original", "<image>", (300, 100), param=KWARGS),
    *asked_with(INTERNVL_KWARGS, "internvl", "<IMG_CONTEXT>", (300, 100), param=KWARGS),
    *asked_with(
        [({"max_crops": value}, "max_crops") for value in (0, 129, True, 2.0, "3")],
        "molmo",
        "a",
        (9, 9),
    ),
    row("molmo", "what", r"message_format.*'chat'.*role", kwargs={"message_format": "chat"}),
]


def embeds(*shape: int) -> dict[str, Any]:
    return {"image": [torch.ones(*shape)]}


BY_NAME = "takes images, not their embeddings"
EMBEDDINGS = [
    row("chameleon", "<image>", BY_NAME, data=embeds(256, 64), mm=EMBEDS),
    row("florence2", "<OD>", BY_NAME, data={"image": torch.zeros(1, 17, 64)}),
    row("fuyu", "a", BY_NAME, data=embeds(4, 64), mm=EMBEDS),
    row("molmo", "what", BY_NAME, data=embeds(48, 96), mm=EMBEDS),
    row("pixtral", "[IMG]", BY_NAME, data=embeds(4, 64), mm=EMBEDS),
    row("llava", "<image>", "--enable-mm-embeds", data=embeds(16, 64)),
    row(
        "llava",
        "<image>",
        r"hidden dimension mismatch: got 32, the model has 64",
        data=embeds(16, 32),
        mm=EMBEDS,
    ),
    *(
        row("blip2", "what", f"have {n} rows; an image has 8", data=embeds(n, 64), mm=EMBEDS)
        for n in (7, 16)
    ),
]
ALL = [*COUNTS, *RESERVED, *SIZES, *OPTIONS, *EMBEDDINGS]


@pytest.mark.parametrize("refused", ALL, ids=str)
def test_it_is_refused_by_its_name(refused: Refused):
    for cache in (None, MultiModalProcessorOnlyCache(2**24)):
        processor = FAMILIES[refused.family].make_processor(processor_cache=cache, **refused.mm)
        data = {"image": [draw(*size) for size in refused.images]} if refused.images else {}
        kinds = [refused.prompt]
        if isinstance(refused.prompt, str):
            kinds.append(processor.info.get_tokenizer().encode(refused.prompt))
        for prompt in kinds:
            with pytest.raises(RequestError, match=refused.match) as caught:
                processor.apply(
                    prompt, {**data, **refused.data}, hf_processor_mm_kwargs=refused.kwargs
                )
            assert caught.value.status == 400
            if refused.param is not None:
                assert caught.value.param == refused.param
            if "At most" in refused.match:  # the model takes no more
                assert "limit-mm-per-prompt" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "prompt", "match"),
    [
        ("gemma3", BOI, "reserved"),
        ("blip2", "a", "reserved"),
        ("fuyu", "a", "reserved"),
        ("llava", "<image>", "16 `<image>` placeholders but 1 image"),
    ],
)
def test_an_expanded_prompt_is_refused_rather_than_expanded_twice(
    family: str, prompt: str, match: str
):
    for cache in (None, MultiModalProcessorOnlyCache(2**24)):
        processor = FAMILIES[family].make_processor(processor_cache=cache)
        inputs = processor.apply(prompt, {"image": draw(4, 4)})
        with pytest.raises(RequestError, match=match):
            processor.apply(inputs.prompt_token_ids, {"image": draw(4, 4)})


CHECKPOINTS: Mapping[str, list[tuple[dict[str, Any], str]]] = {
    "blip2": [
        (
            {"processor_config": {"num_query_tokens": 32}},
            "`num_query_tokens` of processor_config.json is 32, but config.json has 8",
        ),
        ({"config": {"image_token_index": 7}}, "`<image>` is token 999, .* is 7"),
    ],
    "chameleon": [
        (
            {"processor_config": {"image_seq_length": 1024}},
            "`image_seq_length` of processor_config.json is 1024, .* gives 256; make them equal",
        ),
        (
            {"config": {"vocabulary_map.<image>": 7, "image_token_id": 7}},
            "`<image>` is token 964, but .* is 7",
        ),
    ],
    "fuyu": [
        (
            {"processor_config": {"image_processor.patch_size": {"height": 30, "width": 30}}},
            r"`patch_size` of the image processor is .*30.*, but config.json has .*10",
        ),
        ({"tokenizer": {"model.vocab.|SPEAKER|": None}}, r"tokenizer does not know `\|SPEAKER\|`"),
        ({"config": {"image_token_id": 5}}, r"`\|SPEAKER\|` is token 997, but .* is 5"),
        (
            {"processor_config": {"image_processor.do_normalize": False}},
            "`do_normalize` .* is False, but the model takes True",
        ),
        (
            {"processor_config": {"image_processor.padding_mode": "edge"}},
            "`padding_mode` .* is 'edge', but the model takes 'constant'",
        ),
    ],
    "llava": [
        (
            {"processor_config": {"patch_size": 28}},
            "`patch_size` of processor_config.json is 28, but .* has 14",
        ),
        (
            {"processor_config": {"vision_feature_select_strategy": "full"}},
            "is 'full', but config.json has 'default'",
        ),
        ({"config": {"image_token_index": 7}}, r"`<image>` is token 998, but .* is 7"),
        (
            {"config": {"vision_config.model_type": "siglip2_vision_model"}},
            "model_type` is `siglip2_vision_model`; .*`clip_vision_model`",
        ),
        (
            {"config": {"vision_config.model_type": "dinov2"}},
            "model_type` is `dinov2`; .*`clip_vision_model`",
        ),
        (
            {"processor_config": {"image_processor.image_processor_type": "PixtralImageProcessor"}},
            r"`PixtralImageProcessor`; .*`CLIPImageProcessor`",
        ),
    ],
    "molmo": [
        ({"preprocessor_config": {"do_normalize": False}}, "do_normalize.*False"),
        ({"preprocessor_config": {"image_padding_mask": False}}, "image_padding_mask.*False"),
        ({"preprocessor_config": {"overlap_margins": [2, 3]}}, r"overlap_margins.*\[2, 3\]"),
        ({"preprocessor_config": {"overlap_margins": [4, 4]}}, r"overlap_margins.*\[4, 4\]"),
        ({"preprocessor_config": {"image_patch_size": 16}}, "image_patch_size.*16.*14"),
        ({"preprocessor_config": {"image_token_length_w": 5}}, "image_token_length_w.*5.*4"),
        ({"preprocessor_config": {"base_image_input_size": [56, 56]}}, "base_image_input_size"),
        ({"config": {"embedding_size": 380}}, "<im_start>.*384.*380"),
        (
            {"tokenizer_config": {"eos_token": None, "pad_token": None}},
            "neither a BOS nor an EOS",
        ),
    ],
}
"""By family, changes of its JSON files, and what is said of them."""


@pytest.mark.parametrize(
    ("name", "edits", "match"),
    [
        pytest.param(name, edits, match, id=f"{name}: {match}")
        for name, cases in CHECKPOINTS.items()
        for edits, match in cases
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_named(
    tmp_path: Path, name: str, edits: dict[str, Any], match: str
):
    path = edit_golden(name, tmp_path, **edits)
    with pytest.raises(CheckpointError, match=match):
        golden_processor(name, path=path).apply(FAMILIES[name].placeholder, {"image": draw(4, 4)})
