"""DeepSeek-OCR 2 in DeepSeek's own layout; its boxes; what it refuses."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import DeepseekOcr2ForConditionalGeneration

from mmjax import LLM, SamplingParams
from mmjax.errors import CheckpointError, RequestError
from mmjax.layers.module import build_abstract, flatten_params
from mmjax.models import original_config
from mmjax.models.deepseek_ocr2.model import DeepseekOcr2ForConditionalGeneration as Model
from mmjax.models.model_source import load_generation_defaults, load_model_config
from mmjax.models.registry import create_processor
from mmjax.parity.arrays import PagedModel
from mmjax.parity.reference import run_reference
from mmjax.weights.files.safetensors import StoredTensor
from mmjax.weights.load import match_tensors
from tests.families.deepseek_ocr2 import DEEPSEEK_OCR2, ENCODER, SAM, TEXT, TINY, tiny_config
from tests.families.tiny import Media, TinyModel, Words
from tests.kit import draw
from tests.oracle import assert_close

SAM_MODEL = r"vision_tower\.sam_encoder\."
NAMES = [
    (SAM_MODEL + r"layers\.(\d+)\.layer_norm", r"sam_model.blocks.\1.norm"),
    (SAM_MODEL + r"layers\.", "sam_model.blocks."),
    (SAM_MODEL + r"patch_embed\.projection", "sam_model.patch_embed.proj"),
    (SAM_MODEL + r"neck\.conv1", "sam_model.neck.0"),
    (SAM_MODEL + r"neck\.layer_norm1", "sam_model.neck.1"),
    (SAM_MODEL + r"neck\.conv2", "sam_model.neck.2"),
    (SAM_MODEL + r"neck\.layer_norm2", "sam_model.neck.3"),
    (SAM_MODEL + r"proj\.conv1", "sam_model.net_2"),
    (SAM_MODEL + r"proj\.conv2", "sam_model.net_3"),
    (SAM_MODEL, "sam_model."),
    (r"vision_tower\.vision_encoder\.", "qwen2_model.model.model."),
    (r"vision_tower\.query_(\d+)_resolution", r"qwen2_model.query_\1"),
    (r"multi_modal_projector\.", "projector.layers."),
    ("view_separator", "view_seperator"),
    (r"model\.language_model\.", "model."),
]
"""HF's names, and DeepSeek's, as HF's conversion has them."""
RAW: dict[str, Any] = {
    "architectures": ["DeepseekOCR2ForCausalLM"],
    "auto_map": {"AutoModel": "modeling_deepseekocr2.DeepseekOCR2ForCausalLM"},
    "model_type": "deepseek_vl_v2",
    "candidate_resolutions": [[1024, 1024]],
    "tile_tag": "2D",
    "global_view_pos": "head",
    "torch_dtype": "bfloat16",
    "projector_config": {"input_dim": 896, "n_embed": 1280, "projector_type": "linear"},
    "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "kv_lora_rank": None,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 896,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 10,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 12,
        "num_key_value_heads": 10,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "topk_group": 1,
        "topk_method": "greedy",
        "torch_dtype": "bfloat16",
        "use_mla": False,
        "v_head_dim": 0,
        "vocab_size": 129280,
    },
    "vision_config": {
        "image_size": 1024,
        "mlp_ratio": 3.7362,
        "model_name": "deepencoderv2",
        "model_type": "vision",
        "width": {
            "qwen2-0-5b": {"dim": 896},
            "sam_vit_b": {
                "downsample_channels": [512, 1024],
                "global_attn_indexes": [2, 5, 8, 11],
                "heads": 12,
                "layers": 12,
                "width": 768,
            },
        },
    },
}
"""The published config.json, without keys that nothing depends on."""


