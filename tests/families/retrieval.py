"""Tiny ColQwen2s and ColPalis: directories of the models inside, with a projection behind them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColQwen2Config,
    ColQwen2ForRetrieval,
)
from transformers.models.colpali.processing_colpali import ColPaliProcessor
from transformers.models.colqwen2.processing_colqwen2 import ColQwen2Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.families import paligemma
from tests.families.directories import HEADS, edit_golden, edit_json
from tests.families.family import assemble
from tests.families.qwen2_vl import MROPE
from tests.oracle import fill_with_unit_norms

EMBEDDING_DIM = 24


class Retrieval(NamedTuple):
    """A model that gives a vector for each token, and what it is made of."""

    name: str
    config_class: Any
    model_class: Any
    processor_class: Any
    image_processor_class: Any
    write_inner: Callable[[Path], Path]
    """Writes the files of the inner model, without weights, to a folder."""
    sees_itself: bool = False
    """Whether a prompt is computed in one step."""

    def write(self, folder: Path, settings: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint with random weights; `settings`: of processor_config.json."""
        inner = self.write_inner(folder / "inner")
        path = Path(copytree(inner, folder / self.name))
        vlm: Any = AutoConfig.from_pretrained(inner)
        config = self.config_class(vlm_config=vlm.to_dict(), embedding_dim=EMBEDDING_DIM)
        config.architectures = [self.model_class.__name__]
        model = self.model_class(config).eval()
        fill_with_unit_norms(model)
        others = {file: file.read_bytes() for file in path.glob("*.json")}
        model.save_pretrained(path)
        written = json.loads((path / "config.json").read_text())
        for file, content in others.items():
            file.write_bytes(content)
        (path / "config.json").write_text(json.dumps(written))
        edit_json(path / "processor_config.json", dict(settings or {}))
        return path

    def load_processor(self, path: Path) -> Any:
        """Return HF's processor of a directory."""
        settings = json.loads((path / "processor_config.json").read_text())
        named = ("visual_prompt_prefix", "query_prefix")
        own = {name: settings[name] for name in named if name in settings}
        return assemble(self.processor_class, self.image_processor_class, path, **own)


def run_hf(model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return float32[B, T, D]: HF's vectors, what training alone reads left out.

    ColQwen2's pictures with M-RoPE's positions, which the models were trained with, and which HF's
    class takes, but does not make.
    """
    given = {name: one for name, one in inputs.items() if name != "labels"}
    if "image_grid_thw" in given:
        kinds = (given["input_ids"] == model.config.vlm_config.image_token_id).int()
        given["position_ids"], _ = model.vlm.get_rope_index(
            given["input_ids"], mm_token_type_ids=kinds, image_grid_thw=given["image_grid_thw"]
        )
    with torch.no_grad():
        return model(**given).embeddings


COLQWEN2 = Retrieval(
    name="colqwen2",
    config_class=ColQwen2Config,
    model_class=ColQwen2ForRetrieval,
    processor_class=ColQwen2Processor,
    image_processor_class=Qwen2VLImageProcessorPil,
    write_inner=lambda folder: edit_golden("qwen2_vl", folder, config={**HEADS, **MROPE}),
)
COLPALI = Retrieval(
    name="colpali",
    config_class=ColPaliConfig,
    model_class=ColPaliForRetrieval,
    processor_class=ColPaliProcessor,
    image_processor_class=SiglipImageProcessorPil,
    write_inner=paligemma.write_files,
    sees_itself=True,
)
RETRIEVAL = (COLQWEN2, COLPALI)
