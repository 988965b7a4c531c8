r"""Idefics3's and SmolVLM's prompt side: tiles of a picture and the whole of it, frames of a video.

Before: `look <image>`. After, of a picture of one row and two columns: `look
<fake_token_around_image> <row_1_col_1> <image>*N <fake_token_around_image> <row_1_col_2>
<image>*N \n \n <fake_token_around_image> <global-img> <image>*N <fake_token_around_image>`;
of one that is not split, the last four alone. A frame of a video is such a picture, behind its
time. Only the N take embeddings.

Pictures and frames -> tiles, as HF's Idefics3 image processor for Pillow makes them.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import RequestValueError, check_settings
from mmjax.models.family import item_fields, make_factories
from mmjax.models.idefics3.host_inputs import Idefics3HostInputs
from mmjax.models.tiles import TileGridInfo
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.affine import ARITHMETIC
from mmjax.processing.image_processors.frames import Timing, read_timing, split_pairs
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_video_settings
from mmjax.processing.image_processors.pil_classes import make_image_processor
from mmjax.processing.items.parse import ImageSize, ImagesOnlyDataParser, PixelsOnlyDataParser
from mmjax.processing.prompt_updates.updates import as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

_MOST_SIDE = 4096
"""HF scales no side beyond it, whatever `size` says (`MAX_IMAGE_SIZE`)."""
_SMALL = (
    *("zero one two three four five six seven eight nine ten eleven twelve thirteen".split()),
    *("fourteen fifteen sixteen seventeen eighteen nineteen".split()),
)
_TENS = ("", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split())


class TileCutter:
    """An image becomes the tiles of its grid and the whole of it, all of one size."""

    valid_kwargs: ClassVar = frozenset(
        {"do_image_splitting", "size", "max_image_size", "resample", *ARITHMETIC}
    )

    def __init__(self, hf: Any, side: int) -> None:
        """`hf`: an `Idefics3ImageProcessorPil` whose pixels stay bytes; `side`: of a tile."""
        self.hf, resized = hf, {"do_resize": True}
        check_settings(hf, resized, where="the image processor", source="mmjax takes")
        source = "`vision_config.image_size` of config.json is"
        found, wanted = dict(hf.max_image_size), {"longest_edge": side}
        check_settings(found, wanted, where="`max_image_size`", source=source)

    def __call__(
        self, images: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return `pixel_values` uint8[units, C, Y, X], `image_grid` int64[images, 2].

        Rows and columns are 0 of an image that is not split.
        """
        self.find_longest(kwargs)
        self._check_tile(kwargs.get("max_image_size"))
        fixed = {"do_resize": True, "do_pad": False, "return_row_col_info": True}
        made = [self.hf([image], **{**kwargs, **fixed}) for image in images]
        grids = [(one["rows"][0][0], one["cols"][0][0]) for one in made]
        return {
            "pixel_values": np.concatenate([one["pixel_values"][0] for one in made]),
            "image_grid": np.array(grids, np.int64),
            "image_affine": made[0]["image_affine"],
        }

    def _check_tile(self, given: Any) -> None:
        """Refuse `max_image_size` but the tower's own, as vLLM's example for SmolVLM has it."""
        own = dict(self.hf.max_image_size)
        if given is not None and given != {key: side for key, side in own.items() if side}:
            raise RequestValueError(
                f"`max_image_size` is {str(given)[:100]} in mm_processor_kwargs, but the tower "
                f"takes tiles of {own['longest_edge']} pixels a side; leave it out, and give "
                "`size` for fewer tiles",
                param="mm_processor_kwargs",
            )

    def find_longest(self, kwargs: Mapping[str, Any]) -> int:
        """Return the longest side to which these kwargs scale; `RequestValueError` for no side."""
        size: Any = kwargs.get("size") or dict(self.hf.size)
        given = {k: v for k, v in size.items() if v} if isinstance(size, Mapping) else {}
        longest: Any = given.get("longest_edge", 0)
        is_side = isinstance(longest, int) and not isinstance(longest, bool)
        if not is_side or not 1 <= longest <= _MOST_SIDE or len(given) > 1:
            raise RequestValueError(
                f"`size` is {str(size)[:100]}; this model's pictures are scaled by "
                f'{{"longest_edge": N}}, N from 1 to {_MOST_SIDE}',
                param="mm_processor_kwargs",
            )
        return longest

    def count_most(self, kwargs: Mapping[str, Any]) -> int:
        """Return how many tiles a side of the largest picture has; 0: it is not split."""
        is_split = kwargs.get("do_image_splitting", self.hf.do_image_splitting)
        number = math.ceil(self.find_longest(kwargs) / self.hf.max_image_size["longest_edge"])
        return number if is_split and number > 1 else 0


