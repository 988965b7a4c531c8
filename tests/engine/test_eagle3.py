"""An EAGLE-3 head guesses what its published maths say, and no answer changes.

HF has no class of it. The oracle is the paper's layer in plain torch, as vLLM's `llama_eagle3.py`
orders it, over the states that enter the layers of HF's model.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from mmjax import LLM
from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.module import Params, build_abstract, flatten_params, unflatten_params
from mmjax.models.eagle3.model import Eagle3Head, check_sizes, read_tapped_layers
from mmjax.models.model_source import load_model_config
from mmjax.parity.arrays import Sample
from tests.engine.test_draft import Eager, compare_mixed
from tests.engine.test_mtp import (
    SAMPLINGS,
    TWO_DEVICES,
    ask_all,
    check_guesses_of_files,
    noting,
    params_of_guesser,
    serve_without,
    start_guessing,
    without_layers,
)
from tests.engine.tiny import answer_all
from tests.families import TINY_FAMILIES, gemma3
from tests.families.tiny import Media, Parts, TinyModel, Words

EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_DRAFTED = 60
"""Tokens that a head can guess."""
TAPPED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen3_vl": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, (2, 3)),
    "gemma3": ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "norm_before_fc": True}, (0, 2, 3)),
}
"""What config.json says, in both ways to count, and the layers whose inputs are read."""
KIND = pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
NUM_BLOCKS = 30
PROMPTS: tuple[Parts, ...] = (
    (Words(4, 20),),
    (Words(0, 10), Media(0), Words(1, 9)),
    (Media(2), Words(5, 12)),
    (Words(0, 10), Media(1), Words(1, 9), Media(2), Words(7, 2)),
)


@cache
def model(kind: str) -> TinyModel:
    row = TINY_FAMILIES[kind]
    text = {"num_hidden_layers": 4} if kind == "qwen3_vl" else {}
    return TinyModel(row, **{**row.served, "text": text})


def head_config(text_config: Any, **changes: Any) -> LlamaConfig:
    """Return a head's configuration for a decoder."""
    settings: dict[str, Any] = {
        "vocab_size": text_config.vocab_size,
        "hidden_size": text_config.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "draft_vocab_size": NUM_DRAFTED,
        **changes,
    }
    config = LlamaConfig(**settings)
    config.architectures = [ARCHITECTURE]
    return config


@cache
def config_of(kind: str) -> LlamaConfig:
    more = {"norm_before_residual": True} if kind == "gemma3" else {}
    return head_config(model(kind).config.get_text_config(), **TAPPED[kind][0], **more)


def make_tensors(config: Any, num_tapped: int) -> dict[str, torch.Tensor]:
    """Return a random head by the names that files have."""
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = [number * head_dim for number in (config.num_attention_heads,)]
    key_rows = config.num_key_value_heads * head_dim
    shapes = {
        "fc": (width, num_tapped * width),
        "midlayer.self_attn.q_proj": (rows[0], 2 * width),
        "midlayer.self_attn.k_proj": (key_rows, 2 * width),
        "midlayer.self_attn.v_proj": (key_rows, 2 * width),
        "midlayer.self_attn.o_proj": (width, rows[0]),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (config.draft_vocab_size, width),
    }
    norms = ["midlayer.hidden_norm", "midlayer.input_layernorm", "norm"]
    norms.append("midlayer.post_attention_layernorm")
    if getattr(config, "norm_before_fc", False):
        norms.append("input_norm")
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {f"{name}.weight": 0.4 * randn(*shape) for name, shape in shapes.items()}
    wide = {"input_norm": num_tapped * width}
    tensors |= {f"{one}.weight": 1 + 0.2 * randn(wide.get(one, width)) for one in norms}
    ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    ids = ids.sort().values
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


@cache
def tensors_of(kind: str) -> dict[str, torch.Tensor]:
    return make_tensors(config_of(kind), len(TAPPED[kind][1]))


def params_of_head(config: Any, tensors: dict[str, torch.Tensor]) -> Params:
    return params_of_guesser(Eagle3Head, config, tensors)


# ---- the published maths -------------------------------------------------------------------------


