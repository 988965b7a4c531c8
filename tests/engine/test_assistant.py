"""Gemma 4's assistants, which guess tokens ahead: as HF's do, and never an answer.

HF's `SinglePositionMultiTokenCandidateGenerator` over keys and states that HF's model computes of
all tokens at once is the reference.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from mmjax import LLM
from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.models.gemma4.assistant import Gemma4Assistant
from mmjax.models.model_source import load_model_config
from mmjax.parity.arrays import Sample
from tests.engine.test_draft import Eager, compare_mixed
from tests.engine.test_mtp import (
    PROMPTS,
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
from tests.engine.tiny import answer_all, drain_through_failures
from tests.families import TINY_FAMILIES, gemma4
from tests.families.gemma4 import GLOBAL, LARGE, SLIDING
from tests.families.tiny import TinyModel

DRAFT = {"model": "assistant", "num_speculative_tokens": 3}
ARCHITECTURE = "Gemma4AssistantForCausalLM"
KINDS: dict[str, dict[str, Any]] = {
    "small": {"text": gemma4.ALL},
    "large": {"text": LARGE},
}
"""Two of whose layers read others' keys, and one whose keys are values; the assistant of the
former computes the logits of some tokens alone, as published."""
KIND = pytest.mark.parametrize("kind", KINDS)
SMALL = pytest.mark.parametrize("kind", ["small", pytest.param("large", marks=pytest.mark.slow)])
"""By default the other is in `test_right_guesses_are_all_accepted`."""
NUM_BLOCKS = 16
"""So few that requests of PROMPTS are preempted."""


def list_sharing_modes(config: Any) -> list[str | None]:
    """Return what each layer does with keys of its own kind: the last that has any stores them.

    transformers 5.23 knows none of models whose layers read no others' keys, and refuses those that
    have none themselves, as assistants.
    """
    kinds, num_shared = config.layer_types, config.num_kv_shared_layers
    own = kinds[: len(kinds) - num_shared]
    last = {kind: number for number, kind in enumerate(own)}
    stored = ["store" if last[kind] == number else None for number, kind in enumerate(own)]
    return stored + ["reuse"] * num_shared


@cache
def model(kind: str) -> TinyModel:
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(list_sharing_modes)):
        return TinyModel(TINY_FAMILIES["gemma4"], **KINDS[kind])


def make_assistant(text: Mapping[str, Any], *, has_centroids: bool, width: int = 24) -> Any:
    """Return HF's assistant for a model of a text configuration, random."""
    shared = ("vocab_size", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window")
    shared += ("num_global_key_value_heads", "attention_k_eq_v", "max_position_embeddings")
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(
            **{name: text[name] for name in shared if name in text},
            hidden_size=width,
            intermediate_size=40,
            num_hidden_layers=3,
            num_kv_shared_layers=3,
            layer_types=[SLIDING, SLIDING, GLOBAL],
            num_attention_heads=4,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        ),
        backbone_hidden_size=text["hidden_size"],
        use_ordered_embeddings=has_centroids,
        num_centroids=text["vocab_size"] // 8,
        centroid_intermediate_top_k=3,
    )
    config.architectures = [ARCHITECTURE]
    with patch.object(Gemma4TextConfig, "kv_sharing_modes", property(list_sharing_modes)):
        assistant = Gemma4AssistantForCausalLM(config).eval()
    gemma4.fill(assistant)
    if assistant.masked_embedding is not None:
        order = np.random.default_rng(3).permutation(text["vocab_size"])
        assistant.masked_embedding.token_ordering.copy_(torch.tensor(order))
    return assistant


@cache
def assistant_of(kind: str) -> Any:
    text = {**gemma4.TEXT, **KINDS[kind]["text"]}
    return make_assistant(text, has_centroids=kind == "small")


def params_of(assistant: Any) -> Params:
    return params_of_guesser(Gemma4Assistant, assistant.config, assistant.state_dict())


