"""HF's image processors that need torchvision: their own code, for which Pillow resizes.

Their modules cannot be imported without it; all but the base of their classes is theirs.
"""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend


def normalize(image: Any, mean: Any, std: Any) -> Any:
    """Return `image` without its colours' `mean`, by their `std`, in its dtype."""
    of_colours = (torch.as_tensor(one, dtype=image.dtype) for one in (mean, std))
    mean, std = (one.reshape(-1, 1, 1) for one in of_colours)
    return (image - mean) / std


class PillowBackend(PilBackend):
    """What a subclass of HF's `TorchvisionBackend` asks of it."""

    def process_image(self, *args: Any, **kwargs: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(super().process_image(*args, **kwargs)))

    def resize(self, image: Any, size: Any, resample: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Resize uint8[..., C, height, width]."""
        sides = (size.width, size.height)
        flat = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
        found = [np.asarray(Image.fromarray(one).resize(sides, resample)) for one in flat]
        resized = torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2)
        return resized.reshape(*image.shape[:-2], size.height, size.width)

    def pad(self, image: Any, pad_size: Any, *args: Any, **kwargs: Any) -> Any:
        """Pad [..., height, width] with zeros, at the bottom and the right."""
        missing = (0, pad_size.width - image.shape[-1], 0, pad_size.height - image.shape[-2])
        return torch.nn.functional.pad(image, missing)

    def rescale_and_normalize(
        self, images: Any, do_rescale: bool, factor: float, do_normalize: bool, mean: Any, std: Any
    ) -> Any:
        """Rescale mean and deviation in place of the pixels, as HF's, which rounds twice less."""
        if not do_normalize:
            return images.float() * (factor if do_rescale else 1.0)
        scale = 1.0 / factor if do_rescale else 1.0
        mean, std = (torch.tensor(values) * scale for values in (mean, std))
        return normalize(images.float(), mean, std)

    def normalize(self, image: Any, mean: Any, std: Any, **kwargs: Any) -> Any:
        """Normalise in the pixels' dtype, as torchvision."""
        return normalize(image, mean, std)


def pad(images: Any, *, padding: list[int], fill: list[int]) -> Any:
    """Pad with black, as torchvision."""
    assert not any(fill)
    left, top, right, bottom = padding
    return torch.nn.functional.pad(images, (left, right, top, bottom))


def take_image_processor(folder: str, name: str) -> Any:
    """Return the class of a name in a folder of HF's models, upon `PillowBackend`."""
    package = f"transformers.models.{folder}"
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name(f"image_processing_{folder}.py").read_text()
    assert "(TorchvisionBackend)" in source
    source = source.replace("(TorchvisionBackend)", "(PillowBackend)")
    source = source.replace("from torchvision.transforms.v2 import functional as tvF", "")
    # The decorator looks for a file that can be imported.
    source = re.sub(r"^ *@auto_docstring\n", "", source, flags=re.MULTILINE)
    known: dict[str, Any] = {
        "__package__": package,
        "__name__": f"{package}.image_processing_{folder}",
        "PillowBackend": PillowBackend,
        "tvF": SimpleNamespace(pad=pad),
    }
    exec(compile(source, folder, "exec"), known)
    return known[name]
