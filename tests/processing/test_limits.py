"""What an operator says of media: how many, how large, embeddings or not; and the dummies of it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.config.engine_config import MultiModalConfig
from mmjax.errors import ConfigError, RequestValueError
from mmjax.processing import (
    AudioDummyOptions,
    BaseDummyOptions,
    ImageDummyOptions,
    ImageSize,
    VideoDummyOptions,
)
from mmjax.processing.encoder_budget import MultiModalProfiler
from tests.families import gemma3
from tests.kit import draw
from tests.processing.test_prepare import RecordingCache
from tests.processing.test_processor import SOFT, Info, make

LIMITS = {"image": {"count": 3, "width": 5, "height": 99}, "video": 2}


class TestSettings:
    def test_a_limit_is_a_number_or_options(self):
        mm = MultiModalConfig(limit_mm_per_prompt=LIMITS)
        assert [mm.limit(name) for name in ("image", "video", "audio")] == [3, 2, 16]
        assert mm.media_options("image") == {"width": 5, "height": 99}
        assert mm.media_options("video") == mm.media_options("audio") == {}

    def test_options_without_a_count_leave_it_as_it_is(self):
        mm = MultiModalConfig(limit_mm_per_prompt={"image": {"width": 5}})
        assert mm.limit("image") == MultiModalConfig().limit("image")

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            ({"image": "many"}, "gives 'many' as `count` of `image`; give a number of at least 0"),
            ({"image": -1}, "gives -1 as `count`"),
            ({"image": True}, "gives True as `count`"),
            ({"image": {"width": 0}}, "gives 0 as `width` of `image`; give a number of at least 1"),
            ({"image": {"wdth": 5}}, "gives `image` the option `wdth`; known are `count`, `width`"),
            ({"image": {"num_frames": 5}}, "`image` the option `num_frames`"),
            ({"audio": {"width": 5}}, "known are `count`, `length`"),
            ({"smell": {"width": 5}}, "known are `count`"),
        ],
    )
    def test_what_cannot_be_is_named(self, limits: Any, message: str):
        with pytest.raises(ConfigError, match=message):
            MultiModalConfig(limit_mm_per_prompt=limits)


class TestCounts:
    def test_limits_are_the_operators_capped_by_the_models(self):
        info = gemma3.make_processor(limit_mm_per_prompt={"image": 2}).info
        assert info.allowed_mm_limits == {"image": 2}
        assert make().info.allowed_mm_limits == {"image": 5}

    def test_the_hint_is_there_where_it_would_help(self):
        info = make(mm={"limit_mm_per_prompt": {"image": 2}}).info
        at_most = r"^At most 2 image\(s\) may be provided in one prompt\."
        with pytest.raises(ValueError, match=at_most + r".*--limit-mm-per-prompt"):
            info.validate_num_items("image", 5)
        with pytest.raises(ValueError, match=at_most) as caught:
            info.validate_num_items("image", 6)
        assert "--limit-mm-per-prompt" not in str(caught.value)

    def test_items_are_counted_once(self, monkeypatch: pytest.MonkeyPatch):
        info = make(mm={"enable_mm_embeds": True}).info
        counted: list[int] = []
        monkeypatch.setattr(
            info, "validate_num_items", lambda modality, number, **kwargs: counted.append(number)
        )
        info.parse_mm_data({"image": [draw(2, 2), draw(2, 2)]})
        info.parse_mm_data({"image": jnp.ones((3, 4, 6))})
        assert counted == [2, 3]

    def test_a_modality_that_the_model_lacks(self):
        for data in ("x", [], {"frames": 1}):
            with pytest.raises(ValueError, match="Unsupported modality: audio; this model takes"):
                make().apply("", {"audio": data})

    def test_frames_are_not_items(self):
        class Videos(Info):
            def get_supported_mm_limits(self) -> Any:
                return {"video": 1}

        processor = make()
        processor.info.__class__ = Videos
        items = processor.info.parse_mm_data({"video": [draw(4, 4)] * 9})
        assert items.get_all_counts() == {"video": 1}


class TestEmbeddings:
    EMBEDS = jnp.ones((2, 4, 6))

    def parse(self, data: Any, **mm: Any) -> Any:
        return make(mm=mm).info.parse_mm_data({"image": data})

    def test_they_must_be_allowed(self):
        with pytest.raises(
            RequestValueError, match=r"^You must set `--enable-mm-embeds` to input `image_embeds`$"
        ):
            self.parse(self.EMBEDS)
        assert self.parse(self.EMBEDS, enable_mm_embeds=True).get_all_counts() == {"image": 2}

    def test_a_limit_of_0_is_for_the_tower(self):
        limits = {"enable_mm_embeds": True, "limit_mm_per_prompt": {"image": 0}}
        for data in (self.EMBEDS, list(self.EMBEDS)):
            assert self.parse(data, **limits).get_all_counts() == {"image": 2}
        with pytest.raises(ValueError, match=r"At most 0 image\(s\)"):
            self.parse([draw(2, 2)], **limits)

    def test_another_limit_is_theirs_too(self):
        limits = {"enable_mm_embeds": True, "limit_mm_per_prompt": {"image": 1}}
        with pytest.raises(ValueError, match=r"At most 1 image\(s\)"):
            self.parse(self.EMBEDS, **limits)

    def test_their_width_is_the_models(self):
        info = gemma3.make_processor(enable_mm_embeds=True).info
        width = info.get_hf_config().get_text_config().hidden_size
        assert info.get_expected_hidden_size() == width
        with pytest.raises(ValueError, match="hidden dimension mismatch"):
            info.parse_mm_data({"image": jnp.ones((2, 4, width + 1))})
        assert gemma3.make_processor().info.get_expected_hidden_size() is None


class TestDummies:
    def test_options_can_only_shrink_and_items_are_one_object(
        self, caplog: pytest.LogCaptureFixture
    ):
        builder = make().dummy_inputs
        options = {"image": ImageDummyOptions(width=5, height=99)}
        first, second = builder.get_dummy_mm_data(10, {"image": 2}, options)["image"]
        assert first is second
        assert isinstance(first, Image.Image)
        assert first.size == (5, 4)
        assert first.getpixel((0, 0)) == (255, 255, 255)
        assert "dummy height 99 is above the model's 4" in caplog.text
        assert builder.get_dummy_mm_data(10, {"image": 0})["image"] == []

    def test_videos_and_audios(self):
        builder = make().dummy_inputs
        video, again = builder._get_dummy_videos(
            size=ImageSize(8, 6),
            num_frames=4,
            num_videos=2,
            overrides=VideoDummyOptions(num_frames=3, width=2),
        )
        assert video is again
        assert (video.shape, video.dtype, video.min()) == ((3, 6, 2, 3), np.uint8, 255)
        (audio,) = builder._get_dummy_audios(
            length=9, num_audios=1, overrides=AudioDummyOptions(length=7)
        )
        assert audio.tolist() == [0] * 7
        assert builder._get_dummy_audios(length=9, num_audios=0) == []

    def test_the_operators_options_are_taken(self):
        builder = make(mm={"limit_mm_per_prompt": LIMITS}).dummy_inputs
        assert builder.get_mm_options("image") == ImageDummyOptions(count=3, width=5, height=99)
        assert builder.get_mm_options("video") == VideoDummyOptions(count=2)
        assert builder.get_mm_options("smell") == BaseDummyOptions(count=16)
        inputs = builder.get_dummy_processor_inputs(10, {"image": 1})
        assert inputs.mm_data["image"][0].size == (5, 4)
        inputs = builder.get_dummy_processor_inputs(10, {"image": 1}, {})
        assert inputs.mm_data["image"][0].size == (9, 4)

    @pytest.mark.parametrize(("max_num_batched_tokens", "length"), [(None, 100), (40, 40), (3, 5)])
    def test_the_largest_input_is_filled_up(self, max_num_batched_tokens: int | None, length: int):
        cache = RecordingCache()
        processor = make(cache, mm={"limit_mm_per_prompt": {"image": 0}})
        inputs = MultiModalProfiler(processor).get_dummy_mm_inputs(
            {"image": 2}, max_num_batched_tokens=max_num_batched_tokens
        )
        assert len(inputs.prompt_token_ids) == length
        assert inputs.prompt_token_ids[5:] == [0] * (length - 5)
        assert inputs.prompt_token_ids.count(SOFT) == 4
        assert [item["width"].data[0] for item in inputs.mm_kwargs["image"] if item] == [9, 9]
        assert cache.calls == []

    def test_a_dummy_has_its_tensors_also_where_a_request_brought_the_same(self):
        cache = RecordingCache()
        processor = make(cache)
        processor.apply("[img]", {"image": Image.new("RGB", (9, 4), (255, 255, 255))})
        (item,) = MultiModalProfiler(processor).get_dummy_mm_inputs({"image": 1}).mm_kwargs["image"]
        assert item is not None

    def test_the_maximum_is_measured_where_it_is_not_declared(self):
        measured = MultiModalProfiler(make(MultiModalProcessorOnlyCache(9)))
        assert measured.get_mm_max_tokens_per_item() == {"image": 2}
        none = make(mm={"limit_mm_per_prompt": {"image": 0}})
        assert MultiModalProfiler(none).get_mm_max_tokens_per_item() == {}
        embeds = make(mm={"limit_mm_per_prompt": {"image": 0}, "enable_mm_embeds": True})
        assert MultiModalProfiler(embeds).get_mm_max_tokens_per_item() == {"image": 2}
