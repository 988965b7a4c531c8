"""Qwen2.5-Omni's own: a checkpoint of the whole model, and videos that are heard."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen2_5OmniConfig

from mmjax import LLM, SamplingParams
from mmjax.decoders.limits import MediaLimits
from mmjax.errors import RequestError
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import generate_reference, load_reference, make_pixels, run_reference
from mmjax.processing.media.encoded import EncodedVideo
from mmjax.training.samples import make_sample
from mmjax.weights.files.method import read_method
from tests.families.directories import edit_json
from tests.families.qwen2_5_omni import (
    CLIP,
    IMAGE,
    POSITIONS_PER_SECOND,
    QWEN2_5_OMNI,
    VIDEO,
    load_hf_videos,
)
from tests.kit import draw, draw_video
from tests.models.test_clip_laws import RATE, draw_clip
from tests.processing.test_audio_file import write_heard_video
from tests.processing.test_video_file import write_video
from tests.weights.packers import GPTQ

ARCHITECTURE = "Qwen2_5OmniThinkerForConditionalGeneration"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def make_whole(path: Path, architecture: str) -> None:
    """Make a checkpoint of a thinker one of all that the published ones hold."""
    tensors = load_file(path / "model.safetensors")
    whole = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    whole["talker.model.embed_tokens.weight"] = np.ones((4, 4), np.float32)
    whole["token2wav.code2wav_dit_model.proj_out.bias"] = np.ones(4, np.float32)
    save_file(whole, path / "model.safetensors")
    thinker = json.loads((path / "config.json").read_text())
    config = Qwen2_5OmniConfig(thinker_config=thinker).to_dict()
    config["architectures"] = [architecture]
    (path / "config.json").write_text(json.dumps(config))


def answer(path: Path) -> tuple[Any, Any]:
    media = {"image": draw(90, 70), "audio": (draw_clip(1, 9_600), RATE)}
    prompt: Any = {"prompt": f"look {IMAGE} and {CLIP} which", "multi_modal_data": media}
    with LLM(path, use_tqdm_on_load=False, **QWEN2_5_OMNI.llm_settings) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.prompt_token_ids, output.outputs[0].token_ids


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen2_5OmniModel",
        pytest.param("Qwen2_5OmniForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_the_thinker_of_a_whole_checkpoint_answers(architecture: str, tmp_path: Path):
    """As its own; what speaks is not read."""
    path = QWEN2_5_OMNI.write(tmp_path)
    expected = answer(path)
    make_whole(path, architecture)
    assert answer(path) == expected


def test_how_a_whole_checkpoint_is_quantised_is_how_its_thinker_is(tmp_path: Path):
    path = QWEN2_5_OMNI.write(tmp_path)
    make_whole(path, "Qwen2_5OmniForConditionalGeneration")
    edit_json(path / "config.json", {"quantization_config": GPTQ})
    method = read_method(load_model_config(str(path)).hf_config)
    assert method is not None
    assert (method.name, method.bits) == ("gptq", 4)


# ---- videos that are heard -----------------------------------------------------------------------

HEARD = {"use_audio_in_video": True}
START = "here are some videos to look at and to hear, and a picture beside them "
FPS = 1.0
"""Of all videos, which HF's processor is told; steps of two seconds."""


