"""Tiny Qwen2-VL directories, as the hub has them: through `LLM`, and through the parity tool."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmjax import LLM, SamplingParams
from mmjax.parity.reference import load_reference, make_pixels
from tests.families.qwen2_vl import VIDEO, hf_processor, make_processor
from tests.families.qwen2_vl import write as write_qwen2_vl
from tests.kit import draw

MAX_TOKENS = 8
QUESTION = "what color is the circle?"


def test_the_engine_says_what_hf_says(tmp_path: Path):
    path = write_qwen2_vl(tmp_path)
    reference = load_reference(path, "Qwen2VLForConditionalGeneration")
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
    data = make_pixels(found.mm_kwargs.get_data())
    tensors = {name: torch.tensor(value) for name, value in data.items()}
    ids = torch.tensor([video_output.prompt_token_ids])
    tensors |= {"input_ids": ids, "mm_token_type_ids": (ids == 999).int() * 2}
    assert video_output.outputs[0].token_ids == answer(tensors)
