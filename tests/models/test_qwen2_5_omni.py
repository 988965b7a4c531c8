"""Qwen2.5-Omni's own: a checkpoint of the whole model, of which the thinker alone is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import Qwen2_5OmniConfig

from mmjax import LLM, SamplingParams
from tests.families.qwen2_5_omni import CLIP, IMAGE, QWEN2_5_OMNI
from tests.kit import draw
from tests.models.test_clip_laws import RATE, draw_clip

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


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
