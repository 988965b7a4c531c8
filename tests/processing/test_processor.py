"""The flow that all families share, with a family made up for each question."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import BatchFeature

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.errors import ProcessingError, RequestError, RequestTypeError, RequestValueError
from mmjax.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    InputProcessingContext,
    MultiModalFieldConfig,
    PlaceholderRange,
    ProcessorCache,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)
from tests.families import gemma3
from tests.kit import draw, gemma_tokenizer

TOKENIZER = gemma_tokenizer()
SOFT = TOKENIZER.image_token_id


class FakeHFProcessor:
    """Gives each image its width; writes two `<image_soft_token>` for each `[img]`, or does not."""

    writes_without_images = False

    def __init__(self, *, applies_updates: bool) -> None:
        self.applies_updates = applies_updates

    def __call__(
        self,
        text: str,
        images: Sequence[Any] | None = None,
        return_tensors: str = "np",
        add_special_tokens: bool = True,
        scale: int = 1,
    ) -> BatchFeature:
        if images is not None and text.count("[img]") not in (0, len(images)):
            raise RuntimeError("bad number of tags")
        if self.applies_updates and (self.writes_without_images or images is not None):
            text = text.replace("[img]", "<image_soft_token>" * 2)
        token_ids = TOKENIZER.encode(text, add_special_tokens=add_special_tokens)
        outputs: dict[str, Any] = {"input_ids": np.array([token_ids])}
        if images is not None:
            outputs["width"] = np.array([[image.width * scale] for image in images])
        return BatchFeature(outputs)


class Info(BaseProcessingInfo):
    hf_applies_updates = True

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 5}

    def load_hf_processor(self) -> Any:
        return FakeHFProcessor(applies_updates=self.hf_applies_updates)


class DummyInputs(BaseDummyInputsBuilder[Info]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return "[img]" * mm_counts.get("image", 0)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Any, mm_options: Any = None) -> Any:
        images = self._get_dummy_images(
            width=9,
            height=4,
            num_images=mm_counts["image"],
            overrides=(mm_options or {}).get("image"),
        )
        return {"image": images}


class Processor(BaseMultiModalProcessor[Info]):
    updates: Sequence[PromptUpdate] = (
        PromptReplacement("image", "[img]", PromptUpdateDetails.select_token_id([SOFT] * 2, SOFT)),
    )
    fields: Mapping[str, MultiModalFieldConfig] = {"width": MultiModalFieldConfig.batched("image")}

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        return self.fields

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        return self.updates

    def _hf_processor_applies_updates(
        self, prompt: Any, mm_items: Any, hf_processor_mm_kwargs: Any, tokenization_kwargs: Any
    ) -> bool:
        return self.info.hf_applies_updates


def make(
    processor_cache: ProcessorCache | None = None,
    *,
    hf_applies_updates: bool = True,
    base: type[Processor] = Processor,
    mm: Mapping[str, Any] | None = None,
    max_model_len: int = 100,
    **changes: Any,
) -> Processor:
    """Make a processor of a subclass with other class attributes."""
    hf_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=len(TOKENIZER)))
    config = ModelConfig(
        model="fake",
        path=gemma3.directory(),
        hf_config=hf_config,
        architecture="Fake",
        max_model_len=max_model_len,
        mm=MultiModalConfig(**(mm or {})),
    )
    info = Info(InputProcessingContext(model_config=config, tokenizer=TOKENIZER))
    info.hf_applies_updates = hf_applies_updates
    changed = type("Changed", (base,), changes)
    return changed(info, DummyInputs(info), cache=processor_cache)


def cache() -> MultiModalProcessorOnlyCache:
    return MultiModalProcessorOnlyCache(10_000)


def ids(text: str, *, special: bool = True) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("processor_cache", [None, cache()])
@pytest.mark.parametrize("hf_applies_updates", [True, False])
@pytest.mark.parametrize("as_tokens", [False, True])
def test_both_ways_give_the_same_prompt(
    processor_cache: ProcessorCache | None, hf_applies_updates: bool, as_tokens: bool
):
    processor = make(processor_cache, hf_applies_updates=hf_applies_updates)
    prompt: Any = ids("a [img]b[img]") if as_tokens else "a [img]b[img]"
    inputs = processor.apply(prompt, {"image": [draw(3, 2), draw(7, 2)]})
    start = len(ids("a "))
    assert inputs.prompt_token_ids == [*ids("a "), SOFT, SOFT, *ids("b", special=False), SOFT, SOFT]
    mask = np.array([True, True])
    assert inputs.mm_placeholders["image"] == [
        PlaceholderRange(start, 2, mask),
        PlaceholderRange(start + 3, 2, mask),
    ]
    assert inputs.mm_kwargs.get_data()["width"].tolist() == [[3], [7]]
    assert inputs.prompt == (None if as_tokens else prompt)
    assert [one.mm_hash for one in inputs.to_features()] == inputs.mm_hashes["image"]


def test_insertions_need_no_placeholder():
    insertion = PromptInsertion("image", PromptIndexTargets.start(), [SOFT] * 3)
    processor = make(updates=[insertion], processor_cache=cache())
    inputs = processor.apply("hello", {"image": [draw(2, 2)] * 2})
    assert inputs.prompt_token_ids == [SOFT] * 6 + ids("hello")
    assert [one.offset for one in inputs.mm_placeholders["image"]] == [0, 3]


def test_a_target_hidden_in_other_tokens_is_found_in_the_text():
    """`color` is one token, and `col` is none of its own: only the text has it."""
    assert len(ids("color", special=False)) == 1
    processor = make(updates=[PromptReplacement("image", "col", [SOFT])], processor_cache=cache())
    inputs = processor.apply("color", {"image": draw(2, 2)})
    assert inputs.prompt_token_ids == [TOKENIZER.bos_token_id, SOFT, *ids("or", special=False)]


@pytest.mark.parametrize("processor_cache", [None, cache()])
def test_what_a_family_declares_is_written_whatever_hf_writes_beside_media(
    processor_cache: ProcessorCache | None,
):
    updates = [PromptReplacement("image", "[img]", [SOFT] * 7)]
    inputs = make(processor_cache, updates=updates).apply("[img]", {"image": draw(2, 2)})
    assert inputs.prompt_token_ids == [*ids(""), *[SOFT] * 7]


class WritingHFProcessor(FakeHFProcessor):
    """Changes every text, and writes placeholders always, never, or beside images alone."""

    def __init__(self, *, writes_placeholders: bool | None) -> None:
        super().__init__(applies_updates=writes_placeholders is not False)
        self.writes_without_images = writes_placeholders is True

    def __call__(
        self,
        text: str,
        images: Sequence[Any] | None = None,
        return_tensors: str = "np",
        add_special_tokens: bool = True,
        scale: int = 1,
        ending: str = "!",
    ) -> BatchFeature:
        return super().__call__(f"{text}{ending}", images, add_special_tokens=add_special_tokens)


class Undeclared(Processor):
    """Says nothing of who applies the updates."""

    def _hf_processor_applies_updates(self, *args: Any, **kwargs: Any) -> bool:
        return BaseMultiModalProcessor._hf_processor_applies_updates(self, *args, **kwargs)


class TestTextGoesThroughTheHFProcessor:
    """With a cache, without, with images and without: what HF does to text is done."""

    @pytest.fixture(params=["cached", "uncached"])
    def processor(self, request: pytest.FixtureRequest) -> Undeclared:
        processor = make(cache() if request.param == "cached" else None, base=Undeclared)
        assert isinstance(processor, Undeclared)
        return processor

    @pytest.mark.parametrize("writes_placeholders", [True, False, None])
    @pytest.mark.parametrize("num_images", [0, 1, 2])
    def test_the_same_ids_whoever_writes_the_placeholders(
        self,
        processor: Undeclared,
        monkeypatch: pytest.MonkeyPatch,
        writes_placeholders: bool | None,
        num_images: int,
    ):
        hf_processor = WritingHFProcessor(writes_placeholders=writes_placeholders)
        monkeypatch.setattr(processor.info, "get_hf_processor", lambda **_: hf_processor)
        images = [draw(3 + index, 2) for index in range(num_images)]
        expected = ids("a " + "<image_soft_token>" * 2 * num_images + "!")
        for _ in range(2):  # the second time, a cache has the images
            inputs = processor.apply("a " + "[img]" * num_images, {"image": images})
            assert inputs.prompt_token_ids == expected
            offsets = [one.offset for one in inputs.mm_placeholders.get("image", [])]
            assert offsets == [expected.index(SOFT) + 2 * index for index in range(num_images)]

    @pytest.mark.parametrize("images", [[], [draw(3, 2)]])
    def test_a_requests_kwargs_reach_it(
        self, processor: Undeclared, monkeypatch: pytest.MonkeyPatch, images: list[Any]
    ):
        hf_processor = WritingHFProcessor(writes_placeholders=False)
        monkeypatch.setattr(processor.info, "get_hf_processor", lambda **_: hf_processor)
        inputs = processor.apply(
            "[img]" * len(images),
            {"image": images},
            hf_processor_mm_kwargs={"ending": "?"},
            tokenization_kwargs={"add_special_tokens": False},
        )
        assert inputs.prompt_token_ids == [*[SOFT] * 2 * len(images), *ids("?", special=False)]

    def test_token_ids_go_by_it(self, processor: Undeclared, monkeypatch: pytest.MonkeyPatch):
        hf_processor = WritingHFProcessor(writes_placeholders=True)
        monkeypatch.setattr(processor.info, "get_hf_processor", lambda **_: hf_processor)
        assert processor.apply(ids("a")).prompt_token_ids == ids("a")
        inputs = processor.apply(ids("a[img]"), {"image": draw(3, 2)})
        assert inputs.prompt_token_ids == [*ids("a"), SOFT, SOFT]


class CountingHFProcessor(FakeHFProcessor):
    """Gives each image the number of images beside it, as DeepSeek-VL2's crops depend on it."""

    def __call__(
        self,
        text: str,
        images: Sequence[Any] | None = None,
        return_tensors: str = "np",
        add_special_tokens: bool = True,
        scale: int = 1,
    ) -> BatchFeature:
        outputs = super().__call__(text, images, return_tensors, add_special_tokens)
        if images is not None:
            outputs["width"] = np.array([[len(images) > 2]] * len(images))
        return outputs


