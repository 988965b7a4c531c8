"""The guide's processors give what mmjax's own families give: ids, and placeholders.

Of text and of token ids, with a cache and without, over no, one and two images. For Molmo and
DeepSeek-VL2 small custom HF processors stand in, and a formula for the ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from transformers import BatchFeature

from mmjax import MULTIMODAL_REGISTRY
from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.processing import (
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    ImageProcessorItems,
    ImageSize,
    MultiModalFieldConfig,
    MultiModalInputs,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdateDetails,
)
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import FAMILIES, gemma3
from tests.kit import draw
from tests.processing.seed_processors import (
    BoiTokens,
    LargestImages,
    SeedBlip2,
    SeedChameleon,
    SeedFlorence2,
    SeedFuyu,
    SeedGemma3,
    SeedLlava,
)

# ---- the same as the families in the tree -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Port:
    """A processor of this page, and the family that it must equal."""

    model: type
    family: str
    prompt: Callable[[int], str]
    """(number of images) -> text."""
    max_images: int = 2
    alone: Callable[[Any, list[int]], list[int]] = field(default=lambda tokenizer, ids: ids)
    """What the hook for token ids makes of a prompt without images, where HF leaves it alone."""


def _with_boa(tokenizer: Any, ids: list[int]) -> list[int]:
    return [*ids, tokenizer.get_vocab()["<0x04>"]]


def _with_bos_and_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    return [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id]


PORTS = (
    Port(model=SeedLlava, family="llava", prompt=lambda n: f"what{'<image>' * n} is this"),
    Port(
        model=SeedFuyu, family="fuyu", prompt=lambda n: "what is it", max_images=1, alone=_with_boa
    ),
    Port(
        model=SeedGemma3, family="gemma3", prompt=lambda n: f"what\n{'<start_of_image>' * n}is it"
    ),
    Port(model=SeedBlip2, family="blip2", prompt=lambda n: "what is it", max_images=1),
    Port(
        model=SeedFlorence2,
        family="florence2",
        prompt=lambda n: "<OD>",
        max_images=1,
        alone=_with_bos_and_eos,
    ),
    Port(model=SeedChameleon, family="chameleon", prompt=lambda n: f"what{'<image>' * n} is this"),
)
CASES = [
    pytest.param(port, num_images, id=f"{port.family}-{num_images}")
    for port in PORTS
    for num_images in range(port.max_images + 1)
]


def make_cache(*, is_cached: bool) -> MultiModalProcessorOnlyCache | None:
    return MultiModalProcessorOnlyCache(2**26) if is_cached else None


def summarize(inputs: MultiModalInputs) -> Any:
    return (
        inputs.prompt_token_ids,
        inputs.encoder_prompt_token_ids,
        [
            (one.offset, one.length, one.get_num_embeds())
            for one in inputs.mm_placeholders.get("image", ())
        ],
    )


@pytest.mark.parametrize("is_cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize(("port", "num_images"), CASES)
def test_it_equals_the_family_in_the_tree(
    port: Port, num_images: int, as_tokens: bool, is_cached: bool
):
    own = FAMILIES[port.family].make_processor()
    tokenizer = own.info.get_tokenizer()
    factories = MULTIMODAL_REGISTRY.get_factories(port.model)
    processor = factories.build_processor(own.info.ctx, cache=make_cache(is_cached=is_cached))
    prompt: Any = port.prompt(num_images)
    if as_tokens:
        prompt = tokenizer.encode(prompt)
    images = [draw(31 + 8 * index, 20) for index in range(num_images)]
    expected = own.apply(prompt, {"image": images})
    token_ids, encoder_ids, ranges = summarize(expected)
    if not images and encoder_ids is not None:
        encoder_ids = port.alone(tokenizer, encoder_ids)
    elif not images:
        token_ids = port.alone(tokenizer, token_ids)
    for _ in range(2):  # the second time, a cache has the images
        inputs = processor.apply(prompt, {"image": images})
        assert summarize(inputs) == (token_ids, encoder_ids, ranges)
        assert all(inputs.mm_kwargs.get("image", []))


@pytest.mark.parametrize("port", PORTS, ids=[port.family for port in PORTS])
def test_the_dummy_inputs_have_the_most_embeddings(port: Port):
    own = FAMILIES[port.family].make_processor()
    processor = MULTIMODAL_REGISTRY.get_factories(port.model).build_processor(own.info.ctx)
    assert (
        MultiModalProfiler(processor).get_mm_max_tokens_per_item()
        == MultiModalProfiler(own).get_mm_max_tokens_per_item()
    )


# ---- Molmo: a template of the HF processor's own, and an insertion after a token ----------------

TOKENIZER = gemma3.hf_processor().tokenizer
BOS, PATCH = TOKENIZER.bos_token_id, TOKENIZER.image_token_id
START, END = TOKENIZER.boi_token_id, TOKENIZER.eoi_token_id


class MolmoHFProcessor:
    """Writes a template around every text, and an image's tokens after its first token."""

    def write(self, text: str) -> list[int]:
        return [BOS, *TOKENIZER.encode(f" User: {text} Assistant:", add_special_tokens=False)]

    def __call__(
        self, text: str, images: Sequence[Any] = (), return_tensors: str = "np"
    ) -> BatchFeature:
        first, *rest = self.write(text)
        outputs: dict[str, Any] = {}
        if images:
            outputs["images"] = np.array([[image.width, image.height] for image in images])
            rest = [*(one for image in images for one in molmo_tokens(image.width)), *rest]
        return BatchFeature({"input_ids": [[first, *rest]], **outputs}, tensor_type=return_tensors)


