"""Unlimited-OCR and the first DeepSeek-OCR: their authors' layouts, boxes, windows, refusals."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import UnlimitedOcrForConditionalGeneration

from mmjax.errors import CheckpointError, RequestError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models import original_config
from mmjax.models.deepseek_ocr2 import model as ours
from mmjax.models.model_source import load_generation_defaults, load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.parity.reference import run_reference
from mmjax.weights.files.safetensors import StoredTensor
from mmjax.weights.load import match_tensors
from tests.engine.tiny import answer_all
from tests.families import served_model
from tests.families.tiny import Media, TinyModel, Words
from tests.families.unlimited_ocr import (
    CLIP,
    PATCH,
    SAM,
    TINY,
    UNLIMITED_OCR,
    VIEW,
    WINDOW,
    tiny_config,
)
from tests.kit import draw
from tests.models import test_deepseek_ocr2
from tests.models.served import make_request, start_engine
from tests.oracle import assert_close

MODEL = ours.UnlimitedOcrForConditionalGeneration
DEEPSEEK: dict[str, Any] = {
    **test_deepseek_ocr2.RAW,
    "architectures": ["DeepseekOCRForCausalLM"],
    "projector_config": {"input_dim": 2048, "n_embed": 1280, "projector_type": "linear"},
    "vision_config": {
        "image_size": 1024,
        "mlp_ratio": 3.7362,
        "model_name": "deeplip_b_l",
        "model_type": "vision",
        "width": {
            "clip-l-14-224": {
                **{"heads": 16, "image_size": 224, "layers": 24, "patch_size": 14, "width": 1024}
            },
            "sam_vit_b": test_deepseek_ocr2.RAW["vision_config"]["width"]["sam_vit_b"],
        },
    },
}
"""The published config.json, without keys that nothing depends on."""
UNLIMITED: dict[str, Any] = {
    **DEEPSEEK,
    "architectures": ["UnlimitedOCRForCausalLM"],
    "model_type": "unlimited-ocr",
    "sliding_window": 128,
    "sliding_window_size": 128,
}
CLIP_MODEL = r"vision_tower\.vision_encoder\."
CLIP_NAMES = [
    (CLIP_MODEL + r"encoder\.", "vision_model.transformer."),
    (CLIP_MODEL, "vision_model."),
]


def to_original(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of HF's module as the authors' files have them: CLIP's qkv as one."""
    joined: dict[str, dict[str, torch.Tensor]] = {}
    plain = {}
    for name, tensor in tensors.items():
        for pattern, replacement in CLIP_NAMES:
            name = re.sub(pattern, replacement, name)
        if found := re.fullmatch(r"(.*vision_model.*\.)[qkv]_proj\.(\w+)", name):
            parts = joined.setdefault(f"{found[1]}qkv_proj.{found[2]}", {})
            parts[name[len(found[1])]] = tensor
        else:
            plain[name] = tensor
    plain |= {name: torch.cat([parts[part] for part in "qkv"]) for name, parts in joined.items()}
    embeddings = "model.vision_model.embeddings."
    num_positions = len(plain[f"{embeddings}position_embedding.weight"])
    yield f"{embeddings}patch_embedding.weight", torch.zeros(4, 3, 2, 2)
    yield f"{embeddings}position_ids", torch.arange(num_positions)[None]
    yield from test_deepseek_ocr2.to_original(plain)