class FrameCutter(TileCutter):
    """Frames are scaled as images that are not split."""

    valid_kwargs: ClassVar = TileCutter.valid_kwargs - {"do_image_splitting"}

    def __call__(
        self, videos: Sequence[Any], *, return_tensors: str = "np", **kwargs: Any
    ) -> dict[str, Any]:
        """Return the frames of all videos, and the seconds that they are written with.

        A video is its frames, or a pair of them and its metadata. `pixel_values_videos`
        uint8[frames, C, Y, X]; `num_frames` int64[videos]; `video_seconds` int64[videos + frames]:
        of each video its length, then its frames'.
        """
        pairs = split_pairs(videos)
        images = [Image.fromarray(frame) for frames, _ in pairs for frame in frames]
        cut = super().__call__(images, **kwargs | {"do_image_splitting": False})
        seconds = [find_seconds(read_timing(len(frames), known)) for frames, known in pairs]
        return {
            "pixel_values_videos": cut["pixel_values"],
            "num_frames": np.array([len(frames) for frames, _ in pairs], np.int64),
            "video_seconds": np.concatenate(seconds),
            "video_affine": cut["image_affine"],
        }


def find_seconds(timing: Timing) -> np.ndarray:
    """Return int64[1 + frames]: a video's whole seconds, and those at which its frames stand."""
    seconds = timing.seconds
    whole = seconds[-1] if timing.duration is None else timing.duration
    return np.array([whole, *seconds]).astype(np.int64)


def write_number(number: int) -> str:
    """Return a number from 0 to 999,999 in words: "one hundred and twenty-eight"."""
    if number < 100:
        tens, ones = divmod(number, 10)
        rest = f"-{_SMALL[ones]}" if ones else ""
        return _SMALL[number] if number < 20 else _TENS[tens] + rest
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    joint = ", " if rest >= 100 else " and "
    return f"{write_number(count)} {name}" + (joint + write_number(rest) if rest else "")


IMAGE, FAKE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
END_OF_TURN = "<end_of_utterance>"

CHAT_TEMPLATE = write_turns(
    start="('<|im_start|>' if loop.first else '') + message.role | capitalize"
    " + (':' if message.content[0].type == 'image' else ': ')",
    content=write_parts("part.text if part.type == 'text' else '<' + part.type + '>'"),
    end=r"'<end_of_utterance>\n'",
    answer="'Assistant:'",
)
"""SmolVLM's turns (HF: `DEFAULT_CHAT_TEMPLATE` of processing_smolvlm.py)."""


DOCTAG = "<doctag>"
"""Granite-Docling's tokenizer alone has it, of all that are served as Idefics3."""
DOCLING_TASKS = {
    "Page to DocTags": "Convert this page to docling.",
    "Chart to a table": "Convert chart to OTSL.",
    "Code to text": "Convert code to text.",
}