def draw_heard(seed: int, num_frames: int, num_samples: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Return a video, whose metadata have its sound."""
    sound = draw_clip(seed, num_samples)
    return draw_video(num_frames, 90, 60 + 10 * seed), {"fps": FPS, "sound": (sound, RATE)}


Prompt = tuple[str, dict[str, Any], list[int | None]]
"""A text, its media, and of each sound in its order which video's it is."""
PROMPTS: dict[str, Prompt] = {
    "more to hear": (f"{START}{VIDEO} which", {"video": [draw_heard(1, 2, 15_000)]}, [0]),
    "more to see": (f"{START}{VIDEO}", {"video": [draw_heard(2, 8, 5_001)]}, [0]),
    "mixture": (
        f"{START}{CLIP} what {VIDEO}{IMAGE} and {VIDEO} color {CLIP}",
        {
            "image": draw(90, 70),
            "video": [draw_heard(3, 4, 16_000), draw_heard(0, 3, 9_600)],
            "audio": [(draw_clip(4, 5_001), RATE), (draw_clip(2, 641), RATE)],
        },
        [None, 0, 1, None],
    ),
}


def call_hf(prompt: Prompt) -> Any:
    """Return what HF's processor makes of a prompt, for HF's model."""
    text, media, sources = prompt
    videos, clips = media["video"], iter(media.get("audio", ()))
    sounds = [next(clips) if at is None else videos[at][1]["sound"] for at in sources]
    return load_hf_videos()(
        text=[text],
        images=[media["image"]] if "image" in media else None,
        videos=[frames for frames, _ in videos],
        audio=[samples for samples, _ in sounds],
        audio_from_video_indices=sources,
        load_audio_from_video=True,
        fps=FPS,
        position_id_per_seconds=POSITIONS_PER_SECOND,
        return_tensors="np",
    )


@cache
def process() -> tuple[Any, dict[str, Any]]:
    """Return our processor, and what it makes of every prompt."""
    processor = QWEN2_5_OMNI.make_processor()
    return processor, {
        name: processor.apply(text, media, HEARD) for name, (text, media, _) in PROMPTS.items()
    }


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_and_features_of_videos_with_sound_are_hfs(name: str):
    processor, inputs = process()
    ours, hf = inputs[name], call_hf(PROMPTS[name])
    assert ours.prompt_token_ids == hf["input_ids"][0].tolist()
    data = processor.info.reference_inputs(
        ours.prompt_token_ids, make_pixels(ours.mm_kwargs.get_data())
    )
    mask = hf["feature_attention_mask"]
    assert np.array_equal(data["feature_attention_mask"], mask)
    heard = hf["input_features"] * mask[:, None]
    np.testing.assert_allclose(data["input_features"], heard, rtol=0, atol=2e-5)
    for key in ("pixel_values", "pixel_values_videos", "video_second_per_grid", "video_grid_thw"):
        if key in hf:
            np.testing.assert_allclose(data[key], hf[key], rtol=0, atol=1e-6)
    marks = {processor.info.get_embed_token_id(m) for m in ("image", "video", "audio")}
    places = [
        place
        for ranges in ours.mm_placeholders.values()
        for one in ranges
        for first, last in one.extract_embeds_range()
        for place in range(first, last + 1)
    ]
    assert sorted(places) == [n for n, one in enumerate(ours.prompt_token_ids) if one in marks]


def as_inputs(hf: Any) -> dict[str, Any]:
    names = ("input_ids", "pixel_values", "pixel_values_videos", "image_grid_thw")
    names += ("video_grid_thw", "video_second_per_grid", "input_features", "feature_attention_mask")
    tensors = {name: torch.as_tensor(np.asarray(hf[name])) for name in names if name in hf}
    mask = torch.ones_like(tensors["input_ids"])
    return {**tensors, "attention_mask": mask, "use_audio_in_video": True}


def load_hf() -> Any:
    return load_reference(QWEN2_5_OMNI.checkpoint, ARCHITECTURE)


def ask_hf(reference: Any) -> list[list[int]]:
    """Return HF's answers to all prompts."""
    inputs = [as_inputs(call_hf(prompt)) for prompt in PROMPTS.values()]
    answers = [list(generate_reference(reference, one, 24)) for one in inputs]
    assert len({str(one) for one in answers}) == len(answers)
    return answers


def test_positions_logits_and_tokens_of_videos_with_sound_are_hfs():
    config = load_model_config(str(QWEN2_5_OMNI.checkpoint))
    parts: Any = (QWEN2_5_OMNI.checkpoint, load_model_class(ARCHITECTURE), config.hf_config)
    model = PagedModel.from_directory(*parts, max_len=1024, prompt_step=512)
    reference = load_hf()
    for (name, prompt), answer in zip(PROMPTS.items(), ask_hf(reference), strict=True):
        inputs = as_inputs(call_hf(prompt))
        sample = make_sample(process()[1][name])
        rotary = model.host_inputs.rotary_positions(sample.num_tokens, sample.items)
        places, offset = reference.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            inputs["video_grid_thw"],
            inputs["attention_mask"],
            True,
            inputs["feature_attention_mask"].sum(-1),
            inputs["video_second_per_grid"],
        )
        assert rotary is not None
        np.testing.assert_array_equal(rotary.prompt, places[:, 0])
        assert rotary.offset == int(offset)
        logits = run_reference(reference, inputs, ())[LOGITS]
        np.testing.assert_allclose(model.run(sample)[LOGITS], logits, rtol=0, atol=1e-4)
        assert list(model.generate(sample, 24)) == answer


