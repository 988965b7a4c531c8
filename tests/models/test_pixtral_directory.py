"""Pixtral from a checkpoint's directory, through `LLM`: HF's processor of it wants torchvision."""

from typing import Any

from mmjax import LLM, SamplingParams
from mmjax.models.model_source import load_model_config
from mmjax.parity.case import Case, Parity
from mmjax.parity.reference import generate_reference
from tests.families.pixtral import PIXTRAL
from tests.kit import draw

TEXT = "what color is the circle"


def open_llm(**settings: Any) -> LLM:
    sizes = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return LLM(
        PIXTRAL.checkpoint,
        enable_mm_embeds=True,
        use_tqdm_on_load=False,
        **sizes,
        **settings,
    )


def conversation(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]


def of_pictures(pictures: list[Any]) -> list[Any]:
    return conversation(*({"type": "image_pil", "image_pil": picture} for picture in pictures))


def chat(llm: LLM, messages: list[Any]) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (output,) = llm.chat(messages, greedy, use_tqdm=False)
    return list(output.prompt_token_ids), list(output.outputs[0].token_ids)


def expect(pictures: list[Any]) -> tuple[list[int], list[int]]:
    """Return the prompt of our processor, and HF's answer."""
    parity = Parity(load_model_config(str(PIXTRAL.checkpoint)), max_len=64)
    prompt = parity.write_prompt(TEXT, len(pictures))
    inputs = dict(parity.process_reference(Case(name="", prompt=prompt, images=pictures)))
    for name in ("input_ids", "attention_mask"):
        # The chat template, not the tokenizer, says how a conversation begins.
        inputs[name] = inputs[name][:, 1:]
    answer = generate_reference(parity.reference, inputs, 8)
    return inputs["input_ids"][0].tolist(), list(answer)


def test_pixtrals_answers_are_hfs():
    pictures = [draw(90, 40), draw(20, 30)]
    with open_llm() as llm:
        assert chat(llm, of_pictures(pictures)) == expect(pictures)
        assert llm.engine.compilations == 0


def test_text_alone_needs_no_tower():
    """Nor does an engine that takes embeddings, of a tower whose pictures have any size."""
    with open_llm(limit_mm_per_prompt={"image": 0}) as llm:
        assert chat(llm, conversation()) == expect([])
