"""A tiny Qwen2-VL directory, as the hub has it: a video through `LLM`."""

from typing import Any

import numpy as np
import torch

from mmjax import LLM, SamplingParams
from mmjax.parity.reference import generate_reference, load_reference, make_pixels
from tests.families.qwen2_vl import QWEN2_VL, VIDEO, make_processor
from tests.kit import draw

MAX_TOKENS = 8


def test_the_engine_says_of_a_video_what_hf_says():
    """HF processes no videos without torchvision: our processor's patches, for HF's model."""
    path = QWEN2_VL.checkpoint
    reference = load_reference(path, "Qwen2VLForConditionalGeneration")
    frames = np.stack([np.asarray(draw(60, 60, seed)) for seed in range(4)])
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    sizes = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 128}
    video: Any = {"prompt": f"a {VIDEO} b", "multi_modal_data": {"video": [frames]}}
    with LLM(str(path), use_tqdm_on_load=False, **sizes) as llm:
        (output,) = llm.generate(video, params, use_tqdm=False)
        assert llm.engine.compilations == 0
    found = make_processor().apply(video["prompt"], video["multi_modal_data"])
    data = make_pixels(found.mm_kwargs.get_data())
    tensors = {name: torch.tensor(value) for name, value in data.items()}
    ids = torch.tensor([output.prompt_token_ids])
    tensors |= {"input_ids": ids, "mm_token_type_ids": (ids == 999).int() * 2}
    assert tuple(output.outputs[0].token_ids) == generate_reference(reference, tensors, MAX_TOKENS)
