"""HF's image processors that need Pillow and numpy alone, with pixels that stay bytes.

Each is found by its name: transformers has one for each of the classes that use torchvision.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.affine import keep_bytes
from mmjax.processing.image_processors.parts import load_image_settings


def load_image_processor(path: Path, folders: Mapping[str, str], *changes: type) -> Any:
    """Load the image processor that a checkpoint names, of those that a family is served with.

    Args:
        path: The checkpoint, whose `image_processor_type` is asked where there are several.
        folders: By the beginning of a class's name (`CLIP` of `CLIPImageProcessor`), the folder of
            `transformers.models` that has it. The first is that of a checkpoint that names none.
        changes: Of HF's class, beside that its pixels stay bytes; as in `keep_bytes`.
    """
    name = next(iter(folders)) if len(folders) == 1 else _find_name(path, folders)
    return load_class(name, folders[name], *changes).from_pretrained(path)


def load_class(name: str, folder: str, *changes: type) -> Any:
    """Return such a class by the beginning of its name; arguments as above."""
    # On use only: it brings an installed torch along.
    module = import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    return keep_bytes(getattr(module, f"{name}ImageProcessorPil"), *changes)


def make_image_processor(hf_class: Any, settings: Mapping[str, Any]) -> Any:
    """Return one of HF's image processors by those of the settings that its class knows."""
    known = hf_class.valid_kwargs.__annotations__
    return hf_class(**{key: value for key, value in settings.items() if key in known})


def _find_name(path: Path, folders: Mapping[str, str]) -> str:
    found = load_image_settings(path).get("image_processor_type") or next(iter(folders))
    name = found.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
    if name not in folders:
        known = ", ".join(f"`{one}ImageProcessor`" for one in folders)
        raise CheckpointError(
            f"`image_processor_type` of the checkpoint is `{found}`; the model is served with "
            f"{known}"
        )
    return name
