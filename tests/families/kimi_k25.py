"""Tiny Kimi K2.5s: pictures of any grid, clips of up to four frames, a decoder of latents."""

import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration, video_utils
from transformers.image_processing_base import BatchFeature
from transformers.image_utils import ChannelDimension, SizeDict, get_image_size
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.utils.generic import TensorType
from transformers.video_utils import default_sample_indices_fn

from mmjax.models.kimi_k25 import model as ours
from mmjax.models.kimi_k25.processor import split_grids
from mmjax.parity.arrays import Sample
from mmjax.parity.reference import make_reference_inputs
from tests.families.directories import made_once, make_tokenizer, with_weights, write_directory
from tests.families.family import Family, assemble, call_processor, written
from tests.families.hf_videos import HFVideos, take_functions
from tests.families.published import Published
from tests.families.sizes import DECODER, NO_KEYS, TOWER, Keys, fit_text, resize_text
from tests.families.tiny import AFFINE, DrawnItem, Media, TinyFamily, Variant, draw_bytes, joined
from tests.families.without_torchvision import PillowBackend, take_image_processor
from tests.oracle import fill_with_unit_norms

IMAGE_TOKEN, VIDEO_TOKEN, BEGIN, END = 127, 126, 125, 124
CLIP_FRAMES = 4
TEXT: dict[str, Any] = {
    **DECODER,
    **{"model_type": "deepseek_v3", "num_key_value_heads": 4, "max_position_embeddings": 1024},
    **{"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_group": 1},
    **{"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "mscale": 1.0},
        **{"original_max_position_embeddings": 64, "mscale_all_dim": 1.0},
        **{"beta_fast": 32.0, "beta_slow": 1.0},
    },
}
VISION: dict[str, Any] = {
    **TOWER,
    **{"pos_emb_height": 5, "pos_emb_width": 5, "pos_emb_time": CLIP_FRAMES, "patch_size": 4},
}
GRIDS: Mapping[str, list[tuple[int, int, int]]] = {
    "image": [(1, 6, 10), (1, 8, 2), (1, 2, 8)],
    "video": [(3, 4, 6), (7, 4, 2), (5, 6, 2)],
}
"""Frames, rows and columns of patches, by turns: clips of one frame, of three and of four."""


def tiny_config(
    *, text: Keys = NO_KEYS, vision: Keys = NO_KEYS, is_tied: bool = False, **settings: Any
) -> Kimi_K25Config:
    """Return HF's config, with 25 learned positions."""
    vision_config = {**VISION, **vision}
    return Kimi_K25Config(
        text_config={**TEXT, **text},
        vision_config=vision_config,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        projection_hidden_size=vision_config["hidden_size"],
        tie_word_embeddings=is_tied,
        **settings,
        architectures=["Kimi_K25ForConditionalGeneration"],
    )


