"""Florence-2 in Microsoft's own layout: its config, its names of tensors, its tokenizer.

transformers has no class for it: its own model's weights are renamed, as its conversion does.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import (
    AutoConfig,
    BartConfig,
    Florence2Config,
    Florence2ForConditionalGeneration,
    PreTrainedConfig,
)

from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models.florence2.model import Florence2ForConditionalGeneration as Model
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import run_reference
from mmjax.weights.files.safetensors import StoredTensor
from mmjax.weights.load import match_tensors
from tests.families.florence2 import FLORENCE2, TINY
from tests.families.tiny import Media, TinyModel, Words
from tests.kit import draw
from tests.oracle import assert_close

NUM_BART_TOKENS = 979
"""Of the tiny checkpoint's tokenizer, before the tasks' tokens."""
NAMES = [
    (r"^model\.", ""),
    (r"^(vision_tower\.convs\.\d+)\.conv\.", r"\1.proj."),
    (r"\.(conv[12])\.(weight|bias)$", r".\1.fn.dw.\2"),
    (r"\.spatial_block\.norm1\.", ".spatial_block.window_attn.norm."),
    (r"\.channel_block\.norm1\.", ".channel_block.channel_attn.norm."),
    (r"\.((?:window|channel)_attn)\.(qkv|proj)\.", r".\1.fn.\2."),
    (r"\.norm2\.", ".ffn.norm."),
    (r"\.ffn\.(fc[12])\.", r".ffn.fn.net.\1."),
    (r"^multi_modal_projector\.image_projection\.weight$", "image_projection"),
    (r"^multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
    (r"^multi_modal_projector\.", ""),
    (r"^language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
]


def to_original(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def original_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return config.json as Microsoft wrote it, of the same sizes."""
    vision: dict[str, Any] = config.vision_config.to_dict()
    text: dict[str, Any] = config.text_config.to_dict()
    for name in ("mlp_ratio", "qkv_bias", "activation_function", "in_channels"):
        del vision[name]
    moved = ("embed_dim", "max_position_embeddings", "max_temporal_embeddings")
    dims, positions, frames = (vision.pop(name) for name in moved)
    return {
        "architectures": ["Florence2ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_florence2.Florence2Config"},
        "model_type": "florence2",
        "is_encoder_decoder": True,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "projection_dim": vision["projection_dim"],
        "vocab_size": text["vocab_size"],
        "vision_config": {
            **vision,
            "model_type": "davit",
            "dim_embed": dims,
            "image_pos_embed": {
                "type": "learned_abs_2d",
                "max_pos_embeddings": positions,
            },
            "visual_temporal_embedding": {
                "type": "COSINE",
                "max_temporal_embeddings": frames,
            },
            "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
        },
        "text_config": {**text, "model_type": "florence2_language"},
    }


