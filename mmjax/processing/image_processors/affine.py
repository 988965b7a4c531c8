"""Pixels that stay bytes until the model: what HF does to them next is one affine map.

HF's image processors rescale and normalise what Pillow resized, `(x * rescale_factor - mean) /
std`, which makes four bytes of each. Here the bytes are kept, cached and sent; the map goes along
as nine numbers, and P1 applies it in `encode`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from mmjax.processing.image_processors.image import to_pixels
from mmjax.processing.media.decode import map_in_threads

AFFINE_KEYS: Mapping[str, str] = MappingProxyType(
    {"image": "image_affine", "video": "video_affine"}
)
"""By modality, what the map is called among an item's tensors."""

ARITHMETIC = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
"""HF's names of the settings that the map is made of."""
_SHORT = np.uint32(0xFFFFFF00)
"""The bits of a float32 that leave 16 of its significand."""

_BEFORE_RESIZING = ("crop_to_patches", "do_pad", "do_pan_and_scan")
"""What some do to an image before they resize it, or that asks it for more than its shape."""

ArrayT = TypeVar("ArrayT", bound=Any)


def make_affine(
    *,
    rescale_factor: float = 1.0,
    mean: float | Sequence[float] = 0.0,
    std: float | Sequence[float] = 1.0,
) -> np.ndarray:
    """Return float32[3, 3]: a factor's high and low part and an offset; each of red, green, blue.

    `x * high + (x * low + offset)` is `(x * rescale_factor - mean) / std` to a few 1e-7. Both parts
    have 16 bits, so that their products with bytes are exact: it is the same bits whether a
    compiler makes one instruction of a product and a sum or not.
    """
    means, stds = (_by_channel(values, name) for values, name in ((mean, "mean"), (std, "std")))
    with np.errstate(all="ignore"):
        factor = rescale_factor / stds
        high = _shorten(factor)
        affine = np.stack([high, _shorten(factor - high), (-means / stds).astype(np.float32)])
    if not np.isfinite(affine).all():
        raise ValueError(
            f"pixels cannot be rescaled by {rescale_factor} and normalised by the mean {mean} and "
            f"the standard deviation {std}; give finite numbers, and no deviation of 0"
        )
    return affine


def read_affine(settings: Mapping[str, Any]) -> np.ndarray:
    """Return the same of an image processor's settings, by HF's names, all of which are given."""
    names = ("mean", "std") if settings["do_normalize"] else ()
    factor = settings["rescale_factor"] if settings["do_rescale"] else 1.0
    return make_affine(rescale_factor=factor, **{name: settings[f"image_{name}"] for name in names})


def apply_affine(pixels: ArrayT, affine: ArrayT) -> ArrayT:
    """Return float32 pixels of bytes, arrays of numpy or jax.

    Args:
        pixels: uint8[units, ...], in which colours come first or last.
        affine: float32[units, 3, 3, 1] where colours come first, [units, 3, 1, 3] where last.
    """
    sides = [side if side > 1 else -1 for side in affine.shape[2:]]
    by_colour = pixels.astype("float32").reshape(len(pixels), *sides)
    high, low, offset = (affine[:, row] for row in range(3))
    return (by_colour * high + (by_colour * low + offset)).reshape(pixels.shape)


def keep_bytes(hf_class: Any, *changes: type) -> Any:
    """Return a subclass of one of HF's PIL image processors whose pixels stay bytes.

    `image_affine` comes beside them, by all that HF would have gone by: the checkpoint's settings,
    the operator's and the request's. `changes`: classes whose methods stand before HF's, too.
    """
    return type(hf_class.__name__, (*changes, _KeepsBytes, hf_class), {"hf_class": hf_class})


