"""Molmo 2's prompt side: BOS, and each `<|image|>` becomes two views of the image.

Before: `<|image|>what is it`. After: `<bos> <low_res_im_start> (<im_patch>*14 <im_col>)*14
<im_end> <im_start> (<im_patch>*columns <im_col>)*rows <im_end> what is it`. The marks are
embeddings of the image, too: they see it, and are seen, in both directions. A video's `<|video|>`
becomes `0.0 <frame_start> <im_patch>*81 <frame_end> 0.5 <frame_start> ...`: seconds as text before
each frame.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import CheckpointError, check_settings
from mmjax.models.family import item_fields, make_factories
from mmjax.models.molmo2.host_inputs import (
    MARKS,
    MAX_POOLED,
    NO_PATCH,
    Molmo2HostInputs,
    read_prompt_ids,
)
from mmjax.models.molmo2.image_processor import (
    Molmo2ImageProcessor,
    Molmo2Sampling,
    Molmo2VideoProcessor,
)
from mmjax.models.tiles import CropsInfo
from mmjax.processing.answers import MOLMO_2
from mmjax.processing.chat_turns import write_chatml
from mmjax.processing.image_processors.parts import (
    ProcessorOfParts,
    load_image_settings,
    load_video_settings,
)
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import PixelsOnlyDataParser
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_MEDIA = r"""
{%- set parts = messages | sum(attribute='content', start=[]) -%}
{%- set images = parts | selectattr('type', 'equalto', 'image') | list -%}
{%- for image in images -%}
    {{- ('Image ' ~ loop.index if images | length > 1 else '') ~ '<|image|>' -}}
{%- endfor -%}
{%- for part in parts if part.type == 'video' -%}
    {{- '<|video|>' -}}
{%- endfor -%}
"""
_TEXTS = r"""
{%- for part in message.content if part.type == 'text' -%}
    {{- ('' if loop.first else ' ') + part.text -}}
{%- endfor -%}
"""
CHAT_TEMPLATE = write_chatml(_TEXTS.strip(), first=_MEDIA)
"""The published order, media before all turns; the published one refuses a system's turn."""
_FIXED_SETTINGS: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 2,
}


