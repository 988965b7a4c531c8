"""Kimi K2.5's prompt side: a picture's pads, and a video's clips, each with its time before it.

Before: `<|media_begin|>image<|media_content|><|media_pad|><|media_end|>`. After: as many pads as
the picture has squares of 28 x 28 pixels. A video's placeholder becomes, for each clip of four
frames, `00:00:02.000<|media_begin|>video<|media_content|> <|kimi_k25_video_placeholder|>*N
<|media_end|>`, all N take embeddings.

Pictures and frames -> patches, as HF's Kimi_K25ImageProcessor and Kimi_K25VideoProcessor make them,
which need torchvision: scaled down to a number of patches, and never up, then padded with black.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError, check_settings
from mmjax.models.family import FamilyInfo, item_fields, make_factories
from mmjax.models.kimi_k25.host_inputs import KimiK25HostInputs
from mmjax.models.kimi_k25.tokenizer import load_tokenizer
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.affine import read_affine
from mmjax.processing.image_processors.frames import EvenSampling, split_pairs
from mmjax.processing.image_processors.image import bad_kwarg, check_count, patchify, to_pixels
from mmjax.processing.image_processors.parts import (
    ProcessorOfParts,
    load_image_settings,
    load_video_settings,
)
from mmjax.processing.items.parse import ImageEmbedsDataParser, ImageSize
from mmjax.processing.media.decode import map_in_threads
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.rounding import cdiv

PLANNED_CLIPS = 4
"""Of the videos that memory is planned for; longer ones are admitted within the encoder budget."""
_MOST_PATCHES, _MOST_SIDE = 2**20, 2**16
"""Of a picture, and of a side of one, that a request may ask for."""
_PUBLISHED = "media_proc_cfg"
"""The key of Moonshot's own preprocessor_config.json that holds the settings."""
_SHARED_NAMES = {
    **{"merge_kernel_size": "merge_size", "temporal_merge_kernel_size": "temporal_patch_size"},
    **{"sample_fps": "fps", "patch_size": "patch_size"},
    **{"image_mean": "image_mean", "image_std": "image_std"},
}
_LIMIT_NAMES = {"image": "in_patch_limit", "video": "in_patch_limit_each_frame"}
_UNSERVED = {
    "fixed_output_tokens": None,
    "in_patch_limit_video": None,
    "max_num_frames_each_video": None,
    "timestamp_mode": "hh:mm:ss.fff",
}
"""Of Moonshot's settings, the only values that HF's processor knows."""
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "size": {"max_height": 512, "max_width": 512},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "resample": Image.Resampling.BICUBIC,
    }
)
"""Of a checkpoint that says nothing (HF: `Kimi_K25ImageProcessor`)."""
_MOST = {"image": 16384, "video": 4096}
"""Patches of a picture and of a frame, likewise."""


def respell(settings: Mapping[str, Any], modality: str) -> dict[str, Any]:
    """Return a checkpoint's settings of a modality by HF's names; they may have Moonshot's."""
    if _PUBLISHED not in settings:
        return dict(settings)
    given = settings[_PUBLISHED]
    for name, served in _UNSERVED.items():
        if given.get(name, served) != served:
            raise CheckpointError(
                f"`{_PUBLISHED}.{name}` of preprocessor_config.json is {given[name]!r}; mmjax, as "
                f"HF's processor, knows {served!r} alone"
            )
    found = {new: given[old] for old, new in _SHARED_NAMES.items() if old in given}
    if (most := given.get(_LIMIT_NAMES[modality])) is not None:
        found["max_patches"] = most
    if (side := given.get("patch_limit_on_one_side")) is not None:
        found["size"] = {"max_height": side, "max_width": side}
    return found


class Limits(NamedTuple):
    """What a picture is scaled down to, in patches."""

    patches: int
    side: int


