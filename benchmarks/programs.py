"""What each family compiles before it serves, beside Gemma 3 in the same run.

`python -m benchmarks.programs [FAMILY ...]`: decoders and towers of four layers, width 256 and
heads of 64, one image of a few dozen embeddings. Counts the engine's programs, and traces and
compiles those of the largest and of the smallest bucket by themselves, without a cache. Seconds
are of the processor, and Gemma 3's are taken before every family's. No weights are made: programs
are compiled from shapes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import transformers

from mmjax.config.engine_config import ParallelConfig
from mmjax.engine.device.compilation import Program
from mmjax.engine.device.encoder import choose_sizes
from mmjax.engine.device.functions import ModelShape
from mmjax.engine.device.mesh import make_placement
from mmjax.engine.device.programs import Programs
from mmjax.engine.scheduling.buckets import Buckets
from mmjax.layers.attention.api import choose_cache_type, span_variants
from mmjax.layers.module import bind, build_abstract
from mmjax.models.host_inputs import EncoderSpec
from mmjax.models.model_source import load_model_config
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
    strategy: dict[str, Any] = {"vision_feature_layer": -1} if vision else {}
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
    # Four residual blocks, two of them behind the levels, and one of attention.
    levels = {"channel_multiplier": [1, 2], "num_res_blocks": 1, "base_channels": 128}
    vq = {**levels, "resolution": 16, "num_embeddings": 64}
    return transformers.ChameleonConfig(**TEXT, vq_config=vq, vocabulary_map=names | codes)


def florence2() -> Any:
    sides = {
        f"{side}coder_{name}": value
        for side in ("en", "de")
        for name, value in (("layers", 4), ("ffn_dim", 512), ("attention_heads", 4))
    }
    # A stage is a block of attention within windows and one among channels: four in all.
    stages = {"depths": [1, 1], "embed_dim": [128, 256], "num_heads": [2, 4], "num_groups": [2, 4]}
    patches = {"patch_size": [7, 3], "patch_stride": [4, 4], "patch_padding": [3, 1]}
    edges = {"patch_prenorm": [False, True], "projection_dim": 256, "image_size": 112}
    vision = {**stages, **patches, **edges}
    return transformers.Florence2Config(
        text_config={"model_type": "bart", "vocab_size": 1024, "d_model": 256, **sides},
        vision_config={**vision, "max_position_embeddings": 16},
        image_token_id=1000,
    )


def read_config(**keys: Any) -> Any:
    """Return the configuration of a family that transformers has no class for."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(keys))
        return load_model_config(folder).hf_config


def molmo() -> Any:
    # Its tower is read behind the first and the last of four blocks; a fifth is not computed.
    tower = {
        "image_default_input_size": [112, 112],
        "image_patch_size": 14,
        "image_pos_patch_size": 14,
        "image_emb_dim": 256,
        "image_num_heads": 4,
        "image_num_key_value_heads": 4,
        "image_num_layers": 5,
        "image_head_dim": 64,
        "image_mlp_dim": 512,
        "image_mlp_activations": "quick_gelu",
        "image_num_pos": 65,
        "image_norm_eps": 1e-5,
        "vit_layers": [-2, -5],
    }
    flags = dict.fromkeys(("attention_layer_norm", "norm_after", "tie_word_embeddings"), False)
    return read_config(
        **{**TEXT, "intermediate_size": 1024},
        **flags,
        model_type="molmo",
        architectures=["MolmoForCausalLM"],
        embedding_size=1024,
        layer_norm_eps=1e-6,
        layer_norm_type="rms",
        qkv_bias=True,
        rope_theta=1e6,
        test_vision_backbone=tower,
    )


def deepseek_vl2() -> Any:
    experts = {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
    }
    latents = {
        "use_mla": True,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    }
    return read_config(
        model_type="deepseek_vl_v2",
        architectures=["DeepseekVLV2ForCausalLM"],
        language_config={"model_type": "deepseek_v2", **TEXT, **experts, **latents},
        vision_config={"image_size": 112, "layers": 4, "mlp_ratio": 2, "patch_size": 14}
        | {"model_name": "siglip_so400m_patch14_384", "model_type": "vision", "width": 256},
        projector_config={"model_type": "mlp_projector", "input_dim": 256, "n_embed": 256},
        candidate_resolutions=[[112, 112], [112, 224], [224, 112]],
        global_view_pos="head",
        tile_tag="2D",
    )


def qwen_vl() -> Any:
    visual = {"width": 256, "layers": 4, "heads": 4, "mlp_ratio": 2, "output_dim": 256}
    kept = {name: TEXT[name] for name in TEXT if name != "num_key_value_heads"}
    return read_config(
        **{**kept, "intermediate_size": 1024},
        model_type="qwen",
        architectures=["QWenLMHeadModel"],
        kv_channels=64,
        layer_norm_epsilon=1e-6,
        no_bias=True,
        rotary_emb_base=10000,
        rotary_pct=1.0,
        seq_length=2048,
        tie_word_embeddings=False,
        use_dynamic_ntk=True,
        use_logn_attn=True,
        visual={**visual, "image_size": 224, "patch_size": 14, "image_start_id": 1000},
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
    "Molmo": (molmo, "MolmoForCausalLM"),
    "DeepSeek-VL2": (deepseek_vl2, "DeepseekVLV2ForCausalLM"),
    "Qwen-VL": (qwen_vl, "QWenLMHeadModel"),
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
    if isinstance(spec, EncoderSpec):
        rows = round_up(max(1, 2 * encoder_len), spec.tokens_per_unit)
    placement = make_placement(ParallelConfig(), num_kv_heads=4)
    shape = ModelShape.of(graphdef, params)
    cache_type = choose_cache_type(placement.platform, model.kv_cache_spec, shape.dtype)
    buckets = Buckets.create(
        max_num_seqs=4,
        max_num_batched_tokens=128,
        encode_sizes={"encode": choose_sizes(spec, rows, rows)},
        span_variants=span_variants(cache_type, has_spans=model.sees != "past"),
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
        max_encoder_len=encoder_len,
    )


def measure(program: Program) -> float:
    """Return the seconds to trace and compile a program, the less of two times."""
    return min(_compile(program) for _ in range(2))


def _compile(program: Program) -> float:
    jax.clear_caches()
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
    print(f"| family | programs | {' | '.join(COLUMNS)} |")
    print("|---|" + "---|" * (1 + len(COLUMNS)))
    for name in families:
        # Anew for each: a machine's speed changes while this runs.
        number, yardstick = measure_family("Gemma 3")
        print(format_row("Gemma 3", number, yardstick, yardstick), flush=True)
        print(format_row(name, *measure_family(name), yardstick), flush=True)


if __name__ == "__main__":
    main()
