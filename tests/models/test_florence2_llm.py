"""Florence-2 from a directory: `LLM` against HF's own processor and model."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor

from mmjax import LLM, SamplingParams
from mmjax.parity.reference import generate_reference, load_reference
from tests.families.florence2 import FLORENCE2
from tests.kit import draw

MAX_TOKENS = 8
UNREPEATED = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, no_repeat_ngram_size=size)
    for size in (2, 3)
]


def test_answers_of_a_directory_are_hfs():
    checkpoint = FLORENCE2.checkpoint
    picture = draw(90, 40)
    with LLM(
        str(checkpoint),
        max_num_seqs=2,
        max_num_batched_tokens=8,
        use_tqdm_on_load=False,
    ) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        prompts = [
            {"prompt": "<CAPTION>", "multi_modal_data": {"image": picture}},
            {"prompt": "<OD>", "multi_modal_data": {"image": picture}},
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        unrepeated = llm.generate(prompts, UNREPEATED, use_tqdm=False)
        content = [
            {"type": "image_pil", "image_pil": picture},
            {"type": "text", "text": "<CAPTION>"},
        ]
        (chat,) = llm.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    ours = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert tuple(chat.outputs[0].token_ids) == ours[0]
    assert ours[0] != ours[1]
    reference = load_reference(checkpoint, "Florence2ForConditionalGeneration")
    processor: Any = Florence2Processor(
        CLIPImageProcessorPil.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
        num_additional_image_tokens=1,
        post_processor_config={"pure_text": {}, "description_with_bboxes": {}},
    )
    tasks, sizes = ("<CAPTION>", "<OD>"), (2, 3)
    for output, other, task, size in zip(outputs, unrepeated, tasks, sizes, strict=True):
        inputs = processor(text=[task], images=[picture], return_tensors="pt")
        answer = generate_reference(reference, inputs, MAX_TOKENS)
        assert tuple(output.outputs[0].token_ids) == answer
        text = processor.tokenizer.decode(answer, skip_special_tokens=False)
        assert output.outputs[0].parsed == processor.post_process_generation(
            text, task=task, image_size=picture.size
        )
        with torch.no_grad():
            wanted = reference.generate(
                **inputs, do_sample=False, max_new_tokens=40, no_repeat_ngram_size=size
            )
        assert other.outputs[0].token_ids == wanted[0, 1:].tolist()


def test_answers_begin_with_the_forced_token(tmp_path: Path):
    """Published checkpoints force `<s>` (0), behind which the answers are HF's."""
    path, picture = tmp_path / "model", draw(90, 40)
    shutil.copytree(FLORENCE2.checkpoint, path)
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "forced_bos_token_id": 0}))
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompt = {"prompt": "<OD>", "multi_modal_data": {"image": picture}}
    with LLM(str(path), max_num_seqs=2, max_num_batched_tokens=8, use_tqdm_on_load=False) as llm:
        (output,) = llm.generate(prompt, sampling, use_tqdm=False)
    reference = load_reference(path, "Florence2ForConditionalGeneration")
    processor: Any = Florence2Processor(
        CLIPImageProcessorPil.from_pretrained(path),
        AutoTokenizer.from_pretrained(path),
        num_additional_image_tokens=1,
    )
    inputs = processor(text=["<OD>"], images=[picture], return_tensors="pt")
    with torch.no_grad():
        wanted = reference.generate(
            **inputs, do_sample=False, min_new_tokens=9, max_new_tokens=9, forced_bos_token_id=0
        )
    assert wanted[0, :2].tolist() == [2, 0]
    assert output.outputs[0].token_ids == wanted[0, 2:].tolist()