@pytest.mark.slow  # 20 s of compiling an engine
def test_the_engines_tokens_of_videos_with_sound_are_hfs():
    """In chunks, with cold caches and with warm ones."""
    expected = ask_hf(load_hf())
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": media, "mm_processor_kwargs": HEARD}
        for text, media, _ in PROMPTS.values()
    ]
    own = {**QWEN2_5_OMNI.llm_settings, "max_num_batched_tokens": 32}
    with LLM(QWEN2_5_OMNI.checkpoint, use_tqdm_on_load=False, **own) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        assert llm.engine.stats().prefix_cache_hits > 0
        assert llm.engine.compilations == 0


def test_the_sound_of_a_videos_file_is_heard():
    """As the same frames with the same sound; a silent file, and without the flag, is seen."""
    file = write_heard_video()
    seen, heard = (EncodedVideo(file, MediaLimits()) for _ in range(2))
    silent = EncodedVideo(write_video(8), MediaLimits())
    processor = QWEN2_5_OMNI.make_processor()
    config = processor.info.get_hf_config()
    counts = []
    for video, kwargs in ((seen, {}), (heard, HEARD), (silent, HEARD)):
        inputs = processor.apply(VIDEO, {"video": video}, kwargs)
        ids = inputs.prompt_token_ids
        counts.append([ids.count(config.video_token_id), ids.count(config.audio_token_id)])
    number = counts[1][1]
    assert counts == [[counts[0][0], 0], [counts[0][0], number], [counts[2][0], 0]]
    assert number * 640 <= len(heard.decode_sound(RATE)) < (number + 1) * 640
    frames, metadata = heard.decode()
    given = (frames, {**(metadata or {}), "sound": (heard.decode_sound(RATE), RATE)})
    one, other = (processor.apply(VIDEO, {"video": [video]}, HEARD) for video in (heard, given))
    assert one.prompt_token_ids == other.prompt_token_ids
    mine, its = (inputs.mm_kwargs["video"][0].get_data() for inputs in (one, other))
    np.testing.assert_array_equal(mine["sound_features"], its["sound_features"])
    fresh = EncodedVideo(file, MediaLimits())
    assert fresh.count_sound_bytes() >= len(fresh.decode_sound(RATE)) * 4
    assert fresh.count_sound_bytes() == 0, "it is there"


def test_a_chat_about_a_videos_file_hears_it():
    url = f"data:video/mp4;base64,{base64.b64encode(write_heard_video()).decode()}"
    content: Any = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": "what is it"},
    ]
    counts = []
    for settings in ({}, {"mm_processor_kwargs": HEARD}):
        own: Any = {**QWEN2_5_OMNI.llm_settings, **settings}
        with LLM(QWEN2_5_OMNI.checkpoint, use_tqdm_on_load=False, **own) as llm:
            (item,) = llm.explain([{"role": "user", "content": content}]).items
            counts.append(item.num_embeds)
    assert 22 <= counts[1] - counts[0] <= 24


@pytest.mark.parametrize(
    ("sound", "kwargs", "match"),
    [
        ((np.zeros(16_001, np.float32), RATE), HEARD, "video's sound lasts 1.0 s, and the model"),
        (b"RIFF", HEARD, r"video\[0\].sound is a file; give its samples"),
        (None, {"use_audio_in_video": "yes"}, "`use_audio_in_video` is 'yes' in mm_processor"),
    ],
)
def test_sounds_that_are_refused(sound: Any, kwargs: dict[str, Any], match: str):
    metadata = {"fps": 2.0} | ({} if sound is None else {"sound": sound})
    with pytest.raises(RequestError, match=match):
        QWEN2_5_OMNI.make_processor().apply(
            VIDEO, {"video": [(draw_video(2, 90, 60), metadata)]}, kwargs
        )
