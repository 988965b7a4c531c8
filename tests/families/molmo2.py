"""Tiny Molmo 2s: crops whose seams windows of patches reach over; Qwen3's and OLMo 3's decoders.

HF's image processor needs torchvision: here its own functions run on torch's `interpolate`.
"""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, Molmo2Config
from transformers import Molmo2ForConditionalGeneration as HFModel
from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor as HFCutter
from transformers.models.molmo2.processing_molmo2 import Molmo2Processor

from mmjax.models.molmo2.host_inputs import MAX_POOLED, read_prompt_ids
from mmjax.models.molmo2.image_processor import (
    Molmo2ImageProcessor,
    Molmo2Sampling,
    Molmo2VideoProcessor,
)
from mmjax.models.molmo2.model import Molmo2ForConditionalGeneration
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, with_weights, write_directory
from tests.families.family import CHATML, Family, HFInputs, written
from tests.families.hf_videos import HFVideos, take_functions
from tests.families.published import Published
from tests.families.published_names import list_molmo2
from tests.families.sizes import NO_KEYS, Keys
from tests.families.tiny import DrawnItem, Media, TinyFamily, Variant
from tests.kit import draw, draw_video

SIDE, PATCH, MARGIN, MAX_CROPS, VOCAB, NUM_FRAMES = 70, 14, 1, 3, 600, 3


def make_cutter(side: int = SIDE) -> Molmo2ImageProcessor:
    """Return ours, for crops of so many pixels a side."""
    return Molmo2ImageProcessor(
        crop_side=side, patch_size=PATCH, overlap_margins=(MARGIN, MARGIN), max_crops=MAX_CROPS
    )


