"""What laws and goldens need to know of a family, and how its golden processor is made."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

from mmjax.config.engine_config import ModelConfig, MultiModalConfig
from mmjax.models.model_source import load_model_config
from mmjax.models.registry import create_processor, get_processor_factories
from mmjax.processing import BaseMultiModalProcessor, MultiModalInputs
from mmjax.processing.processor import ProcessorCache

GOLDEN = Path(__file__).parent.parent.parent / "golden"
GOLDEN_MODELS = GOLDEN.parent / "golden_models"
"""Checkpoints with weights, of families that transformers has no class for."""
_WITH_WEIGHTS = {
    "deepseek_vl2": "deepseek_vl2_tiny",
    "molmo": "molmo_7b_d",
    "qwen_vl": "qwen_vl_chat",
}


def golden_path(name: str) -> Path:
    """Return the tiny checkpoint of a family."""
    return GOLDEN_MODELS / _WITH_WEIGHTS[name] if name in _WITH_WEIGHTS else GOLDEN / name


class HFInputs(NamedTuple):
    """What the HF processor makes of a prompt and its images."""

    input_ids: list[int]
    tensors: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One row of the laws."""

    name: str
    """The folder in `mmjax/models`."""
    make_processor: Callable[..., BaseMultiModalProcessor[Any]]
    """(processor_cache=None, **MultiModalConfig fields) -> our processor."""
    call_hf: Callable[[str, list[Any], Mapping[str, Any]], HFInputs]
    """(prompt, images, processor kwargs) -> what HF makes of them."""
    embed_token_ids: Callable[[BaseMultiModalProcessor[Any]], Sequence[int]]
    """The ids that stand where embeddings go, and nowhere else."""
    placeholder: str = ""
    """What a text prompt has for each image; empty where it has nothing."""
    max_images: int = 8
    extra_kwargs: tuple[dict[str, Any], ...] = ({},)
    """Processor kwargs under which the laws must hold too."""
    mm_configs: tuple[dict[str, Any], ...] = ({}, {"trust_request_mm_kwargs": True})
    """Operators' settings under which the dummy inputs have the declared maximum."""
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
    takes_size: Callable[[int, int], bool] = lambda width, height: True
    """Whether HF's processor itself takes a picture of (width, height): some refuse slivers."""
    words: tuple[str, ...] = (
        *("what", " ", "\n", "\n\n", "the car", "Here", " Here", "ü日", "\t", "!", "  ", "<eos>"),
    )
    """Pieces of text that prompts are made of."""

    def prompt_ids(self, inputs: MultiModalInputs) -> list[int]:
        """Return the token ids in which the placeholders stand."""
        if self.updates_encoder_prompt:
            assert inputs.encoder_prompt_token_ids is not None
            return inputs.encoder_prompt_token_ids
        return inputs.prompt_token_ids


def edit_golden(name: str, folder: Path, **edits: Mapping[str, Any] | None) -> Path:
    """Copy a golden directory and change its JSON files.

    `config={"vision_config.patch_size": 7}` sets a value (None removes the key);
    `processor_config=None` removes the file.
    """
    path = Path(copytree(golden_path(name), folder / name))
    for stem, edit in edits.items():
        file = path / f"{stem}.json"
        if edit is None:
            file.unlink()
        else:
            edit_json(file, edit)
    return path


def edit_json(file: Path, edit: Mapping[str, Any]) -> None:
    """Set the values of a JSON file's keys, `outer.inner` of a nested one; None removes a key."""
    whole = json.loads(file.read_text()) if file.exists() else {}
    for keys, value in edit.items():
        *outer, last = keys.split(".")
        inner = whole
        for key in outer:
            inner = inner[key]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    file.write_text(json.dumps(whole))


def golden_processor(
    name: str,
    *,
    path: Path | None = None,
    processor_cache: ProcessorCache | None = None,
    **mm: Any,
) -> BaseMultiModalProcessor[Any]:
    """Return our processor for the tiny checkpoint in `tests/golden/<name>`, or at `path`."""
    path = path or golden_path(name)
    hf_config = load_model_config(str(path)).hf_config
    assert hf_config.architectures, f"{path=}"
    config = ModelConfig(
        model=f"tiny-{name}",
        path=path,
        hf_config=hf_config,
        architecture=hf_config.architectures[0],
        max_model_len=4096,
        mm=MultiModalConfig(**mm),
    )
    return create_processor(config, cache=processor_cache)


def get_placeholder_str(architecture: str, modality: str, i: int) -> str | None:
    """Return what stands for the i-th (from 1) item of a modality, as a family declares it."""
    info: Any = get_processor_factories(architecture).info
    return info.get_placeholder_str(modality, i)
