r"""MiniCPM-V 4.6's prompt side: a number, the whole picture, and its slices row by row.

Before: `look <|image_pad|>`. After, of the first picture, of two rows of one slice: `look
<image_id>0</image_id><image><|image_pad|>*N</image><slice><|image_pad|>*M</slice>\n<slice>
<|image_pad|>*M</slice>`. Only the pads take embeddings. A video is such a text for each frame,
with its own pads, behind its own number.

Pictures and frames -> patches of the whole and of slices, through HF's PIL image processor.

Of a picture that is larger than `scale_resolution` squared, up to `max_slice_nums` slices follow
the whole, in the arrangement whose shape is closest; each is scaled to about as many pixels. Frames
are chosen as HF's `MiniCPMV4_6VideoProcessor` does, which needs torchvision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError, RequestValueError, check_settings
from mmjax.models.family import FamilyInfo, FamilyProcessor, item_fields, make_factories
from mmjax.models.minicpmv4_6.host_inputs import MiniCPMV46HostInputs
from mmjax.processing.chat_turns import write_chatml, write_parts
from mmjax.processing.image_processors.frames import FrameSampling, Timing, split_pairs
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_video_settings
from mmjax.processing.image_processors.patches import PLANNED_ASPECT_RATIO, check_aspect_ratio
from mmjax.processing.image_processors.pil_classes import load_image_processor, make_image_processor
from mmjax.processing.image_processors.tiling import check_limits
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import PixelsOnlyDataParser
from mmjax.processing.media.decode import map_in_threads
from mmjax.processing.prompt_updates.updates import (
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_TENTH = 0.1
"""Seconds between the frames of which those of a long video are chosen."""


class SliceCutter:
    """The part for images."""

    valid_kwargs = frozenset({"max_slice_nums", "slice_mode"})
    planned_ratio = PLANNED_ASPECT_RATIO
    """Of the sides of the pictures that memory is planned for."""
    planned_slices = 81
    """As many pixels as these the largest picture has: any scale gives as many embeddings."""

    def __init__(self, hf_processor: Any, *, patch_size: int, downsample_mode: str) -> None:
        """`patch_size`, `downsample_mode`: of config.json, which the tower goes by."""
        self.hf = hf_processor
        wanted = {"patch_size": patch_size, "downsample_mode": downsample_mode, "do_resize": True}
        where, source = "the image processor", "the tower of config.json takes"
        check_settings(hf_processor, wanted, where=where, source=source)
        self.unit = patch_size * (2 if downsample_mode == "4x" else 4)
        """The side of the square of pixels that one embedding stands for."""
        # What is largest depends on the number of slices alone.
        self.find_largest = cache(self._find_largest)

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, Any]:
        """Return the patches of all units (wholes and slices), one behind the other.

        Returns:
            `pixel_values` uint8[patches, C, rows, columns], row by row; `target_sizes`
            int32[units, 2], rows and columns of patches; `image_grids` int64[images, 2], rows and
            columns of slices (0, 0: none); `image_num_units`, `image_num_patches` int64[images].
        """
        for image in images:
            check_aspect_ratio(ImageSize(*image.size), "image")
        most = self.resolve(kwargs)
        slices = {"max_slice_nums": most, "slice_mode": most > 1}
        # One by one: of a batch, all would be resized as the first.
        made = map_in_threads(lambda one: self.hf([one], return_tensors="np", **slices), images)
        sizes = [one["target_sizes"] for one in made]
        return {
            "pixel_values": np.concatenate([_split(one["pixel_values"]) for one in made]),
            "target_sizes": np.concatenate(sizes),
            "image_grids": np.array([one["grids"][0] for one in made], np.int64),
            "image_num_units": np.array([len(one) for one in sizes], np.int64),
            "image_num_patches": np.array([one.prod(-1).sum() for one in sizes], np.int64),
            "image_affine": made[0]["image_affine"],
        }

    def resolve(self, kwargs: Mapping[str, Any]) -> int:
        """Return the most slices of a call; 1: none is cut. `RequestValueError` for no number."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        most, is_cut = (given.get(n, getattr(self.hf, n)) for n in ("max_slice_nums", "slice_mode"))
        check_limits(1, most, ("slices", "max_slice_nums"))
        if not isinstance(is_cut, bool):
            raise RequestValueError(
                f"`slice_mode` is {is_cut!r} in mm_processor_kwargs; it must be true or false",
                param="mm_processor_kwargs",
            )
        return most if is_cut else 1

    def count_tokens(self, size: ImageSize, most: int) -> int:
        """Return how many embeddings a picture has, of at most so many slices."""
        pixels, scale = (size.height, size.width), self.hf.scale_resolution
        grid = self.hf.get_sliced_grid(pixels, most, scale)
        rest = (scale, self.hf.patch_size, self.hf.downsample_mode)
        whole = self.hf.find_best_resize(pixels, *rest, allow_upscale=grid is None)
        slices = (0, 0)
        if grid is not None:
            slices = self.hf.get_refine_size(pixels, grid, *rest, allow_upscale=True)
        return (math.prod(whole) + math.prod(slices)) // self.unit**2

    def _find_largest(self, most: int) -> tuple[ImageSize, int]:
        """Return the size of a picture with the most embeddings, no sliver, and their number."""
        area = most * self.hf.scale_resolution**2
        longest = math.isqrt(area * self.planned_ratio)
        sides = range(-(-area // longest), longest + 1)
        # An operator describes a smaller one, and neither side may be longer.
        scale = max(1, math.isqrt(self.planned_slices // most))
        sizes = [ImageSize(width=area // height * scale, height=height * scale) for height in sides]
        counts = [self.count_tokens(size, most) for size in sizes]
        best = max(range(len(sizes)), key=lambda n: (counts[n], min(sizes[n])))
        return sizes[best], counts[best]


@dataclass(frozen=True, kw_only=True)
class SecondSampling(FrameSampling):
    """A frame of each second; of a longer video so many, evenly."""

    max_num_frames: int = 128

    requested = frozenset({"do_sample_frames", "max_num_frames"})

    def choose(self, timing: Timing) -> np.ndarray:
        """Return int64[seen]: a frame may be seen twice, of a video that is slower."""
        most = int(self.max_num_frames) or 1
        duration = timing.total / timing.fps if timing.duration is None else timing.duration
        if duration > most:
            steps = np.linspace(0, int(duration / _TENTH) - 1, most, dtype=int)
            seconds = np.round(steps * _TENTH, 1)
        else:
            seconds = np.arange(max(math.ceil(duration), 1))
        return np.minimum((seconds * timing.fps).astype(np.int64), timing.total - 1)


class FrameSliceCutter(SliceCutter):
    """The part for videos, each frame of which is cut as a picture."""

    planned_ratio, planned_slices = 3, 4  # there are many of them

    def __init__(self, hf_processor: Any, *, settings: Mapping[str, Any], **sizes: Any) -> None:
        """`settings`: the checkpoint's of videos."""
        super().__init__(hf_processor, **sizes)
        if (stacked := settings.get("stack_frames") or 1) != 1:
            raise CheckpointError(
                f"`stack_frames` of the video processor is {stacked}; mmjax shows every frame by "
                "itself: set it to 1"
            )
        self.sampling = SecondSampling().of_checkpoint(settings)

    @property
    def valid_kwargs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return SliceCutter.valid_kwargs | self.sampling.requested

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the same of the frames of all videos, by HF's names, and by video.

        A video is its frames, or a pair of them and its metadata.
        """
        sampling = self.sampling.asked(kwargs)
        seen = [sampling.select(*pair)[0] for pair in split_pairs(videos)]
        images = [Image.fromarray(frame) for frames in seen for frame in frames]
        own = {key: value for key, value in kwargs.items() if key in SliceCutter.valid_kwargs}
        cut = super().__call__(images, **own)
        firsts = np.cumsum([0, *map(len, seen[:-1])])
        return {
            "pixel_values_videos": cut["pixel_values"],
            "target_sizes_videos": cut["target_sizes"],
            "video_grids": cut["image_grids"][firsts],
            "video_num_units": np.add.reduceat(cut["image_num_units"], firsts),
            "video_num_patches": np.add.reduceat(cut["image_num_patches"], firsts),
            "video_affine": cut["image_affine"],
        }


def _split(packed: np.ndarray) -> np.ndarray:
    """Return HF's [1, C, rows, patches * columns] as [patches, C, rows, columns]."""
    _, channels, side, _ = packed.shape
    return packed[0].reshape(channels, side, -1, side).transpose(2, 0, 1, 3)


def join_patches(patches: np.ndarray) -> np.ndarray:
    """Undo that: return [1, C, rows, patches * columns] of [patches, C, rows, columns]."""
    _, channels, side, _ = patches.shape
    return patches.transpose(1, 2, 0, 3).reshape(1, channels, side, -1)


_PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_SUFFIXES = {"image": "", "video": "_videos"}
"""Of HF's names of a modality's tensors."""


class MiniCPMV46ProcessingInfo(FamilyInfo):
    chat_template = write_chatml(write_parts(**_PLACEHOLDERS))
    data_parser = PixelsOnlyDataParser
    """Nothing says how many of the embeddings are a slice."""
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
        sizes = {
            "patch_size": config.vision_config.patch_size,
            "downsample_mode": config.downsample_mode,
        }
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=SliceCutter(own, **sizes),
            video_processor=FrameSliceCutter(
                make_image_processor(type(own), videos), settings=videos, **sizes
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

    def get_largest_video(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> tuple[int, ImageSize]:
        cutter, most = self.find_cutter("video")
        return self.get_max_frames(seq_len, mm_counts), cutter.find_largest(most)[0]

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

    @property
    def num_frame_tokens(self) -> int:
        cutter, most = self.find_cutter("video")
        return cutter.find_largest(most)[1]

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
