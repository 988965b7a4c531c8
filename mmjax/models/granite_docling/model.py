"""Granite for Docling (IBM, 2026): SigLIP, pixel shuffles of two sizes, Granite.

States of the tower's blocks are shuffled, too, and added behind layers of the decoder (DeepStack,
arXiv 2406.04334).
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from mmjax.connectors.mlp import MLPProjector
from mmjax.layers.activation import get_activation
from mmjax.layers.linear import Linear
from mmjax.layers.norm import LayerNorm
from mmjax.layers.vision import join_squares
from mmjax.models.granite_docling.host_inputs import GraniteDoclingHostInputs, read_states
from mmjax.models.tower_model import ViTModel
from mmjax.weights.rules import Rule, RuleTypes

States = Sequence[Float[Array, "I P D"]]
_EPS = 1e-5
"""Of the connector's norms: torch's default, whatever the config says of the tower's."""
_TEMPERATURE = 10_000
"""Of the sinusoids of rows and columns."""
_CONNECTOR = r"^model\.vision_model\.connector\."
_OURS = "multi_modal_projector."


class GraniteDoclingForConditionalGeneration(ViTModel):
    """Served as HF's class of this name."""

    host_inputs = GraniteDoclingHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        self.states = read_states(hf_config)
        super().__init__(hf_config, dtype=dtype)
        self.language_model.fed_layers = self.host_inputs(hf_config).fed_layers

    @staticmethod
    def build_projector(hf_config: Any, *, dtype: Any) -> nnx.Module:
        return RoutedConnector(hf_config.vision_config, dtype=dtype)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map HF's names, which are those of the published files.

        What chooses a route (a client does, here), and what guesses tokens ahead, is not read.
        """
        route = _CONNECTOR + r"(coarse|fine)\."
        return (
            Rule(r"^(mtp|model\.density_router)\.", None),
            Rule(_CONNECTOR + r"$", None),  # HF's module has the rows of one route
            Rule(
                route + r"deepstack_mergers\.(\d+)\.",
                _OURS + r"\1_projector.deepstack_merger_list.\2.",
            ),
            Rule(route, _OURS + r"\1_projector."),
            Rule(_CONNECTOR, _OURS),
            *ViTModel.rules(hf_config),
        )

    def encode_units(self, pixel_values: Float[Array, "I C _y _x"]) -> Any:
        """Return the tower's last states, and those that feed layers of the decoder."""
        return self.vision_tower(pixel_values, feature_layers=self.states)


class RoutedConnector(nnx.Module):
    """A tile's embeddings by every route, one behind the other, with their features behind each."""

    def __init__(self, vision: Any, *, dtype: Any) -> None:
        width, factor = vision.out_hidden_size, vision.scale_factor
        self.ln_in = LayerNorm(vision.hidden_size, eps=_EPS, dtype=dtype)
        self.coarse_projector = ShuffleProjector(vision, factor, dtype=dtype)
        self.fine_projector = (
            ShuffleProjector(vision, factor // 2, dtype=dtype) if vision.use_fine_route else None
        )
        self.ln_mid = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.mlp_fc2 = Linear(width, width, use_bias=False, dtype=dtype)
        self.ln_out = LayerNorm(width, eps=_EPS, dtype=dtype)
        self.activation = get_activation("gelu")

    def __call__(
        self, states: tuple[Float[Array, "I P D"], States]
    ) -> Float[Array, "I _rows _wide"]:
        """Embed the tower's last states; the others become features."""
        last, others = states
        normed = self.ln_in(last)
        projectors = [self.coarse_projector, self.fine_projector]
        routes = [project(normed, others) for project in projectors if project is not None]
        rows, *features = (
            jnp.concatenate(parts, axis=1)
            for parts in zip(*((rows, *features) for rows, features in routes), strict=True)
        )
        embeds = self.ln_out(self.mlp_fc2(self.activation(self.ln_mid(rows))))
        return jnp.concatenate([embeds, *features], axis=-1)


class ShuffleProjector(nnx.Module):
    """Squares of patches, projected: of the last states with their places, of others as features.

    Parameters bear HF's names.
    """

    def __init__(self, vision: Any, factor: int, *, dtype: Any) -> None:
        """`factor`: patches along a square's side."""
        self.factor, self.width = factor, vision.out_hidden_size
        merged = vision.hidden_size * factor**2
        self.projection = Linear(merged, self.width, use_bias=False, dtype=dtype)
        self.deepstack_merger_list = nnx.List(
            MLPProjector(merged, self.width, "gelu", norm_eps=_EPS, dtype=dtype)
            for _ in vision.deepstack_visual_indexes
        )

    def __call__(
        self, last: Float[Array, "I P D"], others: States
    ) -> tuple[Float[Array, "I _tokens _width"], list[Float[Array, "I _tokens _width"]]]:
        """Return a tile's embeddings, before what the routes share, and its features."""
        rows = self.projection(join_squares(last, self.factor))
        places = find_sinusoids(round(rows.shape[1] ** 0.5), self.width)
        features = [
            merge(join_squares(one, self.factor))
            for merge, one in zip(self.deepstack_merger_list, others, strict=True)
        ]
        return rows + jnp.asarray(places, rows.dtype)[None], features


def find_sinusoids(side: int, width: int) -> Float[np.ndarray, "_tokens _width"]:
    """Return what places in a square are told by: sines and cosines of columns, then of rows."""
    frequencies = 1 / _TEMPERATURE ** (np.arange(width // 4) / (width // 4))
    rows, columns = np.indices((side, side)).reshape(2, -1)
    angles = [np.outer(places, frequencies) for places in (columns, rows)]
    parts = [wave(one) for one in angles for wave in (np.sin, np.cos)]
    return np.concatenate(parts, axis=1).astype(np.float32)
