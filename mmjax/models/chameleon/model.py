"""Chameleon (arXiv 2405.09818): pictures are codes, and codes are tokens of the text's table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mmjax.errors import CheckpointError
from mmjax.models.chameleon.host_inputs import ChameleonHostInputs
from mmjax.models.interface import MultiModalModel
from mmjax.models.text_model import build_text_model
from mmjax.towers.chameleon_vqvae import ChameleonVQVAE, ChameleonVQVAEConfig
from mmjax.weights.rules import Rule

_PREFIX = "IMGIMG"
_DIGITS = str.maketrans("ABCDEFGHIJ", "0123456789")


@dataclass(frozen=True, slots=True)
class CodeTokens:
    """The tokens of the vocabulary that stand for codes."""

    by_code: tuple[int, ...]
    """The token of code 0, 1, ...: a tuple, for a module's structure must have a hash."""
    every: tuple[int, ...]
    """Those of codes that the codebook lacks, too: none of them is ever sampled."""

    @classmethod
    def from_map(cls, vocabulary_map: Mapping[str, int] | None, num_codes: int) -> "CodeTokens":
        """Read `vocabulary_map` of config.json; `CheckpointError` where a code has no token.

        `IMGIMGBCZ` is the token of code 12: its digits are letters from A on, and Z ends them.
        """
        if vocabulary_map is None:
            raise CheckpointError(
                "`vocabulary_map` is missing in config.json; it must give each token its id, the "
                f"`{_PREFIX}...` of the picture's codes among them"
            )
        every = {name: i for name, i in vocabulary_map.items() if name.startswith(_PREFIX)}
        by_code: dict[int, int] = {}
        for name, token_id in every.items():
            digits = name.removeprefix(_PREFIX)[:-1].translate(_DIGITS)
            if not digits.isdecimal():
                raise CheckpointError(
                    f"`vocabulary_map` has `{name}`, which names no code; expected `{_PREFIX}`, "
                    "the code's digits as letters from A to J, and Z"
                )
            by_code[int(digits)] = token_id
        missing = sorted(set(range(num_codes)) - by_code.keys())
        if missing:
            raise CheckpointError(
                f"`vocabulary_map` has no token for {len(missing)} of the {num_codes} codes of "
                f"`vq_config.num_embeddings`, the first of which is {missing[0]}"
            )
        return cls(tuple(by_code[code] for code in range(num_codes)), tuple(sorted(every.values())))


class ChameleonForConditionalGeneration(MultiModalModel):
    """Served as HF's class of this name: it answers in text."""

    host_inputs = ChameleonHostInputs

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        vq_config = ChameleonVQVAEConfig.from_hf(hf_config.vq_config)
        with self._mark_tower_model(hf_config, "image"):
            # Of a dtype of its own, whatever the rest has.
            self.vqmodel = ChameleonVQVAE(vq_config)
        self.language_model = build_text_model(hf_config, dtype=dtype)
        self.code_tokens = CodeTokens.from_map(hf_config.vocabulary_map, vq_config.num_embeddings)

    @staticmethod
    def rules(hf_config: Any) -> Sequence[Rule]:
        """Map the hub's names, which are the module's own; the VQ-VAE's decoder is left out."""
        return (
            Rule(r"^model\.vqmodel\.(decoder|post_quant_conv)\..*", None),
            Rule(r"^model\.vqmodel\.", "vqmodel."),
            Rule(r"^model\.", "language_model."),
            Rule(r"^lm_head\.", "language_model.lm_head."),
        )

    def embed_multimodal(self, pixel_values: Float[Array, "I C _y _x"]) -> Float[Array, "I P D"]:
        """Return the embeddings of the tokens that a picture's codes are."""
        with jax.named_scope("vqmodel"):
            codes = self.vqmodel(pixel_values)
        tokens = jnp.asarray(np.array(self.code_tokens.by_code, np.int32))[codes]
        return self.language_model.embed_input_ids(tokens.reshape(-1)).reshape(*codes.shape, -1)

    def compute_logits(self, hidden_states: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Project onto the vocabulary, in float32; a code's token gets the least that there is."""
        logits = self.language_model.compute_logits(hidden_states)
        is_code = np.zeros(logits.shape[1], bool)
        is_code[list(self.code_tokens.every)] = True
        return jnp.where(is_code[None], jnp.finfo(logits.dtype).min, logits)