def molmo_tokens(width: int) -> list[int]:
    return [START, *[PATCH] * width, END]


class MolmoInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def load_hf_processor(self) -> Any:
        return MolmoHFProcessor()

    def get_image_size_with_most_features(self) -> ImageSize:
        return ImageSize(width=6, height=6)


class MolmoProcessor(BaseMultiModalProcessor[MolmoInfo]):
    def _apply_hf_processor_tokens_only(self, prompt_tokens: list[int]) -> list[int]:
        text = self.info.get_tokenizer().decode(prompt_tokens, skip_special_tokens=True)
        return self.info.get_hf_processor().write(text)

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"images": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        def get_insertion_molmo(item_idx: int) -> PromptUpdateDetails:
            images = mm_items.get_items("image", ImageProcessorItems)
            tokens = molmo_tokens(images.get_image_size(item_idx).width)
            return PromptUpdateDetails.select_token_id(tokens, embed_token_id=PATCH)

        return [
            PromptInsertion(
                modality="image",
                target=PromptIndexTargets.prefix([BOS]),
                insertion=get_insertion_molmo,
            )
        ]


@MULTIMODAL_REGISTRY.register_processor(MolmoProcessor, info=MolmoInfo, dummy_inputs=LargestImages)
class SeedMolmo:
    pass


def build(model: type, *, is_cached: bool = False) -> BaseMultiModalProcessor[Any]:
    own = gemma3.make_processor()
    factories = MULTIMODAL_REGISTRY.get_factories(model)
    return factories.build_processor(own.info.ctx, cache=make_cache(is_cached=is_cached))


@pytest.mark.parametrize("is_cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_molmos_template_is_written_around_every_prompt(
    num_images: int, as_tokens: bool, is_cached: bool
):
    processor = build(SeedMolmo, is_cached=is_cached)
    prompt: Any = TOKENIZER.encode("what is it") if as_tokens else "what is it"
    images = [draw(3 + index, 4) for index in range(num_images)]
    written = TOKENIZER.encode(" User: what is it Assistant:", add_special_tokens=False)
    image_tokens = [token_id for image in images for token_id in molmo_tokens(image.width)]
    for _ in range(2):
        inputs = processor.apply(prompt, {"image": images})
        assert inputs.prompt_token_ids == [BOS, *image_tokens, *written]
        found = inputs.mm_placeholders.get("image", [])
        assert [one.get_num_embeds() for one in found] == [image.width for image in images]