@torch.no_grad()
def guess(kind: str, sample: Sample, answer: Sequence[int], number: int) -> list[int]:
    """Return what HF's assistant says behind a prompt and the beginning of its answer."""
    reference, assistant = model(kind).reference, assistant_of(kind)
    ids = [*sample.token_ids.tolist(), *answer]
    known = replace(sample, token_ids=np.array(ids[:-1], np.int32))
    found = reference(
        **TINY_FAMILIES["gemma4"].torch_inputs(reference, known),
        output_hidden_states=True,
        return_shared_kv_states=True,
    )
    state, last, guessed = found.hidden_states[-1][:, -1:], ids[-1], []
    for _ in range(number):
        embed = reference.get_input_embeddings()(torch.tensor([[last]]))
        out = assistant(
            inputs_embeds=torch.cat([embed, state], dim=-1),
            position_ids=torch.tensor([[len(ids) - 1]]),
            shared_kv_states=found.shared_kv_states,
        )
        last, state = int(out.logits.argmax()), out.last_hidden_state
        guessed.append(last)
    return guessed


def start(
    kind: str, params: Any = None, draft_params: Any = None, assistant: Any = None, **settings: Any
) -> EngineCore:
    assistant = assistant or assistant_of(kind)
    own = params_of(assistant) if draft_params is None else draft_params
    named = {"hf_config": assistant.config, "architecture": ARCHITECTURE}
    sizes = {"num_blocks": NUM_BLOCKS, **settings}
    return start_guessing(model(kind), DRAFT, params, own, draft=named, **sizes)


def requests_of(kind: str, **fields: Any) -> list[Any]:
    return ask_all(model(kind), PROMPTS, max_tokens=20, **fields)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="preempted"),
        pytest.param({"max_num_batched_tokens": 13}, id="in chunks", marks=pytest.mark.slow),
        pytest.param({"num_blocks": None}, id="whole", marks=pytest.mark.slow),
    ],
)
@SMALL
def test_it_guesses_as_hf_does(kind: str, settings: dict[str, Any]) -> None:
    """Behind text, pictures and videos, windows that end before a prompt's, and prefix hits."""
    core = start(kind, **settings)
    eager = Eager(core)
    with noting(core) as noted:
        for _ in range(2):  # the second time behind prefixes that are found
            answer_all(core, requests_of(kind))
    assert ("num_blocks" in settings) is (core.num_preemptions == 0)
    assert core.compilations == 0
    assert eager.num_draft_tokens > 40
    assert {name for name, _, _ in noted} >= {"0", "1", "3"}
    samples = [model(kind).draw_sample(parts) for parts in PROMPTS]
    for name, known, tokens in {(name, tuple(a), tuple(b)) for name, a, b in noted}:
        assert guess(kind, samples[int(name)], known, len(tokens)) == [*tokens], (name, known)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one device"),
        pytest.param({"size": 2, "num_blocks": 24}, id="two devices", marks=TWO_DEVICES),
        pytest.param({"quantization": "int8"}, id="int8"),
        pytest.param({"quantization": "int4"}, id="int4"),
        pytest.param({"kv_offload_gb": 0.001}, id="offloaded"),
    ],
)
@pytest.mark.slow  # of greedy ones `test_a_failed_guess_and_sleep_leave_nothing_behind` says so
@KIND
def test_no_answer_changes(kind: str, settings: dict[str, Any]) -> None:
    core = start(kind, **settings)
    eager = Eager(core)
    for fields in SAMPLINGS:
        expected = serve_without(core, requests_of(kind, **fields))
        for _ in range(2):
            core.reset_prefix_cache()
            assert answer_all(core, requests_of(kind, **fields)) == expected
    assert eager.num_draft_tokens > 100


@pytest.mark.slow  # as those of `test_draft.py` and `test_mtp.py`
def test_right_guesses_are_all_accepted() -> None:
    """Of a model whose next token depends on the last one alone, which the assistant passes on."""
    width = gemma4.TEXT["hidden_size"]
    assistant = make_assistant({**gemma4.TEXT, **LARGE}, has_centroids=False, width=width)
    target, own = (
        flatten_params(without_layers(one)) for one in (model("large").params, params_of(assistant))
    )
    own["language_model.pre_projection.weight"] = jnp.eye(width, 2 * width)
    own["language_model.norm.weight"] = target["language_model.norm.weight"]
    own["language_model.lm_head.weight"] = target["language_model.embed_tokens.weight"]
    core = start("large", *map(unflatten_params, (target, own)), assistant=assistant)
    eager = Eager(core)
    expected = serve_without(core, requests_of("large"))
    assert answer_all(core, requests_of("large")) == expected
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 40


