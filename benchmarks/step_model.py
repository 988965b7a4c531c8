"""A Gemma 3 decoder of 268M parameters with weights by formula, for `benchmarks.step`.

Knows both worlds: files for programs that read checkpoints, arrays for the engine in this process.
"""

import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers import Gemma3Config, Gemma3TextConfig, SiglipVisionConfig

from mmjax.config.engine_config import (
    CacheConfig,
    DtypeName,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
)
from mmjax.engine.core import EngineCore
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.gemma3.model import Gemma3ForConditionalGeneration
from mmjax.params.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest

MAX_MODEL_LEN = 1024
SMALL_SHARE = 0.05
"""How much layers behind a draft model's add, beside whole ones."""


def text_config(**changes: Any) -> Gemma3TextConfig:
    """Return 18 layers of width 640 over 262,208 tokens, less what `changes` says."""
    shape: dict[str, Any] = {
        "vocab_size": 262208,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "max_position_embeddings": 8192,
    }
    return Gemma3TextConfig(**{**shape, **changes})


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of one of the decoder's tensors, float32."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape, np.float32)
    if "norm" in name:
        return 0.05 * values
    width = shape[-1]
    return values * np.float32((0.35 if "embed_tokens" in name else 1.0) / width**0.5)


def write_checkpoint(folder: Path) -> None:
    """Write the decoder as a text model in HF's format, float32."""
    # On use only: it brings an installed torch along.
    import torch
    from transformers import Gemma3ForCausalLM

    model = Gemma3ForCausalLM(text_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = weight(name.removeprefix("model."), tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))
    model.save_pretrained(folder)


def model_config(text: Gemma3TextConfig) -> Gemma3Config:
    """Return the configuration of a model whose tower is as small as can be."""
    vision = SiglipVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=28,
        patch_size=7,
        vision_use_head=False,
    )
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)


def make_params(hf_config: Gemma3Config, dtype: DtypeName, *, num_whole: int | None = None) -> Any:
    """Return the parameters, rounded to `dtype`; those of the tower, which is never used, are zero.

    Layers behind the first `num_whole` add little to what those give, as a trained model's do whose
    draft model says mostly the same; None: all are whole.
    """
    _, abstract = build_abstract(Gemma3ForConditionalGeneration, hf_config, dtype=jnp.dtype(dtype))
    leaves: dict[str, Any] = {}
    for name, leaf in flatten_params(abstract).items():
        own = name.removeprefix("language_model.")
        is_text = own != name
        values = weight(own, leaf.shape) if is_text else np.zeros(leaf.shape, np.float32)
        layer = re.match(r"layers\.(\d+)\.post_", own)
        if layer is not None and num_whole is not None and int(layer[1]) >= num_whole:
            # Gemma's norms multiply by one more than their weights.
            values = values + (SMALL_SHARE - 1)
        leaves[name] = values.astype(leaf.dtype)
    return unflatten_params(leaves)


def make_config(
    hf_config: Any,
    model_class: Any,
    dtype: DtypeName,
    lora: LoRAConfig | None = None,
    **scheduler: Any,
) -> EngineConfig:
    """Return the configuration of an engine whose weights are given, for its constructor."""
    model = ModelConfig(
        model="benchmark",
        path=Path("."),
        hf_config=hf_config,
        architecture=model_class.__name__,
        max_model_len=MAX_MODEL_LEN,
        dtype=dtype,
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(**scheduler),
        lora=lora or LoRAConfig(),
        precompile="all",
        use_tqdm=False,
    )


def make_engine(
    text: Gemma3TextConfig,
    *,
    dtype: DtypeName = "float32",
    lora: LoRAConfig | None = None,
    draft: Gemma3TextConfig | None = None,
    **scheduler: Any,
) -> EngineCore:
    """Start an engine over the same weights; `draft`: of a model of its first layers."""
    hf_config = model_config(text)
    num_whole = None if draft is None else draft.num_hidden_layers
    params = make_params(hf_config, dtype, num_whole=num_whole)
    config = make_config(hf_config, Gemma3ForConditionalGeneration, dtype, lora, **scheduler)
    draft_params = None
    if draft is not None:
        its = model_config(draft)
        config = replace(config, draft=replace(config.model, hf_config=its))
        draft_params = make_params(its, dtype)
    return EngineCore(
        config,
        model_class=Gemma3ForConditionalGeneration,
        params=params,
        draft_params=draft_params,
    )


def make_request(number: int, num_prompt_tokens: int, num_tokens: int) -> EngineCoreRequest:
    """Return a request that ends by length alone."""
    rng = np.random.default_rng(number)
    return EngineCoreRequest(
        request_id=f"{number}",
        prompt_token_ids=rng.integers(3, 1000, num_prompt_tokens).tolist(),
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        eos_token_ids=[1],
    )
