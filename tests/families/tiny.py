"""What a row of the table is: HF's tiny random model, ours with its weights, prompts for both."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mmjax.layers.module import build_abstract
from mmjax.models.host_inputs import PromptItem
from mmjax.parity.arrays import TILE, PagedModel, Sample
from mmjax.parity.reference import make_pixels, make_reference_inputs
from mmjax.processing.image_processors.affine import make_affine
from mmjax.processing.tensors.inputs import PlaceholderRange
from mmjax.rounding import round_up
from tests.families.sizes import resize_text
from tests.kit import is_slow_run
from tests.oracle import fill_with_unit_norms, params_of


class Words(NamedTuple):
    """Random tokens of text; texts of one seed begin alike."""

    seed: int
    length: int


class Media(NamedTuple):
    """An image or a video; its seed decides its size, too."""

    seed: int
    modality: str = "image"


Part = Words | Media
Parts = tuple[Part, ...]
"""A prompt, in words that mean something to every family."""


class DrawnItem(NamedTuple):
    """What a processor makes of an image or a video."""

    tensors: Mapping[str, np.ndarray]
    token_ids: Sequence[int]
    """Of the placeholder."""
    is_embed: np.ndarray | None = None
    """bool[placeholder]; None: everywhere."""
    before: Sequence[int] = ()
    after: Sequence[int] = ()


class Variant(NamedTuple):
    """A configuration whose keys change the mathematics."""

    settings: Mapping[str, Any]
    """Keywords of `TinyFamily.make_reference`."""
    num_states: int
    """Outputs that are compared for a prompt with images, so that none is lost by its name."""
    prompts: Sequence[str] = ()
    """Names of `TinyFamily.prompts`, where the usual ones would be too long."""


AFFINE = make_affine(rescale_factor=1 / 255, mean=(0.4, 0.5, 0.6), std=(0.25, 0.3, 0.35))
"""What pixels are made with: each colour otherwise."""


def draw_bytes(seed: Any, shape: Sequence[int]) -> np.ndarray:
    """Return an image as its processor gives it: random bytes."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def draw_words(part: Words, ids: range) -> list[int]:
    """Return the tokens of a text."""
    generator = np.random.default_rng(part.seed)
    return generator.integers(ids.start, ids.stop, 64)[: part.length].tolist()


def joined(sample: Sample, *, colours_last: bool = False) -> dict[str, np.ndarray]:
    """Return the tensors of all items by name, joined along the first axis."""
    items = [make_pixels(item.tensors, colours_last=colours_last) for item in sample.items]
    names = dict.fromkeys(name for item in items for name in item)
    return {name: np.concatenate([i[name] for i in items if name in i]) for name in names}


def listed(sample: Sample) -> dict[str, list[np.ndarray]]:
    """Return the tensors of all items by name, which `make_reference_inputs` stacks."""
    items = [make_pixels(item.tensors) for item in sample.items]
    return {name: [item[name] for item in items] for name in (items[0] if items else ())}


def stacked_inputs(reference: Any, sample: Sample) -> dict[str, Any]:
    """Return the sample as most of HF's processors would give it: items stacked, padded."""
    return make_reference_inputs(sample.token_ids, listed(sample))


