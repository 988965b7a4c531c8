"""Laws that every family obeys which hears clips: its processor, and its answers, are HF's."""

import base64
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmjax import LLM, SamplingParams
from mmjax.cache.media.processor_cache import MultiModalProcessorOnlyCache
from mmjax.errors import RequestError, RequestValueError
from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import generate_reference, load_reference, run_reference
from mmjax.processing import BaseMultiModalProcessor, MultiModalInputs
from mmjax.processing.encoder_budget import MultiModalProfiler
from mmjax.processing.validation import validate_num_embeds
from mmjax.training.samples import make_sample
from tests.families import CLIP_FAMILIES
from tests.families.default_run import mark
from tests.families.family import Family
from tests.processing.test_audio_file import write_audio

RATE = 16_000
ROWS = [
    pytest.param(family, id=name)
    for name, family in CLIP_FAMILIES.items()
    if not family.updates_encoder_prompt
]
"""Whisper's prompts hold no placeholders: `test_whisper_transcripts.py` has what it says."""
ASKED_BY_HF = [row for row in ROWS if CLIP_FAMILIES[str(row.id)].has_reference]
"""transformers has no class of an Ultravox: `test_ultravox.py` has what the published one says."""
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


def draw_clip(seed: int, length: int = 12_345) -> np.ndarray:
    """Return float32[T]: two tones and a little noise."""
    time = np.arange(length) / RATE
    hertz = 200.0 + 170 * seed
    noise = np.random.default_rng(seed).normal(size=length) * 0.02
    tones = np.sin(2 * np.pi * hertz * time) + np.sin(4.4 * np.pi * hertz * time) * (time % 0.3)
    return (0.3 * tones + noise).astype(np.float32)


def clip_of(family: Family, seed: int) -> np.ndarray:
    return draw_clip(seed, family.clip_lengths[seed % len(family.clip_lengths)])


def write_prompt(family: Family, clips: int) -> str:
    return "\n".join(["look", *[family.placeholder] * clips, "what is it?"])


def with_cache(family: Family, capacity: int = 2**26) -> BaseMultiModalProcessor[Any]:
    return family.make_processor(processor_cache=MultiModalProcessorOnlyCache(capacity))


@cache
def make_once(family: Family) -> tuple[BaseMultiModalProcessor[Any], BaseMultiModalProcessor[Any]]:
    return family.make_processor(), with_cache(family)


def data_of(clips: list[np.ndarray]) -> dict[str, Any]:
    return {"audio": [(clip, RATE) for clip in clips]} if clips else {}


def assert_same(one: MultiModalInputs, other: MultiModalInputs) -> None:
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.mm_placeholders == other.mm_placeholders
    assert one.mm_hashes == other.mm_hashes
    assert one.mm_kwargs == other.mm_kwargs


def assert_hfs(
    family: Family, ours: MultiModalInputs, clips: list[np.ndarray], prompt: str
) -> None:
    hf = family.call_hf(prompt, clips, {})
    assert ours.prompt_token_ids == hf.input_ids
    processor, _ = make_once(family)
    embedded = set(family.embed_token_ids(processor))
    places = [
        place
        for one in ours.mm_placeholders.get("audio", ())
        for start, end in one.extract_embeds_range()
        for place in range(start, end + 1)
    ]
    wanted = [place for place, token_id in enumerate(hf.input_ids) if token_id in embedded]
    assert places == (wanted if clips else [])
    if not clips:
        return
    data = processor.info.reference_inputs(ours.prompt_token_ids, ours.mm_kwargs.get_data())
    for key, tolerance in family.tensors.items():
        assert np.shape(data[key]) == np.shape(hf.tensors[key]), key
        np.testing.assert_allclose(data[key], hf.tensors[key], rtol=0, atol=tolerance)


