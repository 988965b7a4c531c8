"""A tokenizer and what processes images, videos and clips behind one call, as HF's processors are.

It leaves the prompt's placeholders as they are: a family's updates write over them afterwards. So
a family needs no processor of HF's, which may want torchvision, but its parts alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import BatchFeature

from mmjax.errors import CheckpointError

KnownKwargs = Mapping[str, frozenset[str]]
"""By scope (`images_kwargs`), the names that have an effect there; under "", those of no scope."""


def names_of(valid_kwargs: Any) -> frozenset[str]:
    """Return the names of a typed dict, or those of a collection."""
    return frozenset(getattr(valid_kwargs, "__annotations__", valid_kwargs))


@dataclass(frozen=True, kw_only=True)
class ProcessorOfParts:
    """Calls each part with the kwargs that it knows.

    A part is `part(media, return_tensors=..., **kwargs) -> tensors by name`, and `valid_kwargs`.
    """

    tokenizer: Any
    image_processor: Any = None
    video_processor: Any = None
    feature_extractor: Any = None
    """Of clips."""
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By scope (`images_kwargs`), what a call may override."""
    text_settings: frozenset[str] = frozenset()
    """Text kwargs that are the family's own, and not the tokenizer's."""

    def __call__(
        self,
        text: str,
        images: Any = None,
        videos: Any = None,
        audio: Any = None,
        *,
        return_tensors: str = "np",
        **kwargs: Any,
    ) -> BatchFeature:
        """Tokenize, and process the media; kwargs are scoped, or flat for every part with them."""
        scoped = self.scope_kwargs(kwargs)
        for_text = {k: v for k, v in scoped["text_kwargs"].items() if k not in self.text_settings}
        outputs = dict(self.tokenizer([text], return_tensors=return_tensors, **for_text))
        for part, media, scope in (
            (self.image_processor, images, "images_kwargs"),
            (self.video_processor, videos, "videos_kwargs"),
            (self.feature_extractor, audio, "audio_kwargs"),
        ):
            if media:
                outputs |= part(media, return_tensors=return_tensors, **scoped[scope])
        return BatchFeature(outputs)

    @property
    def known_kwargs(self) -> KnownKwargs:
        """Each part's names, by scope."""
        # On use only: it brings an installed torch along.
        from transformers.processing_utils import TextKwargs

        return {
            "text_kwargs": names_of(TextKwargs) | self.text_settings,
            "images_kwargs": names_of(getattr(self.image_processor, "valid_kwargs", ())),
            "videos_kwargs": names_of(getattr(self.video_processor, "valid_kwargs", ())),
            "audio_kwargs": names_of(getattr(self.feature_extractor, "valid_kwargs", ())),
        }

    def scope_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Hand every flat kwarg to each part that knows it; that one does is checked before."""
        known = self.known_kwargs
        flat = {key: value for key, value in kwargs.items() if key not in known}
        return {
            scope: {
                **self.defaults.get(scope, {}),
                **{key: value for key, value in flat.items() if key in names},
                **kwargs.get(scope, {}),
            }
            for scope, names in known.items()
        }


def load_video_settings(path: Path) -> dict[str, Any]:
    """Return the checkpoint's settings for videos, from the file that HF would take them from."""
    names = ("video_preprocessor_config.json", "preprocessor_config.json")
    return _load_settings(path, "video_processor", names)


def load_image_settings(path: Path, *, are_needed: bool = True) -> dict[str, Any]:
    """Return the checkpoint's settings for images, likewise; `CheckpointError` for none."""
    settings = _load_settings(path, "image_processor", ("preprocessor_config.json",))
    if are_needed and not settings:
        raise CheckpointError(
            "the checkpoint has no preprocessor_config.json with settings for images; download it"
        )
    return settings


def load_feature_settings(path: Path) -> dict[str, Any]:
    """Return the checkpoint's settings for audio, likewise."""
    return _load_settings(path, "feature_extractor", ("preprocessor_config.json",))


def _load_settings(path: Path, key: str, names: Sequence[str]) -> dict[str, Any]:
    nested = read_json(path / "processor_config.json").get(key)
    if nested is not None:
        return nested
    return next((read_json(path / name) for name in names if (path / name).exists()), {})


def read_json(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file, empty where there is no file; `CheckpointError` else."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"`{file.name}` is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"`{file.name}` has a {type(loaded).__name__}; it must be an object")
    return loaded