# ---- DeepSeek-VL2: two images are cut into crops, three are not ---------------------------------


class DeepseekHFProcessor:
    """Refuses a text with other placeholders than images; cuts up to two of them into crops."""

    def __call__(
        self, text: str, images: Sequence[Any] = (), return_tensors: str = "np"
    ) -> BatchFeature:
        num_tags = text.count("<start_of_image>")
        if num_tags != len(images):
            raise ValueError(f"{num_tags} tags and {len(images)} images")
        num_crops = count_crops(len(images))
        outputs = {"crops": np.array([[num_crops]] * len(images))} if images else {}
        text = text.replace("<start_of_image>", "<image_soft_token>" * 2 * num_crops)
        return BatchFeature({"input_ids": [TOKENIZER.encode(text)], **outputs}, tensor_type="np")


def count_crops(num_images: int) -> int:
    return 3 if num_images <= 2 else 1


class DeepseekInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def load_hf_processor(self) -> Any:
        return DeepseekHFProcessor()

    def get_image_size_with_most_features(self) -> ImageSize:
        return ImageSize(width=6, height=6)


class DeepseekProcessor(BaseMultiModalProcessor[DeepseekInfo]):
    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        if not mm_data:
            # The HF processor wants an image for every tag.
            prompt_ids = self.info.get_tokenizer().encode(prompt)
            return BatchFeature({"input_ids": [prompt_ids]}, tensor_type="np")
        return super()._call_hf_processor(
            prompt=prompt, mm_data=mm_data, mm_kwargs=mm_kwargs, tok_kwargs=tok_kwargs
        )

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return {"crops": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        num_crops = count_crops(mm_items.get_count("image"))
        return [PromptReplacement("image", [START], [PATCH] * 2 * num_crops)]

    def _get_hash_kwargs(self, mm_items: Any, hf_processor_mm_kwargs: Any) -> Any:
        if mm_items.get_count("image", strict=False) > 2:
            return {**hf_processor_mm_kwargs, "cropping": False}
        return hf_processor_mm_kwargs

    def _cached_apply_hf_processor(
        self,
        prompt: Any,
        mm_data_items: Any,
        hf_processor_mm_kwargs: Any,
        tokenization_kwargs: Any,
        mm_uuids: Any = None,
    ) -> Any:
        # A cache holds what an image gives whatever stands beside it: true of up to two.
        arguments = {
            "prompt": prompt,
            "mm_data_items": mm_data_items,
            "hf_processor_mm_kwargs": hf_processor_mm_kwargs,
            "tokenization_kwargs": tokenization_kwargs,
            "mm_uuids": mm_uuids,
        }
        if mm_data_items.get_count("image", strict=False) > 2:
            return self._apply_hf_processor(**arguments)
        return super()._cached_apply_hf_processor(**arguments)


@MULTIMODAL_REGISTRY.register_processor(
    DeepseekProcessor, info=DeepseekInfo, dummy_inputs=BoiTokens
)
class SeedDeepseek:
    pass


@pytest.mark.parametrize("is_cached", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
def test_deepseeks_crops_are_those_of_the_request(as_tokens: bool, is_cached: bool):
    processor = build(SeedDeepseek, is_cached=is_cached)
    images = [draw(3 + index, 4) for index in range(3)]
    names: dict[int, set[str]] = {}
    for num_images in (2, 3, 2, 1, 3, 0):
        text = "what" + "<start_of_image>" * num_images
        prompt: Any = TOKENIZER.encode(text) if as_tokens else text
        inputs = processor.apply(prompt, {"image": images[:num_images]})
        num_crops = count_crops(num_images)
        expected = [*TOKENIZER.encode("what"), *[PATCH] * 2 * num_crops * num_images]
        assert inputs.prompt_token_ids == expected
        items = inputs.mm_kwargs.get("image", [])
        assert [item["crops"].data.tolist() for item in items if item] == [[num_crops]] * num_images
        names.setdefault(num_crops, set()).update(inputs.mm_hashes.get("image", []))
    assert names[1].isdisjoint(names[3])