SIZES = [(105, 175), (58, 40), (224, 70), (80, 154)]
"""Width and height of drawn images, by turns."""
TOKENS = (
    *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>"),
    *("<im_low>", "<frame_start>", "<frame_end>", "<|video|>", "<|im_start|>", "<|im_end|>"),
)
"""In the published order, and the turns' two, which published tokenizers have before them."""
YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.2},
    **{"original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, adapter: Keys = NO_KEYS, first_id: int = VOCAB
) -> Molmo2Config:
    """Return a config of width 32 and three blocks, and a tower of which two blocks are read."""
    decoder = {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": VOCAB},
        **{"additional_vocab_size": 16, "max_position_embeddings": 1024},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    tower = {
        **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "head_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "image_size": [SIDE, SIDE]},
        "patch_size": PATCH,
    }
    decoder |= text
    pooler = {
        **{"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        **{"intermediate_size": 40, "text_hidden_size": decoder["hidden_size"]},
        "vision_feature_layer": [-1, 0],
    }
    return Molmo2Config(
        text_config=decoder,
        vision_config={**tower, **vision},
        adapter_config={**pooler, **adapter},
        image_start_token_id=first_id,
        image_end_token_id=first_id + 1,
        image_patch_id=first_id + 2,
        low_res_image_start_token_id=first_id + 4,
        frame_start_token_id=first_id + 7,
        frame_end_token_id=first_id + 8,
    )


def make_frames(side: int = SIDE) -> Molmo2VideoProcessor:
    """Return ours of videos, of which three frames are seen."""
    return Molmo2VideoProcessor(
        crop_side=side, patch_size=PATCH, sampling=Molmo2Sampling(num_frames=NUM_FRAMES)
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, or a video of two or three frames."""
    if media.modality == "video":
        frames = draw_video(2 + media.seed % 2, 50, 40, media.seed)
        tensors = only(make_frames(config.vision_config.image_size[0])([frames]))
        ids = as_tokens(config, tensors["video_rows"])
        steps = np.split(np.array(ids), len(tensors["pixel_values_videos"]))
        ids = [token_id for number, step in enumerate(steps) for token_id in (5 + number, *step)]
        return DrawnItem(tensors, ids[1:], np.array(ids[1:]) >= VOCAB, before=ids[:1])
    picture = draw(*SIZES[media.seed % len(SIZES)], media.seed)
    tensors = only(make_cutter(config.vision_config.image_size[0])([picture]))
    return DrawnItem(tensors, as_tokens(config, tensors["image_rows"]))


def only(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the only item's of what an image processor gives."""
    return {n: value[0] if isinstance(value, list) else value for n, value in tensors.items()}


def as_tokens(config: Any, rows: np.ndarray) -> list[int]:
    """Return the tokens at whose places rows of the encoder go."""
    patch, *marks = read_prompt_ids(config)
    return [patch if row >= 0 else marks[-1 - row] for row in rows]


def torch_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as HF's processor would give it; videos as images without tiles."""
    kinds = torch.tensor(sample.is_embed, dtype=torch.long)[None]
    crops, pooling, grids, first = [], [], [], 0
    for item in sample.items:
        data = make_pixels(item.tensors, colours_last=True)
        is_image = "pixel_values" in data
        crops.append(data["pixel_values" if is_image else "pixel_values_videos"])
        windows = data["image_token_pooling" if is_image else "video_token_pooling"]
        windows = np.where(windows < 0, windows, windows + first)
        pad = ((0, 0), (0, MAX_POOLED - windows.shape[1]))
        pooling.append(np.pad(windows, pad, constant_values=-1))
        grids.append([data["image_grids"]] if is_image else [[len(windows), 1, 0, 0]])
        first += np.prod(crops[-1].shape[:-1])
    named = {"pixel_values": crops, "image_token_pooling": pooling, "image_grids": grids}
    tensors = {name: np.concatenate(parts) for name, parts in named.items()} if crops else {}
    return make_reference_inputs(sample.token_ids, tensors) | {"mm_token_type_ids": kinds}


OLMO = {"qk_norm_type": "olmo", "norm_after": True, "num_key_value_heads": 4}


def cut_table(folder: Path) -> None:
    """Cut the table of tokens as published."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    # NOTE: HF's `save_pretrained` cuts the table of tokens in halves, not behind the vocabulary.
    names = [f"model.transformer.wte.{name}" for name in ("embedding", "new_embedding")]
    table, place = np.concatenate([tensors[name] for name in names]), len(tensors["lm_head.weight"])
    tensors |= dict(zip(names, np.split(table, [place]), strict=True))
    save_file(tensors, file, metadata={"format": "pt"})


TINY = TinyFamily(
    name="molmo2",
    model_class=Molmo2ForConditionalGeneration,
    reference_class=HFModel,
    make_config=tiny_config,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    publish_names=cut_table,
    word_ids=range(5, 590),
    published_head_dim=128,
    max_embeds={
        "image": make_cutter().find_largest({})[1],
        "video": NUM_FRAMES * make_frames().num_frame_tokens,
    },
    max_model_len=96,
    # Two images, and the text between them.
    longest_run=2 * make_cutter().find_largest({})[1] + 16,
    max_items=2,
    variants={
        "qwen3": Variant({}, 9),
        "olmo3": Variant(
            {"text": {**OLMO, "rope_parameters": YARN, "rope_scaling_layers": [2]}}, 9
        ),
        "biases and one block": Variant(
            {"text": {"attention_bias": True}, "adapter": {"vision_feature_layer": [1]}}, 8
        ),
        "blocks of rows": Variant({"vision": {"image_size": [238, 238]}}, 9, ("image",)),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


def write_files(path: Path) -> Path:
    """Write the files of a checkpoint without weights, in the published layout."""
    tokenizer = make_tokenizer(TOKENS)
    first = tokenizer.convert_tokens_to_ids(TOKENS[0])
    config = tiny_config(text={"vocab_size": first, "num_key_value_heads": 4}, first_id=first)
    config.architectures = [MOLMO2.architecture]
    size = {"height": SIDE, "width": SIDE}
    preprocessor = {
        "image_processor_type": "Molmo2ImageProcessor",
        **{"size": size, "patch_size": PATCH, "pooling_size": [2, 2], "max_crops": MAX_CROPS},
        **{"overlap_margins": [MARGIN, MARGIN], "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        **{"do_convert_rgb": True, "resample": 2},
    }
    video = {"video_processor_type": "Molmo2VideoProcessor", "size": size, "patch_size": PATCH}
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config=preprocessor,
        video_preprocessor_config={**video, "pooling_size": [3, 3], "num_frames": NUM_FRAMES},
    )


path = made_once(write_files)


def write(folder: Path) -> Path:
    """Write random weights, too, as published."""
    with_weights(write_files)(folder)
    cut_table(folder)
    return folder


class WithoutTorchvision:
    """What HF's image processor asks of torchvision, by torch alone."""

    def resize(self, image: Any, size: Any, resample: Any, antialias: bool) -> Any:
        assert not antialias
        shape = (size.height, size.width)
        return torch.nn.functional.interpolate(image, shape, mode="bilinear")

    def rescale_and_normalize(
        self, images: Any, do_rescale: bool, factor: float, do_normalize: bool, mean: Any, std: Any
    ) -> Any:
        mean, std = (torch.tensor(values)[None, :, None, None] for values in (mean, std))
        return (images.float() * factor - mean) / std


for name in ("_build_overlapping_crops", "_image_batch_to_patches_and_grids", "_preprocess"):
    # NOTE: HF's class refuses to give any attribute by its name while torchvision is missing.
    setattr(WithoutTorchvision, name, type.__getattribute__(HFCutter, name))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(path())


PREPROCESSING: dict[str, Any] = {
    "size": SimpleNamespace(height=SIDE, width=SIDE),
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "patch_size": PATCH,
}
"""What pictures and frames have in common."""


def cut(images: list[Any], max_crops: int) -> dict[str, Any]:
    """Return the tensors that HF's image processor makes."""
    pixels = [torch.from_numpy(np.array(one.convert("RGB"))).permute(2, 0, 1) for one in images]
    cutter: Any = WithoutTorchvision()
    return dict(
        cutter._preprocess(
            pixels,
            **PREPROCESSING,
            do_resize=True,
            do_convert_rgb=True,
            max_crops=max_crops,
            overlap_margins=[MARGIN, MARGIN],
            pooling_size=[2, 2],
            disable_grouping=False,
            return_tensors="pt",
        )
    )


def call_hf(prompt: str, images: list[Any], kwargs: Mapping[str, Any]) -> HFInputs:
    """Return what HF's processor makes of a prompt, by its own functions."""
    tensors = cut(images, kwargs.get("max_crops", MAX_CROPS)) if images else {}
    settings: Any = SimpleNamespace(
        image_use_col_tokens=True, use_single_crop_col_tokens=None, use_single_crop_start_token=True
    )
    first, *others = prompt.split("<|image|>")
    for number, text in enumerate(others):
        first += Molmo2Processor.replace_image_token(settings, tensors, number) + text
    bos = tokenizer().eos_token
    ids = tokenizer().encode(first if first.startswith(bos) else bos + first)
    marks = tokenizer().convert_tokens_to_ids(list(TOKENS[:5]))
    tensors["mm_token_type_ids"] = torch.tensor(np.isin(ids, marks).astype(int))[None]
    return HFInputs(ids, tensors)


class HFWithVideos:
    """HF's processor, whose video processor is made of its own functions."""

    def __init__(self) -> None:
        backend: Any = WithoutTorchvision()
        known = backend._preprocess.__globals__
        shared = ("batch_pixels_to_patches", "arange_for_pooling", "build_resized_image")
        own = take_functions(
            "molmo2",
            *("sample_frames", "_build_video_patches", "_preprocess"),
            **{name: known[name] for name in shared},
            **dict.fromkeys(("PILImageResampling", "SizeDict", "TensorType"), Any),
            BatchFeature=lambda data, tensor_type: data,
        )
        backend._build_video_patches = partial(own._build_video_patches, backend)
        self.settings = SimpleNamespace(num_frames=NUM_FRAMES, max_fps=2)
        self.videos = HFVideos(
            None,
            lambda known: own.sample_frames(self.settings, known).numpy(),
            lambda _, seen: own._preprocess(
                backend,
                [torch.from_numpy(frames).permute(0, 3, 1, 2) for frames in seen],
                **PREPROCESSING,
                pooling_size=[3, 3],
            ),
        )

    def __call__(self, text: list[str], images: Any, videos: Any, **kwargs: Any) -> Any:
        tensors = self.videos(videos, kwargs["video_metadata"])
        writer: Any = SimpleNamespace(
            use_frame_special_tokens=True,
            video_use_col_tokens=False,
            video_processor=self.settings,
        )
        writer.get_video_string = partial(Molmo2Processor.get_video_string, writer)
        (prompt,) = text
        for number in range(len(videos)):
            written = Molmo2Processor.replace_video_token(writer, tensors, number)
            prompt = prompt.replace("<|video|>", written, 1)
        ids, own = call_hf(prompt, images or [], {})
        return {**own, **tensors, "input_ids": [ids]}


MOLMO2 = Family(
    **written(TINY, write_files) | {"write": write},
    needless_files=frozenset({"video_preprocessor_config.json"}),
    published=Published(list_shapes=list_molmo2),
    rendered="<|image|>" + CHATML.format(image=""),
    with_system=("<|image|>", "<|image|><|im_start|>system\nbe short<|im_end|>\n"),
    call_hf=call_hf,
    embed_token_ids=lambda processor: list(read_prompt_ids(processor.info.get_hf_config())),
    placeholder="<|image|>",
    video="<|video|>",
    max_videos=1,
    load_hf_videos=HFWithVideos,
    video_kwargs=({}, {"num_frames": 2}, {"do_sample_frames": False}),
    sizes=((90, 70), (37, 201)),  # without halves, which torch rounds as its threads are (below)
    takes_embeds=False,
    extra_kwargs=({}, {"max_crops": 2}),
    lowering_kwargs={"max_crops": 1},
    # One step of 8 bits: how torch rounds a half depends on its number of threads; what is no half
    # is held in tests/processing/test_molmo2.py.
    tensors={"pixel_values": 1 / 127, "image_token_pooling": 0.0, "image_grids": 0.0},
    colours_last=True,
    words=(*Family.words, "<|im_start|>", "<|im_end|>"),
)
