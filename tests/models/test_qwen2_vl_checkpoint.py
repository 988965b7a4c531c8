"""Tiny Qwen2-VL directories, as the hub has them: through `LLM`, and through the parity tool."""

from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from mmjax import LLM, SamplingParams
from mmjax.parity.__main__ import main
from mmjax.weights.safetensors import open_safetensors
from tests.kit import draw
from tests.models.families.qwen2_vl import CLASSES, QWEN2_VL
from tests.processing.families.family import GOLDEN, edit_golden
from tests.processing.families.qwen2_vl import VIDEO, hf_processor, make_processor

QWEN2_5: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "text_config.model_type": "qwen2_5_vl_text",
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}
MAX_TOKENS = 8
QUESTION = "what color is the circle?"


def write_weights(path: Path) -> Any:
    """Write random weights beside config, tokenizer and processor files; return HF's model."""
    config = AutoConfig.from_pretrained(path)
    model = CLASSES[config.model_type][0](config).eval()
    QWEN2_VL.fill(model)
    model.generation_config = GenerationConfig(pad_token_id=992)
    model.save_pretrained(path)
    return model


def test_the_engine_says_what_hf_says(tmp_path: Path):
    path = Path(copytree(GOLDEN / "qwen2_vl", tmp_path / "qwen2_vl"))
    reference = write_weights(path)
    picture = draw(90, 60)
    content: list[Any] = [
        {"type": "image_pil", "image_pil": picture},
        {"type": "text", "text": QUESTION},
    ]
    frames = np.stack([np.asarray(draw(60, 60, seed)) for seed in range(4)])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 128}
    with LLM(str(path), use_tqdm_on_load=False, **sizes) as llm:
        (chat,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        video: Any = {"prompt": f"a {VIDEO} b", "multi_modal_data": {"video": [frames]}}
        (video_output,) = llm.generate(video, params, use_tqdm=False)
        assert llm.engine.compilations == 0

    def answer(inputs: Any) -> list[int]:
        with torch.no_grad():
            out = reference.generate(**inputs, do_sample=False, max_new_tokens=MAX_TOKENS)
        return out[0, inputs["input_ids"].shape[1] :].tolist()

    inputs = hf_processor()(text=chat.prompt, images=[picture], return_tensors="pt")
    assert chat.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert chat.outputs[0].token_ids == answer(inputs)

    # HF processes no videos without torchvision: our processor's patches, for HF's model.
    found = make_processor().apply(video["prompt"], video["multi_modal_data"])
    tensors = {name: torch.tensor(value) for name, value in found.mm_kwargs.get_data().items()}
    ids = torch.tensor([video_output.prompt_token_ids])
    tensors |= {"input_ids": ids, "mm_token_type_ids": (ids == 999).int() * 2}
    assert video_output.outputs[0].token_ids == answer(tensors)


def test_the_parity_tool_runs_on_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = edit_golden("qwen2_vl", tmp_path, config=QWEN2_5)
    write_weights(path)
    with open_safetensors(path) as tensors:
        names = set(tensors)
    assert {"visual.merger.mlp.0.weight", "model.layers.0.mlp.up_proj.weight"} <= names
    arguments = [str(path), "--prompts", QUESTION, "--num-images", "0", "2"]
    assert main([*arguments, "--max-tokens", "4", "--max-len", "256"]) == 0
    said = capsys.readouterr().out
    assert "parity: yes" in said
    assert "visual.blocks.1" in said