class _Unresized(Image.Image):
    """An image that HF's functions resize as it is: else they make an array of it, and an image.

    They ask for its sides by `shape`, or by `size`, which `get_image_size` of transformers takes
    for rows and columns.
    """

    def __init__(self, pixels: Image.Image) -> None:
        super().__init__()
        self.pixels = pixels
        self.batch: Sequence[_Unresized] = ()
        """Those that HF resizes with it, by the same arguments, while it does."""
        self.resized: np.ndarray | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.height, self.pixels.width

    @property
    def shape(self) -> tuple[int, int, int]:
        return 3, self.pixels.height, self.pixels.width

    def resize(self, *args: Any, **kwargs: Any) -> "_Resized":  # pyrefly: ignore[bad-override]
        return _Resized(self.pixels.resize(*args, **kwargs))


class _Resized:
    """An RGB image of which HF's functions make an array, and put its colours first.

    They lie one after the other from the start: Pillow's own array has them beside each other, and
    is copied once more to be reordered.
    """

    def __init__(self, pixels: Image.Image) -> None:
        self.pixels = pixels

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return uint8[height, width, 3]."""
        width, height = self.pixels.size
        colours = bytearray().join(self.pixels.tobytes("raw", band) for band in "RGB")
        planes = np.frombuffer(colours, np.uint8).reshape(3, height, width)
        return np.moveaxis(planes, 0, -1)


class _KeepsBytes:
    """Stands before a class of HF's, whose methods `super()` has."""

    def process_image(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave an image to Pillow until it is resized."""
        if isinstance(image, Image.Image) and image.mode == "RGB":
            return _Unresized(image)
        hf: Any = super()
        return hf.process_image(image, *args, **kwargs)

    def resize(self, image: Any, *args: Any, **kwargs: Any) -> Any:
        """Resize a batch at its first image, side by side: HF goes from one to the next."""
        hf: Any = super()
        resize = hf.resize
        if not isinstance(image, _Unresized):
            return resize(image, *args, **kwargs)
        if image.resized is None:
            batch = image.batch or [image]
            arrays = map_in_threads(lambda one: resize(one, *args, **kwargs), batch)
            for one, array in zip(batch, arrays, strict=True):
                one.resized = array
        resized, image.resized = image.resized, None
        return resized

    def _preprocess(
        self,
        images: Sequence[Any],
        *args: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: float | Sequence[float],
        image_std: float | Sequence[float],
        **kwargs: Any,
    ) -> Any:
        normalization = {"mean": image_mean, "std": image_std} if do_normalize else {}
        affine = make_affine(rescale_factor=rescale_factor if do_rescale else 1.0, **normalization)
        is_resized_first = kwargs.get("do_resize") and not any(map(kwargs.get, _BEFORE_RESIZING))
        batch = [image for image in images if isinstance(image, _Unresized)]
        hf: Any = super()
        with _as_batch(batch):
            outputs = hf._preprocess(
                images if is_resized_first else [_as_array(image) for image in images],
                *args,
                do_rescale=False,
                rescale_factor=rescale_factor,
                do_normalize=False,
                image_mean=image_mean,  # a colour to pad with, in some
                image_std=image_std,
                **kwargs,
            )
        outputs[AFFINE_KEYS["image"]] = affine
        return outputs


@contextmanager
def _as_batch(images: Sequence[_Unresized]) -> Iterator[None]:
    """Let each know the others; not for longer, since they would keep each other alive."""
    for image in images:
        image.batch = images
    try:
        yield
    finally:
        for image in images:
            image.batch = ()


def _as_array(image: Any) -> Any:
    return to_pixels(image.pixels) if isinstance(image, _Unresized) else image


def _by_channel(values: float | Sequence[float], name: str) -> np.ndarray:
    by_channel = np.asarray(values, np.float64)
    if by_channel.shape not in ((), (3,)):
        raise ValueError(f"the {name} of pixels is {values}; give one number, or three")
    return np.broadcast_to(by_channel, (3,))


def _shorten(values: np.ndarray) -> np.ndarray:
    """Return float32, cut to 16 bits."""
    return (values.astype(np.float32).view(np.uint32) & _SHORT).view(np.float32)