class Idefics3ProcessingInfo(TileGridInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    host_inputs = Idefics3HostInputs
    image_processors: ClassVar = {"Idefics3": "idefics3"}
    placeholders: ClassVar = {"image": IMAGE}
    embed_token = IMAGE
    grid_name = "image_grid"

    def get_tasks(self) -> Mapping[str, str]:
        """Return Granite-Docling's; others are asked in words of one's own."""
        return DOCLING_TASKS if DOCTAG in self.get_tokenizer().get_vocab() else self.tasks

    def get_ending_token_ids(self) -> Sequence[int]:
        """Return what ends a turn: Idefics3's files name Llama 3's ends alone."""
        token_id = self.get_tokenizer().get_vocab().get(END_OF_TURN)
        return () if token_id is None else (token_id,)

    def load_hf_processor(self) -> ProcessorOfParts:
        """Assemble the parts: HF's processor of SmolVLM needs torchvision and num2words."""
        check_settings(self.processor_settings, {"image_seq_len": self.num_unit_tokens})
        self.check_token(IMAGE)
        return super().load_hf_processor()

    def wrap_image_processor(self, hf_processor: Any) -> TileCutter:
        return TileCutter(hf_processor, self.unit_side)

    def reference_inputs(
        self, token_ids: Sequence[int], tensors: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Give HF's model `[prompts, units, C, Y, X]`, of videos as of images."""
        joined = self.join_pixels(tensors, *Idefics3HostInputs.pixel_keys)
        return {k: v[None] if k == "pixel_values" else v for k, v in joined.items()}

    def get_largest_mm_kwargs(self) -> Mapping[str, object]:
        """Return the larger `size` of the checkpoint's and the operator's, split into tiles."""
        cutter: TileCutter = self.get_image_processor()
        size = {"longest_edge": self.find_larger(cutter.find_longest)}
        return {"do_image_splitting": True, "size": size}

    def find_largest_image(self) -> tuple[ImageSize, int]:
        """Return the size of a picture with the most tiles, a square, and its embeddings."""
        cutter: TileCutter = self.get_image_processor()
        number = cutter.count_most(self.scope_kwargs(self.get_planned_mm_kwargs()))
        side = max(number, 1) * self.unit_side
        return ImageSize(width=side, height=side), (number**2 + 1) * self.num_unit_tokens

    def write_item(self, modality: str, size: tuple[int, ...]) -> list[int]:
        """Write a picture of (rows, columns) of tiles, (0, 0) where it is not split."""
        rows, columns = size
        lines = [
            "".join(self.write_unit(f"<row_{row + 1}_col_{col + 1}>") for col in range(columns))
            for row in range(rows)
        ]
        text = "\n".join([*lines, "", ""]) if lines else ""
        return as_ids(text + self.write_unit(WHOLE) + FAKE, self.get_tokenizer())

    def write_unit(self, name: str) -> str:
        """Return the text of a tile or of a whole picture."""
        return FAKE + name + IMAGE * self.num_unit_tokens


class SmolVLMProcessingInfo(Idefics3ProcessingInfo):
    data_parser = PixelsOnlyDataParser
    limits: ClassVar = {"image": None, "video": None}
    placeholders: ClassVar = {"image": IMAGE, "video": "<video>"}
    text_bounds: ClassVar = {"video": (FAKE, FAKE)}

    def load_hf_processor(self) -> ProcessorOfParts:
        parts = super().load_hf_processor()
        settings = load_video_settings(self.ctx.model_config.path)
        sampled = (settings.get("video_sampling") or {}).get("video_size")
        settings = {**({"size": sampled} if sampled else {}), **settings}
        hf = make_image_processor(type(parts.image_processor.hf), settings)
        return replace(parts, video_processor=FrameCutter(hf, self.unit_side))

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        counts, frames = np.asarray(outputs.get("num_frames", ()), int), ["pixel_values_videos"]
        return {
            **super().get_fields(outputs),
            **item_fields("video", units=frames, counts=counts, on_host=["num_frames"]),
            **item_fields("video", units_on_host=["video_seconds"], counts=counts + 1),
        }

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        if modality == "image":
            return super().measure_item(modality, tensors)
        return tuple(tensors["video_seconds"].tolist())

    def write_item(self, modality: str, size: tuple[int, ...]) -> list[int]:
        """Write a video of (its seconds, those of each frame), or an image."""
        if modality == "image":
            return super().write_item(modality, size)
        duration, *times = size
        frames = "".join(
            f"\nFrame from {time // 60:02d}:{time % 60:02d}:{self.write_unit(WHOLE)}{FAKE}"
            for time in times
        )
        text = (
            f"You are provided the following series of {write_number(len(times))} frames from a "
            f"{timedelta(seconds=duration)} [H:MM:SS] video.\n{frames}\n\n"
        )
        return as_ids(text, self.get_tokenizer())


FACTORIES = make_factories(Idefics3ProcessingInfo)
SMOLVLM_FACTORIES = make_factories(SmolVLMProcessingInfo)