class Molmo2ProcessingInfo(CropsInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Describe": "Describe this image.",
        "Point to": "Point to the {boats}.",
        "Count": "How many {boats} are there?",
    }
    data_parser = PixelsOnlyDataParser
    host_inputs = Molmo2HostInputs
    limits: ClassVar = {"image": None, "video": 1}
    placeholders: ClassVar = {"image": "<|image|>", "video": "<|video|>"}
    answer_form = MOLMO_2

    @cached_property
    def vocab_size(self) -> int:
        """Token ids at or above this are refused; the last rows have no logits."""
        text = self.get_hf_config().get_text_config()
        return text.vocab_size + text.additional_vocab_size

    def load_hf_processor(self) -> ProcessorOfParts:
        """Return mmjax's own: HF's needs torchvision."""
        path = self.ctx.model_config.path
        _ = self.encoder_spec  # refuses crops that the tower does not take
        ids: dict[str, int] = dict(zip(("<im_patch>", *MARKS), self._prompt_ids, strict=True))
        found = {token: self.get_token_id(token) for token in ids}
        check_settings(found, ids, where="the tokenizer")
        images, frames = load_image_settings(path), load_video_settings(path)
        # Frames are whole crops: they have no margins.
        frames |= {"sampling": Molmo2Sampling().of_checkpoint(frames), "overlap_margins": (0, 0)}
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=self._make_part("image", Molmo2ImageProcessor, images),
            video_processor=self._make_part("video", Molmo2VideoProcessor, frames),
        )

    def _make_part(
        self, modality: str, kind: type[Molmo2ImageProcessor], settings: Mapping[str, Any]
    ) -> Any:
        """Return what cuts images, or frames; `CheckpointError` for what no model takes."""
        vision = self.get_hf_config().vision_config
        side, patch_size = vision.image_size[0], vision.patch_size
        found: dict[str, Any] = {"size": {"height": 378, "width": 378}}
        found["patch_size"] = kind.patch_size
        found |= {**settings, **self.processor_settings, "crop_side": side}
        wanted = {"size": {"height": side, "width": side}, "patch_size": patch_size}
        where, source = f"the {modality} processor", "the model takes"
        check_settings(found, {**_FIXED_SETTINGS, **wanted}, where=where, source=source)
        part = kind(**{name: found[name] for name in found.keys() & kind.__dataclass_fields__})
        if not 1 <= math.prod(part.pooling_size) <= MAX_POOLED or part.window_patches < 1:
            raise CheckpointError(
                f"`pooling_size` and `overlap_margins` of {where} are {list(part.pooling_size)} "
                f"and {list(part.overlap_margins)}; mmjax pools up to {MAX_POOLED} patches, and a "
                f"crop has {side // patch_size} a side"
            )
        return part

    @property
    def _prompt_ids(self) -> Sequence[int]:
        return read_prompt_ids(self.get_hf_config())

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Begin a prompt with BOS, or with EOS where the tokenizer has none, as Qwen's."""
        bos = self.find_bos(or_eos=True)
        return token_ids if token_ids[:1] == [bos] else [bos, *token_ids]

    def find_largest_frame(self) -> tuple[ImageSize, int]:
        part: Molmo2VideoProcessor = self.get_hf_processor().video_processor
        return ImageSize(width=part.crop_side, height=part.crop_side), part.num_frame_tokens

    @property
    def num_frame_room(self) -> int:
        """How many tokens a frame has at most, with its second: a digit is one."""
        return self.num_frame_tokens + len(" 99999.9 ")

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        images = ["pixel_values", "image_token_pooling", "image_rows"]
        videos = ["pixel_values_videos", "video_token_pooling", "video_rows"]
        fields = item_fields("image", rows=images, on_host=["image_grids"])
        return fields | item_fields("video", rows=videos, on_host=["timestamps"])

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Number patches over all crops of a prompt, as HF's model reads them.

        A video is given as images, of which it has no tiles: HF's takes none beside images.
        """
        found = {"mm_token_type_ids": np.isin([token_ids], self._prompt_ids).astype(int)}
        frames, ours = (tensors.get(n, ()) for n in ("pixel_values_videos", "video_token_pooling"))
        crops = [*tensors.get("pixel_values", ()), *frames]
        if not crops:
            return found
        windows = [*tensors.get("image_token_pooling", ()), *ours]
        most = max(one.shape[1] for one in windows)
        pooling, first = [], 0
        for pixels, own in zip(crops, windows, strict=True):
            numbered = np.where(own < 0, own, own + first)
            behind = ((0, 0), (0, most - own.shape[1]))
            pooling.append(np.pad(numbered, behind, constant_values=NO_PATCH))
            first += np.prod(pixels.shape[:2])
        grids = [*tensors.get("image_grids", ()), *([len(one), 1, 0, 0] for one in ours)]
        return found | {
            "pixel_values": np.concatenate(crops),
            "image_token_pooling": np.concatenate(pooling),
            "image_grids": np.array(grids),
        }

    def get_embed_token_ids(self, modality: str) -> Sequence[int]:
        return self._prompt_ids

    def get_target(self, modality: str) -> list[int]:
        return [self.get_token_id(self.placeholders[modality])]

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        ids = self._prompt_ids  # first the patch token, then the marks, which count back from -1
        tokens = tuple(ids[max(-row, 0)] for row in tensors[f"{modality}_rows"].tolist())
        return tokens, tuple(tensors["timestamps"].tolist()) if modality == "video" else ()

    def write_item(self, modality: str, size: Any) -> list[int]:
        tokens, seconds = size
        if not seconds:
            return list(tokens)
        times = (f"{' ' * (number > 0)}{second:.1f} " for number, second in enumerate(seconds))
        frame = tokens[: len(tokens) // len(seconds)]
        return [one for time in times for one in (*as_ids(time, self.get_tokenizer()), *frame)]


FACTORIES = make_factories(Molmo2ProcessingInfo)
