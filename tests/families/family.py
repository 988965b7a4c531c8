"""What a row of the table is: a served family (or a layout of its checkpoints), as laws ask it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer
from transformers.video_processing_utils import VideoProcessorMixin

from mmjax.models.registry import MODELS
from mmjax.processing import BaseMultiModalProcessor, MultiModalInputs
from mmjax.processing.prepared import ProcessorCache
from tests.families.directories import GOLDEN, golden_processor, made_once, with_weights
from tests.families.published import Published
from tests.families.tiny import TinyFamily


class HFInputs(NamedTuple):
    """What the HF processor makes of a prompt and its images."""

    input_ids: list[int]
    tensors: Mapping[str, Any]


CHATML = (
    "<|im_start|>user\n{image}what is it<|im_end|>\n"
    "<|im_start|>assistant\na car<|im_end|>\n"
    "<|im_start|>user\nwhich color<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""`rendered` of several families."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One row of the laws."""

    name: str
    """Of the row: the folder in `mmjax/models` unless that has several rows."""
    architecture: str
    """Of the checkpoint: a row of `mmjax.models.registry.MODELS`."""
    tiny: TinyFamily | None = None
    """HF's tiny random model and prompts for its arrays; of one row of a family's at least."""
    has_reference: bool = True
    """Whether transformers has a class of the model."""

    published: Published = field(default_factory=Published)
    """How published files name tensors: `tests/models/published.json` has their sizes."""

    # Its directories.
    is_written: bool = False
    """Whether tests write its directory: no golden one, and HF's answers are made anew."""
    path: Callable[[], Path]
    """Makes, once, a directory whose config, tokenizer and processor files are read."""
    write: Callable[[Path], Path]
    """Writes a checkpoint, weights included, into an empty folder; returns its directory."""
    needless_files: frozenset[str] = frozenset()
    """Files in `path()` without which prompts are processed: the family has a default."""
    llm_settings: Mapping[str, Any] = field(
        default_factory=lambda: {
            "max_num_seqs": 2,
            "max_num_batched_tokens": 64,
            "max_model_len": 1024,
        }
    )
    """Settings of `LLM` under which few programs are compiled and two images fit."""
    question: str = "what color is the circle"
    """A text that the model takes beside an image."""
    probed: tuple[str, ...] = ()
    """Modules of towers and connectors that the parity command must compare."""

    # Its prompts.
    rendered: str
    """What `tests/frontend/test_family_templates.py` says, where a checkpoint has no template."""
    with_system: tuple[str, str] | None = ("", "")
    """What of it a system's message changes: this, and to what; None: it is refused."""
    call_hf: Callable[[str, list[Any], Mapping[str, Any]], HFInputs]
    """(prompt, images, processor kwargs) -> what HF makes of them."""
    embed_token_ids: Callable[[BaseMultiModalProcessor[Any]], Sequence[int]] = lambda processor: [
        processor.info.get_hf_config().image_token_id
    ]
    """The ids that stand where embeddings go, and nowhere else."""
    placeholder: str = ""
    """What a text prompt has for each image; empty where it has nothing."""
    video: str = ""
    """What a text prompt has for each video; empty where it takes none."""
    video_pixels: str = "pixel_values_videos"
    """What HF calls the pixels of a prompt with a video alone."""
    load_hf_videos: Callable[[], Any] | None = None
    """HF's processor, whose video processor is a stand-in (`hf_videos.py`); None: HF has none."""
    max_videos: int = 8
    """In a prompt."""
    video_kwargs: tuple[dict[str, Any], ...] = ({},)
    """Processor kwargs under which dummy videos have the declared maximum."""
    takes_embeds: bool = True
    """Whether `image_embeds` alone stand for an image."""
    min_images: int = 0
    """In a prompt that HF's model takes."""
    max_images: int = 8
    extra_kwargs: tuple[dict[str, Any], ...] = ({},)
    """Processor kwargs under which the laws must hold too."""
    operator_kwargs: tuple[Mapping[str, Any], ...] = ()
    """An operator's processor kwargs under which the dummy inputs have the declared maximum."""
    lowering_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """An operator's kwargs under which an item has fewer embeddings; empty where none can."""
    tensors: Mapping[str, float] = field(default_factory=lambda: {"pixel_values": 1e-6})
    """Tensors that equal HF's, each with its largest absolute difference."""
    colours_last: bool = False
    """Whether a patch's pixels have their three colours side by side."""
    pixels_dtype: str = "uint8"
    """Of what crosses to P1, before rescaling and normalising."""
    updates_encoder_prompt: bool = False
    """Whether images stand in the encoder's prompt (encoder-decoder models)."""
    sizes: tuple[tuple[int, int], tuple[int, int]] = ((90, 70), (37, 211))
    """Width and height of the pictures about which `tests/models/test_hf_answers.py` asks."""
    has_pixel_counts: bool = False
    """Whether its processor's `size` has numbers of pixels, and no sides."""
    takes_size: Callable[[int, int], bool] = lambda width, height: True
    """Whether HF's processor itself takes a picture of (width, height): some refuse slivers."""
    contradictions: tuple[tuple[str, Mapping[str, Any], str], ...] = ()
    """Files of `path()`, by their stems, edits by which they are refused, and what is said then."""
    takes_length: Callable[[int], bool] = lambda num_samples: True
    """Whether a clip of so many samples is taken, at 16,000 a second."""
    clip_lengths: tuple[int, ...] = (16_000, 5_001, 641, 12_345, 9_600)
    """Of clips, in samples: most are no whole number of frames, or of embeddings."""
    words: tuple[str, ...] = (
        *("what", " ", "\n", "\n\n", "the car", "Here", " Here", "ü日", "\t", "!", "  ", "<eos>"),
    )
    """Pieces of text that prompts are made of."""

    @property
    def folder(self) -> str:
        """Its folder in `mmjax/models`."""
        return MODELS[self.architecture].folder

    def make_published_config(self, values: Mapping[str, Any]) -> Any:
        """Return the config that a published config.json has."""
        if self.published.make_config is not None:
            return self.published.make_config(**values)
        assert self.tiny is not None, f"`make_config` of `published` of {self.name}"
        return self.tiny.reference_class.config_class(**values)

    @cached_property
    def checkpoint(self) -> Path:
        """A directory that `write` wrote, once in a process; it must not be changed."""
        return made_once(self.write)()

    @property
    def mm_configs(self) -> list[dict[str, Any]]:
        """Operators' settings under which the dummy inputs have the declared maximum."""
        own = [{"mm_processor_kwargs": kwargs} for kwargs in self.operator_kwargs]
        return [{}, *own, {"trust_request_mm_kwargs": True}]

    @property
    def is_hf_asked(self) -> bool:
        """Whether HF's model takes what HF's processor makes of a prompt, without more ado."""
        return self.has_reference and bool(self.tensors) and not self.updates_encoder_prompt

    @property
    def has_golden(self) -> bool:
        """Whether answers of others are committed in `tests/golden`; else HF's are made anew."""
        return (GOLDEN / self.name / "expected.json").is_file()

    def make_processor(
        self, *, processor_cache: ProcessorCache | None = None, **mm: Any
    ) -> BaseMultiModalProcessor[Any]:
        """Return our processor of `path()`; `mm`: fields of `MultiModalConfig`."""
        return golden_processor(self.name, path=self.path(), processor_cache=processor_cache, **mm)

    def prompt_ids(self, inputs: MultiModalInputs) -> list[int]:
        """Return the token ids in which the placeholders stand."""
        if self.updates_encoder_prompt:
            assert inputs.encoder_prompt_token_ids is not None
            return inputs.encoder_prompt_token_ids
        return inputs.prompt_token_ids


