r"""MiniCPM-V 4.6's prompt side: a number, the whole picture, and its slices row by row.

Before: `look <|image_pad|>`. After, of the first picture, of two rows of one slice: `look
<image_id>0</image_id><image><|image_pad|>*N</image><slice><|image_pad|>*M</slice>\n<slice>
<|image_pad|>*M</slice>`. Only the pads take embeddings. A video is such a text for each frame,
with its own pads, behind its own number.

MiniCPM-V 4.7's videos have no number. MiniCPM-OCR's prompts are 4.6's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from mmjax.errors import check_settings
from mmjax.models.family import FamilyInfo, FamilyProcessor, item_fields, make_factories
from mmjax.models.minicpmv4_6.glyphs import GlyphCutter
from mmjax.models.minicpmv4_6.host_inputs import (
    MARKS,
    MiniCPMV46HostInputs,
    MiniCPMV47HostInputs,
)
from mmjax.models.minicpmv4_6.slices import (
    FrameSliceCutter,
    SecondSampling,
    SliceCutter,
    join_patches,
)
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.parts import (
    ProcessorOfParts,
    load_image_settings,
    load_video_settings,
)
from mmjax.processing.image_processors.pil_classes import (
    load_class,
    load_image_processor,
    make_image_processor,
)
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import PixelsOnlyDataParser
from mmjax.processing.prompt_updates.updates import (
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_SUFFIXES = {"image": "", "video": "_videos"}
"""Of HF's names of a modality's tensors."""


class MiniCPMV46ProcessingInfo(FamilyInfo):
    chat_template = write_chatml(write_parts(**_PLACEHOLDERS))
    data_parser = PixelsOnlyDataParser
    """Nothing says how many of the embeddings are a slice."""
    host_inputs = MiniCPMV46HostInputs
    limits: ClassVar = {"image": None, "video": None}
    numbered: ClassVar = frozenset({"image", "video"})
    """The modalities whose items have numbers."""
    hf_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings that HF's processors of the model have where the files leave them out."""
    image_processors: ClassVar = {"MiniCPMV4_6": "minicpmv4_6"}
    placeholders: ClassVar = _PLACEHOLDERS

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts: AutoProcessor needs torchvision for videos."""
        path, config = self.ctx.model_config.path, self.get_hf_config()
        for modality, placeholder in self.placeholders.items():
            self.check_token(placeholder, f"{modality}_token_id")
        videos = load_video_settings(path)
        sizes = {
            "patch_size": config.vision_config.patch_size,
            "downsample_mode": config.downsample_mode,
        }
        cutter = self.load_cutter(path, sizes)
        own = make_image_processor(type(cutter.hf), {**self.hf_defaults, **videos})
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=cutter,
            video_processor=FrameSliceCutter(own, settings=videos, **sizes),
        )

    def load_cutter(self, path: Path, sizes: Mapping[str, Any]) -> SliceCutter:
        """Return the part for images; `sizes`: of the tower."""
        return SliceCutter(load_image_processor(path, self.image_processors), **sizes)

    # ---- sizes -----------------------------------------------------------------------------------

    def find_cutter(self, modality: str) -> tuple[SliceCutter, int]:
        """Return the part of a modality, and the most slices that memory is planned for."""
        cutter: SliceCutter = getattr(self.get_hf_processor(), f"{modality}_processor")
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs(), f"{modality}s_kwargs")
        return cutter, cutter.resolve(kwargs)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger numbers of slices and frames, the checkpoint's or the operator's."""
        parts = self.get_hf_processor()

        def plan(cutter: SliceCutter, scope: str) -> dict[str, int]:
            cut = {"slice_mode": True}
            most = self.find_larger(lambda kwargs: cutter.resolve({**kwargs, **cut}), scope)
            return {**cut, "max_slice_nums": most}

        images = plan(parts.image_processor, "images_kwargs")
        videos = plan(parts.video_processor, "videos_kwargs")
        sampling: SecondSampling = parts.video_processor.sampling
        frames = self.find_larger(
            lambda kwargs: sampling.asked(kwargs).max_num_frames, "videos_kwargs"
        )
        return {"images_kwargs": images, "videos_kwargs": {**videos, "max_num_frames": frames}}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        cutter, most = self.find_cutter("image")
        return cutter.find_largest(most)

    def find_largest_frame(self) -> tuple[ImageSize, int]:
        cutter, most = self.find_cutter("video")
        return cutter.find_largest(most)

    def get_max_frames(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        """Return the frames of a video whose memory is planned: as long as one without slices.

        That is of all frames that may be seen, of those that fit if videos share a prompt.
        """
        cutter: FrameSliceCutter = self.get_hf_processor().video_processor
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs(), "videos_kwargs")
        num_frames = cutter.sampling.asked(kwargs).max_num_frames
        num_videos = max((mm_counts or {}).get("video", 0), 1)
        share = self.ctx.model_config.max_model_len // num_videos
        num_tokens = min(share, num_frames * cutter.find_largest(1)[1])
        return max(min(num_tokens // self.num_frame_tokens, num_frames), 1)

    # ---- tokens and tensors ----------------------------------------------------------------------

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        fields: dict[str, MultiModalFieldConfig] = {}
        for modality, suffix in _SUFFIXES.items():
            names = [f"{modality}_num_patches", f"{modality}_num_units"]
            patches, units = (outputs.get(name, ()) for name in names)
            fields |= item_fields(modality, units=[f"pixel_values{suffix}"], counts=patches)
            fields |= item_fields(modality, units_on_host=[f"target_sizes{suffix}"], counts=units)
            fields |= item_fields(modality, on_host=[f"{modality}_grids", *names])
        return fields

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model patches beside each other."""
        names = [f"pixel_values{suffix}" for suffix in _SUFFIXES.values()]
        joined = {name: join_patches(tensors[name]) for name in names if name in tensors}
        return {**tensors, **joined}

    def get_embed_token_id(self, modality: str) -> int:
        return self.get_token_id(self.placeholders[modality])

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the rows and columns of slices, and the embeddings of every unit."""
        sizes = np.asarray(tensors[f"target_sizes{_SUFFIXES[modality]}"])
        counts = sizes.prod(-1) // self.encoder_spec.patches_per_token
        return (*tensors[f"{modality}_grids"].tolist(), *counts.tolist())

    def write_item(self, modality: str, size: tuple[int, ...]) -> list[int]:
        """Write the whole and the slices of each frame; a picture is one."""
        rows, columns, *counts = size
        pad = self.get_embed_token_id(modality)
        whole, piece = (self._find_marks(name) for name in ("image", "slice"))
        newline = as_ids("\n", self.get_tokenizer())
        tokens: list[int] = []
        for place, count in enumerate(counts):
            number = place % (rows * columns + 1)  # 0: of a whole
            if number > 1 and (number - 1) % columns == 0:
                tokens += newline
            start, end = piece if number else whole
            tokens += [start, *[pad] * count, end]
        return tokens

    def write_number(self, modality: str, index: int) -> list[int]:
        """Return the tokens before the n-th item of a modality; none where they are turned off."""
        if modality not in self.numbered or not self.get_image_processor().hf.use_image_id:
            return []
        start, end = self._find_marks("image_id")
        return [start, *as_ids(str(index), self.get_tokenizer()), end]

    def _find_marks(self, name: str) -> tuple[int, int]:
        """Return the tokens around what tokenizer_config.json calls so."""
        defaults = {"start": f"<{name}>", "end": f"</{name}>"}
        start, end = (
            self.get_token_id(self.find_token(f"{name}_{key}_token", token))
            for key, token in defaults.items()
        )
        return start, end


class MiniCPMV46MultiModalProcessor(FamilyProcessor[MiniCPMV46ProcessingInfo]):
    def _recompute_cached_prompt_update(
        self, cached_update: ResolvedPromptUpdate, new_item_idx: int
    ) -> ResolvedPromptUpdate:
        """Put the item's number before it, which depends on the request."""
        update = super()._recompute_cached_prompt_update(cached_update, new_item_idx)
        item = as_ids(update.content.full, self.info.get_tokenizer())
        tokens = [*self.info.write_number(update.modality, new_item_idx), *item]
        pad = self.info.get_embed_token_id(update.modality)
        return replace(update, content=PromptUpdateDetails.select_token_id(tokens, pad))


FACTORIES = make_factories(MiniCPMV46ProcessingInfo, MiniCPMV46MultiModalProcessor)


# ---- MiniCPM-V 4.7 -------------------------------------------------------------------------------


class MiniCPMV47ProcessingInfo(MiniCPMV46ProcessingInfo):
    host_inputs = MiniCPMV47HostInputs
    numbered: ClassVar = frozenset({"image"})

    def load_hf_processor(self) -> ProcessorOfParts:
        """Check also that config.json and the tokenizer agree about the tokens with places."""
        marks = [*self._find_marks("image"), *self._find_marks("slice")]
        marks += as_ids("\n", self.get_tokenizer())
        check_settings(
            self.get_hf_config(),
            dict(zip(MARKS, marks, strict=True)),
            where="config.json",
            source="the tokenizer has",
        )
        return super().load_hf_processor()


V4_7_FACTORIES = make_factories(MiniCPMV47ProcessingInfo, MiniCPMV46MultiModalProcessor)


# ---- MiniCPM-OCR ---------------------------------------------------------------------------------


class MiniCPMOcrProcessingInfo(MiniCPMV46ProcessingInfo):
    tasks: ClassVar = {"Read text": "Text Recognition:", "Table": "Table Recognition:"}
    hf_defaults: ClassVar = MappingProxyType({"downsample_mode": "4x"})

    def load_cutter(self, path: Path, sizes: Mapping[str, Any]) -> SliceCutter:
        """Make 4.6's of HF, which has a torchvision processor alone for MiniCPM-OCR."""
        given = {**self.hf_defaults, **load_image_settings(path)}
        made = make_image_processor(load_class("MiniCPMV4_6", "minicpmv4_6"), given)
        return GlyphCutter(made, settings=given, **sizes)


OCR_FACTORIES = make_factories(MiniCPMOcrProcessingInfo, MiniCPMV46MultiModalProcessor)