def test_the_config_and_the_tensors_are_those_of_hfs_layout(tmp_path: Path):
    model = TinyModel(TINY)
    reference = model.reference
    raw = original_config(reference.config)
    assert not {"embed_dim", "max_position_embeddings"} & raw["vision_config"].keys()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = {
        to_original(name): np.ascontiguousarray(tensor.numpy())
        for name, tensor in reference.state_dict().items()
    }
    tensors["image_projection"] = np.ascontiguousarray(tensors["image_projection"].T)
    tensors["language_model.final_logits_bias"] = np.zeros((1, raw["vocab_size"]), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")

    found = load_model_config(str(tmp_path)).hf_config
    assert isinstance(found, Florence2Config)
    assert isinstance(found.text_config, BartConfig)
    for name, value in reference.config.vision_config.to_dict().items():
        assert getattr(found.vision_config, name) == value, name
    assert found.image_token_id == raw["vocab_size"]
    ours = PagedModel.from_directory(tmp_path, Model, found, max_len=64)
    for parts in ((Media(1), Words(1, 7), Words(2, 2)), (Words(1, 7), Words(2, 2))):
        sample = model.draw_sample(parts)
        inputs = TINY.torch_inputs(reference, sample)
        assert_close(ours.run(sample), run_reference(reference, inputs, Model.rules(found)))


@pytest.mark.slow  # the files above have the layout, and `test_full_size.py` the sizes
@pytest.mark.parametrize("width", [768, 1024])
def test_at_full_size_every_tensor_has_one_place(width: int, tmp_path: Path):
    layers = 6 if width == 768 else 12
    text = {
        "model_type": "bart",
        "vocab_size": 51289,
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "max_position_embeddings": 1024,
    }
    vision = {"projection_dim": width, "image_size": 768}
    config = Florence2Config(text_config=text, vision_config=vision)
    with torch.device("meta"):
        shapes = {
            to_original(name): tuple(tensor.shape)
            for name, tensor in Florence2ForConditionalGeneration(config).state_dict().items()
            if name != "lm_head.weight"
        }
    shapes["image_projection"] = shapes["image_projection"][::-1]
    shapes["language_model.final_logits_bias"] = (1, 51289)
    (tmp_path / "config.json").write_text(json.dumps(original_config(config)))
    found = load_model_config(str(tmp_path)).hf_config
    abstract = flatten_params(build_abstract(Model, found, dtype=jnp.bfloat16)[1])
    tensors = [
        StoredTensor(name, "model.safetensors", shape, "F16", None)
        for name, shape in shapes.items()
    ]
    sources = match_tensors(tensors, abstract, Model.rules(found), source="original")
    assert sources.keys() == abstract.keys()
    used = {tensor.name for tensor in sources.values()}
    tied = {"language_model.model.encoder.embed_tokens.weight"}
    tied |= {"language_model.model.decoder.embed_tokens.weight", "language_model.final_logits_bias"}
    assert len(used) == len(sources)
    assert shapes.keys() - used == tied


def test_a_directory_is_processed_as_hfs(tmp_path: Path):
    """Its tokenizer is BART's alone: what the tasks add has its place in the embedding table."""
    path = tmp_path / "original"
    shutil.copytree(FLORENCE2.path(), path)
    raw = original_config(AutoConfig.from_pretrained(path))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    bart = [token for token in tokenizer["added_tokens"] if token["id"] < NUM_BART_TOKENS]
    tokenizer["added_tokens"] = bart
    for token in list(tokenizer["model"]["vocab"]):
        if tokenizer["model"]["vocab"][token] >= NUM_BART_TOKENS:
            del tokenizer["model"]["vocab"][token]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["image_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    processor_config = json.loads((path / "processor_config.json").read_text())
    (path / "processor_config.json").unlink()
    (path / "preprocessor_config.json").write_text(json.dumps(processor_config["image_processor"]))
    image_id = NUM_BART_TOKENS + 1024
    raw["text_config"]["vocab_size"] = raw["vocab_size"] = image_id
    (path / "config.json").write_text(json.dumps(raw))

    processor = create_processor(load_model_config(str(path)))
    picture = draw(90, 40)
    prepared = processor.prepare("<OD>", {"image": picture})
    wanted = FLORENCE2.make_processor().apply("<OD>", {"image": picture})
    given, expected = prepared.encoder_prompt_token_ids, wanted.encoder_prompt_token_ids
    assert given is not None
    assert expected is not None
    assert given[:17] == [image_id] * 17
    assert given[17:] == expected[17:]
    to_ids = processor.info.get_tokenizer().convert_tokens_to_ids
    places = {"<od>": 0, "</ocr>": 3, "<loc_0>": 4, "<loc_999>": 1003, "<and>": 1023}
    assert {token: to_ids(token) - NUM_BART_TOKENS for token in places} == places
    assert prepared.parse_answer is not None
    corners = [to_ids(f"<loc_{n}>") for n in (0, 0, 499, 999)]
    answer = prepared.parse_answer([*to_ids(["c", "at"]), *corners, 2])
    assert answer["<OD>"]["bboxes"] == [[0, 0, 44, 39]]
