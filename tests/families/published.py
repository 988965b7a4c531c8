"""How the published files of a family name their tensors, beside HF's module; no file is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
Layout = Mapping[str, str]
"""How files tell a prefix of the module's own names; {inner}: what a tower's class calls itself."""
MODULE: Layout = {}
LLM_FIRST: Layout = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
HUB: Layout = {**LLM_FIRST, "model.vision_tower.": "vision_tower.{inner}"}
THREE_LAYOUTS = {"hub": HUB, "save_pretrained": LLM_FIRST, "module": MODULE}


@dataclass(frozen=True, kw_only=True)
class Published:
    """Where a family's published names and shapes come from."""

    make_config: Callable[..., Any] | None = None
    """Of the values of config.json; None: HF's class of the model's config."""
    list_shapes: Callable[[Any], Shapes] | None = None
    """Without HF's class."""
    left_out: tuple[str, ...] = ("lm_head.weight",)
    """Ends of names that files leave out where embeddings are tied: copies of the one table."""
    layouts: Mapping[str, Layout] = field(default_factory=lambda: {"module": MODULE})
    unread: tuple[str, ...] = ()
    """Names that some files have beside those of the module, and nothing reads."""