class Counting(Undeclared):
    """More than two images are processed together, and named as such."""

    def _get_hash_kwargs(self, mm_items: Any, hf_processor_mm_kwargs: Any) -> Any:
        is_crowd = mm_items.get_count("image", strict=False) > 2
        return {**hf_processor_mm_kwargs, **({"crops": False} if is_crowd else {})}

    def _cached_apply_hf_processor(
        self,
        prompt: Any,
        mm_data_items: Any,
        hf_processor_mm_kwargs: Any,
        tokenization_kwargs: Any,
        mm_uuids: Any = None,
    ) -> Any:
        name = "_apply_hf_processor"
        if mm_data_items.get_count("image", strict=False) <= 2:
            name = "_cached_apply_hf_processor"
        return getattr(super(), name)(
            prompt=prompt,
            mm_data_items=mm_data_items,
            hf_processor_mm_kwargs=hf_processor_mm_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_uuids=mm_uuids,
        )


def test_a_family_may_go_round_the_cache_and_name_its_items(monkeypatch: pytest.MonkeyPatch):
    processor = make(cache(), base=Counting)
    hf_processor = CountingHFProcessor(applies_updates=False)
    monkeypatch.setattr(processor.info, "get_hf_processor", lambda **_: hf_processor)
    images = [draw(3 + index, 2) for index in range(3)]
    few = processor.apply("[img]" * 2, {"image": images[:2]})
    many = processor.apply("[img]" * 3, {"image": images})
    assert few.mm_kwargs.get_data()["width"].tolist() == [[False]] * 2
    assert many.mm_kwargs.get_data()["width"].tolist() == [[True]] * 3
    assert not set(few.mm_hashes["image"]) & set(many.mm_hashes["image"])


