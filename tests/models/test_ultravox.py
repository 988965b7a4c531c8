"""Ultravox against what the published code made of tiny checkpoints: ids, places, logits, tokens.

And checkpoints as they are published, whose files have what was trained alone.
"""

import json
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import WhisperForConditionalGeneration

from mmjax import LLM, SamplingParams, ScoredModel
from mmjax.cli.models import examine
from mmjax.convert import main as convert
from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor, load_model_class
from mmjax.parity.arrays import PagedModel
from mmjax.parity.compare import LOGITS
from mmjax.training.checkpoint import save_checkpoint
from mmjax.training.samples import make_sample
from tests.families.directories import GOLDEN_MODELS, edit_json, made_once
from tests.families.ultravox import LATE_NORM, ULTRAVOX, write
from tests.models.test_clip_laws import RATE, data_of, draw_clip
from tests.oracle import fill_with_unit_norms

GOLDEN = GOLDEN_MODELS / "ultravox"
CASES = {one["name"]: one for one in json.loads((GOLDEN / "expected.json").read_text())["cases"]}
LONG = CASES["two chunks"]
late = made_once(lambda folder: write(folder, **LATE_NORM))


def path_of(case: dict[str, Any]) -> Path:
    return late() if case["is_late"] else ULTRAVOX.checkpoint


@cache
def load(path: Path) -> tuple[Any, PagedModel]:
    config = load_model_config(str(path))
    parts: Any = (path, load_model_class(config.architecture), config.hf_config)
    return create_processor(config), PagedModel.from_directory(*parts, max_len=256, prompt_step=256)


def clips_of(case: dict[str, Any]) -> dict[str, Any]:
    clips = [draw_clip(seed, length) for seed, length in enumerate(case["clip_lengths"])]
    return data_of(clips)


@pytest.mark.parametrize("name", CASES)
def test_ids_logits_and_tokens_are_the_published_ones(name: str):
    case = CASES[name]
    processor, model = load(path_of(case))
    inputs = processor.apply(case["prompt"], clips_of(case))
    assert inputs.prompt_token_ids == case["prompt_token_ids"]
    places = [
        place
        for one in inputs.mm_placeholders.get("audio", ())
        for start, end in one.extract_embeds_range()
        for place in range(start, end + 1)
    ]
    chunks = case["chunks"]
    assert places == [start + number for start, count in chunks for number in range(count)]
    sample, expected = make_sample(inputs), load_file(GOLDEN / "expected.safetensors")
    logits = model.run(sample)[LOGITS][-1]
    np.testing.assert_allclose(logits, expected[f"{name}.logits"][0], rtol=0, atol=1e-5)
    tokens = case["output_token_ids"]
    assert list(model.generate(sample, len(tokens))) == tokens