class Oracle:
    """EAGLE-3's layer over all tokens at once."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor]) -> None:
        self._config, self._tensors = config, tensors

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self._tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        root = (x.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).sqrt()
        return x / root * self._tensors[f"{name}.weight"]

    def join(self, tapped: torch.Tensor) -> torch.Tensor:
        has_norm = "input_norm.weight" in self._tensors
        return self._linear("fc", self._norm("input_norm", tapped) if has_norm else tapped)

    def _attend(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        config, half = self._config, self._config.head_dim // 2
        base = config.rope_parameters["rope_theta"]
        angles = positions[:, None] * base ** (-torch.arange(half) / half)
        cos, sin = (part[:, None] for part in (angles.cos(), angles.sin()))

        def cut(name: str) -> torch.Tensor:
            whole = self._linear(f"midlayer.self_attn.{name}_proj", x)
            return whole.view(len(x), -1, config.head_dim)

        def turn(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads[..., :half], heads[..., half:]
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

        shared = config.num_attention_heads // config.num_key_value_heads
        key, value = (part.repeat_interleave(shared, dim=1) for part in (turn(cut("k")), cut("v")))
        scores = torch.einsum("qnd,knd->nqk", turn(cut("q")), key) * config.head_dim**-0.5
        hidden = torch.full(scores.shape[1:], -torch.inf).triu(1)
        out = torch.einsum("nqk,knd->qnd", (scores + hidden).softmax(-1), value)
        return self._linear("midlayer.self_attn.o_proj", out.reshape(len(x), -1))

    def run(
        self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return what stands behind each token, before the norm of the head."""
        normed = self._norm("midlayer.hidden_norm", states)
        is_normed = getattr(self._config, "norm_before_residual", False)
        joined = torch.cat([self._norm("midlayer.input_layernorm", embeds), normed], dim=-1)
        x = (normed if is_normed else states) + self._attend(joined, positions)
        y = self._norm("midlayer.post_attention_layernorm", x)
        gate = torch.nn.functional.silu(self._linear("midlayer.mlp.gate_proj", y))
        return x + self._linear(
            "midlayer.mlp.down_proj", gate * self._linear("midlayer.mlp.up_proj", y)
        )

    def choose(self, state: torch.Tensor) -> int:
        place = int(self._linear("lm_head", self._norm("norm", state)).argmax())
        return place + int(self._tensors["d2t"][place])


@torch.no_grad()
def guess(kind: str, sample: Sample, answer: Sequence[int], number: int) -> list[int]:
    """Return what the head says behind a prompt and the beginning of its answer."""
    reference, oracle = model(kind).reference, Oracle(config_of(kind), tensors_of(kind))
    ids = [*sample.token_ids.tolist(), *answer]
    known = replace(sample, token_ids=np.array(ids[:-1], np.int32))
    text, seen = reference.model.language_model, dict[Any, Any]()

    def note(name: Any) -> Any:
        return lambda module, args, kwargs: seen.update({name: (args, kwargs)})

    tapped = TAPPED[kind][1]
    modules = {n: text.norm if n == len(text.layers) else text.layers[n] for n in tapped}
    hooks = [
        module.register_forward_pre_hook(note(name), with_kwargs=True)
        for name, module in {"text": text, **modules}.items()
    ]
    reference(**TINY_FAMILIES[kind].torch_inputs(reference, known))
    for hook in hooks:
        hook.remove()
    states = oracle.join(torch.cat([seen[n][0][0][0] for n in tapped], dim=-1))
    given = seen["text"][1].get("position_ids") if kind == "qwen3_vl" else None
    positions = torch.arange(len(ids) - 1) if given is None else given[-3, 0]
    behind = int((positions if given is None else given[-3:]).max())
    table, guessed = text.embed_tokens.weight, list[int]()
    for place in range(number):
        embeds = table[torch.tensor(ids[1:])]
        states = torch.cat([states, oracle.run(embeds, states, positions)[-1:]])
        ids.append(oracle.choose(states[-1]))
        guessed.append(ids[-1])
        positions = torch.cat([positions, torch.tensor([behind + 1 + place])])
    return guessed


# ---- guesses and answers -------------------------------------------------------------------------


