"""What each family compiles before it serves, beside Gemma 3 in the same run.

`python -m benchmarks.programs [FAMILY ...]`: decoders and towers of four layers, width 256 and
heads of 64, one image of a few dozen embeddings. Counts the engine's programs, and traces and
compiles those of the largest and of the smallest bucket by themselves, without a cache. Seconds
are of the processor, so that other load changes them little. No weights are made: programs are
compiled from shapes.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import transformers

from mmjax.config import ParallelConfig
from mmjax.engine.device.compilation import Program
from mmjax.engine.device.encoder import choose_patches, count_units
from mmjax.engine.device.mesh import make_placement
from mmjax.engine.device.programs import ModelShape, Programs
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.layers.attention.api import choose_cache_type, span_variants
from mmjax.layers.module import bind, build_abstract
from mmjax.models.host_inputs import require_units
from mmjax.models.registry import load_model_class
from mmjax.rounding import cdiv, round_up

BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 16, 1024, 256
YARDSTICK = "Gemma3ForConditionalGeneration"
COLUMNS: Mapping[str, tuple[str, int]] = {
    "largest step": ("step", 0),
    "smallest step": ("step", -1),
    "encode": ("encode", 0),
    "sample": ("sample", 0),
}
"""A function, and which of its programs, that of the largest bucket first."""
LIMIT = 2.0
"""Times Gemma 3's seconds of a program; more is marked."""

TEXT: Mapping[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 112,
    "patch_size": 14,
}
QWEN_VISION: Mapping[str, Any] = {"depth": 4, "num_heads": 4, "patch_size": 14}
ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
LAST_TOKENS: Mapping[str, Any] = {"image_token_id": 1000, "video_token_id": 1001}


def gemma3() -> Any:
    text = {**TEXT, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 512}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=16,
        boi_token_index=1001,
        eoi_token_index=1002,
        image_token_index=1000,
    )


def llava(**vision: Any) -> Any:
    strategy = {"vision_feature_layer": -1} if vision else {}
    # Its last block is not computed: the embeddings are the states before it.
    depth = {} if vision else {"num_hidden_layers": 5}
    return transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"},
        vision_config={**VISION, "model_type": "clip_vision_model", **depth, **vision},
        image_token_index=1000,
        vision_feature_select_strategy="full" if vision else "default",
        **strategy,
    )


def qwen2_vl() -> Any:
    rope = {**ROPE, "mrope_section": [8, 12, 12]}
    return transformers.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**QWEN_VISION, "embed_dim": 256, "hidden_size": 256, "mlp_ratio": 2},
        **LAST_TOKENS,
    )


def qwen2_5_vl() -> Any:
    rope = {**ROPE, "mrope_section": [8, 12, 12]}
    widths = {"hidden_size": 256, "intermediate_size": 512, "out_hidden_size": 256}
    return transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={**QWEN_VISION, **widths, "fullatt_block_indexes": [3]},
        **LAST_TOKENS,
    )


def internvl() -> Any:
    return transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={**VISION},
        image_token_id=1000,
        image_seq_length=16,
    )


def fuyu() -> Any:
    kept = {name: value for name, value in TEXT.items() if name != "num_key_value_heads"}
    rope = {**ROPE, "partial_rotary_factor": 0.5}
    text = {**kept, "model_type": "persimmon", "rope_parameters": rope}
    return transformers.FuyuConfig(text_config=text, patch_size=30, image_token_id=1000)


def blip2() -> Any:
    text = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    qformer = {name: VISION[name] for name in VISION if name not in ("image_size", "patch_size")}
    return transformers.Blip2Config(
        text_config={"model_type": "opt", **text, "ffn_dim": 512, "num_attention_heads": 4},
        vision_config={**VISION},
        qformer_config={**qformer, "encoder_hidden_size": 256},
        num_query_tokens=32,
        image_token_index=1000,
    )


def chameleon() -> Any:
    codes = {
        f"IMGIMG{str(code).translate(str.maketrans('0123456789', 'ABCDEFGHIJ'))}Z": 900 + code
        for code in range(64)
    }
    names = {"<image>": 1000, "<racm3:break>": 1001, "<eoss>": 1002}
    vq = {"resolution": 112, "num_embeddings": 64, "base_channels": 128}
    return transformers.ChameleonConfig(**TEXT, vq_config=vq, vocabulary_map=names | codes)


