"""HF's image processors that need Pillow and numpy alone, with pixels that stay bytes.

Each is found by its name: transformers has one for each of the classes that use torchvision.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.affine import keep_bytes


def find_pil_class(name: str, folder: str) -> Any:
    """Return `<name>ImageProcessorPil` of `transformers.models.<folder>`; its pixels stay bytes."""
    # On use only: it brings an installed torch along.
    module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return keep_bytes(getattr(module, f"{name}ImageProcessorPil"))


def load_image_processor(path: Path, folders: Mapping[str, str]) -> Any:
    """Load the image processor that a checkpoint names, of those that a family is served with.

    Args:
        path: The checkpoint, whose `image_processor_type` is asked.
        folders: As `find_pil_class` takes them, by name (`CLIP`); the first is that of a checkpoint
            that names none.
    """
    # On use only: it brings an installed torch along.
    from transformers.image_processing_base import ImageProcessingMixin

    settings, _ = ImageProcessingMixin.get_image_processor_dict(path)
    found = settings.get("image_processor_type") or next(iter(folders))
    name = found.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    if name not in folders:
        known = ", ".join(f"`{one}ImageProcessor`" for one in folders)
        raise CheckpointError(
            f"`image_processor_type` of the checkpoint is `{found}`; the model is served with "
            f"{known}"
        )
    return find_pil_class(name, folders[name]).from_pretrained(path)