def joined_inputs(
    reference: Any, sample: Sample, *, left_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the sample as processors of tiles would give it: those of all images, one by one."""
    tensors = {name: one for name, one in joined(sample).items() if name not in left_out}
    return make_reference_inputs(sample.token_ids, tensors)


@dataclass(frozen=True, kw_only=True, eq=False)
class TinyFamily:
    """A served family (or a kind of its towers), as tests make and ask it."""

    name: str
    model_class: Any
    reference_class: Any
    """HF's."""
    make_config: Callable[..., Any]
    """HF's config; keywords are what differs from the tiny one."""
    resize: Callable[[int, int, int], Mapping[str, Any]] = resize_text
    """Keywords of `make_config` for a decoder of a width, with heads of a width, and so many."""
    variants: Mapping[str, Variant]
    """The first one gets prompts of every kind, unless it names some."""
    served: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `make_reference`: the model that engines serve."""
    draw_item: Callable[[Any, Media], DrawnItem]
    """What a processor makes, under a config."""
    torch_inputs: Callable[[Any, Sample], dict[str, Any]] = stacked_inputs
    """The sample as HF's processor gives it to HF's model."""
    word_ids: range
    """Of text."""
    published_head_dim: int
    """Of the decoders of published checkpoints (of the smallest, where they differ)."""
    max_embeds: Mapping[str, int]
    """Of the largest item of each modality."""
    num_clip_states: int = 0
    """Outputs that are compared of what projects clips, where a prompt has them beside pictures."""
    max_items: int = 3
    """In a prompt."""
    longest_run: int = 0
    """Of tokens that are computed in one step, where it must have room for more than 7: embeddings
    that see each other both ways, or a recurrent layer's chunk."""
    max_model_len: int = 80
    """Of engines."""
    fill: Callable[[Any], None] = fill_with_unit_norms
    """Gives HF's model random values, loud enough that every input changes the answer."""
    publish_names: Callable[[Path], None] = lambda folder: None
    """Makes the published tensors of those that HF's `save_pretrained` has written to a folder."""
    mend: Callable[[Any], object] = lambda model: None
    """Lets HF's model take a prompt that it refuses."""

    def make_reference(self, *, config: Any = None, **settings: Any) -> Any:
        """Return HF's model of a config, random, whose `generate` never ends a text."""
        from transformers import GenerationConfig

        model = self.reference_class(config or self.make_config(**settings)).eval()
        self.fill(model)
        self.mend(model)
        # BLIP-2 generates by its inner model's.
        for module in model.modules():
            if hasattr(module, "generation_config"):
                module.generation_config = GenerationConfig(pad_token_id=0)
        return model

    def draw_sample(self, config: Any, parts: Sequence[Part]) -> Sample:
        """Return a prompt of the parts, in their order."""
        ids: list[int] = []
        items = []
        for part in parts:
            if isinstance(part, Words):
                ids += draw_words(part, self.word_ids)
                continue
            item = self.draw_item(config, part)
            ids += item.before
            place = PlaceholderRange(len(ids), len(item.token_ids), item.is_embed)
            items.append(PromptItem(place, item.tensors))
            ids += [*item.token_ids, *item.after]
        return Sample(token_ids=np.array(ids, np.int32), items=items)

    def torch_call(self, reference: Any, sample: Sample) -> tuple[Any, dict[str, Any]]:
        """Return the module that takes the sample, and the sample as it takes it."""
        return reference, self.torch_inputs(reference, sample)

    @property
    def hears_and_sees(self) -> bool:
        """Whether a prompt may have clips beside pictures."""
        return {"image", "audio"} <= self.max_embeds.keys()

    @property
    def prompts(self) -> dict[str, Parts]:
        """Prompts of no image to as many as the family takes, and of its videos and clips."""
        image, two = Media(0), (Words(1, 9), Media(0), Words(2, 5), Media(1), Words(3, 7))
        prompts: dict[str, Parts] = {"text": (Words(4, 20),), "image": (image, Words(1, 6))}
        if self.max_items > 1:
            prompts["two images"] = two
        if self.max_items > 2:
            three = (Words(5, 3), Media(2), Media(1), Words(6, 1), Media(3), Words(2, 9))
            prompts["three images"] = three
        if "video" in self.max_embeds:
            video = Media(2, "video")
            prompts["video"] = (Words(1, 4), video, Words(2, 6))
            prompts["both"] = (Words(1, 3), Media(1), Words(2, 2), video, Words(3, 4), Media(0))
            prompts["both"] += (Words(4, 5),)
        if self.hears_and_sees:
            clips = (Media(1, "audio"), Words(2, 2), Media(0), Words(3, 4), Media(2, "audio"))
            prompts["clips"] = (Words(1, 3), *clips, Words(4, 2), Media(3, "audio"))
        return prompts

    @property
    def richest_prompts(self) -> dict[str, Parts]:
        """Return text alone, and the fewest prompts that have several items of each modality."""
        prompts = self.prompts
        images = next(name for name in ("both", "two images", "image") if name in prompts)
        return {name: prompts[name] for name in ("text", images, "clips") if name in prompts}

    def variant_prompts(self, name: str) -> dict[str, Parts]:
        """Return those that a variant gets, if it is not the first."""
        if self.variants[name].prompts:
            return {prompt: self.prompts[prompt] for prompt in self.variants[name].prompts}
        chosen = ("two images", "both") if "video" in self.max_embeds else ("two images", "image")
        chosen += ("clips",)
        found = {name: self.prompts[name] for name in chosen if name in self.prompts}
        return found if "video" in self.max_embeds else dict([next(iter(found.items()))])

    @property
    def workload(self) -> list[Parts]:
        """Prompts for an engine: equal beginnings with other ends, equal texts of other images."""
        video = Media(1, "video") if "video" in self.max_embeds else Media(4)
        more = [Media(1), Words(7, 2)] if self.max_items > 1 else []
        heard = [Media(3, "audio"), Words(6, 1)] if self.hears_and_sees else []
        return [
            (Words(0, 10), Media(0), Words(1, 9)),
            (Words(2, 21),),
            (Words(0, 10), Media(0), Words(1, 4), *more),
            (Words(0, 10), video, Words(1, 9)),
            (Media(2), Words(5, 20 - len(heard)), *heard),
        ]


class TinyModel:
    """HF's random model of a configuration, and its weights in our tree."""

    def __init__(self, family: TinyFamily, **settings: Any) -> None:
        self.family = family
        self.reference = family.make_reference(**settings)
        self.config = self.reference.config
        self.rules = family.model_class.rules(self.config)

    @cached_property
    def params(self) -> Any:
        """The weights as our tree."""
        _, abstract = build_abstract(self.family.model_class, self.config, dtype=jnp.float32)
        return params_of(self.reference, abstract, self.rules)

    @cached_property
    def paged(self) -> PagedModel:
        """Our model, for one request at a time."""
        return self.make_paged(self.params, max(256, self.family.max_model_len))

    def make_paged(self, params: Any, max_len: int = 256) -> PagedModel:
        """Return our model with parameters of your own."""
        parts = (self.family.model_class, self.config, params, max_len)
        # Prompts of any length are one program, but in the slow run.
        return PagedModel(*parts, prompt_step=TILE if is_slow_run() else round_up(max_len, TILE))

    def with_weights(self, params: Any) -> PagedModel:
        """Return our model with other numbers in a tree like its own, and `paged`'s programs."""
        other = copy(self.paged)
        other.params = params
        return other

    def draw_sample(self, parts: Sequence[Part]) -> Sample:
        """Return a prompt of the parts."""
        return self.family.draw_sample(self.config, parts)