# ---- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROWS)
@pytest.mark.parametrize("num_clips", [0, 1, 2, 3])
def test_prompts_and_spectrograms_equal_hf(family: Family, num_clips: int) -> None:
    """Of text and of token ids, with a cache and without."""
    uncached, cached = make_once(family)
    prompt = write_prompt(family, num_clips)
    token_ids = uncached.info.get_tokenizer().encode(prompt)
    for shift in range(len(family.clip_lengths) if num_clips else 1):
        clips = [clip_of(family, shift + number) for number in range(num_clips)]
        for processor in (uncached, cached):
            for form in (prompt, token_ids):
                assert_hfs(family, processor.apply(form, data_of(clips)), clips, prompt)


@pytest.mark.parametrize("family", ROWS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 4))
def test_any_words_around_clips_give_hf_tokens(
    family: Family, data: st.DataObject, seed: int
) -> None:
    words = st.lists(st.sampled_from(family.words), max_size=6).map("".join)
    pieces = data.draw(st.lists(words, min_size=1, max_size=4))
    prompt = family.placeholder.join(pieces)
    clips = [clip_of(family, seed + number) for number in range(len(pieces) - 1)]
    uncached, cached = make_once(family)
    text = uncached.apply(prompt, data_of(clips))
    assert text.prompt_token_ids == family.call_hf(prompt, clips, {}).input_ids
    token_ids = uncached.info.get_tokenizer().encode(prompt)
    assert_same(text, uncached.apply(token_ids, data_of(clips)))
    assert_same(text, cached.apply(prompt, data_of(clips)))
    assert_same(text, cached.apply(token_ids, data_of(clips)))


@pytest.mark.parametrize("family", ROWS)
@pytest.mark.parametrize("capacity", [0, 20_000, 2**26])
def test_cold_warm_and_partly_warm_caches_agree(family: Family, capacity: int) -> None:
    clips = [clip_of(family, seed) for seed in range(3)]
    wanted = [clips[0], clips[1], clips[0], clips[2]]
    prompt = write_prompt(family, len(wanted))
    uncached = make_once(family)[0].apply(prompt, data_of(wanted))
    processor = with_cache(family, capacity)
    processor.apply(write_prompt(family, 1), data_of([clips[1]]))
    for _ in range(3):
        assert_same(uncached, processor.apply(prompt, data_of(wanted)))


@pytest.mark.parametrize("family", ROWS)
def test_files_and_samples_of_another_rate_are_resampled(family: Family) -> None:
    channels = np.stack([draw_clip(0, 22_050), draw_clip(3, 22_050)])
    file = write_audio(channels, 44_100, codec="pcm_f32le", form="flt")
    processor, _ = make_once(family)
    prompt = write_prompt(family, 1)
    forms = (file, (channels, 44_100), (channels.T, 44_100))
    whole, *others = (processor.apply(prompt, {"audio": [form]}) for form in forms)
    for other in others:
        assert other.prompt_token_ids == whole.prompt_token_ids
        mine, its = (inputs.mm_kwargs.get_data() for inputs in (whole, other))
        np.testing.assert_allclose(mine["input_features"], its["input_features"], atol=1e-4)


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROWS)
def test_dummy_inputs_have_exactly_the_declared_maximum(family: Family) -> None:
    settings_of_operators: list[dict[str, Any]] = [{}, {"trust_request_mm_kwargs": True}]
    for mm in settings_of_operators:
        profiler = MultiModalProfiler(family.make_processor(**mm))
        declared = profiler.info.get_mm_max_tokens_per_item(4096, {"audio": 1})
        assert declared is not None
        measured = profiler.measure_mm_max_tokens_per_item(4096, {"audio": 1})["audio"]
        planned = profiler.get_mm_max_tokens_per_item(4096)["audio"]
        assert measured == declared["audio"] == planned
        profiler.check_settings()
        inputs = profiler.get_dummy_mm_inputs({"audio": 1}, max_num_batched_tokens=1024)
        assert inputs.mm_placeholders["audio"][0].get_num_embeds() == declared["audio"]


