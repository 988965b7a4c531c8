"""LFM3-VL's prompt side: grids, and each step of a video has its second before it, as Qwen3-VL's.

Before: `<|vision_start|> <|video_pad|> <|vision_end|>`. After: `<|vision_start|>`, then for each
step of the video `<0.3 seconds> <|vision_start|> <|video_pad|>*N <|vision_end|>`, of which the pads
take embeddings, then `<|vision_end|>`.
"""

from mmjax.models.family import make_factories
from mmjax.models.grid_family import VISION_PARTS, StampedGridInfo
from mmjax.models.lfm3_vl.host_inputs import Lfm3VLHostInputs
from mmjax.processing.chat_turns import write_chatml


class Lfm3VLProcessingInfo(StampedGridInfo):
    chat_template = write_chatml(VISION_PARTS, "{{- bos_token -}}")
    host_inputs = Lfm3VLHostInputs


FACTORIES = make_factories(Lfm3VLProcessingInfo)
