"""GOT-OCR 2's prompt side: each `<imgpad>` becomes 256 for every tile of a picture.

A prompt is a task, `OCR: ` or `OCR with format: `, about a page or, with a mark for each, several.
"""

from collections.abc import Sequence
from typing import ClassVar

from mmjax.models.family import make_factories
from mmjax.models.got_ocr2.host_inputs import GotOcr2HostInputs
from mmjax.models.tiles import TiledInfo
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.parts import ProcessorOfParts

IMAGE_PAD, TURN_END = "<imgpad>", "<|im_end|>"
_SYSTEM = (
    "{%- if messages[0].role != 'system' -%}"
    r"{{- '<|im_start|>system\nYou should follow the instructions carefully and explain your "
    "answers in detail.<|im_end|>' -}}{%- endif -%}"
)
CHAT_TEMPLATE = write_turns(
    start=r"'<|im_start|>' + message.role + '\n'",
    content=write_parts(image=rf"<img>{IMAGE_PAD}</img>\n"),
    end=f"'{TURN_END}'",
    answer=r"'<|im_start|>assistant\n'",
    first=_SYSTEM,
)
"""As HF's processor writes a prompt of pictures alone; no newline ends a turn."""
_FILES_LEFT_OUT = {"crop_to_patches": False, "min_patches": 1, "max_patches": 12}
"""What HF's GotOcr2Processor asks of its image processor, whatever the checkpoint's files say."""


class GotOcr2ProcessingInfo(TiledInfo):
    chat_template = CHAT_TEMPLATE
    tasks: ClassVar = {"Read text": "OCR: ", "Read text with its format": "OCR with format: "}
    host_inputs = GotOcr2HostInputs
    placeholders: ClassVar = {"image": IMAGE_PAD}

    def get_ending_token_ids(self) -> Sequence[int]:
        """Return the end of a turn, where HF's examples stop an answer."""
        return (self.get_token_id(TURN_END),)

    def load_hf_processor(self) -> ProcessorOfParts:
        self.check_token(IMAGE_PAD)
        parts = super().load_hf_processor()
        for name, value in _FILES_LEFT_OUT.items():
            setattr(parts.image_processor.hf, name, value)
        return parts


FACTORIES = make_factories(GotOcr2ProcessingInfo)
