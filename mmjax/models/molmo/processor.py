"""Molmo's processor: BOS, then the image's tokens, then the text in the format of a turn.

Before: `what is it`. After: `<bos> <im_start> (<im_patch>*12 <im_col>)*12 <im_end> <im_start>
(<im_patch>*columns <im_col>)*rows <im_end>  User: what is it Assistant:`; only the `<im_patch>`
take embeddings. `message_format="none"` leaves the text as it is.

Molmo's crops: the whole image once, and overlapping windows over an enlarged one.

As the published `MolmoImageProcessor` (arXiv 2409.17146), in numpy and Pillow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from mmjax.errors import CheckpointError, RequestValueError, check_settings
from mmjax.models.family import Target, item_fields, make_factories
from mmjax.models.molmo.host_inputs import (
    NEW_TOKENS,
    NUM_NEW_TOKENS,
    POOLING_SIDE,
    MolmoHostInputs,
    MolmoVisionSizes,
    count_embedding_rows,
    new_token_id,
)
from mmjax.models.tiles import CropsInfo
from mmjax.processing.answers import MOLMO
from mmjax.processing.image_processors.crops import Grid, OverlappingCrops
from mmjax.processing.image_processors.image import bad_kwarg
from mmjax.processing.image_processors.parts import ProcessorOfParts, load_image_settings
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import ImagesOnlyDataParser
from mmjax.processing.prompt_updates.updates import PromptIndexTargets, as_ids
from mmjax.processing.tensors.fields import MultiModalFieldConfig

DROPPED = -100
"""Stands in `image_input_idx` for an embedding that no token takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MolmoImageProcessor(OverlappingCrops):
    """Cuts images; the defaults are the published preprocessor_config.json."""

    crop_side: int = 336
    patch_size: int = 14
    max_crops: int = 12
    image_mean: Sequence[float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: Sequence[float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def crop_tokens(self) -> int:
        """Embeddings of a crop along a side."""
        return self.crop_patches // POOLING_SIDE

    def count_tokens(self, tiling: Grid) -> Grid:
        """Return the rows and columns of tokens of an image that is tiled so."""
        return self.count_windows(tiling, POOLING_SIDE, POOLING_SIDE)

    def find_largest(self, kwargs: Mapping[str, Any]) -> tuple[ImageSize, int]:
        """Return the size of an image with the most embeddings, and how many."""
        size, most = self.find_most(kwargs, lambda tiling: math.prod(self.count_tokens(tiling)))
        return size, self.crop_tokens**2 + most

    def __call__(self, images: Sequence[Image.Image], **kwargs: Any) -> dict[str, np.ndarray]:
        """Return the crops of all images, one behind the other.

        `images` float32[crops, patches, values], `image_masks` float32[crops, patches],
        `image_input_idx` int32[crops, tokens]; `num_crops` int64[images], `image_grid_hw`
        int64[images, 2]: rows and columns of tokens of the tiled image.
        """
        max_crops = self.resolve_max_crops(kwargs)
        made = [self._cut(image, max_crops) for image in images]
        joined = {key: np.concatenate([one[key] for one in made]) for key in made[0]}
        num_crops = np.array([len(one["images"]) for one in made], np.int64)
        return {**joined, "num_crops": num_crops}

    def _cut(self, image: Image.Image, max_crops: int) -> dict[str, np.ndarray]:
        pixels = np.asarray(image.convert("RGB"), np.float32) / np.float32(255)
        tiling = self.choose(ImageSize(*image.size), max_crops)
        side = self.crop_side
        whole, _ = self._resize_and_pad(pixels, ImageSize(width=side, height=side))
        tiled, is_real = self._resize_and_pad(pixels, self.size_of(tiling))
        is_real = is_real[None].astype(np.float32)
        shares = self.cut_patches(is_real, tiling).mean(axis=-1)
        # The published processor appends the whole image's row, whose crop comes first: every
        # row is applied to the crop before its own.
        masks = np.pad(shares, ((0, 1), (0, 0)), constant_values=-1)
        crops = np.concatenate(
            [self.cut_patches(whole, Grid(1, 1)), self.cut_patches(tiled, tiling)]
        )
        return {
            "images": crops,
            "image_masks": masks,
            "image_input_idx": self._place_tokens(tiling),
            "image_grid_hw": np.array([self.count_tokens(tiling)], np.int64),
        }

    def _resize_and_pad(
        self, pixels: np.ndarray, target: ImageSize
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fit [height, width, 3] into a size; return [3, height, width], and where the image is.

        The published arithmetic is in float32, which decides how sizes are rounded. Padding is
        black, and normalised with the image.
        """
        height, width = pixels.shape[:2]
        sides = np.array([height, width], np.float32)
        scale = (np.array([target.height, target.width], np.float32) / sides).min()
        new_height, new_width = (int(side) for side in sides * scale)
        if min(new_height, new_width) < 1:
            raise RequestValueError(
                f"image is {width}x{height} pixels: its short side would have none when it is "
                f"scaled to fit {target.width}x{target.height}; crop it",
                param="multi_modal_data",
            )
        top, left = (target.height - new_height) // 2, (target.width - new_width) // 2
        inside = (slice(top, top + new_height), slice(left, left + new_width))
        padded = np.zeros((3, target.height, target.width), np.float32)
        padded[:, *inside] = _resize(pixels, new_height, new_width)
        is_real = np.zeros((target.height, target.width), bool)
        is_real[inside] = True
        mean, std = (
            np.array(values, np.float32)[:, None, None]
            for values in (self.image_mean, self.image_std)
        )
        return (padded - mean) / std, is_real

    def _place_tokens(self, tiling: Grid) -> np.ndarray:
        """Return int32[crops, tokens]: where in the prompt each embedding of a crop belongs.

        BOS is at 0 and the first `<im_start>` at 1. A token of an overlap is read in one crop.
        """
        side, numbers = self.crop_tokens, self.number_cells(tiling, POOLING_SIDE)
        rows, columns = np.indices(numbers.shape)
        # Rows of tokens, each followed by `<im_col>`.
        whole = 2 + np.arange(side)[:, None] * (side + 1) + np.arange(side)
        first = 2 + side * (side + 1) + 2  # behind `<im_end>` and `<im_start>`
        places = np.full((1 + math.prod(tiling)) * side**2, DROPPED, np.int32)
        places[: side**2] = whole.reshape(-1)
        places[side**2 + numbers] = first + rows * (numbers.shape[1] + 1) + columns
        return places.reshape(-1, side**2)


def _resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return float32[3, height, width] of [.., .., 3]: bilinear, antialiased, within [0, 1].

    Pillow's filter on floats is torch's with `antialias`.
    """
    channels = [
        Image.fromarray(np.ascontiguousarray(pixels[..., channel])).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        for channel in range(3)
    ]
    return np.clip(np.stack([np.asarray(channel) for channel in channels]), 0, 1)


CHAT_TEMPLATE = r"""
{%- set system = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
        {{- raise_exception('roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {{- '' if loop.first else ' ' -}}
    {{- message.role | capitalize + ': ' + (system if loop.first else '') + message.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ' Assistant:' -}}
{%- endif -%}
"""
"""The published one, and a system's text before the first question: it has no turn of its own."""
_TURN = "User:"

_TEXT_SETTINGS: Mapping[str, Any] = {"message_format": "role", "always_start_with_space": True}
_FIXED_SETTINGS = {"do_normalize": True, "image_padding_mask": True}


def format_prompt(text: str, message_format: str, *, always_start_with_space: bool) -> str:
    """Return a text as a user's turn, once: one that begins as such a turn stays as it is.

    RequestValueError for a format that is none of `role` and `none`.
    """
    if message_format not in ("role", "none"):
        raise bad_kwarg("message_format", message_format, "`role` or `none`")
    if text.startswith(f" {_TURN}"):
        return text
    if message_format == "role" and not text.startswith(_TURN):
        text = f"{_TURN} {text} Assistant:"
    return f" {text}" if always_start_with_space else text


class MolmoProcessingInfo(CropsInfo):
    chat_template = CHAT_TEMPLATE
    data_parser = ImagesOnlyDataParser
    host_inputs = MolmoHostInputs
    answer_form = MOLMO
    limits: ClassVar = {"image": 1}
    """The published processor places the tokens of a second image wrongly."""
    inserts_items = True

    @cached_property
    def vocab_size(self) -> int:
        """Token ids at or above this are refused; the last rows have no logits."""
        return count_embedding_rows(self.get_hf_config()) + NUM_NEW_TOKENS

    def load_hf_processor(self) -> ProcessorOfParts:
        """Return mmjax's own: the published one is remote code."""
        settings = load_image_settings(self.ctx.model_config.path)
        where, source = "the image processor", "the model takes"
        check_settings(settings, _FIXED_SETTINGS, where=where, source=source)
        names = settings.keys() & MolmoImageProcessor.__dataclass_fields__
        own = {name: settings[name] for name in names}
        if "base_image_input_size" in settings:  # height and width, which are equal
            own["crop_side"] = settings["base_image_input_size"][0]
        if "image_patch_size" in settings:
            own["patch_size"] = settings["image_patch_size"]
        image_processor = MolmoImageProcessor(**own)
        self._check_crops(image_processor, settings)
        ids = {token: new_token_id(self.get_hf_config(), token) for token in NEW_TOKENS}
        found = {token: self.get_token_id(token) for token in ids}
        source = "`embedding_size` of config.json gives"
        check_settings(found, ids, where="the tokenizer", source=source)
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=image_processor,
            text_settings=frozenset(_TEXT_SETTINGS),
        )

    def _check_crops(self, processor: MolmoImageProcessor, settings: Mapping[str, Any]) -> None:
        """Refuse crops that the model's encoder does not take, or that pooling would cut."""
        sizes = MolmoVisionSizes.from_hf(self.get_hf_config())
        expected: Mapping[str, Any] = {
            "base_image_input_size": [sizes.crop_side] * 2,
            "image_patch_size": sizes.image_patch_size,
            "image_token_length_h": processor.crop_tokens,
            "image_token_length_w": processor.crop_tokens,
        }
        where, source = "the image processor", "the model's encoder takes"
        check_settings(settings, expected, where=where, source=source)
        margins = list(processor.overlap_margins)
        if any(margin % 2 for margin in margins) or processor.window_patches < 1:
            raise CheckpointError(
                f"`overlap_margins` of the image processor is {margins}; both must be even, and "
                f"together less than the {processor.crop_patches} patches of a crop"
            )

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Begin a prompt with BOS, once, and write its text as a user's turn.

        A control token's name that a user wrote, and that was tokenized as mere text, stays so.
        """
        tokenizer, bos = self.get_tokenizer(), self.find_bos(or_eos=True)
        words = token_ids[1:] if token_ids[:1] == [bos] else token_ids
        given = self.scope_kwargs(mm_kwargs, "text_kwargs")
        settings = {key: given.get(key, value) for key, value in _TEXT_SETTINGS.items()}
        text = tokenizer.decode(words, clean_up_tokenization_spaces=False)
        formatted = format_prompt(text, **settings)
        if formatted == text:
            return [bos, *words]
        if as_ids(text, tokenizer) == words:
            return [bos, *as_ids(formatted, tokenizer)]
        start = formatted.index(text)
        prefix, suffix = formatted[:start], formatted[start + len(text) :]
        return [bos, *_encode_around(tokenizer, prefix, words, suffix)]

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        return item_fields(
            "image",
            units=["images", "image_masks", "image_input_idx"],
            counts=outputs.get("num_crops", ()),
            on_host=["num_crops", "image_grid_hw"],
        )

    def get_embed_token_id(self, modality: str) -> int:
        return new_token_id(self.get_hf_config(), "<im_patch>")

    def get_target(self, modality: str) -> Target:
        return PromptIndexTargets.prefix([self.find_bos(or_eos=True)])

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(tensors["image_grid_hw"].tolist())

    def write_item(self, modality: str, size: tuple[int, int]) -> list[int]:
        side = self.get_image_processor().crop_tokens
        hf_config = self.get_hf_config()
        start, end, patch, column = (new_token_id(hf_config, name) for name in NEW_TOKENS[:4])
        grids = ((side, side), size)
        rows = [[start, *[*[patch] * columns, column] * rows, end] for rows, columns in grids]
        return rows[0] + rows[1]


def _encode_around(tokenizer: Any, prefix: str, words: list[int], suffix: str) -> list[int]:
    """Return the ids of words with texts around them; control tokens are those of `words` alone."""
    is_control = tokenizer.added_tokens_decoder.__contains__
    token_ids, text = list[int](), prefix
    for are_control, run in groupby(words, is_control):
        if not are_control:
            text += tokenizer.decode(list(run), clean_up_tokenization_spaces=False)
            continue
        token_ids += tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        token_ids += run
        text = ""
    text += suffix
    return token_ids + tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


FACTORIES = make_factories(MolmoProcessingInfo)
