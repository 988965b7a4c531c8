r"""MiniCPM-V 4.6's prompt side: a number, the whole picture, and its slices row by row.

Before: `look <|image_pad|>`. After, of the first picture, of two rows of one slice: `look
<image_id>0</image_id><image><|image_pad|>*N</image><slice><|image_pad|>*M</slice>\n<slice>
<|image_pad|>*M</slice>`. Only the pads take embeddings. A video is such a text for each frame,
with its own pads, behind its own number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from mmjax.models.family import FamilyInfo, FamilyProcessor, item_fields, make_factories
from mmjax.models.minicpmv4_6.host_inputs import MiniCPMV46HostInputs
from mmjax.models.minicpmv4_6.image_processor import (
    FrameSliceCutter,
    SliceCutter,
    join_patches,
)
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_video_settings
from mmjax.processing.image_processors.pil_classes import load_image_processor
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser
from mmjax.processing.prompt_updates.updates import (
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_SUFFIXES = {"image": "", "video": "_videos"}
"""Of HF's names of a modality's tensors."""


class MiniCPMV46DataParser(ImagesOnlyDataParser):
    """Nothing says how many of the embeddings are a slice."""

    keeps_metadata = True


class MiniCPMV46ProcessingInfo(FamilyInfo):
    chat_template = write_chatml(write_parts(**_PLACEHOLDERS))
    data_parser = MiniCPMV46DataParser
    host_inputs = MiniCPMV46HostInputs
    limits: ClassVar = {"image": None, "video": None}
    image_processors: ClassVar = {"MiniCPMV4_6": "minicpmv4_6"}
    placeholders: ClassVar = _PLACEHOLDERS

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the HF processor's parts: AutoProcessor needs torchvision for videos."""
        path, config = self.ctx.model_config.path, self.get_hf_config()
        for modality, placeholder in self.placeholders.items():
            self.check_token(placeholder, f"{modality}_token_id")
        own = load_image_processor(path, self.image_processors)
        videos = load_video_settings(path)
        known = videos.keys() & own.valid_kwargs.__annotations__
        sizes = {
            "patch_size": config.vision_config.patch_size,
            "downsample_mode": config.downsample_mode,
        }
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=SliceCutter(own, **sizes),
            video_processor=FrameSliceCutter(
                type(own)(**{key: videos[key] for key in known}), settings=videos, **sizes
            ),
        )

    # ---- sizes -----------------------------------------------------------------------------------

    def find_cutter(self, modality: str) -> tuple[SliceCutter, int]:
        """Return the part of a modality, and the most slices that memory is planned for."""
        cutter: SliceCutter = getattr(self.get_hf_processor(), f"{modality}_processor")
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs(), f"{modality}s_kwargs")
        return cutter, cutter.resolve(kwargs)

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger numbers of slices and frames, the checkpoint's or the operator's."""
        parts = self.get_hf_processor()
        images, videos = (self.scope_kwargs({}, f"{modality}s_kwargs") for modality in self.limits)
        cut = {"slice_mode": True}

        def find_most(cutter: SliceCutter, operators: Mapping[str, Any]) -> int:
            return max(cutter.resolve({**kwargs, **cut}) for kwargs in ({}, operators))

        sampling = parts.video_processor.sampling
        most = max(sampling.max_num_frames, sampling.asked(videos).max_num_frames)
        slices = {
            "images_kwargs": find_most(parts.image_processor, images),
            "videos_kwargs": find_most(parts.video_processor, videos),
        }
        planned = {scope: {**cut, "max_slice_nums": number} for scope, number in slices.items()}
        planned["videos_kwargs"]["max_num_frames"] = most
        return planned

    def get_largest_image(self) -> ImageSize:
        cutter, most = self.find_cutter("image")
        return cutter.find_largest(most)[0]

    def get_max_image_tokens(self) -> int:
        cutter, most = self.find_cutter("image")
        return cutter.find_largest(most)[1]

    def get_largest_video(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> tuple[int, ImageSize]:
        cutter, most = self.find_cutter("video")
        return self.get_max_frames(seq_len, mm_counts), cutter.find_largest(most)[0]

    def get_max_frames(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        """Return the frames of a video whose memory is planned: as long as one without slices.

        That is of all frames that may be seen, of those that fit if videos share a prompt.
        """
        cutter, most = self.find_cutter("video")
        assert isinstance(cutter, FrameSliceCutter)
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs(), "videos_kwargs")
        num_frames = cutter.sampling.asked(kwargs).max_num_frames
        num_videos = max((mm_counts or {}).get("video", 0), 1)
        share = self.ctx.model_config.max_model_len // num_videos
        num_tokens = min(share, num_frames * cutter.find_largest(1)[1])
        return max(min(num_tokens // cutter.find_largest(most)[1], num_frames), 1)

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        cutter, most = self.find_cutter("video")
        num_frames = self.get_max_frames(seq_len, mm_counts)
        return {
            "image": self.get_max_image_tokens(),
            "video": num_frames * cutter.find_largest(most)[1],
        }

    # ---- tokens and tensors ----------------------------------------------------------------------

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        fields: dict[str, MultiModalFieldConfig] = {}
        for modality, suffix in _SUFFIXES.items():
            names = [f"{modality}_num_patches", f"{modality}_num_units"]
            patches, units = (np.asarray(outputs.get(name, ()), int) for name in names)
            fields |= item_fields(
                modality,
                units=[f"pixel_values{suffix}"],
                counts=patches,
                on_host=[f"{modality}_grids", *names],
            )
            fields[f"target_sizes{suffix}"] = MultiModalFieldConfig.flat_from_sizes(
                modality, units, keep_on_cpu=True
            )
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

    def write_number(self, index: int) -> list[int]:
        """Return the tokens before the n-th item of a modality; none where they are turned off."""
        if not self.get_image_processor().hf.use_image_id:
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
        tokens = [*self.info.write_number(new_item_idx), *item]
        pad = self.info.get_embed_token_id(update.modality)
        return replace(update, content=PromptUpdateDetails.select_token_id(tokens, pad))


FACTORIES = make_factories(MiniCPMV46ProcessingInfo, MiniCPMV46MultiModalProcessor)
