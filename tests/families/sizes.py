"""Sizes that most tiny configs have in common, and the arguments of what makes a config."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mmjax.rounding import round_up

Keys = Mapping[str, Any]
"""Keys of a part of a config that differ from a family's tiny one."""
NO_KEYS: Keys = MappingProxyType({})

DECODER: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
TOWER: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def resize_text(
    width: int, head_dim: int, num_heads: int, *, queries_per_key: int = 4, **more: Any
) -> dict[str, Any]:
    """Return `text` of a `tiny_config`: a decoder of a width, with heads of a width, so many."""
    text = {
        "hidden_size": width,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(1, num_heads // queries_per_key),
    }
    return {"text": {**text, **more}}


def fit_text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """Return `text` of a `tiny_config`: room for a tokenizer, and a key head for each device."""
    return {"vocab_size": round_up(len(tokenizer), 64), "num_key_value_heads": 4, **more}