def start(
    kind: str, params: Any = None, draft: tuple[Any, Any] | None = None, **settings: Any
) -> EngineCore:
    """Start an engine with a head; `draft`: its configuration and weights."""
    hf_config, draft_params = draft or (
        config_of(kind),
        params_of_head(config_of(kind), tensors_of(kind)),
    )
    named = {"hf_config": hf_config, "architecture": ARCHITECTURE}
    sizes = {"num_blocks": NUM_BLOCKS, **settings}
    return start_guessing(model(kind), EAGLE3, params, draft_params, draft=named, **sizes)


def requests_of(kind: str, fields: dict[str, Any]) -> list[Any]:
    """Return requests whose answers are of words: HF's models look for pictures in them, too."""
    words = [*TINY_FAMILIES[kind].word_ids]
    fields = {"max_tokens": 12, "allowed_token_ids": words, **fields}
    return ask_all(model(kind), PROMPTS, **fields)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="preempted"),
        pytest.param(
            {"num_blocks": None, "max_num_batched_tokens": 13},
            id="in chunks",
            marks=pytest.mark.slow,
        ),
        pytest.param({"size": 2}, id="two devices", marks=[pytest.mark.slow, TWO_DEVICES]),
    ],
)
@KIND
def test_it_guesses_as_its_reference(kind: str, settings: dict[str, Any]) -> None:
    """Behind text and pictures, prefix hits and preemption; the answers are those without."""
    core = start(kind, **settings)
    eager = Eager(core)
    expected = serve_without(core, requests_of(kind, {}))
    with noting(core) as noted:
        for _ in range(2):  # the second time behind prefixes that are found
            assert answer_all(core, requests_of(kind, {})) == expected
    assert eager.num_draft_tokens > 40
    assert {name for name, _, _ in noted} >= {"0", "1", "3"}
    samples = [model(kind).draw_sample(parts) for parts in PROMPTS]
    found = {(name, tuple(known), len(tokens)): tokens for name, known, tokens in noted}
    assert len(found) > 12
    for (name, known, number), tokens in found.items():
        assert guess(kind, samples[int(name)], known, number) == tokens, (name, known)


def make_right(kind: str, tapped: int) -> tuple[Params, tuple[Any, Params]]:
    """Return weights of a model whose next token depends on the last one alone, and a head's.

    The head's attention sees the token itself, sharply, and passes its embedding on.
    """
    leaves = flatten_params(without_layers(model(kind).params))
    norm = np.asarray(leaves["language_model.norm.weight"])
    width, text = len(norm), model(kind).config.get_text_config()
    # One head, whose keys are all as long: a token's own is the nearest to its query.
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width}
    own = {**TAPPED[kind][0], "draft_vocab_size": text.vocab_size, "norm_before_residual": True}
    config = head_config(text, **heads, **own)
    tensors = make_tensors(config, tapped)
    # Of states nothing is passed on, not of those behind a guess either.
    silent = ("midlayer.hidden_norm.weight", "midlayer.mlp.down_proj.weight")
    tensors |= {name: torch.zeros_like(tensors[name]) for name in silent}
    embeds, same = torch.eye(width, 2 * width), torch.ones(width)
    for name, scale in {"q": 40.0, "k": 40.0, "v": 1.0}.items():
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = scale * embeds
    tensors["midlayer.self_attn.o_proj.weight"] = torch.eye(width)
    tensors["midlayer.input_layernorm.weight"] = same
    # Gemma's norms add 1 to their weights.
    tensors["norm.weight"] = torch.tensor(norm + (kind == "gemma3"))
    tied = "language_model.embed_tokens.weight"
    head = leaves.get("language_model.lm_head.weight", leaves[tied])
    tensors["lm_head.weight"] = torch.tensor(np.asarray(head))
    return unflatten_params(leaves), (config, params_of_head(config, tensors))


@pytest.mark.slow
@KIND
def test_right_guesses_are_all_accepted(kind: str) -> None:
    """Sampled tokens, too: they are drawn by the requests' own seeds."""
    core = start(kind, *make_right(kind, len(TAPPED[kind][1])))
    eager = Eager(core)
    for sampling in SAMPLINGS:
        fields = {**sampling, "allowed_token_ids": None}  # which no guess knows
        expected = serve_without(core, requests_of(kind, fields))
        for _ in range(2):
            assert answer_all(core, requests_of(kind, fields)) == expected
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 80


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", TAPPED)
def test_mixed_requests_are_answered_as_alone(kind: str) -> None:
    """With penalties, bad words, log-probabilities, priorities, preemption and grammars."""
    params = params_of_head(config_of(kind), tensors_of(kind))
    draft: dict[str, Any] = {"hf_config": config_of(kind), "architecture": ARCHITECTURE}
    draft |= {"least_accepted": -1, "num_caches": 1.2}
    compare_mixed(model(kind), 1, EAGLE3, params, **draft)