def test_an_update_without_its_target_is_an_error():
    with pytest.raises(AssertionError, match=r"prompt replacement for mm_items\['image'\]\[0\]"):
        make(processor_cache=cache()).apply("no tag", {"image": draw(2, 2)})


def test_items_without_tensors_or_updates_are_an_error():
    request = ("[img]", {"image": draw(2, 2)})
    with pytest.raises(ProcessingError, match="1 image items in keyword arguments"):
        make(fields={}).apply(*request)
    with pytest.raises(ProcessingError, match="1 prompt updates corresponding to 1 image"):
        make(updates=[]).apply(*request)


def test_text_alone_and_no_items():
    for processor in (make(), make(processor_cache=cache())):
        for mm_data in (None, {}, {"image": []}):
            inputs = processor.apply("hello", mm_data)
            assert inputs.prompt_token_ids == ids("hello")
            assert inputs.to_features() == []
        plain = processor.apply("hello", tokenization_kwargs={"add_special_tokens": False})
        assert plain.prompt_token_ids == ids("hello", special=False)


def test_the_hook_for_token_prompts_is_called():
    def append_seven(self: Any, prompt_tokens: list[int]) -> list[int]:
        return [*prompt_tokens, 7]

    processor = make(_apply_hf_processor_tokens_only=append_seven)
    assert processor.apply([5, 6]).prompt_token_ids == [5, 6, 7]


