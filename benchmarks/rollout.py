"""Rollouts of a trainer: tokens a second, and the time of an update, beside HF's `generate`.

`python -m benchmarks.rollout [--model DIR] [--prompts 64] [--answers 8] [--tokens 16] [--rounds 3]
[--tunix]`
samples so many answers of so many tokens to each prompt, a question about a picture of its own, in
turns with HF's model of the same weights, in one process; it prints medians. Each round has new
pictures, as a trainer's have: a cache holds nothing but a prompt's own for its other answers. Both
begin at the pictures and end at token ids.
Tunix's vanilla sampler takes turns too with `--tunix`, beside mmjax on the same questions without
pictures, which the released one (0.1.5) does not take; the model must be a Gemma 3. An update is of
all weights, and then of the decoder alone, each time by other arrays.
"""

import argparse
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from PIL import Image

from benchmarks.offline import draw
from mmjax import LLM, SamplingParams
from mmjax.frontend.output.outputs import RequestOutput
from mmjax.integrations.tunix_weights import map_tunix_params
from mmjax.layers.module import flatten_params
from mmjax.models.registry import create_processor
from mmjax.parity.reference import (
    import_torch,
    load_reference,
    load_reference_processor,
    with_float_pixels,
)

QUESTION = "How many objects are there?"


class Engine:
    """mmjax."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.llm = LLM(
            flags.model,
            dtype=flags.dtype,
            max_num_seqs=flags.max_num_seqs,
            max_model_len=flags.max_model_len,
            precompile="all",
            use_tqdm_on_load=False,
        )
        self.params = SamplingParams(
            temperature=1.0, n=flags.answers, max_tokens=flags.tokens, ignore_eos=True, seed=0
        )

    def sample(self, pictures: Sequence[Image.Image]) -> int:
        """Answer about each picture; return the number of tokens."""
        chats = [
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_pil", "image_pil": picture},
                        {"type": "text", "text": QUESTION},
                    ],
                }
            ]
            for picture in pictures
        ]
        return _count(self.llm.chat(chats, self.params, use_tqdm=False))

    def sample_text(self, questions: Sequence[str]) -> int:
        """Answer questions without pictures; return the number of tokens."""
        return _count(self.llm.generate(questions, self.params, use_tqdm=False))

    def ask(self, questions: Sequence[str]) -> list[list[int]]:
        """Return greedy answers, token ids."""
        params = SamplingParams(temperature=0.0, max_tokens=self.params.max_tokens, ignore_eos=True)
        outputs = self.llm.generate(questions, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def update(self, names: Sequence[str]) -> None:
        """Give the engine other arrays for these parts of the model."""
        new = {name: jax.tree.map(lambda leaf: leaf + 0, self.llm.params[name]) for name in names}
        jax.block_until_ready(new)
        start = time.perf_counter()
        self.llm.update_weights(new)
        jax.block_until_ready(self.llm.params)
        self.update_s = time.perf_counter() - start


class Reference:
    """HF's model, on torch."""

    def __init__(self, flags: argparse.Namespace, engine: Engine) -> None:
        self.torch = import_torch()
        config = engine.llm.config.model
        ours = create_processor(config).info.get_hf_processor()
        processor = load_reference_processor(config.path, config.hf_config.model_type, ours)
        self.processor = with_float_pixels(processor)
        self.model = load_reference(config.path, config.architecture, dtype=flags.dtype)
        content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
        self.prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        self.flags = flags

    def sample(self, pictures: Sequence[Image.Image]) -> int:
        """Answer about each picture; return the number of tokens."""
        inputs = self.processor(
            text=[self.prompt] * len(pictures),
            images=[[picture] for picture in pictures],
            return_tensors="pt",
            add_special_tokens=False,
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with self.torch.inference_mode():
            ids = self.model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                num_return_sequences=self.flags.answers,
                max_new_tokens=self.flags.tokens,
            )
        return ids[:, inputs["input_ids"].shape[1] :].numel()


