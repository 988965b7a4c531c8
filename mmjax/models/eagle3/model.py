"""EAGLE-3 (arXiv 2503.01840): a head that guesses tokens ahead, of a checkpoint of its own.

One head for all families: it reads states of the decoder that it was trained with, and its tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmjax.config.engine_config import ModelConfig
from mmjax.errors import CheckpointError, check_settings
from mmjax.language.llama.config import LlamaConfig
from mmjax.language.llama.decoder import Eagle3Config, Eagle3TextModel
from mmjax.models.interface import MultiModalModel
from mmjax.models.original_config import EAGLE3
from mmjax.weights.rules import Rule, RuleTypes

ARCHITECTURES = (
    EAGLE3,
    "Eagle3LlamaForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
)
"""What its authors, and those who train others, call it; all are one layer of Llama's."""
_REQUIRED = {"num_hidden_layers": 1, "fc_norm": False, "norm_output": False, "logit_scale": 1.0}
_REQUIRED_OF_OWN = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}


def is_eagle3(draft: ModelConfig) -> bool:
    """Return whether what guesses is such a head."""
    return draft.architecture in ARCHITECTURES


class Eagle3Head(MultiModalModel):
    """`LlamaForCausalLMEagle3`, also as `speculators` has it; no class of HF's."""

    shared_names = ("language_model.embed_tokens.",)

    def __init__(self, hf_config: Any, *, dtype: Any) -> None:
        check_settings(hf_config, _REQUIRED, where="config.json", source="mmjax's EAGLE-3 has")
        own = _read_own(hf_config)
        check_settings(own, _REQUIRED_OF_OWN, where="`eagle_config`", source="mmjax's EAGLE-3 has")
        vocab_size = hf_config.vocab_size
        self.language_model = Eagle3TextModel(
            LlamaConfig.from_hf(hf_config),
            Eagle3Config(
                target_width=_find_target_width(hf_config),
                num_tapped=len(_list_tapped(hf_config)) or 3,
                draft_vocab_size=getattr(hf_config, "draft_vocab_size", None) or vocab_size,
                norm_before_residual=bool(getattr(hf_config, "norm_before_residual", False)),
                norm_before_fc=bool(
                    own.get("norm_before_fc", getattr(hf_config, "norm_before_fc", False))
                ),
            ),
            dtype=dtype,
        )

    @staticmethod
    def rules(hf_config: Any) -> Sequence[RuleTypes]:
        """Map both layouts; the table is the model's, and what it was trained by is not read."""
        draft_vocab_size = getattr(hf_config, "draft_vocab_size", None) or hf_config.vocab_size
        maps = "t2d" if draft_vocab_size != hf_config.vocab_size else "t2d|d2t"
        layer = r"^(?:model\.)?(?:midlayer|layers\.0)\."
        return (
            Rule(rf"^(?:model\.)?(?:{maps})$", None),
            Rule(r"^(?:model\.)?(?:embed_tokens|verifier_\w+)\.", None),
            Rule(rf"{layer}hidden_norm\.", "language_model.hidden_norm."),
            Rule(layer, "language_model.layers.0."),
            Rule(r"^(?:model\.)?(fc|input_norm|norm|lm_head|d2t)\b", r"language_model.\1"),
        )


def read_tapped_layers(hf_config: Any, text_config: Any) -> tuple[int, ...]:
    """Return the layers of a decoder whose inputs a head reads; CheckpointError if it lacks them.

    By default the third one's, the middle one's and the last but two's.
    """
    num_layers = text_config.num_hidden_layers
    named = _list_tapped(hf_config)
    found = named or (2, num_layers // 2, num_layers - 3)
    if list(found) != sorted(set(found)) or not 0 <= found[0] <= found[-1] <= num_layers:
        raise CheckpointError(
            f"an EAGLE-3 head reads the states before the layers {list(found)} "
            f"(`eagle_aux_hidden_state_layer_ids`{'' if named else ' is not given'}), and the model"
            f" has {num_layers} layers; give the head that was trained with it"
        )
    return found


def _list_tapped(hf_config: Any) -> tuple[int, ...]:
    """Return the layers that config.json names; none: it names none.

    Two ways to count are published: layers whose inputs are read (speculators, vLLM), or whose
    outputs are, where the first is always 1 (SpecForge, ModelOpt; SGLang's pull request 25454).
    """
    own, key = _read_own(hf_config), "eagle_aux_hidden_state_layer_ids"
    named = tuple(getattr(hf_config, key, None) or own.get(key) or ())
    return tuple(one + 1 for one in named) if named[:1] == (1,) else named


def _read_own(hf_config: Any) -> Mapping[str, Any]:
    own = getattr(hf_config, "eagle_config", None)
    return own if isinstance(own, Mapping) else {}


def _find_target_width(hf_config: Any) -> int:
    return getattr(hf_config, "target_hidden_size", None) or hf_config.hidden_size


def check_sizes(hf_config: Any, table: Sequence[int]) -> None:
    """Raise CheckpointError unless a head takes a model's states and tokens; `table`: its shape."""
    own = (hf_config.vocab_size, hf_config.hidden_size, _find_target_width(hf_config))
    vocab_size, width = table
    if own != (vocab_size, width, width):
        raise CheckpointError(
            f"an EAGLE-3 head has {own[0]} tokens, width {own[1]} and reads states of width "
            f"{own[2]}; the model that it would guess for has {vocab_size} tokens and width "
            f"{width}. Give the head that was trained with it"
        )