class TestHashes:
    def hashes(self, processor: Processor, **kwargs: Any) -> list[str]:
        prompt = "[img]" * len(kwargs.get("mm_uuids", {"image": [0]})["image"])
        images = [draw(2, 2)] * prompt.count("[img]")
        return list(processor.apply(prompt, {"image": images}, **kwargs).mm_hashes["image"])

    def test_content_and_kwargs_count(self):
        processor = make()
        (plain,) = self.hashes(processor)
        assert [plain] == self.hashes(make(processor_cache=cache()))
        (scaled,) = self.hashes(processor, hf_processor_mm_kwargs={"scale": 2})
        assert plain != scaled

    def test_a_uuid_stands_for_the_content_and_is_taken_as_it_is(self):
        processor = make()
        (plain,) = self.hashes(processor)
        assert self.hashes(processor, mm_uuids={"image": ["me", None]}) == ["me", plain]
        scaled = self.hashes(
            processor, mm_uuids={"image": ["me"]}, hf_processor_mm_kwargs={"scale": 2}
        )
        assert scaled != ["me"]

    def test_a_cached_item_needs_its_uuid_alone(self):
        processor = make(processor_cache=cache())
        uuids = {"image": ["me"]}
        first = processor.apply("[img]", {"image": draw(5, 2)}, mm_uuids=uuids)
        again = processor.apply("[img]", {"image": [None]}, mm_uuids=uuids)
        assert again.mm_kwargs == first.mm_kwargs
        for other in (make(processor_cache=cache()), make()):
            with pytest.raises(ValueError, match="Cache miss for image at index 0"):
                other.apply("[img]", {"image": [None]}, mm_uuids=uuids)

    def test_a_modality_without_data_needs_uuids(self):
        processor = make(cache())
        first = processor.apply("[img]", {"image": draw(5, 2)}, mm_uuids={"image": "me"})
        again = processor.apply("[img]", {"image": None}, mm_uuids={"image": "me"})
        assert again.mm_kwargs == first.mm_kwargs
        with pytest.raises(ValueError, match=r"\['image'\] is empty but .* is missing"):
            processor.apply("[img]", {"image": None})

    def test_items_that_nothing_keeps_are_named_after_their_request(self):
        processor = make()
        inputs = processor.apply("[img]" * 2, {"image": [draw(5, 2)] * 2}, request_id="r")
        assert inputs.mm_hashes == {"image": ["r-image-0", "r-image-1"]}

    def test_a_claimed_id_leads_to_the_content(self):
        processor = make(cache())
        (plain,) = self.hashes(make())
        assert self.hashes(processor, mm_uuids={"image": ["me"]}, id_domain="key") != ["me"]
        known = processor.apply(
            "[img]", {"image": [None]}, mm_uuids={"image": ["me"]}, id_domain="key"
        )
        assert known.mm_hashes["image"] != ["me"]
        for domain in ("other", None):
            with pytest.raises(ValueError, match="Cache miss for image at index 0"):
                processor.apply(
                    "[img]", {"image": [None]}, mm_uuids={"image": ["me"]}, id_domain=domain
                )
        assert plain


def test_the_count_comes_before_the_decoding():
    with pytest.raises(RequestValueError, match="At most 5"):
        make().apply("", {"image": [b"broken"] * 6})


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1, 10**6], RequestValueError, "prompt token 1 is 1000000"),
        ([-1], RequestValueError, "prompt token 0 is -1"),
        ([True], RequestTypeError, "prompt token 0 is True"),
        ("a\ud800", RequestValueError, "lone surrogate .* at character 1"),
    ],
)
def test_prompts_that_cannot_be(prompt: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make().apply(prompt)


@pytest.mark.parametrize("name", ["text", "images", "return_tensors"])
def test_a_request_may_not_set_what_the_server_sets(name: str):
    with pytest.raises(RequestError, match=f"has `{name}`, which the server sets"):
        make().apply("hello", hf_processor_mm_kwargs={name: "x"})
