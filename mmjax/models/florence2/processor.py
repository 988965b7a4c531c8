"""Florence-2's processor: the encoder prompt is the image's tokens and a task in words.

Before: `<CAPTION>` and an image. After, for the encoder: `<image>*577 <s> What does the image
describe? </s>`, where the first 577 take embeddings; for the decoder: `</s>`. Without an image
the encoder prompt is the task only.

Florence-2's answers to tasks: boxes, polygons and labels, of texts with `<loc_N>` tokens.

As `Florence2Processor.post_process_generation` of transformers, which needs torch. Of `<OD>` and an
image of 1000 x 500 pixels, `cat<loc_0><loc_0><loc_499><loc_999>` gives
`{"<OD>": {"bboxes": [[0, 0, 499, 499]], "labels": ["cat"]}}`.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from transformers import AddedToken

from mmjax.errors import CheckpointError, RequestValueError
from mmjax.models.family import FamilyInfo, FamilyProcessor, Target, make_factories
from mmjax.models.florence2.host_inputs import Florence2HostInputs
from mmjax.models.model_source import read_generation_config
from mmjax.processing.image_processors.pil_classes import load_image_processor
from mmjax.processing.items.items import ImageSize
from mmjax.processing.items.parse import ImagesOnlyDataParser, MultiModalDataItems
from mmjax.processing.prepared import AnswerParser
from mmjax.processing.processor import EncDecMultiModalProcessor
from mmjax.processing.prompt_updates.updates import PromptIndexTargets, as_ids

NUM_BINS = 1000
"""Places along each side of an image that a `<loc_N>` may name."""
_MARKS = re.compile("<s>|</s>|<pad>")
_LOC = r"<loc_(\d+)>"
_ANY_LOC = r"<loc_\d+>"
_PHRASE_WITH_BOXES = re.compile(rf"[^<]+(?:{_ANY_LOC}){{4,}}")
_BOXES_ALONE = re.compile(rf"(?:{_ANY_LOC}){{4,}}")
_POLYGON_PARTS = rf"(?:{_ANY_LOC}|<sep>|<poly>|</poly>){{4,}}"
_PHRASE_WITH_POLYGONS = re.compile(rf"[^<]+{_POLYGON_PARTS}")
_POLYGONS_ALONE = re.compile(_POLYGON_PARTS)
_QUAD_BOX = re.compile(rf"(.+?){_LOC * 8}")
_BOX = re.compile(_LOC * 4)
_LABEL = re.compile(r"\s*(.*?)(?=</?od>|</?box>|</?bbox>|<loc_)")
_POLYGON_LABEL = re.compile(r"\s*(.*?)(?=</?od>|</?box>|</?bbox>|<loc_|<poly>)")
_POLYGON_GROUP = re.compile(r"<poly>(.*?)</poly>")
_POLYGON = re.compile(rf"((?:{_ANY_LOC})+)(?:<sep>|$)")

VAGUE_PHRASES = frozenset(
    """it I me mine you your yours he him his she her hers they them their theirs one oneself we us
    our ours its myself yourself himself herself itself ourselves yourselves themselves this that
    these those who whom whose which what all another any anybody anyone anything each everybody
    everyone everything few many nobody none several some somebody someone something image images
    the a an lots""".split()
) | {"each other", "one another", "the image", "a group", "other objects", "a set"}
"""Phrases of the published checkpoints' `banned_grounding_tokens`, to which no box belongs."""


@dataclass(frozen=True, slots=True)
class _Text:
    """An answer without marks of its beginning and end, and how its places become pixels."""

    text: str
    image_size: ImageSize
    vague_phrases: Collection[str]

    def to_pixels(self, bins: Sequence[str]) -> list[int]:
        """Return x, y, x, y, ...: the centers of bins, cut to whole pixels, in float32 as HF's."""
        per_bin = np.array([side / NUM_BINS for side in self.image_size], np.float32)
        pairs = np.array(bins, np.float32).reshape(-1, 2)
        return ((pairs + np.float32(0.5)) * per_bin).astype(np.int32).reshape(-1).tolist()