class Tunix:
    """Tunix's vanilla sampler, over its own Gemma 3 with the engine's weights."""

    def __init__(self, flags: argparse.Namespace, engine: Engine) -> None:
        from tunix.generate.sampler import CacheConfig, Sampler

        config = engine.llm.config.model.hf_config.text_config
        self.sampler = Sampler(
            _make_tunix_gemma3(engine),
            engine.llm.get_tokenizer(),
            CacheConfig(
                cache_size=flags.max_model_len,
                num_layers=config.num_hidden_layers,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            ),
        )
        self.flags = flags

    def sample_text(self, questions: Sequence[str]) -> int:
        """Answer questions without pictures; return the number of tokens."""
        repeated = [one for one in questions for _ in range(self.flags.answers)]
        output = self.sampler(
            repeated,
            max_generation_steps=self.flags.tokens,
            eos_tokens=[-1],
            temperature=1.0,
            top_p=1.0,
            seed=0,
        )
        return sum(len(tokens) for tokens in output.tokens)

    def ask(self, questions: Sequence[str]) -> list[list[int]]:
        """Return greedy answers, token ids."""
        output = self.sampler(
            questions, max_generation_steps=self.flags.tokens, eos_tokens=[-1], temperature=0.0
        )
        return [tokens.tolist() for tokens in output.tokens]


def _make_tunix_gemma3(engine: Engine) -> Any:
    """Return Tunix's model with the engine's weights."""
    from tunix.models.gemma3.model import Gemma3, ModelConfig

    text = engine.llm.config.model.hf_config.text_config
    rotary = text.rope_parameters
    config = ModelConfig(
        num_layers=text.num_hidden_layers,
        num_embed=text.vocab_size,
        embed_dim=text.hidden_size,
        hidden_dim=text.intermediate_size,
        num_heads=text.num_attention_heads,
        head_dim=text.head_dim,
        num_kv_heads=text.num_key_value_heads,
        sliding_window_size=text.sliding_window,
        local_base_frequency=int(rotary["sliding_attention"]["rope_theta"]),
        global_base_frequency=int(rotary["full_attention"]["rope_theta"]),
        param_dtype=jnp.dtype(engine.llm.config.model.dtype),
    )
    model = Gemma3(config, rngs=nnx.Rngs(params=0))
    own = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wanted = jax.eval_shape(map_tunix_params, own)
    weights = flatten_params(engine.llm.params)
    # The map moves numbers and changes none, so its transpose is its inverse.
    (found,) = jax.linear_transpose(map_tunix_params, own)({name: weights[name] for name in wanted})
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, found)
    nnx.update(model, state)
    return model


def _count(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(one.token_ids) for output in outputs for one in output.outputs)


def measure(sample: Callable[[Sequence[Any]], int], data: Sequence[Any]) -> float:
    """Return tokens a second."""
    start = time.perf_counter()
    num_tokens = sample(data)
    return num_tokens / (time.perf_counter() - start)


def race(
    sides: Mapping[str, Callable[[Sequence[Any]], int]],
    flags: argparse.Namespace,
    data: Sequence[Any],
) -> dict[str, list[float]]:
    """Return each side's rates of all rounds; the first round is a warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(flags.rounds + 1):
        batch = data[number * flags.prompts : (number + 1) * flags.prompts]
        for name, sample in sides.items():
            rate = measure(sample, batch)
            if number:
                rates[name].append(rate)
    return rates


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=None, help="a directory or hub id; default: tiny_scenes")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tunix", action="store_true", help="needs `pip install 'mmjax[tunix]'`")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=512)
    flags = parser.parse_args()
    engine = Engine(flags)
    sides = {"mmjax": engine.sample, "HF generate": Reference(flags, engine).sample}
    rates = race(sides, flags, [draw(seed) for seed in range((flags.rounds + 1) * flags.prompts)])
    if flags.tunix:
        tunix = Tunix(flags, engine)
        questions = [
            f"{number}. {QUESTION}" for number in range((flags.rounds + 1) * flags.prompts)
        ]
        asked = questions[: flags.prompts]
        agree = sum(map(operator.eq, engine.ask(asked), tunix.ask(asked)))
        print(f"greedy answers of mmjax and Tunix that are equal: {agree} of {len(asked)}")
        sides = {"mmjax, text": engine.sample_text, "Tunix, text": tunix.sample_text}
        rates |= race(sides, flags, questions)
    for name, found in rates.items():
        runs = " ".join(f"{rate:.0f}" for rate in found)
        print(f"{name:11} {statistics.median(found):8.0f} tok/s  ({runs})")
    for parts in (list(engine.llm.params), ["language_model"]):
        times = []
        for _ in range(flags.rounds + 1):
            engine.update(parts)
            times.append(engine.update_s)
        print(f"update of {', '.join(parts)}: {1000 * statistics.median(times[1:]):.1f} ms")
    print(f"compiled since the start: {engine.llm.engine.stats().num_compilations}")
    engine.llm.close()


if __name__ == "__main__":
    main()
