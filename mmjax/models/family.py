"""A family's prompt side as one row: what stands for an item, what it becomes, how HF is called.

`FamilyInfo` is the row. What most families share is here, so that a family says what is its own:
its placeholders, its limits, how HF's processor is loaded, and how many embeddings an item has.
Where a row does not suffice, a family overrides a hook of `BaseMultiModalProcessor`, in a subclass
of `FamilyProcessor`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np
from PIL import Image
from transformers import BatchFeature

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.host_inputs import EncoderSpec, HostInputs
from mmjax.models.registry import ProcessorFactories
from mmjax.processing.answers import REASONING_MARKS, AnswerForm, AskedImage, KnownImages
from mmjax.processing.context import BaseProcessingInfo
from mmjax.processing.dummy_inputs import BaseDummyInputsBuilder, BaseDummyOptions
from mmjax.processing.image_processors.image import check_pixel_size
from mmjax.processing.image_processors.parts import (
    ProcessorOfParts,
    load_feature_settings,
    read_json,
)
from mmjax.processing.image_processors.pil_classes import load_image_processor
from mmjax.processing.items.items import ImageProcessorItems
from mmjax.processing.items.parse import (
    ImageEmbedsDataParser,
    ImageSize,
    MultiModalDataDict,
    MultiModalDataItems,
)
from mmjax.processing.media.log_mel import LogMel
from mmjax.processing.prepared import AnswerParser
from mmjax.processing.processor import BaseMultiModalProcessor
from mmjax.processing.prompt_updates.matching import (
    MultiModalPromptUpdatesApplyResult,
    has_long_target,
    splice_in_text,
)
from mmjax.processing.prompt_updates.updates import (
    MultiModalPromptUpdates,
    PlaceholderFeaturesInfo,
    PromptIndex,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
    ResolvedPromptUpdate,
    as_ids,
)
from mmjax.processing.tensors.fields import MultiModalFieldConfig
from mmjax.processing.tensors.inputs import MultiModalKwargsItems
from mmjax.rounding import cdiv

Target = list[int] | PromptIndex
_MAX_CONTENTS = 16
"""How many contents of items a processor keeps; a video's may have 100,000 tokens."""