@pytest.mark.parametrize("family", ROWS)
@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40_000))
def test_no_clip_exceeds_the_declared_maximum(family: Family, length: int) -> None:
    processor, _ = make_once(family)
    most = MultiModalProfiler(processor).get_mm_max_tokens_per_item(4096)["audio"]
    clip, prompt = draw_clip(0, length), write_prompt(family, 1)
    if not family.takes_length(length):
        with pytest.raises(RequestValueError, match="a clip") as caught:
            processor.apply(prompt, data_of([clip]))
        assert caught.value.param == "multi_modal_data.audio"
        return
    inputs = processor.apply(prompt, data_of([clip]))
    (place,) = inputs.mm_placeholders["audio"]
    assert 1 <= place.get_num_embeds() <= most
    hf = family.call_hf(prompt, [clip], {})
    assert place.get_num_embeds() == hf.input_ids.count(family.embed_token_ids(processor)[0])


@pytest.mark.parametrize("family", ROWS)
def test_the_length_that_an_operator_describes_is_what_is_planned_for(family: Family) -> None:
    limit = {"audio": {"count": 2, "length": 8_000}}
    described = family.make_processor(limit_mm_per_prompt=limit)
    profiler = MultiModalProfiler(described)
    plan = profiler.get_mm_max_tokens_per_item(4096)["audio"]
    prompt = write_prompt(family, 1)
    inputs = described.apply(prompt, data_of([draw_clip(0, 8_000)]))
    assert inputs.mm_placeholders["audio"][0].get_num_embeds() == plan
    prepared = described.prepare(prompt, data_of([draw_clip(0, max(family.clip_lengths))]))
    if prepared.mm_placeholders["audio"][0].get_num_embeds() == plan:
        return
    with pytest.raises(RequestError, match=r"length 8000, which `--limit-mm-per-") as caught:
        validate_num_embeds(described.info, prepared.mm_placeholders, profiler.measure_described())
    assert caught.value.param == "multi_modal_data"
    with pytest.raises(RequestError, match=r"At most 2 audio\(s\)"):
        described.apply(write_prompt(family, 3), data_of([draw_clip(0)] * 3))


@pytest.mark.parametrize("family", ROWS)
def test_other_media_are_refused(family: Family) -> None:
    processor, _ = make_once(family)
    known = ", ".join(f"`{name}`" for name in processor.info.supported_mm_limits)
    with pytest.raises(
        RequestError, match=f"Unsupported modality: scent; this model takes {known}"
    ):
        processor.apply("look", {"scent": [np.zeros((8, 8, 3), np.uint8)]})


# ---- conversations ------------------------------------------------------------------------------


def audio_part(clip: np.ndarray) -> dict[str, Any]:
    file = write_audio(clip[None], RATE, codec="pcm_f32le", form="flt")
    data = {"data": base64.b64encode(file).decode(), "format": "wav"}
    return {"type": "input_audio", "input_audio": data}


@pytest.mark.parametrize("family", ROWS)
def test_a_conversation(family: Family, tmp_path: Path) -> None:
    """Without a template in the checkpoint."""
    folder = Path(copytree(family.path(), tmp_path / "checkpoint"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    processor = InputProcessor(load_model_config(str(folder)))
    parser = ChatParser.for_model(processor)
    content = [audio_part(draw_clip(1)), {"type": "text", "text": "what is it"}]
    conversation = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "a car"},
        {"role": "user", "content": "which color"},
    ]
    try:
        prompt = parser.parse(conversation)
        assert prompt.get("prompt") == family.rendered
        said = processor.explain(prompt)
        assert [item.modality for item in said.items] == ["audio"]
        assert (
            said.prompt_token_ids == family.call_hf(family.rendered, [draw_clip(1)], {}).input_ids
        )
        told = [{"role": "system", "content": "be short"}, *conversation]
        if family.with_system is None:
            with pytest.raises(RequestError, match="system message beside a clip"):
                parser.parse(told)
            return
        old, new = family.with_system
        prompt = parser.parse(told)
        assert prompt.get("prompt") == family.rendered.replace(old, new, 1)
    finally:
        processor.close()


# ---- answers ------------------------------------------------------------------------------------

