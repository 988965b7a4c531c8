"""Encoder-decoder models: media and updates in the encoder's prompt, the decoder's beside it."""

from typing import Any

import pytest

from mmjax.errors import RequestError, RequestTypeError, RequestValueError
from mmjax.processing import EncDecMultiModalProcessor, PromptIndexTargets, PromptInsertion
from tests.kit import draw
from tests.processing.test_prepare import RecordingCache
from tests.processing.test_processor import SOFT, TOKENIZER, Processor, ids, make

EOS = TOKENIZER.eos_token_id
INSERTION = PromptInsertion("image", PromptIndexTargets.start(), [SOFT] * 3)


class EncDec(EncDecMultiModalProcessor[Any], Processor):
    updates = (INSERTION,)

    def create_encoder_prompt(self, prompt: Any, mm_items: Any) -> Any:
        return prompt

    def _hf_processor_applies_updates(self, *args: Any, **kwargs: Any) -> bool:
        return False


def make_encdec(cache: Any = None, **changes: Any) -> Any:
    return make(cache, base=EncDec, **changes)


@pytest.mark.parametrize("cache", [None, RecordingCache()])
def test_media_stand_in_the_encoders_prompt(cache: Any):
    processor = make_encdec(cache)
    inputs = processor.apply("a cat", {"image": draw(3, 2)})
    assert inputs.encoder_prompt_token_ids == [SOFT] * 3 + ids("a cat")
    assert inputs.prompt_token_ids == ids("a cat", special=False)
    (placeholder,) = inputs.mm_placeholders["image"]
    assert (placeholder.offset, placeholder.length) == (0, 3)
    assert inputs.prompt == "a cat"


def test_a_family_makes_both_prompts_of_one():
    processor = make_encdec(
        create_encoder_prompt=lambda self, prompt, mm_items: f"x{len(mm_items['image'])}",
        create_decoder_prompt=lambda self, prompt, mm_items: [EOS],
    )
    inputs = processor.apply([5, 6], {"image": draw(3, 2)})
    assert inputs.encoder_prompt_token_ids == [SOFT] * 3 + ids("x1")
    assert inputs.prompt_token_ids == [EOS]
    assert inputs.prompt is None


@pytest.mark.parametrize("decoder_prompt", ["dog", ids("dog", special=False)])
def test_the_caller_may_give_the_decoders_prompt(decoder_prompt: Any):
    processor = make_encdec(create_decoder_prompt=lambda self, prompt, mm_items: [EOS])
    prepared = processor.prepare("cat", {"image": draw(3, 2)}, decoder_prompt=decoder_prompt)
    assert prepared.prompt_token_ids == ids("dog", special=False)
    assert prepared.encoder_prompt_token_ids == [SOFT] * 3 + ids("cat")
    assert processor.commit(prepared).prompt_token_ids == prepared.prompt_token_ids


@pytest.mark.parametrize(
    ("decoder_prompt", "error"),
    [([10**6], RequestValueError), ("\ud800", RequestValueError), ([True], RequestTypeError)],
)
def test_a_wrong_decoder_prompt_is_named(decoder_prompt: Any, error: type[RequestError]):
    with pytest.raises(error, match=r"^decoder_prompt ") as caught:
        make_encdec().apply("cat", {}, decoder_prompt=decoder_prompt)
    assert caught.value.param == "decoder_prompt"


def test_an_item_is_rebuilt_as_elsewhere():
    cache = RecordingCache()
    processor = make_encdec(cache)
    processor.apply("cat", {"image": draw(3, 2)})
    prepared = processor.prepare("cat", {"image": draw(3, 2)})
    assert not prepared.fresh
    rebuilt = processor.rebuild(prepared, prepared.mm_hashes["image"])
    assert rebuilt.encoder_prompt_token_ids == prepared.encoder_prompt_token_ids
    cache.items.clear()
    assert processor.commit(rebuilt).mm_kwargs["image"][0] is not None