class FamilyInfo(BaseProcessingInfo):
    """One row; every family sets `host_inputs`, and `image_processors` where HF's are taken."""

    data_parser = ImageEmbedsDataParser
    host_inputs: ClassVar[type[HostInputs]]
    """Says how large the encoder's units are, and how many embeddings one gives."""
    image_processors: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """HF's image processors that the family is served with, as `load_image_processor` takes them;
    none: `load_hf_processor` says what is loaded."""
    limits: ClassVar[Mapping[str, int | None]] = MappingProxyType({"image": None})
    """Modality -> how many items the model takes; None: any number."""
    sound_limits: ClassVar[Mapping[str, int | None]] = MappingProxyType({})
    """The same of clips, of a family that sees and hears; a checkpoint of it may hear nothing."""
    placeholders: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Modality -> what stands for an item in a text; nothing where updates insert."""
    embed_token: ClassVar[str | None] = None
    """At whose places an item's embeddings go; None: config.json's, as `image_token_id`."""
    reserves_embed_token: ClassVar[bool] = False
    """Whether only updates may write it: a prompt that has it is refused."""
    item_bounds: ClassVar[tuple[str, str] | None] = None
    """The special tokens that an item's tokens begin and end with, of a family whose placeholder
    may be several tokens (`<`, `image`, `>`): such a one is replaced in the text, as HF does."""
    text_bounds: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    """By modality, the special tokens that an item's tokens begin and end with but for words around
    them: prompts with such an item are replaced in the text, as HF does, since these words may
    merge with the user's."""
    inserts_items: ClassVar[bool] = False
    """Whether an item is written behind its target, and not in place of it."""
    cuts_clips: ClassVar[bool] = False
    """Whether a clip may be longer than a unit, and becomes several."""
    adds_special_tokens: ClassVar[bool] = True
    """Whether the tokenizer adds its own to a text, where a request does not say; else the chat
    template writes BOS."""
    answer_form: ClassVar[AnswerForm | None] = None
    """How its answers write boxes or points; None: it was trained on none."""

    # ---- what most rows say: an item is so many units of one size --------------------------------

    @cached_property
    def encoder_spec(self) -> Any:
        """The units that the model's encoder takes."""
        return self.own_inputs.encoder_spec

    @cached_property
    def own_inputs(self) -> Any:
        """One of the class `host_inputs`; made once, since a family's may read files."""
        return self.host_inputs(self.get_hf_config())

    @property
    def num_unit_tokens(self) -> int:
        """How many embeddings a unit has."""
        return self.encoder_spec.tokens_per_unit

    @property
    def unit_side(self) -> int:
        """The pixels of a unit's side, of a row whose units are squares."""
        return self.encoder_spec.inputs["pixel_values"][0][-1]

    def get_unit_size(self) -> ImageSize | None:
        """Return the pixels of a unit, to which HF's are held; None where images have any size."""
        if not isinstance(self.encoder_spec, EncoderSpec):
            return None
        shape, _ = self.encoder_spec.inputs.get("pixel_values", ((), ""))
        return ImageSize(width=shape[-1], height=shape[-2]) if shape else None

    def load_hf_processor(self) -> Any:
        """Return the tokenizer and the image processor; AutoProcessor's where a row names none."""
        if not self.image_processors:
            return super().load_hf_processor()
        path = self.ctx.model_config.path
        return ProcessorOfParts(
            tokenizer=self.get_tokenizer(),
            image_processor=self.wrap_image_processor(
                load_image_processor(path, self.image_processors)
            ),
        )

    def wrap_image_processor(self, hf_processor: Any) -> Any:
        """Return the part for images, of HF's image processor.

        `CheckpointError` where it makes images of another size than a unit's. What an operator's
        settings make of them is seen when the largest is processed.
        """
        size = self.get_unit_size()
        if size is not None and not self.ctx.get_mm_config().mm_processor_kwargs:
            image = Image.new("RGB", (2 * size.width, size.height + 1))
            pixels = hf_processor([image], return_tensors="np")["pixel_values"]
            found = ImageSize(height=np.shape(pixels)[-2], width=np.shape(pixels)[-1])
            if found != size:
                raise CheckpointError(
                    f"the checkpoint's image processor makes {found.height}x{found.width} pixels "
                    f"(height x width) of images, and the vision tower of config.json takes "
                    f"{size.height}x{size.width}; correct `size`, `crop_size`, `do_resize` and "
                    "`do_center_crop` of the processor's file"
                )
        return hf_processor

    def get_embed_token_id(self, modality: str) -> int:
        """Return the token at whose places the embeddings of an item go."""
        if self.embed_token is None:
            return getattr(self.get_hf_config(), f"{modality}_token_id")
        return self.get_token_id(self.embed_token)

    def get_embed_token_ids(self, modality: str) -> Sequence[int]:
        """Return all tokens of an item at whose places its embeddings go.

        Marks may be among them, whose embeddings are the model's own (`extra_embeds`): they see the
        item, and are seen, as its embeddings are.
        """
        return [self.get_embed_token_id(modality)]

    def get_target(self, modality: str) -> Target:
        """Return what an item replaces in the prompt, or the place behind which it is inserted."""
        if self.item_bounds is None and modality not in self.text_bounds:
            return [self.get_embed_token_id(modality)]
        return as_ids(self.placeholders[modality], self.get_tokenizer())

    def measure_item(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        """Return what an item's tokens depend on: its number of embeddings, or its grid."""
        return self.num_unit_tokens

    def measure_embeds(self, modality: str, tensors: Mapping[str, Any]) -> Hashable:
        """Return the same of an item whose embeddings came with the request."""
        return len(tensors[f"{modality}_embeds"])

    def write_item(self, modality: str, size: Any) -> list[int]:
        """Return the tokens of an item, of what `measure_item` gave."""
        return [self.get_embed_token_id(modality)] * size

    def get_fields(self, outputs: Mapping[str, Any]) -> Mapping[str, MultiModalFieldConfig]:
        """Say for each tensor of the HF processor's output how it divides among items."""
        return item_fields("image", rows=("pixel_values",))

    def frame_text(self, text: str) -> str:
        """Return a prompt of text as it is tokenized: with marks that HF's processor writes in it.

        `frame_prompt`, which gets the tokens, then finds them there.
        """
        return text

    def load_feature_settings(self) -> Mapping[str, Any]:
        """Return the feature extractor's settings, of the checkpoint's files."""
        return load_feature_settings(self.ctx.model_config.path)

    @cached_property
    def log_mel(self) -> LogMel:
        """What makes spectrograms of clips; `CheckpointError` where the encoder takes others."""
        made = LogMel.from_settings(self.load_feature_settings())
        shape = (made.feature_size, made.num_frames)
        expected, _ = self.encoder_spec.inputs["input_features"]
        if shape != expected:
            raise CheckpointError(
                f"the feature extractor makes spectrograms of {list(shape)} (`feature_size`, "
                f"frames), and the encoder takes {list(expected)} (`num_mel_bins`, twice "
                "`max_source_positions` of config.json)"
            )
        return made

    @property
    def audio_rate(self) -> int | None:
        return self.log_mel.sampling_rate if "audio" in self.supported_mm_limits else None

    def find_longest_clip(self, mm_counts: Mapping[str, int]) -> tuple[int, int]:
        """Return the samples of a clip with the most embeddings, and how many.

        If all clips share a prompt.
        """
        made, num_units = self.log_mel, 1
        if self.cuts_clips:
            limits, num_clips = self.get_media_limits(), max(mm_counts.get("audio", 0), 1)
            most = min(limits.max_audio_seconds * made.sampling_rate, limits.max_audio_samples)
            fitting = self.ctx.model_config.max_model_len // self.num_unit_tokens // num_clips
            num_units = max(min(fitting, cdiv(most, made.num_samples)), 1)
        return num_units * made.num_samples, num_units * self.num_unit_tokens

    def find_largest_image(self) -> tuple[ImageSize | None, int]:
        """Return the size of an image with the most embeddings, and how many: a unit's."""
        return self.get_unit_size(), self.num_unit_tokens

    def get_largest_image(self) -> ImageSize:
        """Return the size of that image."""
        size, _ = self.find_largest_image()
        assert size is not None, "images of any size: a family says which is largest"
        return size

    def get_max_image_tokens(self) -> int:
        """Return how many embeddings it has."""
        return self.find_largest_image()[1]

    def get_largest_video(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> tuple[int, ImageSize]:
        """Return the frames of a video with the most embeddings, and their size."""
        size, _ = self.find_largest_frame()
        assert size is not None, "frames of any size: a family says which are largest"
        return self.get_max_frames(seq_len, mm_counts), size

    def find_largest_frame(self) -> tuple[ImageSize | None, int]:
        """Return the size of a frame with the most embeddings, and how many: a unit's."""
        return self.get_unit_size(), self.num_unit_tokens

    @property
    def num_frame_tokens(self) -> int:
        """How many embeddings a frame of a video has, at most."""
        return self.find_largest_frame()[1]

    @property
    def num_frame_room(self) -> int:
        """How many tokens it has, with text of its own."""
        return self.num_frame_tokens

    def get_max_video_tokens(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        """Return how many embeddings a video has, at most."""
        return self.get_max_frames(seq_len, mm_counts) * self.num_frame_tokens

    def get_max_frames(self, seq_len: int | None, mm_counts: Mapping[str, int] | None) -> int:
        """Return the maximum number of frames of a video, if all videos share `seq_len` tokens.

        No more than are seen of one, where the part for videos has a `sampling`.
        """
        num_tokens = seq_len or self.ctx.model_config.max_model_len
        num_videos = max((mm_counts or {}).get("video", 0), 1)
        most = self.get_media_limits().max_video_frames
        part = getattr(self.get_hf_processor(), "video_processor", None)
        if (sampling := getattr(part, "sampling", None)) is not None:
            most = sampling.asked(self.scope_kwargs({}, "videos_kwargs")).num_frames or most
        return max(min(num_tokens // self.num_frame_room // num_videos, most), 1)

    # ---- the seeds' hooks, by the row ------------------------------------------------------------

    def get_expected_hidden_size(self) -> int | None:
        width = super().get_expected_hidden_size()
        return None if width is None else width * (1 + len(self.own_inputs.fed_layers))

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {**self.limits, **self.sound_limits}

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        placeholder = cls.placeholders.get(modality)
        return None if placeholder is None else placeholder.format(i=i)

    def get_reserved_tokens(self) -> Mapping[str, int]:
        if self.embed_token is None or not self.reserves_embed_token:
            return {}
        return {self.embed_token: self.get_embed_token_id("image")}

    def get_mm_max_tokens_per_item(
        self, seq_len: int | None = None, mm_counts: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        most = dict[str, int]()
        if "image" in self.supported_mm_limits:
            most["image"] = self.get_max_image_tokens()
        if "video" in self.supported_mm_limits:
            most["video"] = self.get_max_video_tokens(seq_len, mm_counts)
        if "audio" in self.supported_mm_limits:
            _, most["audio"] = self.find_longest_clip(mm_counts or {})
        return most

    def parse_answer(
        self, token_ids: Sequence[int], *, images: Sequence[AskedImage], is_reasoning: bool = False
    ) -> Mapping[str, Any]:
        """Return an answer's boxes or points, of what follows its reasoning.

        `is_reasoning`: it begins amid reasoning, which its prompt has opened.
        """
        assert self.answer_form is not None
        text = self.get_tokenizer().decode(token_ids, skip_special_tokens=False)
        start, end = REASONING_MARKS
        _, mark, answer = text.rpartition(end)
        is_cut_off = not mark and (is_reasoning or text.lstrip().startswith(start))
        return {} if is_cut_off else self.answer_form.read(answer, images)

    def find_seen_size(self, size: ImageSize, mm_kwargs: Mapping[str, object]) -> ImageSize:
        """Return what an image of this size is resized to, of a form that counts its pixels."""
        raise NotImplementedError(f"{type(self).__name__} says no sizes")

    def choose_items(
        self, mm_items: MultiModalDataItems, mm_kwargs: Mapping[str, object]
    ) -> MultiModalDataItems:
        """Return what of a request's items its kwargs have processed."""
        return mm_items

    # ---- what rows are written with --------------------------------------------------------------

    @cached_property
    def processor_settings(self) -> Mapping[str, Any]:
        """What the checkpoint's processor_config.json has; empty where there is none."""
        return read_json(self.ctx.model_config.path / "processor_config.json")

    def find_token(self, name: str, default: str) -> str:
        """Return the token that the tokenizer calls `name`, or processor_config.json does."""
        named = getattr(self.get_tokenizer(), name, None)
        return named or self.processor_settings.get(name, default)

    def get_token_id(self, token: str) -> int:
        """Return the id of a token that prompts are made of; `CheckpointError` where it is none."""
        tokenizer = self.get_tokenizer()
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is None or (
            token_id == tokenizer.unk_token_id and token != tokenizer.unk_token
        ):
            raise CheckpointError(
                f"the tokenizer does not know `{token}`, which the model's prompts are made of"
            )
        return token_id

    def find_bos(self, *, or_eos: bool = False) -> int:
        """Return the token that prompts begin with; `CheckpointError` where there is none.

        `or_eos`: the tokenizer's EOS where it has no BOS, as Qwen2's.
        """
        tokenizer = self.get_tokenizer()
        for found in (tokenizer.bos_token_id, tokenizer.eos_token_id)[: 1 + or_eos]:
            if found is not None:
                return found
        lacking = "neither a BOS nor an EOS" if or_eos else "no BOS"
        raise CheckpointError(
            f"the tokenizer has {lacking} token, and the model's prompts need one: name it in "
            "tokenizer_config.json"
        )

    def check_token(self, token: str, key: str = "image_token_id") -> None:
        """Refuse a checkpoint whose config.json gives a token another id than the tokenizer."""
        expected = getattr(self.get_hf_config(), key)
        if expected not in (None, self.get_token_id(token)):
            raise CheckpointError(
                f"`{token}` is token {self.get_token_id(token)}, but `{key}` of config.json is "
                f"{expected}"
            )

    def check_rows(
        self,
        modality: str,
        num_embeds: int,
        known: Sequence[int],
        hint: str,
        *,
        what: str = "an image",
    ) -> None:
        """Refuse embeddings of an item with as many rows as no item (`what`) has."""
        if num_embeds not in known:
            raise RequestValueError(
                f"{modality} embeddings have {num_embeds} rows; {what} has {hint}",
                param="multi_modal_data",
            )

    @staticmethod
    def join_pixels(tensors: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
        """Return the tensors with the units of images and videos as one `pixel_values`.

        `names`: of the pixels, in the order in which parity's prompts have their items.
        """
        found = [tensors[name] for name in names if name in tensors]
        return {**tensors, "pixel_values": np.concatenate(found)} if found else tensors

    def find_larger(
        self, read: Callable[[Mapping[str, Any]], int], scope: str = "images_kwargs"
    ) -> int:
        """Return the larger of what a part reads of the checkpoint's settings and the operator's.

        `read` is given the kwargs of a call: none, and the operator's own.
        """
        return max(read(kwargs) for kwargs in ({}, self.scope_kwargs({}, scope)))

    def scope_kwargs(
        self, mm_kwargs: Mapping[str, object], scope: str = "images_kwargs"
    ) -> dict[str, Any]:
        """Return a part's kwargs: a request's, merged with the operator's."""
        return self.get_hf_processor().scope_kwargs(self.ctx.merge_mm_kwargs(mm_kwargs))[scope]


class WindowedClipsInfo(FamilyInfo):
    """Clips of any length, which the host inputs cut into windows (`ClipWindows`)."""

    def find_longest_clip(self, mm_counts: Mapping[str, int]) -> tuple[int, int]:
        """Return the same: as long as the operator's limits allow."""
        windows = self.own_inputs.windows
        limits, made = self.get_media_limits(), self.log_mel
        most = min(limits.max_audio_seconds * made.sampling_rate, limits.max_audio_samples)
        share = self.ctx.model_config.max_model_len // max(mm_counts.get("audio", 0), 1)
        num_rows = max(min(windows.count_rows(most // made.hop_length), share), 1)
        num_frames = windows.count_frames(num_rows)
        # So many are mirrored at either end.
        return max(num_frames * made.hop_length, made.n_fft // 2 + 1), num_rows


def item_fields(
    modality: str,
    *,
    rows: Sequence[str] = (),
    units: Sequence[str] = (),
    counts: Any = (),
    on_host: Sequence[str] = (),
    units_on_host: Sequence[str] = (),
) -> dict[str, MultiModalFieldConfig]:
    """Return the fields of a modality, its precomputed embeddings among them.

    Args:
        modality: Of the items.
        rows: Tensors of which a row is an item, or lists of an array for each.
        units: Tensors of which an item has several rows: `counts[i]` of them.
        counts: As above; empty where there is none of these tensors.
        on_host: Those of `rows` that the device never sees.
        units_on_host: Those of `units` that it never sees.
    """
    sizes, config = np.asarray(counts), MultiModalFieldConfig
    one, kept_one = (config.batched(modality, keep_on_cpu=x) for x in (False, True))
    several, kept = (config.flat_from_sizes(modality, sizes, keep_on_cpu=x) for x in (False, True))
    return {
        f"{modality}_embeds": one,
        **dict.fromkeys(rows, one),
        **dict.fromkeys(units, several),
        **dict.fromkeys(on_host, kept_one),
        **dict.fromkeys(units_on_host, kept),
    }


class FamilyDummyInputs(BaseDummyInputsBuilder[FamilyInfo]):
    """The largest items of a row."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "".join(
            (self.info.find_placeholder_str(modality, 1) or "") * number
            for modality, number in mm_counts.items()
        )

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions] | None = None,
    ) -> MultiModalDataDict:
        options, data = mm_options or {}, dict[str, Any]()
        if "image" in mm_counts:
            size = self.info.get_largest_image()
            data["image"] = self._get_dummy_images(
                width=size.width,
                height=size.height,
                num_images=mm_counts["image"],
                overrides=options.get("image"),
            )
        if mm_counts.get("video"):
            num_frames, size = self.info.get_largest_video(seq_len, mm_counts)
            videos = self._get_dummy_videos(
                size=size,
                num_frames=num_frames,
                num_videos=mm_counts["video"],
                overrides=options.get("video"),
            )
            data["video"] = [(frames, _mark_sampled(len(frames))) for frames in videos]
        if "audio" in mm_counts:
            data["audio"] = self._get_dummy_audios(
                length=self.info.find_longest_clip(mm_counts)[0],
                num_audios=mm_counts["audio"],
                overrides=options.get("audio"),
            )
        return data


def _mark_sampled(num_frames: int) -> dict[str, Any]:
    """Return the metadata of frames that were sampled already: all of them are seen."""
    return {"total_num_frames": num_frames + 1, "frames_indices": list(range(num_frames))}


InfoT = TypeVar("InfoT", bound=FamilyInfo)


class FamilyProcessor(BaseMultiModalProcessor[InfoT]):
    """The hooks of `BaseMultiModalProcessor`, by the row.

    The tokenizer makes ids of a text, and the row's updates write the items: HF's processor is
    called for the items' tensors alone.
    """

    @cached_property
    def known_images(self) -> KnownImages:
        """The sizes of images that were seen lately."""
        return KnownImages()

    def _hf_processor_applies_updates(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _choose_items(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> MultiModalDataItems:
        return self.info.choose_items(mm_items, hf_processor_mm_kwargs)

    def _tokenize_text(
        self,
        prompt: str,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> list[int]:
        kwargs = {"add_special_tokens": self.info.adds_special_tokens, **tokenization_kwargs}
        return list(self.info.get_tokenizer().encode(self.info.frame_text(prompt), **kwargs))

    def _get_answer_parser(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
        names: Mapping[str, Sequence[str]],
    ) -> AnswerParser | None:
        """Return the row's, for answers about images whose sizes are all known."""
        form = self.info.answer_form
        if form is None or not 1 <= len(names.get("image", ())) <= form.max_images:
            return None
        found = self.find_image_sizes(mm_items, names)
        if found is None:
            return None
        find = self.info.find_seen_size
        images = [
            one._replace(seen=find(one.seen, mm_kwargs)) if form.in_pixels else one for one in found
        ]
        text = prompt if isinstance(prompt, str) else self.info.get_tokenizer().decode(prompt[-8:])
        is_reasoning = text.rstrip().endswith(REASONING_MARKS[0])
        return partial(self.info.parse_answer, images=images, is_reasoning=is_reasoning)

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        outputs = super()._call_hf_processor(prompt, mm_data, mm_kwargs, tok_kwargs)
        size = self.info.get_unit_size() if "pixel_values" in outputs else None
        if size is not None:
            check_pixel_size(outputs["pixel_values"], size.height, size.width)
        return outputs

    def find_image_sizes(
        self, mm_items: MultiModalDataItems, names: Mapping[str, Sequence[str]]
    ) -> list[AskedImage] | None:
        """Return the sizes of a prompt's images, of which few must be decoded for it.

        None where there is no image, and where one came as its embeddings, or as an id alone that
        was not seen lately.
        """
        images = mm_items.get("image")
        if not isinstance(images, ImageProcessorItems):
            return None
        found = []
        for index, name in enumerate(names["image"]):
            size = self.known_images.get(name)
            if size is None:
                if images.get_item_for_hash(index) is None:
                    return None
                sizes = images.find_sizes(index) or self._decode_sizes(images, index, mm_items)
                size = self.known_images[name] = AskedImage(*sizes)
            found.append(size)
        return found or None

    def _decode_sizes(
        self, images: ImageProcessorItems, index: int, mm_items: MultiModalDataItems
    ) -> tuple[ImageSize, ImageSize]:
        num_bytes, cancellation = images.count_bytes_to_decode(index), mm_items.cancellation
        with self.decode_budget.hold(num_bytes, cancellation, on_wait=mm_items.drop_decoded):
            images.get(index)
        sizes = images.find_sizes(index)
        assert sizes is not None, "it is decoded"
        return sizes

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return self.info.get_fields(hf_inputs)

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        kind = PromptInsertion if self.info.inserts_items else PromptReplacement
        return [
            kind(modality, self.info.get_target(modality), self._describe(modality, out_mm_kwargs))
            for modality in self.info.supported_mm_limits
        ]

    def _apply_token_matches(
        self, prompt: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> tuple[list[int], MultiModalPromptUpdatesApplyResult]:
        """Replace; a target of several tokens may have merged with the words beside it.

        So may the words that an item begins or ends with (`text_bounds`). Token ids that do not
        round-trip through text are replaced as they are.
        """
        if any(mm_prompt_updates.get(modality) for modality in self.info.text_bounds):
            tokenizer = self.info.get_tokenizer()
            text = tokenizer.decode(prompt)
            if as_ids(text, tokenizer) == prompt:
                new_text, result = self._apply_text_matches(text, mm_prompt_updates)
                return as_ids(new_text, tokenizer), result
        bounds = self.info.item_bounds
        if bounds is not None and has_long_target(mm_prompt_updates):
            start, end = bounds
            tokenizer = self.info.get_tokenizer()
            spliced = splice_in_text(prompt, mm_prompt_updates, tokenizer, before=end, after=start)
            if spliced is not None:
                return spliced
        return super()._apply_token_matches(prompt, mm_prompt_updates)

    def _find_mm_placeholders(
        self, token_ids: list[int], mm_prompt_updates: MultiModalPromptUpdates
    ) -> Mapping[str, list[PlaceholderFeaturesInfo]]:
        """Find items of `text_bounds` from their first mark to their last: around them is text."""
        inner = {
            modality: [[self._cut_text(update) for update in one] for one in items]
            for modality, items in mm_prompt_updates.items()
        }
        return super()._find_mm_placeholders(token_ids, inner)

    def _cut_text(self, update: ResolvedPromptUpdate) -> ResolvedPromptUpdate:
        tokens, bounds = update.content.full, self.info.text_bounds.get(update.modality)
        if bounds is None or not isinstance(tokens, list):
            return update
        first, last = map(self.info.get_token_id, bounds)
        inner = tokens[tokens.index(first) : len(tokens) - tokens[::-1].index(last)]
        embed_token_ids = self.info.get_embed_token_ids(update.modality)
        return update.with_content(PromptUpdateDetails.select_token_ids(inner, embed_token_ids))

    def _describe(self, modality: str, kwargs: MultiModalKwargsItems) -> Any:
        """Return what gives an item's tokens, and which of them take embeddings."""

        def write_item(item_idx: int) -> PromptUpdateDetails:
            tensors = kwargs.get_item(modality, item_idx).get_data()
            has_embeds = tensors.get(f"{modality}_embeds") is not None
            measure = self.info.measure_embeds if has_embeds else self.info.measure_item
            return self._write(modality, measure(modality, tensors))

        return write_item

    @cached_property
    def _write(self) -> Callable[[str, Hashable], PromptUpdateDetails]:
        """The content of items of a modality and size, which they share."""
        return lru_cache(_MAX_CONTENTS)(self._write_content)

    def _write_content(self, modality: str, size: Hashable) -> PromptUpdateDetails:
        embed_token_ids = self.info.get_embed_token_ids(modality)
        tokens = self.info.write_item(modality, size)
        if {*tokens} <= {*embed_token_ids}:
            return PromptUpdateDetails(tokens)
        return PromptUpdateDetails.select_token_ids(tokens, embed_token_ids)


def make_factories(
    info: type[FamilyInfo],
    processor: type[FamilyProcessor[Any]] = FamilyProcessor,
    **fields: Any,
) -> ProcessorFactories:
    """Return how the processor of a row is made; `fields` are those of `ProcessorFactories`."""
    return ProcessorFactories(
        info=info, dummy_inputs=FamilyDummyInputs, processor=processor, **fields
    )