def write_config(path: Path, raw: Mapping[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps(raw))
    return load_model_config(str(path))


@pytest.mark.slow  # a small tree of the same names is read and answers below
@pytest.mark.parametrize(
    ("raw", "architecture", "window", "max_tiles"),
    [
        (DEEPSEEK, "DeepseekOCRForCausalLM", None, 9),
        (UNLIMITED, "UnlimitedOcrForConditionalGeneration", 128, 32),
    ],
)
def test_the_published_config_is_hfs_and_every_tensor_has_one_place(
    tmp_path: Path, raw: dict[str, Any], architecture: str, window: int | None, max_tiles: int
):
    found = write_config(tmp_path, raw)
    assert found.architecture == architecture
    config, model_class = found.hf_config, getattr(ours, architecture)
    spec = model_class.host_inputs(config).encoder_spec
    assert spec.inputs["pixel_values_local"][0] == (3, max_tiles, 640, 640)
    with torch.device("meta"):
        module = UnlimitedOcrForConditionalGeneration(config)
        stored = [
            StoredTensor(name, "model.safetensors", tuple(tensor.shape), "BF16", None)
            for name, tensor in to_original(module.state_dict())
        ]
    assert len({one.name for one in stored}) == len(stored)
    _, abstract = build_abstract(model_class, config, dtype=jnp.bfloat16)
    places = flatten_params(abstract)
    matched = match_tensors(stored, places, model_class.rules(config), source="here")
    assert matched.keys() == {*places}
    num_read = sum(int(np.prod(one.shape)) for one in places.values())
    assert num_read == pytest.approx(3.34e9, rel=0.01)
    layers: Any = ours.build_text_model(config, dtype=jnp.bfloat16).layers
    assert {layer.self_attn.window for layer in layers} == {window}


@pytest.mark.parametrize("raw", [pytest.param(DEEPSEEK, marks=pytest.mark.slow), UNLIMITED])
def test_a_tiny_checkpoint_in_its_authors_layout_says_what_hf_says(
    tmp_path: Path, raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    has_windows = raw is UNLIMITED
    kinds = {} if has_windows else {"layer_types": ["full_attention"] * 2}
    clip = {"intermediate_size": 4 * CLIP["hidden_size"]}
    model = TinyModel(TINY, text=kinds, encoder=clip)
    sam = {name: SAM[name] for name in ("patch_size", "output_channels", "mlp_dim")}
    monkeypatch.setattr(original_config, "SAM_DEFAULTS", sam)
    raw = json.loads(json.dumps(raw))
    text = model.config.text_config.to_dict()
    raw["language_config"] |= {
        name: text[name] for name in text if name not in ("layer_types", "model_type")
    }
    raw["sliding_window"] = WINDOW
    width = raw["vision_config"]["width"]
    raw["vision_config"]["image_size"] = VIEW
    width["clip-l-14-224"] = {
        **{"heads": CLIP["num_attention_heads"], "layers": CLIP["num_hidden_layers"]},
        **{"width": CLIP["hidden_size"], "image_size": 18, "patch_size": 3},
    }
    width["sam_vit_b"] = {
        **{"downsample_channels": SAM["downsample_channels"], "global_attn_indexes": [1]},
        **{"heads": SAM["num_attention_heads"], "layers": 2, "width": SAM["hidden_size"]},
    }
    tensors = {
        name: np.ascontiguousarray(tensor.numpy())
        for name, tensor in to_original(model.reference.state_dict())
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = write_config(tmp_path, raw)
    assert found.hf_config.vision_config.sam_config.patch_size == PATCH
    model_class = getattr(ours, found.architecture)
    paged = PagedModel.from_directory(tmp_path, model_class, found.hf_config, max_len=192)
    assert paged.sees == ("reference" if has_windows else "past")
    sample = model.draw_sample((Media(1), Words(1, 7)))
    inputs = TINY.torch_inputs(model.reference, sample)
    assert_close(paged.run(sample), run_reference(model.reference, inputs, model.rules))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_patches": 33}, "`max_patches` is 33 .*it must be a number of tiles from 1 to 32"),
        ({"crop_to_patches": 1}, "`crop_to_patches` is 1 .*true or false"),
        ({"size": {"height": 96, "width": 96}}, "size"),
        ({"tile_size": 64}, "tile_size"),
    ],
)
def test_kwargs_that_no_picture_can_have(kwargs: dict[str, Any], match: str):
    processor = create_processor(str(UNLIMITED_OCR.path()))
    with pytest.raises(RequestError, match=match):
        processor.apply("<image>", {"image": draw(200, 90)}, hf_processor_mm_kwargs=kwargs)


def test_a_request_has_pictures_cut_that_the_files_leave_whole(tmp_path: Path):
    path = shutil.copytree(UNLIMITED_OCR.path(), tmp_path / "whole")
    file = path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "crop_to_patches": False}))
    processor = create_processor(str(path))
    for kwargs, num_tiles in (({}, 0), ({"crop_to_patches": True}, 2)):
        inputs = processor.apply("<image>", {"image": draw(190, 90)}, hf_processor_mm_kwargs=kwargs)
        tensors = inputs.mm_kwargs.get_item("image", 0).get_data()
        assert tensors["num_local_patches"] == num_tiles
        assert tensors["pixel_values"].shape == (3, VIEW, VIEW)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sam": {"image_size": 120}}, "`sam_config.image_size` is 120"),
        ({"sam": {"downsample_channels": [20, 28]}}, "`sam_config.downsample_channels`"),
        ({"text": {"layer_types": ["sliding_attention"] * 2}}, "`layer_types`"),
        ({"text": {"sliding_window": 0}}, "`sliding_window` is 0"),
    ],
)
def test_configs_that_are_not_served(settings: dict[str, Any], match: str):
    def build(config: Any) -> None:
        MODEL.host_inputs(config)
        build_abstract(MODEL, config, dtype=jnp.float32)

    with pytest.raises(CheckpointError, match=match):
        build(tiny_config(**settings))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tile_tag": "1D"}, "`tile_tag` of config.json is '1D'"),
        ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector_config.projector_type"),
        ({"language_config": {**DEEPSEEK["language_config"], "use_mla": True}}, "use_mla"),
    ],
)
def test_layouts_that_are_not_served(tmp_path: Path, changes: dict[str, Any], match: str):
    with pytest.raises(CheckpointError, match=match):
        write_config(tmp_path, {**DEEPSEEK, **changes})


def test_the_repetition_rule_of_the_files_is_the_default(tmp_path: Path):
    found = write_config(tmp_path, UNLIMITED)
    assert load_generation_defaults(found).eos_token_ids == (1,)
    settings = {"no_repeat_ngram_size": 35, "no_repeat_ngram_window_size": 128}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert load_generation_defaults(found).sampling == settings


@pytest.mark.slow  # 37 s of compiling; windows behind prompts are in `tests/layers`
def test_an_answer_within_a_later_prompt_is_computed_anew():
    """What follows a prompt sees less than the same tokens in one: no block of it is shared."""
    model = served_model("unlimited_ocr")
    first = model.draw_sample((Media(0), Words(1, 9)))
    answer = model.paged.generate(first, 40)
    seeing = tiny_config(text={"layer_types": ["full_attention"] * 2})
    assert PagedModel(MODEL, seeing, model.params, 192).generate(first, 40) != answer
    ids = np.concatenate([first.token_ids, answer]).astype(np.int32)
    second = Sample(token_ids=ids, items=first.items)
    expected = [list(answer), list(model.paged.generate(second, 16))]
    engine = start_engine(model, max_num_batched_tokens=32)
    for number, (sample, tokens) in enumerate(zip((first, second), expected, strict=True)):
        request = make_request(str(number), sample, max_tokens=len(tokens))
        assert answer_all(engine, [request]) == [tokens]
