"""GOT-OCR 2's prompts, which HF's processor writes itself where a picture comes alone."""

from pathlib import Path

from mmjax.frontend.prompt.chat import ChatParser
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor
from tests.families.got_ocr2 import hf_processor, path
from tests.kit import draw


def ask(directory: Path, text: str) -> list[int]:
    """Return the token ids of a question about a picture."""
    processor = InputProcessor(load_model_config(str(directory)))
    try:
        parser = ChatParser.for_model(processor, are_objects_allowed=True)
        image = {"type": "image_pil", "image_pil": draw(40, 30)}
        message = {"role": "user", "content": [image, {"type": "text", "text": text}]}
        return processor.explain(parser.parse([message])).prompt_token_ids
    finally:
        processor.close()


def test_a_question_is_what_hf_writes_of_a_picture_alone():
    # HF's has a space where the box or the colour would be.
    for text, settings in ((" OCR: ", {}), (" OCR with format: ", {"format": True})):
        hf = hf_processor()(images=draw(40, 30), return_tensors="np", **settings)
        assert ask(path(), text) == hf["input_ids"][0].tolist()


def test_an_answer_ends_with_its_turn():
    info = create_processor(path()).info
    assert info.get_ending_token_ids() == (info.get_token_id("<|im_end|>"),)