def to_original(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of HF's module under DeepSeek's names: its experts lie apart."""
    for name, tensor in tensors.items():
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        stem, _, last = name.rpartition(".experts.")
        if not stem:
            yield name, tensor
            continue
        parts = ("gate", "up") if last == "gate_up_proj" else ("down",)
        for number, expert in enumerate(tensor):
            for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{stem}.experts.{number}.{part}_proj.weight", matrix


def write_config(path: Path, raw: Mapping[str, Any]) -> Any:
    (path / "config.json").write_text(json.dumps(raw))
    return load_model_config(str(path))


def test_the_published_config_is_hfs_and_every_tensor_has_one_place(tmp_path: Path):
    found = write_config(tmp_path, RAW)
    assert found.architecture == "DeepseekOcr2ForConditionalGeneration"
    assert load_generation_defaults(found).eos_token_ids == (1,)
    config = found.hf_config
    with torch.device("meta"):
        module = DeepseekOcr2ForConditionalGeneration(config)
    stored = [
        StoredTensor(name, "model.safetensors", tuple(tensor.shape), "BF16", None)
        for name, tensor in to_original(module.state_dict())
    ]
    assert len({one.name for one in stored}) == len(stored)
    abstract = flatten_params(build_abstract(Model, config, dtype=jnp.bfloat16)[1])
    assert match_tensors(stored, abstract, Model.rules(config), source="here").keys() == {*abstract}
    read, places = (
        sum(int(np.prod(one.shape)) for one in tensors) for tensors in (stored, abstract.values())
    )
    assert read == places == pytest.approx(3.39e9, rel=0.01)


def test_a_tiny_checkpoint_in_deepseeks_layout_says_what_hf_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = TinyModel(TINY)
    rope = {"rope_theta": ENCODER["rope_parameters"]["rope_theta"]}
    sizes = {name: value for name, value in ENCODER.items() if name != "rope_parameters"}
    monkeypatch.setattr(original_config, "QUERY_ENCODER", {**sizes, **rope})
    sam = {name: SAM[name] for name in ("patch_size", "output_channels", "mlp_dim")}
    monkeypatch.setattr(original_config, "SAM_DEFAULTS", sam)
    raw = json.loads(json.dumps(RAW))
    raw["language_config"] |= {
        **TEXT,
        "num_key_value_heads": TEXT["num_attention_heads"],
        "mlp_layer_types": None,
    }
    raw["vision_config"] |= {
        "image_size": SAM["image_size"],
        "width": {
            "qwen2-0-5b": {"dim": ENCODER["hidden_size"]},
            "sam_vit_b": {
                "downsample_channels": SAM["downsample_channels"],
                "global_attn_indexes": SAM["global_attn_indexes"],
                "heads": SAM["num_attention_heads"],
                "layers": SAM["num_hidden_layers"],
                "width": SAM["hidden_size"],
            },
        },
    }
    tensors = {
        name: np.ascontiguousarray(tensor.numpy())
        for name, tensor in to_original(model.reference.state_dict())
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = write_config(tmp_path, raw).hf_config
    ours = PagedModel.from_directory(tmp_path, Model, found, max_len=640)
    for parts in ((Media(1), Words(1, 7)), (Words(1, 7), Words(2, 2))):
        sample = model.draw_sample(parts)
        inputs = TINY.torch_inputs(model.reference, sample)
        assert_close(ours.run(sample), run_reference(model.reference, inputs, model.rules))


def test_an_answers_boxes_are_parsed_of_one_picture_alone():
    processor = create_processor(str(DEEPSEEK_OCR2.path()))
    tokenizer = processor.info.get_tokenizer()
    answer = tokenizer.encode("<|ref|>a<|/ref|><|det|>[[0, 0, 999, 999]]<|/det|>")
    image = draw(90, 70)
    for number, expected in (
        (1, {"boxes": {"bboxes": [[0, 0, 90, 70]], "labels": ["a"]}}),
        (2, {}),
    ):
        prepared = processor.prepare("<image>" * number, {"image": [image] * number})
        parse = prepared.parse_answer
        assert (parse(answer) if parse is not None else {}) == expected


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"max_patches": 7}, "`max_patches` is 7 .*it must be a number of tiles from 1 to 6"),
        ({"min_patches": True}, "`min_patches` is True"),
        ({"min_patches": 4, "max_patches": 3}, "`min_patches` is 4 .*it must be at most"),
        ({"crop_to_patches": False}, "crop_to_patches"),
    ],
)
def test_kwargs_that_no_picture_can_have(kwargs: dict[str, Any], match: str):
    processor = create_processor(str(DEEPSEEK_OCR2.path()))
    with pytest.raises(RequestError, match=match):
        processor.apply("<image>", {"image": draw(200, 90)}, hf_processor_mm_kwargs=kwargs)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sam": {"image_size": 96}}, "`sam_config.image_size` is 96"),
        ({"sam": {"use_rel_pos": False}}, "`use_rel_pos` of SAM's config is false"),
        ({"sam": {"downsample_channels": [20, 28]}}, "`sam_config.downsample_channels`"),
        (
            {"encoder": {"use_sliding_window": True, "max_window_layers": 1}},
            "`encoder_config.layer_types`",
        ),
        ({"text": {"mlp_layer_types": ["sparse", "dense"]}}, "`mlp_layer_types`"),
        ({"text": {"mlp_bias": True}}, "mlp_bias"),
    ],
)
def test_configs_that_are_not_served(settings: dict[str, Any], match: str):
    def build(config: Any) -> None:
        Model.host_inputs(config)
        build_abstract(Model, config, dtype=jnp.float32)

    with pytest.raises(CheckpointError, match=match):
        build(tiny_config(**settings))


def test_a_decoder_with_latents_is_refused(tmp_path: Path):
    raw = {**RAW, "language_config": {**RAW["language_config"], "use_mla": True}}
    with pytest.raises(CheckpointError, match="use_mla"):
        write_config(tmp_path, raw)


@pytest.mark.slow  # logits and tokens of both are compared by default
def test_a_page_is_answered_with_tiles_and_without(tmp_path: Path):
    """With int8, too: what a picture's tiles say changes the answer."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 640}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    image = draw(190, 90)
    data = {"image": image}
    with LLM(
        DEEPSEEK_OCR2.checkpoint, use_tqdm_on_load=False, quantization="int8", **settings
    ) as llm:
        prompts: list[Any] = [
            {
                "prompt": "<image>\nwhat is it",
                "multi_modal_data": data,
                "mm_processor_kwargs": kwargs,
            }
            for kwargs in ({}, {"min_patches": 1, "max_patches": 1})
        ]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    answers = [tuple(output.outputs[0].token_ids) for output in outputs]
    lengths = [len(output.prompt_token_ids or ()) for output in outputs]
    assert lengths[0] - lengths[1] == 144  # of two tiles and of one
    assert answers[0] != answers[1]
