"""Decoding with and without guessed tokens, in turns, by one engine in one process.

`python -m benchmarks.speculation [--model NAME] [--batches 1 4 8]`
prints tokens a second of answers that repeat and of answers that do not, and how many guessed
tokens were right. The ratios are of the medians, and of the best rounds, which other programs
disturbed least. `decoder` is a random Gemma 3 decoder (18 layers of width 640, 262,208 tokens) in
`--dtype`. `drafted` is another (16 layers of width 1,024, 32,768 tokens), for which its first two
layers guess as a draft model. `mtp` has the shape of GLM-OCR's decoder, for which the layer of its
checkpoint guesses: all layers add nothing, so that it is always right; `mtp-wrong`: never.
`recurrent` is the same with the shape of Qwen3.5 0.8B, half as deep, and 32,768 tokens. `assistant`
has the widths of Gemma 4 E2B, eight layers and as many tokens, and an assistant of the published
ones' widths. The answers of both ways are compared, too.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from transformers import (
    Gemma4AssistantConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GlmOcrConfig,
    Qwen3_5Config,
)

from benchmarks.offline import draw
from benchmarks.step_model import make_config, make_engine, text_config, weight
from mmjax import LLM, SamplingParams
from mmjax.engine.core import EngineCore
from mmjax.layers.module import build_abstract, flatten_params, unflatten_params
from mmjax.models.gemma4.model import Gemma4ForConditionalGeneration
from mmjax.models.glm4v.model import GlmOcrForConditionalGeneration
from mmjax.models.qwen3_vl.model import Qwen3_5ForConditionalGeneration
from mmjax.transport.messages import EngineCoreRequest

CONFIG = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
DRAFT_CONFIG = {"method": "draft_model", "model": "layers", "num_speculative_tokens": 4}
MTP_CONFIG = {"method": "mtp", "num_speculative_tokens": 4}
ASSISTANT_CONFIG = {"method": "mtp", "model": "assistant", "num_speculative_tokens": 4}
DRAFT_LAYERS = 2
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
MAX_NUM_SEQS = 8
KINDS: dict[str, dict[str, Any]] = {
    "repeats": {"temperature": 0.0},
    "does not repeat": {"temperature": 2.0, "seed": 1},
}
Answers = list[list[int]]
Serve = Callable[[int, SamplingParams], Answers]


def open_scenes() -> tuple[EngineCore, Serve]:
    """Return tiny_scenes, asked to describe pictures, and to go on when it has."""
    llm = LLM(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=1024,
        speculative_config=CONFIG,
        precompile="all",
        use_tqdm_on_load=False,
    )

    def serve(batch: int, params: SamplingParams) -> Answers:
        question = {"type": "text", "text": "Describe the picture."}
        chats = [
            [{"role": "user", "content": [{"type": "image_pil", "image_pil": draw(n)}, question]}]
            for n in range(batch)
        ]
        outputs = llm.chat(chats, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return llm.engine, serve


def open_decoder(dtype: Any, *, is_drafted: bool = False) -> tuple[EngineCore, Serve]:
    """Return a random decoder, whose prompts are the same 20 tokens three times."""
    options: dict[str, Any] = {"dtype": dtype, "max_num_seqs": MAX_NUM_SEQS}
    options |= {"max_num_batched_tokens": 64, "speculative_config": CONFIG}
    text = text_config()
    if is_drafted:
        sizes = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096}
        text = text_config(**sizes, num_hidden_layers=16)
        draft = text_config(**sizes, num_hidden_layers=DRAFT_LAYERS)
        options |= {"speculative_config": DRAFT_CONFIG, "draft": draft}
    return serving(make_engine(text, **options))


def open_mtp(
    model_class: Any, hf_config: Any, joining: str, dtype: Any, *, is_right: bool = True
) -> tuple[EngineCore, Serve]:
    """Return a decoder whose next token depends on the last one, and a layer that knows it.

    `joining`: the name of what the layer joins an embedding and a state by.
    """
    whole, layer = (
        make_silent_params(one, hf_config, dtype) for one in (model_class, model_class.mtp_class)
    )
    name = f"language_model.{joining}.weight"
    reads = np.eye(*layer[name].shape, dtype=np.float32) * is_right
    layer[name] = reads.astype(layer[name].dtype)
    own = {name: leaf for name, leaf in layer.items() if "embed_tokens" not in name}
    own.pop("language_model.lm_head.weight", None)
    sizes: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 64}
    config = make_config(
        hf_config,
        model_class,
        dtype,
        speculative_config=MTP_CONFIG,
        **sizes,
    )
    core = EngineCore(
        replace(config, max_embeds_per_item={"image": 64, "video": 64}),
        model_class=model_class,
        params=unflatten_params(whole),
        draft_params=unflatten_params(own),
    )
    return serving(core)


def recurrent_config() -> Any:
    """Return the configuration of a smaller Qwen3.5."""
    text = {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
    }
    vision = {**VISION, "out_hidden_size": 1024, "num_position_embeddings": 4}
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)


def open_assistant(dtype: Any) -> tuple[EngineCore, Serve]:
    """Return a decoder whose next token depends on the last one, and an assistant that knows it.

    Tokens differ in the first columns of the table alone, as many as the assistant has.
    """
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    shared: dict[str, Any] = {
        "vocab_size": 32768,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    target = Gemma4TextConfig(
        hidden_size=1536,
        intermediate_size=6144,
        num_attention_heads=8,
        num_hidden_layers=8,
        num_kv_shared_layers=4,
        layer_types=kinds * 2,
        **shared,
    )
    small = Gemma4TextConfig(
        hidden_size=256,
        intermediate_size=2048,
        num_attention_heads=4,
        num_hidden_layers=4,
        num_kv_shared_layers=4,
        layer_types=kinds,
        **shared,
    )
    model_class = Gemma4ForConditionalGeneration
    hf_config = Gemma4Config(
        text_config=target, vision_config={"num_hidden_layers": 1}, audio_config=None
    )
    assistant = Gemma4AssistantConfig(text_config=small, backbone_hidden_size=1536)
    whole = make_silent_params(model_class, hf_config, dtype)
    own = make_silent_params(model_class.assistant_class, assistant, dtype)
    width, table = small.hidden_size, "language_model.embed_tokens.weight"
    whole[table][:, width:] = 0
    del own[table]
    own["language_model.lm_head.weight"] = whole[table][:, :width]
    reads = own["language_model.pre_projection.weight"]
    reads[:] = np.eye(*reads.shape)
    # Of the same vector, but for zeros.
    own["language_model.norm.weight"][:] = (target.hidden_size / width) ** 0.5
    sizes: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 64}
    made = make_config(hf_config, model_class, dtype, speculative_config=ASSISTANT_CONFIG, **sizes)
    architecture = model_class.assistant_architectures[0]
    draft = replace(made.model, hf_config=assistant, architecture=architecture)
    core = EngineCore(
        replace(made, draft=draft, max_embeds_per_item={"image": 64, "video": 64}),
        model_class=model_class,
        params=unflatten_params(whole),
        draft_params=unflatten_params(own),
    )
    return serving(core)


def make_silent_params(model_class: Any, hf_config: Any, dtype: Any) -> dict[str, Any]:
    """Return parameters by name, of layers that add nothing; norms multiply by one."""
    _, abstract = build_abstract(model_class, hf_config, dtype=jnp.dtype(dtype))
    leaves = {}
    for name, leaf in flatten_params(abstract).items():
        values = np.zeros(leaf.shape, np.float32)
        if "norm" in name or name.endswith("layer_scalar"):
            values += 1
        elif not name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "bias")):
            values = weight(name.removeprefix("language_model."), leaf.shape)
        leaves[name] = values.astype(leaf.dtype)
    return leaves


def serving(core: EngineCore) -> tuple[EngineCore, Serve]:
    """Return an engine, and what asks it about 20 tokens three times."""

    def serve(batch: int, params: SamplingParams) -> Answers:
        answers: dict[str, list[int]] = {f"{number}": [] for number in range(batch)}
        for number in range(batch):
            prompt = np.random.default_rng(number).integers(3, 1000, 20).tolist() * 3
            core.add_request(
                EngineCoreRequest(
                    request_id=f"{number}",
                    prompt_token_ids=prompt,
                    mm_features=[],
                    sampling_params=params,
                    eos_token_ids=[1],
                )
            )
        while core.has_unfinished():
            for delta in core.step():
                answers[delta.request_id] += delta.new_token_ids
        return list(answers.values())

    return core, serve


def compare(core: EngineCore, serve: Serve, batches: Sequence[int], rounds: int, num: int) -> None:
    """Print a row for each kind of answer and number of requests at once."""
    scheduler = core._scheduler
    speculation = scheduler.speculation
    assert speculation is not None, "the engine guesses nothing"
    print(
        "answers         | at once | tokens/s without, with | ratio, of the best | right, guessed"
    )
    for kind, fields in KINDS.items():
        params = SamplingParams(min_tokens=num, max_tokens=num, **fields)
        for batch in batches:
            seconds: dict[bool, list[float]] = {False: [], True: []}
            answers: dict[bool, Answers] = {}
            before = speculation.num_draft_tokens, speculation.num_accepted_tokens
            for turn in range(2 * rounds + 2):
                guesses = turn % 4 in (1, 2)
                scheduler.speculation = speculation if guesses else None
                start = time.perf_counter()
                answers[guesses] = serve(batch, params)
                seconds[guesses].append(time.perf_counter() - start)
            assert answers[False] == answers[True], "an answer differs"
            typical = [statistics.median(seconds[one][1:]) for one in (False, True)]
            best = [min(seconds[one][1:]) for one in (False, True)]
            guessed = speculation.num_draft_tokens - before[0]
            right = speculation.num_accepted_tokens - before[1]
            print(
                f"{kind:15} | {batch:7} | {batch * num / typical[0]:10.1f} "
                f"{batch * num / typical[1]:11.1f} | {typical[0] / typical[1]:5.2f} "
                f"{best[0] / best[1]:12.2f} | {right}, {guessed}",
                flush=True,
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--model",
        choices=(
            "tiny_scenes",
            "decoder",
            "drafted",
            "mtp",
            "mtp-wrong",
            "recurrent",
            "assistant",
        ),
        default="tiny_scenes",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    flags = parser.parse_args()
    if flags.model == "tiny_scenes":
        opened = open_scenes()
    elif flags.model == "assistant":
        opened = open_assistant(flags.dtype)
    elif flags.model == "recurrent":
        made = Qwen3_5ForConditionalGeneration, recurrent_config(), "fc"
        opened = open_mtp(*made, flags.dtype)
    elif flags.model.startswith("mtp"):
        config = GlmOcrConfig(
            text_config={"num_nextn_predict_layers": 1},
            vision_config={**VISION, "out_hidden_size": 1024},
        )
        made = GlmOcrForConditionalGeneration, config, "eh_proj"
        opened = open_mtp(*made, flags.dtype, is_right=flags.model == "mtp")
    else:
        opened = open_decoder(flags.dtype, is_drafted=flags.model == "drafted")
    compare(*opened, flags.batches, flags.rounds, flags.tokens)
    opened[0].close()


if __name__ == "__main__":
    main()
