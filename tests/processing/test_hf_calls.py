"""What reaches the HF processor, and what goes round it: kwargs, batches, embeddings."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from transformers import BatchFeature

from mmjax.errors import MediaIdConflictError, ProcessingError, RequestError
from mmjax.processing import (
    InputProcessingContext,
    MultiModalFieldConfig,
    PromptReplacement,
    PromptUpdateDetails,
)
from tests.families import gemma3
from tests.kit import draw
from tests.processing.test_prepare import RecordingCache
from tests.processing.test_processor import SOFT, Info, Processor, ids, make


def context(**mm: Any) -> InputProcessingContext:
    return InputProcessingContext(model_config=gemma3.model_config(**mm), tokenizer=None)


class Picky:
    """Takes what it names, and gives it back."""

    def __call__(self, text: str, return_tensors: str, size: Any = None) -> BatchFeature:
        return BatchFeature({"size": size, "tensors": return_tensors})


class Open:
    def __call__(self, **kwargs: Any) -> BatchFeature:
        return BatchFeature(kwargs)


class TestKwargs:
    def test_the_requests_come_over_the_operators(self):
        ctx = context(mm_processor_kwargs={"size": {"h": 1, "w": 2}, "images_kwargs": {"a": 1}})
        outputs = ctx.call_hf_processor(Open(), {"text": ""}, {"size": {"w": 3}, "a": 4})
        assert outputs["size"] == {"h": 1, "w": 3}
        assert (outputs["a"], outputs["images_kwargs"]) == (4, {})

    def test_what_it_does_not_take_is_dropped(self, caplog: pytest.LogCaptureFixture):
        outputs = context().call_hf_processor(Picky(), {"text": ""}, {"size": 5, "b": 1, "a": 2})
        assert dict(outputs) == {"size": 5, "tensors": "np"}
        assert "Picky does not take `a`, `b`: dropped" in caplog.text
        caplog.clear()
        context().call_hf_processor(Open(), {"text": ""}, {"a": 2})
        assert not caplog.text

    def test_what_it_raises_is_the_servers_error(self):
        def refuse(**kwargs: Any) -> BatchFeature:
            raise OSError("broken")

        with pytest.raises(ValueError, match=r"^Failed to apply function on data=.*: broken") as e:
            context().call_hf_processor(refuse, {"text": "secret", "images": [draw(4, 3)]}, {})
        assert isinstance(e.value, ProcessingError)
        assert not isinstance(e.value, RequestError)
        assert isinstance(e.value.__cause__, OSError)
        assert "secret" not in str(e.value)
        assert "data={'text': '6 characters', 'images': '(4, 3)'} with kwargs={}" in str(e.value)

    def test_floats_stay_as_they_are(self):
        pixels = np.ones((1, 3), np.float32)
        outputs = context(mm_processor_kwargs={}).call_hf_processor(
            Open(), {"pixel_values": pixels}, {}
        )
        assert outputs["pixel_values"] is pixels


def test_a_model_of_text_alone_has_no_settings_for_media():
    config = replace(gemma3.model_config())
    object.__setattr__(config, "mm", None)
    ctx = InputProcessingContext(model_config=config, tokenizer=None)
    with pytest.raises(RuntimeError, match="`tiny-gemma3` is not a multimodal model"):
        ctx.get_mm_config()


def test_audio_has_hfs_name(monkeypatch: pytest.MonkeyPatch):
    processor = make()
    monkeypatch.setattr(processor.info, "get_hf_processor", Open)
    outputs = processor._call_hf_processor("x", {"audios": [1], "images": [2]}, {}, {})
    assert (outputs["audio"], outputs["images"], "audios" in outputs) == ([1], [2], False)


class EmbedsInfo(Info):
    def get_supported_mm_limits(self) -> Any:
        return {"image": 5, "video": 5}


class Embeds(Processor):
    """Pictures of two tokens, and embeddings of as many as they have rows."""

    calls: Sequence[Any] = ()

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Any:
        names = {"width": "image", "image_embeds": "image", "video_embeds": "video"}
        return {key: MultiModalFieldConfig.batched(one) for key, one in names.items()}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Any:
        def content(modality: str, index: int) -> PromptUpdateDetails:
            item = out_mm_kwargs[modality][index]
            elem = item.get(f"{modality}_embeds")
            return PromptUpdateDetails.from_seq([SOFT] * (2 if elem is None else len(elem.data)))

        return [
            PromptReplacement("image", "[img]", lambda index: content("image", index)),
            PromptReplacement("video", "[vid]", lambda index: content("video", index)),
        ]

    def _call_hf_processor(self, prompt: str, mm_data: Any, *rest: Any, **kwargs: Any) -> Any:
        self.calls = [*self.calls, (prompt, [image.width for image in mm_data.get("images", [])])]
        return super()._call_hf_processor(prompt, mm_data, *rest, **kwargs)


def make_embeds(cache: Any = None) -> Any:
    processor = make(cache, base=Embeds, mm={"enable_mm_embeds": True})
    processor.info.__class__ = EmbedsInfo
    return processor


class TestEmbeddings:
    EMBEDS = (jnp.ones((3, 8)), jnp.zeros((1, 8)))

    @pytest.mark.parametrize("cache", [None, RecordingCache()])
    @pytest.mark.parametrize("as_tokens", [False, True])
    def test_alone_they_go_round_hf(self, cache: Any, as_tokens: bool):
        processor = make_embeds(cache)
        prompt: Any = ids("a[img]b[img]") if as_tokens else "a[img]b[img]"
        inputs = processor.apply(prompt, {"image": list(self.EMBEDS)})
        assert [*processor.calls] == ([] if as_tokens else [(prompt, [])])  # the text alone
        assert inputs.prompt_token_ids == [
            *[*ids("a"), *[SOFT] * 3],
            *[*ids("b", special=False), SOFT],
        ]
        assert [one.length for one in inputs.mm_placeholders["image"]] == [3, 1]

    def test_beside_raw_media_what_is_held_is_not_processed_again(self):
        cache = RecordingCache()
        processor = make_embeds(cache)
        processor.apply("[img]", {"image": draw(5, 2)})
        processor.calls = ()
        request = {"image": [draw(5, 2), draw(6, 2)], "video": list(self.EMBEDS)}
        prompt = "[vid][img][img][vid]"
        inputs = processor.apply(prompt, request)
        # The text alone; then the image that is not held.
        assert processor.calls == [(prompt, []), ("[img]", [6])]
        assert [one.length for one in inputs.mm_placeholders["video"]] == [3, 1]
        assert [item is None for item in inputs.mm_kwargs["image"]] == [True, False]
        again = processor.apply(prompt, request)
        assert [item for items in again.mm_kwargs.values() for item in items] == [None] * 4
        assert again.mm_placeholders == inputs.mm_placeholders

    def test_without_a_cache_they_have_their_tensors(self):
        inputs = make_embeds().apply("[img]", {"image": [self.EMBEDS[0]]})
        (item,) = inputs.mm_kwargs["image"]
        assert item is not None
        np.testing.assert_array_equal(item["image_embeds"].data, np.ones((3, 8)))

    def test_an_item_may_stand_beside_them_by_its_id_alone(self):
        processor = make_embeds(RecordingCache())
        one, other = self.EMBEDS
        processor.apply("[img]", {"image": [one]}, mm_uuids={"image": ["me"]})
        request = {"image": [None, other]}
        inputs = processor.apply("[img][img]", request, mm_uuids={"image": ["me", None]})
        assert [place.length for place in inputs.mm_placeholders["image"]] == [3, 1]
        with pytest.raises(ValueError, match="Cache miss for image at index 0 but data is not"):
            processor.apply("[img][img]", request, mm_uuids={"image": ["you", None]})


class TestOneIdForTwoItems:
    """An id that the caller answers for must not bring one item's tensors to another's place."""

    @pytest.mark.parametrize("cache", [None, RecordingCache()])
    def test_of_two_modalities_in_one_request(self, cache: Any):
        request = {"image": [TestEmbeddings.EMBEDS[0]], "video": [TestEmbeddings.EMBEDS[0]]}
        uuids = {"image": ["me"], "video": ["me"]}
        with pytest.raises(MediaIdConflictError, match="`me` stands for two items that differ"):
            make_embeds(cache).apply("[img][vid]", request, mm_uuids=uuids)

    def test_of_two_modalities_one_after_the_other(self):
        cache = RecordingCache()
        processor = make_embeds(cache)
        processor.apply("[img]", {"image": draw(5, 2)}, mm_uuids={"image": ["me"]})
        with pytest.raises(MediaIdConflictError):
            processor.apply("[vid]", {"video": [None]}, mm_uuids={"video": ["me"]})

    def test_of_two_sizes(self):
        uuids = {"image": ["me", "me"]}
        with pytest.raises(MediaIdConflictError):
            make_embeds().apply(
                "[img][img]", {"image": list(TestEmbeddings.EMBEDS)}, mm_uuids=uuids
            )
        rows = TestEmbeddings.EMBEDS[0]
        inputs = make_embeds().apply("[img][img]", {"image": [rows, rows]}, mm_uuids=uuids)
        assert inputs.mm_hashes == uuids