START = "here is a clip and some more to help you hear better how many cars there are in all of it "
"""More than a block of the KV cache."""


def prompts_of(family: Family) -> list[tuple[str, list[np.ndarray]]]:
    """Return prompts of no clip, one and two."""
    clips = [clip_of(family, 1), clip_of(family, 3)]
    return [
        (f"{START}{family.placeholder * n} which color is {'the car ' * n}", clips[:n])
        for n in range(3)
    ]


@cache
def load(family: Family) -> tuple[Any, list[dict[str, Any]]]:
    """Return HF's model, and what it takes of each prompt."""
    config = load_model_config(str(family.checkpoint))
    reference = load_reference(family.checkpoint, config.architecture)
    return reference, [as_inputs(family, *prompt) for prompt in prompts_of(family)]


def as_inputs(family: Family, text: str, clips: list[np.ndarray]) -> dict[str, Any]:
    hf = family.call_hf(text, clips, {})
    ids = torch.tensor(hf.input_ids)[None]
    names = family.tensors if clips else ()
    tensors = {name: torch.as_tensor(np.asarray(hf.tensors[name])) for name in names}
    return {**tensors, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(*row.values, id=row.id, marks=mark("HF's logits of clips", str(row.id)))
        for row in ASKED_BY_HF
    ],
)
def test_logits_at_every_position_are_hfs(family: Family) -> None:
    config = load_model_config(str(family.checkpoint))
    processor, model_class = create_processor(config), load_model_class(config.architecture)
    parts: Any = (family.checkpoint, model_class, config.hf_config)
    model = PagedModel.from_directory(*parts, max_len=1024, prompt_step=512)
    reference, prompts = load(family)
    for (text, clips), inputs in zip(prompts_of(family), prompts, strict=True):
        expected = run_reference(reference, inputs, ())[LOGITS]
        found = model.run(make_sample(processor.apply(text, data_of(clips))))[LOGITS]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def generate(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(*row.values, id=row.id, marks=mark("HF's tokens of clips", str(row.id)))
        for row in ASKED_BY_HF
    ],
)
def test_the_engines_greedy_tokens_are_hfs(family: Family, tmp_path: Path) -> None:
    """In chunks, all at once; with cold caches and with warm ones; of samples and of files."""
    reference, inputs = load(family)
    expected = [list(generate_reference(reference, one, NUM_TOKENS)) for one in inputs]
    prompts: list[Any] = [
        {"prompt": text, "multi_modal_data": data_of(clips)} for text, clips in prompts_of(family)
    ]
    own: Any = {**family.llm_settings, "max_num_batched_tokens": 32}
    with LLM(family.checkpoint, use_tqdm_on_load=False, enable_mm_embeds=True, **own) as llm:
        for _ in ("cold", "warm"):
            assert generate(llm, prompts) == expected
        assert llm.engine.stats().prefix_cache_hits > 0
        text, (clip, *_) = prompts_of(family)[1]
        file = tmp_path / "clip.wav"
        file.write_bytes(write_audio(clip[None], RATE, codec="pcm_f32le", form="flt"))
        for form in (str(file), file.read_bytes(), clip, {"audio_embeds": None}):
            if isinstance(form, dict):
                form = {"audio_embeds": llm.embed_multimodal(prompts[1])}
            (found,) = generate(llm, [{"prompt": text, "multi_modal_data": {"audio": form}}])
            assert found == expected[1]
        content: Any = [audio_part(clip), {"type": "text", "text": "what color"}]
        (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        asked = as_inputs(family, str(chat.prompt), [clip])
        assert asked["input_ids"][0].tolist() == list(chat.prompt_token_ids)
        assert chat.num_audio_tokens == chat.items[0].num_embeds > 0
        tokens = generate_reference(reference, asked, NUM_TOKENS)
        assert list(chat.outputs[0].token_ids) == list(tokens)
        assert llm.engine.compilations == 0
    assert len({str(answer) for answer in expected}) == len(expected), "clips change nothing"