def _find_boxes(
    answer: _Text, pattern: re.Pattern[str] = _PHRASE_WITH_BOXES, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return each box of each phrase, and the phrase, but for those of `without`."""
    boxes, labels = [], []
    for phrase in pattern.findall(answer.text):
        match = _LABEL.match(phrase)
        label = None if match is None else match.group().strip()
        if label is None or label in without:
            continue
        for box in _BOX.findall(phrase):
            boxes.append(answer.to_pixels(box))
            labels.append(label.encode("ascii", "ignore").decode("ascii"))
    return {"bboxes": boxes, "labels": labels}


def _parse_quad_boxes(answer: _Text) -> dict[str, Any]:
    found = _QUAD_BOX.findall(answer.text)
    return {
        "quad_boxes": [answer.to_pixels(bins) for _, *bins in found],
        "labels": [label.strip() for label, *_ in found],
    }


def _find_polygons(answer: _Text, pattern: re.Pattern[str]) -> dict[str, Any]:
    """Return, of each object, its polygons (x, y, x, y, ...) and its label."""
    polygons, labels = [], []
    for phrase in pattern.findall(answer.text):
        label = _POLYGON_LABEL.match(re.sub(rf"^{_ANY_LOC}", "", phrase, count=1))
        if label is None:
            continue
        has_groups = "<poly>" in phrase and "</poly>" in phrase
        for group in _POLYGON_GROUP.findall(phrase) if has_groups else [phrase]:
            outlines = [re.findall(_LOC, outline) for outline in _POLYGON.findall(group)]
            if outlines:
                # A last x without a y is left out.
                pairs = [bins[: len(bins) // 2 * 2] for bins in outlines]
                polygons.append([answer.to_pixels(bins) for bins in pairs])
                labels.append(label.group().strip())
    return {"polygons": polygons, "labels": labels}


def _parse_boxes_or_polygons(answer: _Text) -> dict[str, Any]:
    if "<poly>" in answer.text:
        boxes: dict[str, Any] = {"bboxes": [], "labels": []}
        polygons = _find_polygons(answer, _PHRASE_WITH_POLYGONS)
    else:
        boxes, polygons = _find_boxes(answer), {"polygons": [], "labels": []}
    return {
        "bboxes": boxes["bboxes"],
        "bboxes_labels": boxes["labels"],
        "polygons": polygons["polygons"],
        "polygons_labels": polygons["labels"],
    }


_PARSERS: Mapping[str, Callable[[_Text], dict[str, Any]]] = MappingProxyType(
    {
        "ocr": _parse_quad_boxes,
        "description_with_bboxes": _find_boxes,
        "phrase_grounding": lambda answer: _find_boxes(answer, without=answer.vague_phrases),
        "polygons": partial(_find_polygons, pattern=_POLYGONS_ALONE),
        "description_with_bboxes_or_polygons": _parse_boxes_or_polygons,
        "bboxes": partial(_find_boxes, pattern=_BOXES_ALONE),
    }
)
"""By HF's kind of answer (`tasks_answer_post_processing_type`); others are text."""


def parse_answer(
    text: str,
    *,
    task: str,
    kind: str,
    image_size: ImageSize,
    vague_phrases: Collection[str] = VAGUE_PHRASES,
) -> dict[str, Any]:
    """Return `{task: answer}`: a text, or lists of boxes, polygons and labels.

    Args:
        text: With the tokenizer's special tokens.
        task: As `<OD>`.
        kind: HF's name for what the task's answers hold, as `description_with_bboxes`.
        image_size: Of the original image: boxes are in its pixels.
        vague_phrases: Phrases that `<CAPTION_TO_PHRASE_GROUNDING>` leaves out.
    """
    parse = _PARSERS.get(kind)
    if parse is None:
        return {task: text.replace("<s>", "").replace("</s>", "").strip()}
    return {task: parse(_Text(_MARKS.sub("", text), image_size, vague_phrases))}


CHAT_TEMPLATE = r"""
{%- for message in messages if message.role == 'user' -%}
    {%- if loop.last -%}
        {{- message.content -}}
    {%- endif -%}
{%- endfor -%}
"""
"""The task of the last turn alone: the model was trained on tasks, not on conversations."""
IMAGE_TOKEN = "<image>"
"""The image token of checkpoints whose tokenizer names none."""


class Florence2ProcessingInfo(FamilyInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {
        "Caption": "<CAPTION>",
        "Detailed caption": "<DETAILED_CAPTION>",
        "Objects": "<OD>",
        "Find a phrase": "<CAPTION_TO_PHRASE_GROUNDING>{a green car}",
        "Outline": "<REFERRING_EXPRESSION_SEGMENTATION>{a green car}",
        "Regions": "<DENSE_REGION_CAPTION>",
        "Read text": "<OCR>",
        "Text with places": "<OCR_WITH_REGION>",
    }
    data_parser = ImagesOnlyDataParser
    """The encoder's prompt has positions for whole images."""
    host_inputs = Florence2HostInputs
    limits: ClassVar = {"image": 1}
    inserts_items = True

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, with the tokens that Microsoft's own layout adds in its code."""
        tokenizer = super().get_tokenizer()
        if getattr(tokenizer, "image_token", None) is None:
            _add_task_tokens(tokenizer)
        return tokenizer

    def get_reserved_tokens(self) -> Mapping[str, int]:
        processor = self.get_hf_processor()
        return {processor.image_token: processor.image_token_id}

    def load_hf_processor(self) -> Any:
        """Assemble the HF processor, which knows the tasks: AutoProcessor needs torchvision."""
        # On use only: it brings an installed torch along.
        from transformers.models.florence2.processing_florence2 import Florence2Processor

        settings = self.processor_settings
        image_processor = load_image_processor(self.ctx.model_config.path, {"CLIP": "clip"})
        if not getattr(image_processor, "image_seq_length", None):
            raise CheckpointError(
                "the image processor's configuration has no `image_seq_length`: the number of "
                "embeddings of an image (577 for the published models)"
            )
        processor = Florence2Processor(
            image_processor=image_processor,
            tokenizer=self.get_tokenizer(),
            num_additional_image_tokens=settings.get("num_additional_image_tokens", 0),
            post_processor_config=settings.get("post_processor_config"),
        )
        self.check_token(processor.image_token)
        return processor

    def get_unit_size(self) -> ImageSize:
        """Return the pixels that the image processor's own settings make of an image."""
        image_processor = self.get_image_processor()
        crops = image_processor.do_center_crop
        size = image_processor.crop_size if crops else image_processor.size
        return ImageSize(width=size.width, height=size.height)

    @property
    def num_unit_tokens(self) -> int:
        return self.get_hf_processor().num_image_tokens

    def get_target(self, modality: str) -> Target:
        return PromptIndexTargets.start()

    def frame_prompt(
        self, token_ids: list[int], mm_counts: Mapping[str, int], mm_kwargs: Mapping[str, object]
    ) -> list[int]:
        """Add `<s>` and `</s>` around the encoder's prompt, as HF does only with an image."""
        if not mm_counts.get("image"):
            return token_ids
        tokenizer = self.get_tokenizer()
        return [tokenizer.bos_token_id, *token_ids, tokenizer.eos_token_id]

    @cached_property
    def answer_start(self) -> Sequence[int]:
        """`</s>`, and the token with which generation_config.json has answers begin."""
        settings = read_generation_config(self.ctx.model_config.path)
        first = settings.get("forced_bos_token_id")
        start = self.get_hf_config().get_text_config().eos_token_id
        return (start,) if first is None else (start, first)

    def write_task(self, prompt: str) -> str:
        """Replace a task such as `<OD>` by its sentence; other text is unchanged."""
        try:
            (sentence,) = self.get_hf_processor()._construct_prompts([prompt])
        except ValueError as error:
            raise RequestValueError(
                "prompt has a task token (as `<OD>`) among other words; send the task alone",
                param="prompt",
            ) from error
        return sentence

    def find_task(self, prompt: str | list[int]) -> str | None:
        """Return the task in a prompt, as `<OD>`; None: it has none."""
        text = prompt if isinstance(prompt, str) else self.get_tokenizer().decode(prompt)
        tasks = self.get_hf_processor().tasks_answer_post_processing_type
        return next((task for task in tasks if task in text), None)


class Florence2MultiModalProcessor(
    FamilyProcessor[Florence2ProcessingInfo], EncDecMultiModalProcessor[Florence2ProcessingInfo]
):
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> list[int]:
        """Replace the task by its sentence, without `<s>` and `</s>`."""
        if isinstance(prompt, str):
            return as_ids(self.info.write_task(prompt), self.info.get_tokenizer())
        return self._write_task_in_tokens(prompt)

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> list[int]:
        return list(self.info.answer_start)

    def _get_answer_parser(
        self,
        prompt: str | list[int],
        mm_items: MultiModalDataItems,
        mm_kwargs: Mapping[str, object],
        names: Mapping[str, Sequence[str]],
    ) -> AnswerParser | None:
        """Return the task's parser; None without a task, and where the image's size is unknown."""
        task = self.info.find_task(prompt)
        if task is None or (images := self.find_image_sizes(mm_items, names)) is None:
            return None
        return partial(self._parse_answer, task=task, image_size=images[0].sent)

    def _parse_answer(
        self, token_ids: Sequence[int], *, task: str, image_size: ImageSize
    ) -> Mapping[str, Any]:
        processor = self.info.get_hf_processor()
        vague_phrases = processor.post_processor.banned_grounding_tokens
        return parse_answer(
            self.info.get_tokenizer().decode(token_ids, skip_special_tokens=False),
            task=task,
            kind=processor.tasks_answer_post_processing_type[task],
            image_size=image_size,
            vague_phrases=vague_phrases or VAGUE_PHRASES,
        )

    def _write_task_in_tokens(self, prompt_tokens: list[int]) -> list[int]:
        """Replace the task by its sentence, without the tokenizer's `<s>` and `</s>`."""
        tokenizer = self.info.get_tokenizer()
        start = int(prompt_tokens[:1] == [tokenizer.bos_token_id])
        stop = len(prompt_tokens) - int(prompt_tokens[start:][-1:] == [tokenizer.eos_token_id])
        token_ids = prompt_tokens[start:stop]
        text = tokenizer.decode(token_ids)
        sentence = self.info.write_task(text)
        return token_ids if sentence == text else as_ids(sentence, tokenizer)


def _add_task_tokens(tokenizer: Any) -> None:
    """Add what follows BART's vocabulary, in the order of the embedding table; last `<image>`."""
    tokens = [f"<{slash}{name}>" for name in ("od", "ocr") for slash in ("", "/")]
    tokens += [f"<loc_{number}>" for number in range(NUM_BINS)]
    pairs = ("cap", "ncap", "dcap", "grounding", "seg")
    tokens += [f"<{slash}{name}>" for name in pairs for slash in ("", "/")]
    tokens += ["<sep>"]
    # The second is misspelt there, too.
    pairs = ("region_cap", "region_to_desciption", "proposal", "poly")
    tokens += [f"<{slash}{name}>" for name in pairs for slash in ("", "/")]
    tokens += ["<and>", IMAGE_TOKEN]
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True
    )
    tokenizer.image_token = IMAGE_TOKEN
    tokenizer.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)


FACTORIES = make_factories(Florence2ProcessingInfo, Florence2MultiModalProcessor)
