"""EXAONE 4.5's prompt side: each `<|image_pad|>` or `<|video_pad|>` becomes many."""

from typing import ClassVar

from mmjax.models.exaone4_5.host_inputs import Exaone45HostInputs
from mmjax.models.family import make_factories
from mmjax.models.grid_family import GridInfo
from mmjax.processing.chat_turns import write_parts, write_turns

_MARKS = {
    "image": "<vision><|image_pad|></vision>",
    "video": "<vision><|video_pad|></vision>",
}
CHAT_TEMPLATE = write_turns(
    start=r"'<|' + message.role + '|>\n'",
    content=write_parts(**_MARKS),
    end=r"'<|endofturn|>\n'",
    answer=r"'<|assistant|>\n'",
)
"""Of a checkpoint without its own, which asks for thoughts as well."""


class Exaone45ProcessingInfo(GridInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Exaone45HostInputs
    placeholders: ClassVar = _MARKS


FACTORIES = make_factories(Exaone45ProcessingInfo)