@pytest.mark.slow
@pytest.mark.timeout(600)
@KIND
def test_mixed_requests_are_answered_as_alone(kind: str) -> None:
    """With penalties, bad words, log-probabilities, priorities, preemption and grammars."""
    assistant = assistant_of(kind)
    draft: dict[str, Any] = {"hf_config": assistant.config, "architecture": ARCHITECTURE}
    draft |= {"least_accepted": -1, "num_caches": 1.0}
    compare_mixed(model(kind), 1, DRAFT, params_of(assistant), **draft)


def test_a_failed_guess_and_sleep_leave_nothing_behind() -> None:
    """Though the caches that it was lent are gone with the call that failed."""
    core = start("small")
    Eager(core)
    expected = serve_without(core, requests_of("small"))
    assert core._draft is not None
    runner, calls = core._draft.runner, itertools.count()
    run = runner._compiled.__call__

    def fail(function: str, *args: Any, **given: Any) -> Any:
        if function == "step" and next(calls) == 3:
            for leaf in jax.tree.leaves(given["state"]):
                leaf.delete()
            raise RuntimeError("the device fails")
        return run(function, *args, **given)

    failing: Any = Failing(runner._compiled, fail)
    runner._compiled = failing
    for request in requests_of("small"):
        core.add_request(request)
    found = drain_through_failures(core)
    assert [found[name] for name in sorted(found)] == expected
    core.sleep()
    core.wake_up()
    assert answer_all(core, requests_of("small")) == expected


class Failing:
    """Programs whose calls go through a function."""

    def __init__(self, programs: Any, call: Any) -> None:
        self._programs, self._call = programs, call

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._call(*args, **given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._programs, name)


# ---- its files -----------------------------------------------------------------------------------


def write_checkpoints(path: Path, **changes: Any) -> tuple[str, str]:
    """Write a model and its assistant as they are published; `changes`: of whose it is."""
    target = gemma4.write_files(path / "model")
    config = load_model_config(str(target)).hf_config
    reference = TINY_FAMILIES["gemma4"].make_reference(config=config)
    reference.save_pretrained(target)
    text = {"vocab_size": config.text_config.vocab_size, "num_key_value_heads": 4}
    assistant = make_assistant({**gemma4.TEXT, **text, **changes}, has_centroids=True)
    assistant.save_pretrained(path / "assistant")
    return str(target), str(path / "assistant")


@pytest.mark.slow  # its names are `params_of`'s; files of guesses: `test_mtp.py`
def test_it_is_read_from_its_files(tmp_path: Path) -> None:
    """Again, too, after the engine has slept without weights."""
    target, assistant = write_checkpoints(tmp_path)
    # As vLLM's documentation has it; without a method, too.
    speculation = {"method": "mtp", "model": assistant, "num_speculative_tokens": 3}
    check_guesses_of_files(target, speculation, dtype="float32", max_model_len=512)


def test_an_assistant_of_another_model_is_refused(tmp_path: Path) -> None:
    target, assistant = write_checkpoints(tmp_path, hidden_size=40)
    speculation = {"model": assistant, "num_speculative_tokens": 3}
    options: dict[str, Any] = {"use_tqdm_on_load": False, "max_model_len": 256}
    with pytest.raises(CheckpointError, match="trained with a model of width 40"):
        LLM(target, speculative_config=speculation, **options)
    with pytest.raises(CheckpointError, match=ARCHITECTURE):
        LLM(speculative_config=speculation, **options)
    with pytest.raises(ConfigError, match="knows as assistants: none"):
        LLM(speculative_config={**speculation, "method": "mtp"}, **options)
    itself = {"method": "mtp", "model": target, "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match=f"knows as assistants: `{ARCHITECTURE}`"):
        LLM(target, speculative_config=itself, **options)
