"""Qwen3-Omni's own: a checkpoint of the whole model, and videos that are heard."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeConfig

from mmjax import LLM
from mmjax.errors import CheckpointError
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import generate_reference, load_reference, make_pixels, run_reference
from mmjax.training.samples import make_sample
from tests.families.directories import edit_json, golden_processor
from tests.families.qwen3_omni import (
    IMAGE,
    POSITIONS_PER_SECOND,
    QWEN3_OMNI,
    TINY,
    VIDEO,
    load_hf_videos,
    write_files,
)
from tests.kit import draw
from tests.models.test_clip_laws import RATE
from tests.models.test_qwen2_5_omni import FPS, GREEDY, HEARD, START, as_inputs, draw_heard

PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "more to hear": (f"{START}{VIDEO} which", {"video": [draw_heard(1, 2, 40_000)]}),
    "more to see": (f"{START}{VIDEO}", {"video": [draw_heard(2, 8, 20_001)]}),
    "a picture beside it": (
        f"{START}{IMAGE} what {VIDEO} color {IMAGE}",
        {"image": [draw(90, 70), draw(40, 60)], "video": [draw_heard(3, 4, 33_345)]},
    ),
}
"""Of one sound each: HF has silence behind those that are shorter than others."""


def test_the_thinker_of_a_whole_checkpoint_is_taken(tmp_path: Path):
    path = write_files(tmp_path)
    thinker = json.loads((path / "config.json").read_text())
    config = Qwen3OmniMoeConfig(thinker_config=thinker).to_dict()
    config["architectures"] = ["Qwen3OmniMoeForConditionalGeneration"]
    (path / "config.json").write_text(json.dumps(config))
    found = load_model_config(str(path))
    assert found.architecture == QWEN3_OMNI.architecture
    assert found.hf_config.text_config.hidden_size == 32
    processor = golden_processor("qwen3_omni", path=path)
    expected = QWEN3_OMNI.make_processor()
    text, media = PROMPTS["a picture beside it"]
    ours, its = (one.apply(text, media, HEARD) for one in (processor, expected))
    assert ours.prompt_token_ids == its.prompt_token_ids


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"n_window": 48}, "`audio_config.n_window` is 48; expected 49 to 52"),
        ({"n_window": 53}, "`audio_config.n_window` is 53; expected 49 to 52"),
        ({"n_window_infer": 99}, "`audio_config.n_window_infer` is 99; expected 100 or more"),
    ],
)
def test_chunks_that_hfs_model_does_not_count_are_refused(
    keys: dict[str, int], match: str, tmp_path: Path
):
    path = write_files(tmp_path)
    changes = {f"audio_config.{name}": value for name, value in keys.items()}
    edit_json(path / "config.json", changes)
    processor = golden_processor("qwen3_omni", path=path)
    with pytest.raises(CheckpointError, match=match):
        processor.apply(IMAGE, {"image": draw(90, 70)})


def call_hf(prompt: tuple[str, dict[str, Any]]) -> Any:
    """Return what HF's processor makes of a prompt, for HF's model."""
    text, media = prompt
    ((frames, metadata),) = media["video"]
    return load_hf_videos()(
        text=[text],
        images=media.get("image"),
        videos=[frames],
        audio=[metadata["sound"][0]],
        audio_from_video_indices=[0],
        load_audio_from_video=True,
        fps=FPS,
        position_id_per_seconds=POSITIONS_PER_SECOND,
        return_tensors="np",
    )


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_features_and_positions_of_videos_with_sound_are_hfs(name: str):
    processor = QWEN3_OMNI.make_processor()
    text, media = PROMPTS[name]
    ours, hf = processor.apply(text, media, HEARD), call_hf(PROMPTS[name])
    assert ours.prompt_token_ids == hf["input_ids"][0].tolist()
    data = processor.info.reference_inputs(
        ours.prompt_token_ids, make_pixels(ours.mm_kwargs.get_data())
    )
    mask = hf["feature_attention_mask"]
    assert np.array_equal(data["feature_attention_mask"], mask)
    np.testing.assert_allclose(data["input_features"], hf["input_features"], rtol=0, atol=2e-5)
    for key in ("pixel_values", "pixel_values_videos", "video_second_per_grid", "video_grid_thw"):
        if key in hf:
            np.testing.assert_allclose(data[key], hf[key], rtol=0, atol=1e-6)
    config = load_model_config(str(QWEN3_OMNI.path()))
    host_inputs = load_model_class(config.architecture).host_inputs(config.hf_config)
    sample = make_sample(ours)
    rotary = host_inputs.rotary_positions(sample.num_tokens, sample.items)
    inputs = as_inputs(hf)
    with_positions = load_hf_positions(config.hf_config)
    places, offset = with_positions.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs["video_grid_thw"],
        inputs["attention_mask"],
        True,
        inputs["feature_attention_mask"].sum(-1),
        inputs["video_second_per_grid"],
    )
    np.testing.assert_array_equal(rotary.prompt, places[:, 0])
    assert rotary.offset == int(offset)


def load_hf_positions(hf_config: Any) -> Any:
    """Return HF's model without weights, which finds positions."""
    with torch.device("meta"):
        return TINY.reference_class(hf_config)


@pytest.mark.slow
def test_logits_and_tokens_of_videos_with_sound_are_hfs():
    """Of all positions; the engine's tokens in chunks, with cold caches and with warm ones."""
    config = load_model_config(str(QWEN3_OMNI.checkpoint))
    model_class = load_model_class(config.architecture)
    parts: Any = (QWEN3_OMNI.checkpoint, model_class, config.hf_config)
    model = PagedModel.from_directory(*parts, max_len=1024, prompt_step=512)
    reference = load_reference(QWEN3_OMNI.checkpoint, config.architecture)
    processor, expected = QWEN3_OMNI.make_processor(), []
    for text, media in PROMPTS.values():
        inputs = as_inputs(call_hf((text, media)))
        sample = make_sample(processor.apply(text, media, HEARD))
        logits = run_reference(reference, inputs, ())[LOGITS]
        np.testing.assert_allclose(model.run(sample)[LOGITS], logits, rtol=0, atol=1e-4)
        expected.append(list(generate_reference(reference, inputs, 24)))
    assert len({str(one) for one in expected}) == len(expected)
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": media, "mm_processor_kwargs": HEARD}
        for text, media in PROMPTS.values()
    ]
    own = {**QWEN3_OMNI.llm_settings, "max_num_batched_tokens": 32}
    with LLM(QWEN3_OMNI.checkpoint, use_tqdm_on_load=False, **own) as llm:
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == expected
        assert llm.engine.compilations == 0


def test_a_clip_too_short_to_be_heard_is_a_silent_video():
    """HF mirrors the ends of a spectrogram: of so few samples there is none."""
    processor = QWEN3_OMNI.make_processor()
    frames, metadata = draw_heard(1, 2, 200)
    silent = processor.apply(VIDEO, {"video": [(frames, metadata)]}, HEARD)
    seen = processor.apply(VIDEO, {"video": [(frames, {"fps": FPS})]})
    assert silent.prompt_token_ids == seen.prompt_token_ids
    assert metadata["sound"][1] == RATE