class PatchCutter:
    """The part for images."""

    valid_kwargs = frozenset({"max_patches", "size"})

    def __init__(
        self, settings: Mapping[str, Any], modality: str, *, patch_size: int, merge_size: int
    ) -> None:
        """`settings`: the checkpoint's, by HF's names; the sizes are those of config.json."""
        wanted = {"patch_size": patch_size, "merge_size": merge_size, "do_resize": True}
        where, source = f"the {modality} processor", "the tower of config.json takes"
        check_settings(settings, wanted, where=where, source=source)
        given = {name: value for name, value in settings.items() if value is not None}
        self.settings = {"max_patches": _MOST[modality], **_DEFAULTS, **given}
        self.patch_size, self.unit = patch_size, patch_size * merge_size
        """`unit`: the side of the square of pixels that one embedding stands for."""
        self.affine = read_affine(self.settings)
        self.find_largest = cache(self._find_largest)

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, Any]:
        """Return the patches of all images, row by row.

        `pixel_values` uint8[patches, C, side, side]; `image_grid_thw` int64[images, 3], whose
        first is 1; `image_affine`.
        """
        cut, grids = self.cut(images, self.resolve(kwargs))
        ones = np.ones((len(grids), 1), np.int64)
        return {
            "pixel_values": np.concatenate(cut),
            "image_grid_thw": np.concatenate([ones, grids], axis=1),
            "image_affine": self.affine,
        }

    def resolve(self, kwargs: Mapping[str, Any]) -> Limits:
        """Return the limits of a call; `RequestValueError` for what is none."""
        most = kwargs.get("max_patches")
        most = self.settings["max_patches"] if most is None else most
        size = kwargs.get("size")
        size = self.settings["size"] if size is None else size
        sides = size.values() if isinstance(size, Mapping) else ()
        if not isinstance(size, Mapping) or {*size} != {"max_height", "max_width"}:
            raise bad_kwarg("size", size, "an object of `max_height` and `max_width`")
        if len({*sides}) > 1:
            raise bad_kwarg("size", size, "a square: `max_height` and `max_width` are the same")
        return Limits(
            check_count("max_patches", most, _MOST_PATCHES, "patches"),
            check_count("size", size["max_height"], _MOST_SIDE, "patches of a side"),
        )

    def cut(
        self, images: Sequence[Image.Image], limits: Limits
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the patches of each image, and int64[images, 2]: their rows and columns."""
        made = map_in_threads(lambda image: self._pad(image, limits), images)
        side = self.patch_size
        grids = [(one.shape[1] // side, one.shape[2] // side) for one in made]
        flat = [patchify(one, side, side, colours_first=True) for one in made]
        return [one.reshape(len(one), -1, side, side) for one in flat], np.array(grids, np.int64)

    def _pad(self, image: Image.Image, limits: Limits) -> np.ndarray:
        size = self.scale(ImageSize(*image.size), limits)
        image = image if image.mode == "RGB" else image.convert("RGB")
        pixels = to_pixels(image.resize(size, self.settings["resample"]))
        missing = ((0, 0), (0, -size.height % self.unit), (0, -size.width % self.unit))
        return np.pad(pixels, missing)

    def scale(self, size: ImageSize, limits: Limits) -> ImageSize:
        """Return what an image is scaled to: HF's `navit_resize`."""
        patch, longest = self.patch_size, limits.side * self.patch_size
        number = math.prod(max(1.0, side // patch) for side in size)
        by_side = (longest / size.height, longest / size.width)
        scale = min(1.0, math.sqrt(limits.patches / number), *by_side)
        width, height = (min(max(1, int(side * scale)), longest) for side in size)
        return ImageSize(width=width, height=height)

    def count_tokens(self, size: ImageSize, limits: Limits) -> int:
        """Return how many embeddings an image has."""
        return math.prod(cdiv(side, self.unit) for side in self.scale(size, limits))

    def _find_largest(self, limits: Limits) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many.

        Patches that are not whole are none to the limits, and padded: of so many rows of embeddings
        the lowest picture is the widest. It may have too many patches before it is scaled.
        """
        patch, per_unit = self.patch_size, self.unit // self.patch_size
        sizes = [ImageSize(*[limits.side * patch] * 2)]  # where there may be as many patches
        for number in range(cdiv(limits.side, per_unit)):
            rows = max(1, number * per_unit)
            # The least scale at which a pixel is left of the last row.
            scale = (number * self.unit + 1) / ((rows + 1) * patch - 1)
            widest = min(limits.patches / scale**2, (limits.side * rows) ** 2 / limits.patches)
            columns = max(math.floor(widest / rows), 2)
            sizes += [
                ImageSize(width=(each + 1) * patch - 1, height=(rows + 1) * patch - 1)
                for each in (columns - 1, columns, columns + 1, max(limits.patches // rows, 1))
            ]
        counts = [self.count_tokens(size, limits) for size in sizes]
        best = max(range(len(sizes)), key=lambda n: (counts[n], min(sizes[n])))
        return sizes[best], counts[best]


class ClipCutter(PatchCutter):
    """The part for videos, each frame of which is cut as a picture."""

    def __init__(self, settings: Mapping[str, Any], *, clip_frames: int, **sizes: int) -> None:
        super().__init__(settings, "video", **sizes)
        wanted = {"temporal_patch_size": clip_frames}
        source = "`vision_config.pos_emb_time` of config.json is"
        check_settings(settings, wanted, where="the video processor", source=source)
        self.clip_frames = clip_frames
        self.sampling = EvenSampling(fps=2).of_checkpoint(settings)
        self.valid_kwargs = PatchCutter.valid_kwargs | self.sampling.requested

    def __call__(self, videos: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the patches of all videos, frame by frame, and the second of each clip.

        A video is its frames, or a pair of them and its metadata. `pixel_values_videos`
        uint8[patches, C, side, side]; `video_grid_thw` int64[videos, 3]: frames, rows and columns;
        `timestamps` float64[clips of all videos]; `video_affine`.
        """
        sampling, limits = self.sampling.asked(kwargs), self.resolve(kwargs)
        seen = [sampling.select(*pair) for pair in split_pairs(videos)]
        patches, grids = [], []
        for frames, _ in seen:
            cut, sizes = self.cut([Image.fromarray(frame) for frame in frames], limits)
            patches += cut
            grids.append([len(frames), *sizes[0]])
        return {
            "pixel_values_videos": np.concatenate(patches),
            "video_grid_thw": np.array(grids, np.int64),
            "timestamps": np.concatenate([t.seconds[:: self.clip_frames] for _, t in seen]),
            "video_affine": self.affine,
        }


def split_grids(tensors: Mapping[str, Any], clip_frames: int) -> dict[str, Any]:
    """Return the tensors with the grid of each clip, as HF's model takes them, for a video's."""
    if "video_grid_thw" not in tensors:
        return dict(tensors)
    grids = [
        (min(clip_frames, frames - first), rows, columns)
        for frames, rows, columns in np.asarray(tensors["video_grid_thw"]).reshape(-1, 3).tolist()
        for first in range(0, frames, clip_frames)
    ]
    return {**tensors, "video_grid_thw": np.array(grids, np.int64)}


def write_time(second: float) -> str:
    """Return what stands before a clip: hours, minutes, seconds and their thousandths."""
    hours, minutes = int(second) // 3600 % 24, int(second) // 60 % 60
    return f"{hours:02d}:{minutes:02d}:{int(second) % 60:02d}.{int(second % 1 * 1000):03d}"


BEGIN, CONTENT, PAD, END = (f"<|media_{name}|>" for name in ("begin", "content", "pad", "end"))
VIDEO = "<|kimi_k25_video_placeholder|>"
_IMAGE = f"{BEGIN}image{CONTENT}{PAD}{END}"
CHAT_TEMPLATE = write_turns(
    start="'<|im_' + message.role + '|>' + message.role + '<|im_middle|>'",
    content=write_parts(image=_IMAGE, video=VIDEO),
    end="'<|im_end|>'",
    answer="'<|im_assistant|>assistant<|im_middle|>'",
)


class KimiK25DataParser(ImageEmbedsDataParser):
    """Takes embeddings of pictures alone: a video's do not say when its clips are shown."""

    keeps_metadata = True


class KimiK25ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = KimiK25DataParser
    host_inputs = KimiK25HostInputs
    limits: ClassVar = {"image": None, "video": None}
    placeholders: ClassVar = {"image": _IMAGE, "video": VIDEO}
    text_bounds: ClassVar = {"video": (BEGIN, END)}

    def load_hf_processor(self) -> ProcessorOfParts:
        """Put together what AutoProcessor would, which wants torchvision."""
        vision, path = self.get_hf_config().vision_config, self.ctx.model_config.path
        self.check_token(PAD)
        sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge_kernel_size[0]}
        images = respell(load_image_settings(path, are_needed=False), "image")
        videos = respell(load_video_settings(path), "video")
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=PatchCutter(images, "image", **sizes),
            video_processor=ClipCutter(videos, clip_frames=vision.pos_emb_time, **sizes),
        )

    # ---- sizes -----------------------------------------------------------------------------------

    def check_sizes(self, mm_data: Mapping[str, object], mm_kwargs: Mapping[str, object]) -> None:
        """Do nothing: the limits are held to what was planned, and no picture is scaled up."""

    def find_largest(self, modality: str) -> tuple[ImageSize, int]:
        """Return the size of the largest picture or frame, and its embeddings."""
        cutter: PatchCutter = getattr(self.get_hf_processor(), f"{modality}_processor")
        kwargs = self.scope_kwargs(self.get_planned_mm_kwargs(), f"{modality}s_kwargs")
        return cutter.find_largest(cutter.resolve(kwargs))

    def find_largest_image(self) -> tuple[ImageSize, int]:
        return self.find_largest("image")

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger of the checkpoint's limits and the operator's."""
        parts = self.get_hf_processor()

        def plan(modality: str) -> dict[str, Any]:
            cutter, scope = getattr(parts, f"{modality}_processor"), f"{modality}s_kwargs"
            side = self.find_larger(lambda kwargs: cutter.resolve(kwargs).side, scope)
            most = self.find_larger(lambda kwargs: cutter.resolve(kwargs).patches, scope)
            return {"max_patches": most, "size": {"max_height": side, "max_width": side}}

        return {f"{modality}s_kwargs": plan(modality) for modality in self.limits}

    def get_max_clips(self, mm_counts: Mapping[str, int] | None) -> int:
        """Return the clips of the largest video, if all videos share a prompt."""
        num_videos = max((mm_counts or {}).get("video", 0), 1)
        share = self.ctx.model_config.max_model_len // num_videos
        clip_frames = self.get_hf_processor().video_processor.clip_frames
        most = min(PLANNED_CLIPS, self.get_media_limits().max_video_frames // clip_frames)
        return max(min(share // self.find_largest("video")[1], most), 1)

    def get_largest_video(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> tuple[int, ImageSize]:
        clip_frames = self.get_hf_processor().video_processor.clip_frames
        return self.get_max_clips(mm_counts) * clip_frames, self.find_largest("video")[0]

    def get_max_video_tokens(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        return self.get_max_clips(mm_counts) * self.find_largest("video")[1]

    def check_num_embeds(self, modality: str, num_embeds: int) -> None:
        """Refuse more rows than a picture has."""
        most = self.get_max_image_tokens()
        self.check_rows(modality, num_embeds, range(1, most + 1), f"1 to {most}")

    # ---- tokens and tensors ----------------------------------------------------------------------

    def get_counted_placeholder(self, modality: str) -> str | None:
        """Return a picture's pad, without the tokens around it, which the chat template adds."""
        return PAD if modality == "image" else VIDEO

    def get_embed_token_id(self, modality: str) -> int:
        """Return the pad; of videos HF's token where the tokenizer and the table have it."""
        if modality == "video":
            found = self.get_tokenizer().get_vocab().get(VIDEO)
            if found is not None and found < self.get_hf_config().get_text_config().vocab_size:
                return found
        return self.get_token_id(PAD)

    def get_target(self, modality: str) -> list[int]:
        return as_ids(self.get_counted_placeholder(modality) or "", self.get_tokenizer())

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        fields: dict[str, MultiModalFieldConfig] = {}
        none = np.empty((0, 3), np.int64)
        for modality, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            counts = np.asarray(outputs.get(f"{modality}_grid_thw", none)).prod(-1)
            grids = [f"{modality}_grid_thw"]
            fields |= item_fields(modality, units=[name], counts=counts, on_host=grids)
        frames = np.asarray(outputs.get("video_grid_thw", none))[:, 0]
        clips = -(-frames // self.get_hf_config().vision_config.pos_emb_time)
        return fields | item_fields("video", units_on_host=["timestamps"], counts=clips)

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model the grid of each clip."""
        return split_grids(tensors, self.get_hf_config().vision_config.pos_emb_time)

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Any:
        """Return a picture's embeddings; of a video those of a clip, and the time of each."""
        _, rows, columns = (int(size) for size in tensors[f"{modality}_grid_thw"])
        number = rows * columns // self.get_hf_config().vision_config.merge_kernel_size[0] ** 2
        if modality == "image":
            return number
        return number, tuple(write_time(float(second)) for second in tensors["timestamps"])

    def write_item(self, modality: str, size: Any) -> list[int]:
        if modality == "image":
            return super().write_item(modality, size)
        number, times = size
        pad = self.get_tokenizer().decode([self.get_embed_token_id("video")])
        clip = f"{BEGIN}video{CONTENT}{pad * number}{END}"
        return as_ids("".join(time + clip for time in times), self.get_tokenizer())


FACTORIES = make_factories(KimiK25ProcessingInfo, load_tokenizer=load_tokenizer)