def test_tokens_that_their_own_text_does_not_give_stay():
    """Those of `car` as letters."""
    processor, _ = load(ULTRAVOX.checkpoint)
    tokenizer = processor.info.get_tokenizer()
    letters = [token_id for letter in "car" for token_id in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("car")
    given = [*letters, *tokenizer.encode("<|audio|>"), *letters]
    inputs = processor.apply(given, data_of([draw_clip(0, 1_200)]))
    assert inputs.prompt_token_ids == [*letters, tokenizer.eos_token_id, *letters]


# ---- parts --------------------------------------------------------------------------------------


def write_parts(folder: Path, *, has_tower: bool) -> Path:
    """Write a checkpoint whose config.json names a Llama and a Whisper; return its directory.

    `has_tower`: whether its own files have a trained encoder, which is not the Whisper's.
    """
    whole, path = ULTRAVOX.checkpoint, folder / "trained"
    config = json.loads((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    parts = {"text": folder / "llama", "audio": folder / "whisper"}
    for directory in (path, *parts.values()):
        directory.mkdir()
    whisper = load_model_config(str(whole)).hf_config.audio_config
    whisper.decoder_layers, whisper.vocab_size, whisper.pad_token_id = 1, 32, 0
    reference: Any = WhisperForConditionalGeneration(whisper)
    fill_with_unit_norms(reference, seed=1)
    trained = {name: value for name, value in tensors.items() if name.startswith("multi")}
    for name, value in tensors.items():
        inner = name.removeprefix("audio_tower.")
        if inner != name and has_tower:
            trained[name] = value
        elif inner != name:
            reference.model.encoder.get_parameter(inner).data = torch.tensor(value)
    reference.save_pretrained(parts["audio"])
    llama = {name.removeprefix("language_model."): value for name, value in tensors.items()}
    own = {name: value for name, value in llama.items() if name not in tensors}
    save_file(own, parts["text"] / "model.safetensors")
    save_file(trained, path / "model.safetensors")
    (parts["text"] / "config.json").write_text(json.dumps(config.pop("text_config")))
    del config["audio_config"]
    ids = {f"{name}_model_id": str(one) for name, one in parts.items()}
    lora = {f"{name}_model_lora_config": {"r": 0, "lora_alpha": 8} for name in parts}
    (path / "config.json").write_text(json.dumps({**config, **ids, **lora}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        copyfile(whole / name, path / name)
    copyfile(whole / "preprocessor_config.json", parts["audio"] / "preprocessor_config.json")
    return path


def test_what_is_scored_with_has_the_tensors_of_the_parts(tmp_path: Path):
    path = write_parts(tmp_path, has_tower=False)
    parts, whole = (
        flatten_params(ScoredModel.of(one, dtype="float32").load_params(one))
        for one in (path, ULTRAVOX.checkpoint)
    )
    assert parts.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(parts[name], array)


def check_answers(path: Path) -> None:
    """Ask an engine about all cases at once, and about one by its embeddings."""
    cases = [case for case in CASES.values() if not case["is_late"]]
    prompts: list[Any] = [
        {"prompt": case["prompt"], "multi_modal_data": clips_of(case)} for case in cases
    ]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    own: Any = {**ULTRAVOX.llm_settings, "max_num_batched_tokens": 16, "enable_mm_embeds": True}
    with LLM(path, use_tqdm_on_load=False, **own) as llm:
        (embeds,) = (
            llm.embed_multimodal(one) for one in prompts if one["prompt"] == LONG["prompt"]
        )
        data = {"audio": {"audio_embeds": embeds}}
        prompts.append({"prompt": LONG["prompt"], "multi_modal_data": data})
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [case["output_token_ids"] for case in (*cases, LONG)]


@pytest.mark.parametrize("has_tower", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_files_lack_is_read_of_the_checkpoints_that_config_json_names(
    has_tower: bool, tmp_path: Path
):
    path = write_parts(tmp_path, has_tower=has_tower)
    assert examine(str(path)).media == ["audio"], "all tensors have their place"
    check_answers(path)
    params = load(ULTRAVOX.checkpoint)[1].params
    with pytest.raises(CheckpointError, match="has tensors in other checkpoints"):
        save_checkpoint(params, path, tmp_path / "saved")


@pytest.mark.slow  # of parts, which the rows above load
def test_a_snapshot_has_the_tensors_of_all_parts(tmp_path: Path):
    path = write_parts(tmp_path, has_tower=True)
    assert convert([str(path), str(tmp_path / "snapshot")]) == 0
    for part in ("llama", "whisper"):
        (tmp_path / part / "model.safetensors").unlink()
    check_answers(tmp_path / "snapshot")


def test_parts_are_fetched_as_models_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, asked = write_parts(tmp_path, has_tower=True), list[tuple[str, bool]]()
    ids = {"text_model_id": "owner/llama", "audio_model_id": "owner/whisper"}
    edit_json(path / "config.json", ids)

    def download(name: str, *, allow_patterns: list[str], cache_dir: Path, **_: Any) -> str:
        assert cache_dir == tmp_path
        assert not {"*", "*.bin", "*.pt", "*.py"} & {*allow_patterns}
        asked.append((name, "*.safetensors" in allow_patterns))
        return str(tmp_path / name.removeprefix("owner/"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = load_model_config(str(path), download_dir=tmp_path)
    assert create_processor(config).info.audio_rate == RATE
    load_model_config(str(path), download_dir=tmp_path, needs_weights=True)
    assert asked == [(name, needed) for needed in (False, True) for name in ids.values()]
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"`text_model_id` .*llama.*HF_HUB_OFFLINE forbids"):
        load_model_config(str(path))


def test_parts_that_are_not_there(tmp_path: Path):
    path = write_parts(tmp_path, has_tower=True)
    edit_json(path / "config.json", {"text_model_id": "./no/such/llama"})
    with pytest.raises(
        CheckpointError, match=r"`text_model_id` of config\.json names `\./no/such/ll"
    ):
        load_model_config(str(path))
    edit_json(path / "config.json", {"text_model_id": 3})
    with pytest.raises(
        CheckpointError, match=r"`text_model_id` of config\.json is 3; expected a h"
    ):
        load_model_config(str(path))
    llama = tmp_path / "llama"
    edit_json(path / "config.json", {"text_model_id": str(llama)})
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles"):
        load_model_config(str(path), needs_weights=True)
    edit_json(llama / "config.json", {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(CheckpointError, match="names for its `text_config`, is quantised"):
        load_model_config(str(path))
