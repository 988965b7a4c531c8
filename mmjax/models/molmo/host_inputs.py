"""Molmo's encoder inputs: overlapping crops of one size, of which each embedding is read once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmjax.errors import CheckpointError
from mmjax.models.host_inputs import EncoderSpec, HostInputs

NUM_NEW_TOKENS = 128
"""Rows of `wte.new_embedding`, which no configuration names; they follow the vocabulary's."""
NEW_TOKENS = ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<|image|>")
"""The first of them, in order."""
POOLING_SIDE = 2
"""Side of the square of patches that becomes one embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MolmoVisionSizes:
    """What the published code says of the image encoder, where config.json says nothing."""

    image_default_input_size: Sequence[int] = (336, 336)
    image_patch_size: int = 14
    image_pos_patch_size: int = 14
    image_emb_dim: int = 1024
    image_num_heads: int = 16
    image_num_key_value_heads: int = 16
    image_num_layers: int = 23
    image_head_dim: int = 64
    image_mlp_dim: int = 4096
    image_mlp_activations: str = "quick_gelu"
    image_num_pos: int = 577
    image_norm_eps: float = 1e-5
    vit_layers: Sequence[int] = (-2, -9)

    @classmethod
    def from_hf(cls, hf_config: Any) -> "MolmoVisionSizes":
        """Return the published sizes; those of small checkpoints are in `test_vision_backbone`.

        Raises:
            CheckpointError: The encoder would not be CLIP's, or its crops not squares.
        """
        given = getattr(hf_config, "test_vision_backbone", None) or {}
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise CheckpointError(
                f"`test_vision_backbone` of config.json has {sorted(unknown)}; it may have "
                f"{', '.join(cls.__dataclass_fields__)}"
            )
        sizes = cls(**given)
        sizes._check()
        return sizes

    def _check(self) -> None:
        width, heads = self.image_emb_dim, self.image_num_heads
        side = self.crop_side // self.image_patch_size
        for name, expected in (
            ("image_default_input_size", [self.crop_side, self.crop_side]),
            ("image_pos_patch_size", self.image_patch_size),
            ("image_num_pos", side**2 + 1),
            ("image_num_key_value_heads", heads),
            ("image_head_dim", width // heads),
        ):
            value = getattr(self, name)
            if (list(value) if isinstance(value, Sequence) else value) != expected:
                raise CheckpointError(
                    f"`{name}` of the image encoder is {value}; beside the others it must be "
                    f"{expected}"
                )
        if self.crop_side % (POOLING_SIDE * self.image_patch_size):
            raise CheckpointError(
                f"a crop has {self.crop_side} pixels a side and patches of "
                f"{self.image_patch_size}; its patches must come out even in squares of "
                f"{POOLING_SIDE} by {POOLING_SIDE}"
            )
        if not all(-self.image_num_layers <= layer < 0 for layer in self.vit_layers):
            raise CheckpointError(
                f"`vit_layers` is {list(self.vit_layers)}; each counts from the last of "
                f"{self.image_num_layers} blocks, which is -1"
            )

    @property
    def crop_side(self) -> int:
        """Side of a crop, in pixels."""
        return self.image_default_input_size[0]

    @property
    def num_patches(self) -> int:
        """Patches of a crop."""
        return (self.crop_side // self.image_patch_size) ** 2

    @property
    def patch_width(self) -> int:
        """Values of a patch: its pixels' channels."""
        return 3 * self.image_patch_size**2


def count_embedding_rows(hf_config: Any) -> int:
    """Return the rows of `wte.embedding`, and of the head (`embedding_size`)."""
    return int(getattr(hf_config, "embedding_size", None) or hf_config.vocab_size)


def new_token_id(hf_config: Any, token: str) -> int:
    """Return the id of one of `NEW_TOKENS`: the first follows the vocabulary."""
    return count_embedding_rows(hf_config) + NEW_TOKENS.index(token)


class MolmoHostInputs(HostInputs):
    """Units are crops; the embeddings of their overlaps are dropped."""

    def __init__(self, hf_config: Any) -> None:
        super().__init__(hf_config)
        sizes = MolmoVisionSizes.from_hf(hf_config)
        self.encoder_spec = EncoderSpec(
            inputs={
                "images": ((sizes.num_patches, sizes.patch_width), "float32"),
                "image_masks": ((sizes.num_patches,), "float32"),
            },
            tokens_per_unit=sizes.num_patches // POOLING_SIDE**2,
        )

    def units(self, item: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the crops' patches, and how much of each is of the image."""
        return {name: item[name] for name in self.encoder_spec.inputs}

    def embed_rows(self, item: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return int32[num_embeds]: the rows in the order of the tokens that they belong to."""
        places = item["image_input_idx"].reshape(-1)
        order = np.argsort(places, kind="stable")
        return order[places[order] >= 0].astype(np.int32)