# ---- its files -----------------------------------------------------------------------------------


def write_checkpoints(path: Path, *, is_speculator: bool, **changes: Any) -> tuple[str, str]:
    """Write a model and its head as they are published; `changes`: of the latter's config.json."""
    target, head = gemma3.write_files(path / "model"), path / "head"
    text = load_model_config(str(target)).hf_config.get_text_config()
    config = head_config(text, **{"num_key_value_heads": 4, "head_dim": 8, **changes})
    tensors = make_tensors(config, 3)
    written = config.to_dict()
    head.mkdir()
    if is_speculator:
        layer = {n: one for n, one in written.items() if n not in ("architectures", *OWN)}
        own = {n: written[n] for n in OWN if n in written}
        kind = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
        verifier = {"verifier": {"name_or_path": "any"}, "algorithm": "eagle3"}
        written = {**kind, **own, "speculators_config": verifier, "transformer_layer_config": layer}
        tensors = {name.replace("midlayer", "layers.0"): one for name, one in tensors.items()}
    tensors["embed_tokens.weight"] = torch.zeros(text.vocab_size, text.hidden_size)
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    (head / "config.json").write_text(json.dumps(written))
    return str(target), str(head)


OWN = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "norm_before_residual", "dtype")
"""The keys of config.json that are not of the layer."""


@pytest.mark.slow  # its names are `params_of_head`'s; files of what guesses are in `test_mtp.py`
@pytest.mark.parametrize("is_speculator", [True, False])
def test_it_is_read_from_its_files(tmp_path: Path, *, is_speculator: bool) -> None:
    """Of either layout; answers are those of an engine that knows no head, again after sleep."""
    named = {"eagle_aux_hidden_state_layer_ids": [2, 3, 6], "norm_before_residual": True}
    target, head = write_checkpoints(tmp_path, is_speculator=is_speculator, **named)
    reference = TINY_FAMILIES["gemma3"].make_reference(config=load_model_config(target).hf_config)
    reference.save_pretrained(target)
    asked = {**EAGLE3, "model": head}
    if is_speculator:
        del asked["method"]  # its files tell
    check_guesses_of_files(target, asked, dtype="bfloat16", max_model_len=256)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 40}, "width 40 and reads states of width 40; .* and width 32"),
        ({"target_hidden_size": 48}, "reads states of width 48"),
        ({"vocab_size": 256}, "has 256 tokens"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, r"layers \[2, 3, 7\] .* has 6 layers"),
        ({}, "`eagle_aux_hidden_state_layer_ids` is not given"),
        ({"fc_norm": True}, "fc_norm"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    ],
)
def test_a_head_of_another_model_is_refused(changes: dict[str, Any], says: str) -> None:
    text = LlamaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=6)
    config = head_config(text, **changes)

    def read() -> None:
        build_abstract(Eagle3Head, config, dtype=jnp.float32)
        check_sizes(config, (128, 32))
        read_tapped_layers(config, text)

    with pytest.raises(CheckpointError, match=says):
        read()


def test_other_models_are_no_heads() -> None:
    options: dict[str, Any] = {"use_tqdm_on_load": False, "max_model_len": 256}
    with pytest.raises(ConfigError, match="give an EAGLE-3 head: mmjax knows LlamaForCausalLMEag"):
        LLM(speculative_config={**EAGLE3, "model": "tiny_scenes"}, **options)


def test_layers_are_counted_in_both_ways() -> None:
    """By default as the paper's: the inputs of the third, the middle and the last but two."""
    text = LlamaConfig(num_hidden_layers=36)
    key = "eagle_aux_hidden_state_layer_ids"
    given: Any
    for given in ({}, {key: [2, 18, 33]}, {"eagle_config": {key: [1, 17, 32]}}):
        assert read_tapped_layers(LlamaConfig(**given), text) == (2, 18, 33)
