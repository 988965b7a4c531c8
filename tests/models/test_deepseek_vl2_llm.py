"""DeepSeek-VL2 from a directory: a chat and a prompt about images answer as the published code."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmjax import LLM, SamplingParams
from mmjax.models.deepseek_vl2.processor import CHAT_TEMPLATE

PATH = Path(__file__).parent.parent / "golden_models" / "deepseek_vl2_tiny"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.slow
def test_chats_and_prompts_about_images():
    path = PATH
    cases = json.loads((path / "expected.json").read_text())["generation"]
    sizes = {"max_model_len": 160, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    template = "{{ bos_token }}" + CHAT_TEMPLATE
    with LLM(str(path), use_tqdm_on_load=False, chat_template=template, **sizes) as llm:
        wide, two = cases["wide"], cases["two_images"]
        images = [Image.open(PATH / "images" / Path(image).name) for image in two["images"]]
        content: Any = [
            {"type": "image_pil", "image_pil": images[0]},
            {"type": "text", "text": "what colors are in the photo?"},
        ]
        (chat,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
        data: Any = {"prompt": two["prompt"], "multi_modal_data": {"image": images}}
        (prompt,) = llm.generate(data, GREEDY, use_tqdm=False)
        for output, case in ((chat, wide), (prompt, two)):
            assert list(output.prompt_token_ids) == case["input_ids"]
            assert list(output.outputs[0].token_ids) == case["greedy_token_ids"]
        assert llm.engine.compilations == 0