def draw_item(config: Any, media: Media) -> DrawnItem:
    """Return a processed image, or a video, each clip of which has its time before it."""
    grid = GRIDS[media.modality][media.seed % 3]
    num_frames, rows, columns = grid
    size, per_clip = config.vision_config.patch_size, rows * columns // 4
    is_image = media.modality == "image"
    name = "pixel_values" if is_image else "pixel_values_videos"
    tensors = {
        name: draw_bytes(media.seed, (int(np.prod(grid)), 3, size, size)),
        f"{media.modality}_affine": AFFINE,
        f"{media.modality}_grid_thw": np.array(grid, np.int64),
    }
    if is_image:
        return DrawnItem(tensors, [IMAGE_TOKEN] * per_clip, before=[BEGIN], after=[END])
    clip = [BEGIN, *[VIDEO_TOKEN] * per_clip, END]
    numbers = range(-(-num_frames // CLIP_FRAMES))
    ids = [token_id for number in numbers for token_id in (5 + number, *clip)]
    return DrawnItem(tensors, ids, np.equal(ids, VIDEO_TOKEN))


def torch_inputs(reference: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """Return the sample as HF's processor would give it."""
    data = dict(joined(sample))
    for name in data.keys() & {"image_grid_thw", "video_grid_thw"}:
        data[name] = data[name].reshape(-1, 3)
    return make_reference_inputs(sample.token_ids, split_grids(data, CLIP_FRAMES))


def fill(model: Any) -> None:
    """Fill a model whose routers prefer some experts, as trained ones do."""
    fill_with_unit_norms(model, sharpness=1.4)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.5)


def take_clips(model: Any) -> None:
    """Let HF's model take videos: it asks for an embedding of each frame, where clips are pooled.

    It stacks the places of clips' frames, too, which must be as many then: of each clip all are
    repeated to as many, whose mean is the same.
    """
    inner = model.model

    def find_frames(grids: torch.Tensor) -> torch.Tensor:
        found, first = [], 0
        for frames, rows, columns in grids.tolist():
            numbers = torch.arange(first, first + frames * rows * columns)
            squares = numbers.view(frames, rows // 2, 2, columns // 2, 2).permute(1, 3, 0, 2, 4)
            found.append(squares.reshape(-1, frames, 4).repeat(1, 12 // frames, 1))
            first += len(numbers)
        return torch.cat(found)

    def get_video_features(pixel_values_videos: Any, video_grid_thw: Any, **kwargs: Any) -> Any:
        outputs = inner.vision_tower(
            pixel_values_videos,
            grid_thw=video_grid_thw,
            temporal_merge_index=find_frames(video_grid_thw),
        )
        outputs.pooler_output = [inner.mm_projector(outputs.pooler_output).squeeze(1)]
        return outputs

    inner.get_video_features = get_video_features


def resize(width: int, head_dim: int, num_heads: int) -> dict[str, Any]:
    """Return keywords of `tiny_config` for another decoder, whose heads are rotated by half."""
    sizes = resize_text(width, head_dim, num_heads, queries_per_key=1)
    half = head_dim // 2
    more = {"qk_nope_head_dim": half, "qk_rope_head_dim": half, "v_head_dim": head_dim}
    text = {name: size for name, size in sizes["text"].items() if name != "head_dim"}
    return {"text": {**text, **more}}


def publish_names(folder: Path) -> None:
    """Give tensors that HF saved the names that are published.

    `save_pretrained` (5.23) calls the decoder's layers `blocks`, as the tower's, and has what cuts
    patches within its encoder.
    """
    for file in folder.glob("*.safetensors"):
        renamed = {}
        for name, tensor in load_file(file).items():
            right = name.replace("language_model.model.blocks.", "language_model.model.layers.")
            renamed[right.replace("encoder.patch_embed.", "patch_embed.")] = tensor
        save_file(renamed, file, metadata={"format": "pt"})


TINY = TinyFamily(
    name="kimi_k25",
    model_class=ours.Kimi_K25ForConditionalGeneration,
    reference_class=Kimi_K25ForConditionalGeneration,
    make_config=tiny_config,
    resize=resize,
    draw_item=draw_item,
    torch_inputs=torch_inputs,
    word_ids=range(8, 120),
    published_head_dim=192,
    max_embeds={"image": 15, "video": 6},
    fill=fill,
    mend=take_clips,
    publish_names=publish_names,
    variants={
        "plain": Variant({}, 8),
        "fewer positions, gelu, another theta, a tied head": Variant(
            {
                "is_tied": True,
                "projection_layer_norm_eps": 1e-2,
                "text": {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
                "vision": {
                    **{"pos_emb_height": 3, "pos_emb_width": 3, "hidden_act": "gelu"},
                    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
                },
            },
            8,
        ),
    },
)


# ---- its prompts and directories ----------------------------------------------------------------


PAD, VIDEO = "<|media_pad|>", "<|kimi_k25_video_placeholder|>"
IMAGE = f"<|media_begin|>image<|media_content|>{PAD}<|media_end|>"
MARKS = ["<|media_begin|>", "<|media_content|>", PAD, "<|media_end|>", VIDEO, "<|im_middle|>"]
ROLES = [f"<|im_{role}|>" for role in ("system", "user", "assistant", "end")]
SETTINGS: dict[str, Any] = {
    **{"do_resize": True, "patch_size": 14, "merge_size": 2, "max_patches": 64},
    "size": {"max_height": 20, "max_width": 20},
}
VIDEO_SETTINGS: dict[str, Any] = {
    **SETTINGS,
    **{"max_patches": 16, "temporal_patch_size": CLIP_FRAMES, "fps": 2},
}
FEWER: dict[str, Any] = {"max_patches": 12}


def write_files(path: Path) -> Path:
    """Write a directory as HF's processor saves it, of pictures of up to 64 patches."""
    tokenizer = make_tokenizer([*MARKS, *ROLES], eos="<|im_end|>")
    config = tiny_config(text=fit_text(tokenizer), vision={"patch_size": 14})
    names = {"image_token_id": PAD, "video_token_id": VIDEO}
    names |= {"vision_start_token_id": MARKS[0], "vision_end_token_id": MARKS[3]}
    for name, token in names.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    return write_directory(
        path,
        config,
        tokenizer,
        preprocessor_config={"image_processor_type": "Kimi_K25ImageProcessor", **SETTINGS},
        video_preprocessor_config={
            "video_processor_type": "Kimi_K25VideoProcessor",
            **VIDEO_SETTINGS,
        },
    )


path = made_once(write_files)


def write(folder: Path) -> Path:
    """Write a checkpoint with weights, by the published names."""
    made = with_weights(write_files, fill)(folder)
    publish_names(made)
    return made


@cache
def image_class() -> Any:
    """Return HF's image processor, for which Pillow resizes."""
    return take_image_processor("kimi_k25", "Kimi_K25ImageProcessor")


def make_hf_videos() -> HFVideos:
    """Return HF's video processor of the directory, with Pillow's resizing."""
    taken = take_functions(
        "kimi_k25",
        *("navit_resize", "patchify", "_preprocess"),
        **{"SizeDict": SizeDict, "BatchFeature": BatchFeature, "TensorType": TensorType},
        **{"ChannelDimension": ChannelDimension, "get_image_size": get_image_size},
        group_videos_by_shape=video_utils.group_videos_by_shape,
        reorder_videos=video_utils.reorder_videos,
    )
    backend = {n: getattr(PillowBackend, n) for n in ("resize", "rescale_and_normalize")}
    backend["pad"] = lambda self, videos, **sizes: list(PillowBackend.pad(self, videos, **sizes))
    own: Any = type("Videos", (), {**vars(taken), **backend})()
    kwargs: dict[str, Any] = {"resample": 3, "do_rescale": True, "rescale_factor": 1 / 255}
    kwargs |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    kwargs |= {name: VIDEO_SETTINGS[name] for name in VIDEO_SETTINGS if name != "fps"}
    kwargs |= {"size": SizeDict(**VIDEO_SETTINGS["size"]), "return_tensors": None}

    def cut(videos: HFVideos, seen: Sequence[np.ndarray]) -> Mapping[str, Any]:
        frames = [torch.tensor(one).permute(0, 3, 1, 2) for one in seen]
        outputs = own._preprocess(frames, **kwargs)
        return {n: v.numpy() if hasattr(v, "numpy") else v for n, v in outputs.items()}

    def sample(metadata: Any) -> np.ndarray:
        # HF refuses a video that is slower.
        fps = min(VIDEO_SETTINGS["fps"], metadata.fps)
        return default_sample_indices_fn(metadata, fps=fps)

    return HFVideos(None, sample, cut, merge_size=2, temporal_patch_size=CLIP_FRAMES)


@cache
def hf_processor() -> Any:
    """HF's own processor, built apart from ours."""
    return assemble(
        Kimi_K25Processor,
        image_class(),
        path(),
        video_processor=make_hf_videos(),
        has_videos=True,
    )


def list_published(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the published names and shapes, without quantisation: experts one by one."""
    with torch.device("meta"):
        module = Kimi_K25ForConditionalGeneration(config)
    return dict(
        one
        for name, tensor in module.state_dict().items()
        for one in tell(name, tuple(tensor.shape))
    )


def tell(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the published names of a tensor of HF's module, with their shapes."""
    layer, is_expert, part = name.partition(".experts.")
    if is_expert:
        num_experts, rows, columns = shape
        parts = ["gate_proj", "up_proj"] if part == "gate_up_proj" else [part]
        layer = layer.replace("model.language_model.", "language_model.model.")
        one = (rows // len(parts), columns)
        names = [f"{n}.{p}.weight" for n in range(num_experts) for p in parts]
        return [(f"{layer}.experts.{each}", one) for each in names]
    if ".attn.q_proj." in name:
        shape = (3 * shape[0], *shape[1:])
    elif ".attn.k_proj." in name or ".attn.v_proj." in name:
        return []
    for old, new in PUBLISHED_NAMES.items():
        name = re.sub(old, new, name)
    return [(name, shape)]


PUBLISHED_NAMES = {
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.language_model\.": "language_model.model.",
    r"^model\.mm_projector\.in_proj\.": "mm_projector.proj.0.",
    r"^model\.mm_projector\.out_proj\.": "mm_projector.proj.2.",
    r"^model\.mm_projector\.": "mm_projector.",
    r"^model\.vision_tower\.layers\.": "vision_tower.encoder.blocks.",
    r"^model\.vision_tower\.final": "vision_tower.encoder.final",
    r"^model\.vision_tower\.": "vision_tower.",
    r"pos_emb\.position_embeddings$": "pos_emb.weight",
    r"\.norm1\.": ".norm0.",
    r"\.norm2\.": ".norm1.",
    r"\.fc1\.": ".fc0.",
    r"\.fc2\.": ".fc1.",
    r"\.attn\.q_proj\.": ".wqkv.",
    r"\.attn\.proj\.": ".wo.",
}
"""In this order (conversion_mapping.py of transformers, the other way around)."""


KIMI_K25 = Family(
    **written(TINY, write_files) | {"write": write},
    needless_files=frozenset(
        {"tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json"}
    ),
    published=Published(
        list_shapes=list_published, unread=("vision_tower.patch_embed.pos_emb.time_weight",)
    ),
    rendered=f"<|im_user|>user<|im_middle|>{IMAGE}what is it<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>a car<|im_end|>"
    "<|im_user|>user<|im_middle|>which color<|im_end|><|im_assistant|>assistant<|im_middle|>",
    with_system=(
        f"<|im_user|>user<|im_middle|>{IMAGE}",
        f"<|im_system|>system<|im_middle|>be short<|im_end|><|im_user|>user<|im_middle|>{IMAGE}",
    ),
    probed=("visual.blocks.1", "visual.post_layernorm", "visual.merger"),
    call_hf=partial(call_processor, hf_processor),
    placeholder=IMAGE,
    video=VIDEO,
    load_hf_videos=hf_processor,
    video_kwargs=({}, {"max_patches": 4}),
    extra_kwargs=({}, FEWER),
    operator_kwargs=(FEWER, {"size": {"max_height": 6, "max_width": 6}}),
    lowering_kwargs=FEWER,
    tensors={"pixel_values": 1e-6, "image_grid_thw": 0.0},
)