# ---- HF's processors -----------------------------------------------------------------------------


def assemble(
    processor_class: Any,
    image_processor_class: Any,
    path: Path,
    *,
    video_processor: Any = None,
    has_videos: bool = False,
    **settings: Any,
) -> Any:
    """Return HF's processor of a directory, put together where AutoProcessor wants torchvision.

    Args:
        processor_class: HF's, such as `LlavaProcessor`.
        image_processor_class: HF's with PIL, such as `CLIPImageProcessorPil`.
        path: The directory.
        video_processor: Where the class takes one; by default a stub, which processes no videos.
        has_videos: Whether the class takes one.
        settings: Other arguments of the class, which AutoProcessor reads from the directory.
    """

    class WithoutTorchvision(processor_class):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            """Do nothing: HF would refuse any video processor but those of torchvision."""

    parts: dict[str, Any] = {
        "image_processor": image_processor_class.from_pretrained(path),
        "tokenizer": AutoTokenizer.from_pretrained(path),
    }
    if has_videos:
        parts["video_processor"] = video_processor or VideoProcessorMixin()
    return WithoutTorchvision(**parts, **settings)


def hf_of(
    processor_class: Any, image_processor_class: Any, path: Callable[[], Path], **settings: Any
) -> Callable[..., Any]:
    """Return what makes, once, HF's own processor of a directory: `assemble`, apart from ours.

    It may be given HF's video processor, where the class takes one (`has_videos=True`).
    """

    @cache
    def load(video_processor: Any = None) -> Any:
        parts = (processor_class, image_processor_class, path())
        return assemble(*parts, video_processor=video_processor, **settings)

    return load


def call_with_videos(
    processor: Any, prompt: str, images: list[Any], videos: Sequence[Any]
) -> HFInputs:
    """Call HF's processor; `videos` are pairs of frames and metadata."""
    outputs = processor(
        text=[prompt],
        images=images or None,
        videos=[frames for frames, _ in videos],
        video_metadata=[metadata for _, metadata in videos],
        return_tensors="np",
    )
    return HFInputs([int(token_id) for token_id in outputs["input_ids"][0]], outputs)


def call_processor(
    load: Callable[[], Any], prompt: str, images: list[Any], kwargs: Mapping[str, Any]
) -> HFInputs:
    """Call HF's processor, which `load` returns; kwargs are of images."""
    outputs = load()(
        text=[prompt], images=images or None, return_tensors="np", **(kwargs if images else {})
    )
    return HFInputs([int(token_id) for token_id in outputs["input_ids"][0]], outputs)


# ---- rows whose directories tests write ----------------------------------------------------------


def written(
    tiny: TinyFamily, write: Callable[[Path], Path], *hf_classes: Any, **settings: Any
) -> dict[str, Any]:
    """Return the first fields of a family's row, of what is particular to it.

    Args:
        tiny: Its model; the row bears its name.
        write: Writes its directory, without weights, which are `tiny.fill`'s.
        hf_classes: HF's processor and image processor, where they are called as they are.
        settings: Their other arguments, as `hf_of` takes them.
    """
    fields = {
        "name": tiny.name,
        "architecture": tiny.model_class.__name__,
        "tiny": tiny,
        "is_written": True,
        "path": made_once(write),
        "write": with_weights(write, tiny.fill),
    }
    if not hf_classes:
        return fields
    processor, images = hf_classes
    load = hf_of(processor, images, made_once(write), **settings)
    return {**fields, "call_hf": partial(call_processor, load)}