def florence2() -> Any:
    sides = {
        f"{side}coder_{name}": value
        for side in ("en", "de")
        for name, value in (("layers", 4), ("ffn_dim", 512), ("attention_heads", 4))
    }
    stages = {"depths": [1] * 4, "embed_dim": [64, 128, 256, 256], "num_heads": [1, 2, 4, 4]}
    vision = {**stages, "num_groups": [1, 2, 4, 4], "projection_dim": 256, "image_size": 224}
    return transformers.Florence2Config(
        text_config={"model_type": "bart", "vocab_size": 1024, "d_model": 256, **sides},
        vision_config={**vision, "max_position_embeddings": 16},
        image_token_id=1000,
    )


CONFIGS: Mapping[str, tuple[Callable[[], Any], str]] = {
    "Gemma 3": (gemma3, YARDSTICK),
    "LLaVA-1.5": (llava, "LlavaForConditionalGeneration"),
    "Pixtral": (lambda: llava(model_type="pixtral"), "LlavaForConditionalGeneration"),
    "Qwen2-VL": (qwen2_vl, "Qwen2VLForConditionalGeneration"),
    "Qwen2.5-VL": (qwen2_5_vl, "Qwen2_5_VLForConditionalGeneration"),
    "InternVL": (internvl, "InternVLForConditionalGeneration"),
    "Fuyu": (fuyu, "FuyuForCausalLM"),
    "BLIP-2": (blip2, "Blip2ForConditionalGeneration"),
    "Chameleon": (chameleon, "ChameleonForConditionalGeneration"),
    "Florence-2": (florence2, "Florence2ForConditionalGeneration"),
}
"""A configuration, and its architecture."""
MAX_EMBEDS = 64
"""Of an image of those that may have any size."""


def make_programs(config: Any, architecture: str) -> Programs:
    """Return the programs of an engine for 4 requests, steps of 128 tokens and one image."""
    model_class = load_model_class(architecture)
    graphdef, params = build_abstract(model_class, config, dtype=jnp.dtype(jnp.float32))
    model: Any = bind(graphdef, params)
    host_inputs = model_class.host_inputs(config)
    spec, encoder_len = host_inputs.encoder_spec, model.max_encoder_len
    rows = MAX_EMBEDS
    if hasattr(spec, "tokens_per_unit"):
        rows = round_up(max(1, encoder_len), require_units(spec).tokens_per_unit)
    placement = make_placement(ParallelConfig(), num_heads=4, num_kv_heads=4)
    shape = ModelShape.of(graphdef, params)
    cache_type = choose_cache_type(placement.platform, model.kv_cache_spec, shape.dtype)
    buckets = Buckets.create(
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_units=count_units(spec, rows),
        patches=choose_patches(spec, rows, rows),
        span_variants=span_variants(cache_type, has_spans=model.has_bidirectional_spans),
        max_encoder_len=encoder_len,
    )
    return Programs(
        shape,
        params,
        cache_type=cache_type,
        buckets=buckets,
        placement=placement,
        host_inputs=host_inputs,
        num_encoder_rows=rows,
        block_size=BLOCK_SIZE,
        max_blocks=cdiv(MAX_MODEL_LEN, BLOCK_SIZE),
        max_encoder_blocks=cdiv(encoder_len, BLOCK_SIZE),
    )


def measure(program: Program) -> float:
    """Return the seconds to trace and compile a program."""
    start = time.process_time()
    program.jitted.lower(**program.arguments).compile()
    return time.process_time() - start


def measure_family(name: str) -> tuple[int, list[float]]:
    """Return the number of a family's programs, and the seconds of those in `COLUMNS`."""
    make_config, architecture = CONFIGS[name]
    by_kind = make_programs(make_config(), architecture).by_kind(NUM_BLOCKS)
    number = sum(map(len, by_kind.values()))
    return number, [measure(by_kind[kind][place]) for kind, place in COLUMNS.values()]


def format_row(name: str, number: int, seconds: list[float], yardstick: list[float]) -> str:
    """Return a row of the table: per program its seconds, and their ratio to Gemma 3's."""
    cells = [name, str(number)]
    for own, gemmas in zip(seconds, yardstick, strict=True):
        mark = "**" if own / gemmas > LIMIT else ""
        cells.append(f"{own:.2f} s, {mark}{own / gemmas:.2f}x{mark}")
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("families", nargs="*", default=[*CONFIGS][1:], metavar="FAMILY")
    families = parser.parse_args(arguments).families
    # What was compiled before would cost nothing.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    number, yardstick = measure_family("Gemma 3")
    print(f"| family | programs | {' | '.join(COLUMNS)} |")
    print("|---|" + "---|" * (1 + len(COLUMNS)))
    print(format_row("Gemma 3", number, yardstick, yardstick), flush=True)
    for name in families:
        print(format_row(name, *measure_family(name), yardstick), flush=True)


if __name__ == "__main__":
    main()
