"""The prompt side of GLM-4.1V, 4.5V, 4.6V and GLM-OCR: grids, whose steps have seconds behind them.

Before: `<|begin_of_image|> <|image|> <|end_of_image|>`. After: `<|begin_of_image|> <|image|>*N
<|end_of_image|>`, all N take embeddings; N is the item's grid over merge_size^2. A video's
`<|video|>` becomes such an image for each step, and its second: `12`, GLM-4.6V's `12.5 seconds`.

GLM-V's images and videos -> patches: which frames are seen, and how large they are.

As HF's `Glm4vVideoProcessor` and `Glm46VVideoProcessor`, which need torchvision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mmjax.models.family import make_factories
from mmjax.models.glm4v.host_inputs import Glm4vHostInputs
from mmjax.models.grid_family import StampedGridInfo
from mmjax.models.grid_inputs import GridHostInputs
from mmjax.processing.answers import GLM
from mmjax.processing.chat_turns import write_parts, write_turns
from mmjax.processing.image_processors.frames import FrameSampling, Timing
from mmjax.processing.image_processors.patches import ImagePatcher
from mmjax.processing.image_processors.sampled_videos import SampledVideoPatcher


class GlmImagePatcher(ImagePatcher):
    """HF's image processor, whose numbers of pixels are of all frames of a patch together."""

    def get_frame_pixels(self, kwargs: Mapping[str, Any]) -> int:
        """Return the largest number of pixels of an image."""
        return self.get_pixel_limits(kwargs)[1] // self.hf.temporal_patch_size


@dataclass(frozen=True, kw_only=True)
class Glm4vSampling(FrameSampling):
    """So many frames a second; of longer videos than `max_duration`, as many as of that."""

    fps: int | float = 2
    max_duration: int | float = 300
    max_frames: int | None = 640
    """What memory is planned for."""

    requested = frozenset({"do_sample_frames", "fps"})

    def choose(self, timing: Timing) -> np.ndarray:
        return make_even(self.choose_once(timing, read_duration(timing)))

    def choose_once(self, timing: Timing, duration: int | float) -> np.ndarray:
        """Return frames' places in their order; the same may come again."""
        total, most = timing.total, int(self.max_duration * self.fps)
        if duration > self.max_duration:
            if most >= total:
                return np.arange(total)
            places = np.ceil(np.linspace(0, duration, most) * timing.fps)
        else:
            number = max(math.floor(duration * self.fps), 1)
            if self.fps >= 2 * timing.fps:  # not one is left out
                last = math.ceil((number - 1) * timing.fps / self.fps)
                return np.arange(min(last, total - 1) + 1)
            places = np.ceil(np.arange(min(number, 2 * total)) * timing.fps / self.fps)
        return np.minimum(places, total - 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Glm46VSampling(Glm4vSampling):
    """Fewer frames a second, the longer a video is."""

    temporal_patch_size: int = 2

    requested = frozenset({"do_sample_frames"})

    def choose_once(self, timing: Timing, duration: int | float) -> np.ndarray:
        shown = min(duration, 2400)
        per_second = (3 if shown <= 30 else 1 if shown <= 300 else 0.5) * self.temporal_patch_size
        wanted = max(min(int(shown * per_second), 640), 1)
        last = timing.total - 1
        if timing.total < wanted:
            return np.linspace(0, last, wanted, dtype=np.int64)
        places: list[int] = []
        second, step = 0.0, 1 / per_second
        for place in range(timing.total):
            # As HF: the product, not the quotient, decides.
            if place * (1 / timing.fps) >= second:
                second += step
                places.append(place)
                if second >= int(duration):
                    break
        if len(places) < wanted:
            return np.linspace(places[0], places[-1], wanted, dtype=np.int64)
        if len(places) > wanted:
            return np.linspace(0, last, wanted, dtype=np.int64)
        return np.array(places)


class Glm4vVideoPatcher(SampledVideoPatcher):
    """GLM-4.1V's and GLM-4.5V's."""

    sampling = Glm4vSampling()

    def time_steps(self, seconds: np.ndarray) -> np.ndarray:
        """Return float64[steps] of [steps, depth]: those of the first frames."""
        return seconds[:, 0]


class Glm46VVideoPatcher(Glm4vVideoPatcher):
    """GLM-4.6V's."""

    sampling = Glm46VSampling()


def read_duration(timing: Timing) -> int | float:
    """Return the seconds of a video, guessed where nobody says them."""
    return timing.duration or round((timing.total - 1) / timing.fps) + 1


def make_even(places: np.ndarray) -> np.ndarray:
    """Return each place once, and the last one twice where their number is odd."""
    once = np.unique(places)
    return np.concatenate([once, once[-1:]]) if len(once) % 2 else once


CHAT_TEMPLATE = write_turns(
    start=r"'<|' + message.role + '|>\n'",
    content=write_parts(
        image="<|begin_of_image|><|image|><|end_of_image|>",
        video="<|begin_of_video|><|video|><|end_of_video|>",
    ),
    answer=r"'<|assistant|>\n'",
    first="{{- '[gMASK]<sop>' -}}",
)


class Glm4vProcessingInfo(StampedGridInfo):
    chat_template = CHAT_TEMPLATE
    host_inputs = Glm4vHostInputs
    answer_form = GLM
    image_processors: ClassVar = {"Glm4v": "glm4v"}
    image_patcher = GlmImagePatcher
    video_defaults: ClassVar = {
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30_000}
    }
    placeholders: ClassVar = {
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    }
    marks = ("image_start_token_id", "image_end_token_id")
    has_time_behind = True

    def get_embed_token_id(self, modality: str) -> int:
        """Return `<|image|>`, at whose places videos go, too."""
        return self.get_hf_config().image_token_id

    def get_target(self, modality: str) -> list[int]:
        return [getattr(self.get_hf_config(), f"{modality}_token_id")]

    def choose_video_patcher(self, settings: Mapping[str, Any]) -> type[Glm4vVideoPatcher]:
        """Return GLM-4.6V's where the files name its processors: its config.json may be 4.5V's."""
        named = [settings.get("video_processor_type"), settings.get("processor_class")]
        named += [self.processor_settings.get("processor_class"), self._architecture]
        name = next(filter(None, named))
        return Glm46VVideoPatcher if name.startswith("Glm46V") else Glm4vVideoPatcher

    @property
    def _architecture(self) -> str:
        return self.ctx.model_config.architecture

    def write_time(self, second: float) -> str:
        is_4_6 = isinstance(self.get_hf_processor().video_processor, Glm46VVideoPatcher)
        return f"{second:.1f} seconds" if is_4_6 else f"{int(second)}"


class GlmGroundingProcessingInfo(Glm4vProcessingInfo):
    """GLM-4.5V's and 4.6V's, which were trained to find what is described."""

    tasks: ClassVar = {
        "Boxes": "Help me to locate {the red cup} in the image and give me its bounding boxes."
    }


class GlmOcrProcessingInfo(Glm4vProcessingInfo):
    host_inputs = GridHostInputs
    answer_form = None
    tasks: ClassVar = {
        "Read text": "Text Recognition:",
        "Table": "Table Recognition:",
        "Formula": "Formula Recognition:",
    }


FACTORIES = make_factories(Glm4vProcessingInfo)
GROUNDING_FACTORIES = make_factories(GlmGroundingProcessingInfo)
OCR_FACTORIES = make_factories(GlmOcrProcessingInfo)
