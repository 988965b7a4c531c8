"""A layer of the checkpoint that guesses tokens ahead: as its reference does, and never an answer.

HF has no class of it. Its references are what vLLM's `glm_ocr_mtp.py` and `qwen3_5_mtp.py` compute,
of HF's own modules; the former's states are normed before they are read again (`MtpTextModel`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.glm_ocr import modeling_glm_ocr as hf
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse

from mmjax import LLM, SamplingParams
from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.module import Params, build_abstract, flatten_params, unflatten_params
from mmjax.models.glm4v.model import GlmOcrMtp
from mmjax.models.model_source import load_model_config
from mmjax.models.qwen3_vl.model import Qwen3_5Mtp
from mmjax.parity.arrays import Sample
from tests.engine.test_draft import Eager, compare_mixed
from tests.engine.tiny import answer_all, drain, drain_through_failures
from tests.families import TINY_FAMILIES, glm4v, qwen3_vl
from tests.families.directories import edit_json
from tests.families.tiny import Media, Parts, TinyModel, Words
from tests.kit import draw, fill_by_name
from tests.models.served import make_config, make_request
from tests.oracle import params_of_tensors

NUM_GUESSED = 3
TWO_DEVICES = pytest.mark.skipif(
    len(jax.devices()) < 2, reason="needs two devices; CPUs have virtual ones"
)
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": NUM_GUESSED}


class GlmLayer(torch.nn.Module):
    """The layer behind GLM-OCR's last, of HF's modules, by the names that published files have."""

    def __init__(self, text_config: Any) -> None:
        super().__init__()
        width, eps = text_config.hidden_size, text_config.rms_norm_eps
        self.enorm = hf.GlmOcrRMSNorm(width, eps=eps)
        self.hnorm = hf.GlmOcrRMSNorm(width, eps=eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.norm_of_head = hf.GlmOcrRMSNorm(width, eps=eps)
        self.block = hf.GlmOcrTextDecoderLayer(text_config, 0)

    def fill(self) -> None:
        fill_by_name(self, 5)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter += 1.0

    def named_tensors(self, text_config: Any) -> dict[str, torch.Tensor]:
        """Return its tensors as files have them."""
        prefix = f"model.language_model.layers.{text_config.num_hidden_layers}."
        named = {
            name.removeprefix("block.").replace("norm_of_head", "shared_head.norm"): tensor
            for name, tensor in self.named_parameters()
        }
        return {prefix + name: tensor for name, tensor in named.items()}

    @torch.no_grad()
    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return float[tokens, D] of embeddings, and of the states of the tokens before them."""
        embeds = embeds.clone()
        embeds[0] = 0
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(states)], dim=-1))
        hidden = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        out = self.block(x[None], position_embeddings=angles, attention_mask=hidden)[0]
        return self.norm_of_head(out)


class QwenLayer(torch.nn.Module):
    """The layer beside Qwen3.5's decoder, of HF's modules, by the names that files have."""

    def __init__(self, text_config: Any) -> None:
        super().__init__()
        has_experts = text_config.model_type == "qwen3_5_moe_text"
        norm = sparse.Qwen3_5MoeRMSNorm if has_experts else dense.Qwen3_5RMSNorm
        block = sparse.Qwen3_5MoeDecoderLayer if has_experts else dense.Qwen3_5DecoderLayer
        width, eps = text_config.hidden_size, text_config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(width, eps=eps) for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        config = deepcopy(text_config)
        config.layer_types = ["full_attention"]
        self.layers = torch.nn.ModuleList([block(config, 0)])

    def fill(self) -> None:
        fill_by_name(self, 5)

    def named_tensors(self, text_config: Any) -> dict[str, torch.Tensor]:
        """Return its tensors as files have them."""
        return {f"mtp.{name}": tensor for name, tensor in self.named_parameters()}

    @torch.no_grad()
    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return float[tokens, D] of embeddings, and of the states of the tokens before them."""
        normed = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(states)]
        x = self.fc(torch.cat(normed, dim=-1))
        hidden = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        block = self.layers[0]
        return self.norm(block(x[None], position_embeddings=angles, attention_mask=hidden)[0])


class Kind(NamedTuple):
    """A family whose checkpoints have such a layer."""

    layer_class: Any
    mtp_class: Any
    write_files: Any
    key: str
    """Of the number of layers in config.json."""
    num_blocks: int
    """So few that requests of PROMPTS are preempted: all engines have them, and so one program."""
    joining: str
    norm: str
    """Our names of what joins an embedding and a state, and of the norm of the former."""
    num_arrays: int


_QWEN = (QwenLayer, Qwen3_5Mtp, qwen3_vl.write_files, "mtp_num_hidden_layers", 30)
_QWEN_NAMES = ("fc", "pre_fc_norm_embedding")
KINDS = {
    "glm_ocr": Kind(
        *(GlmLayer, GlmOcrMtp, glm4v.write_files, "num_nextn_predict_layers"),
        *(24, "eh_proj", "enorm", 15),
    ),
    "qwen3_5": Kind(*_QWEN, *_QWEN_NAMES, 15),
    "qwen3_5_moe": Kind(*_QWEN, *_QWEN_NAMES, 20),
}
KIND = pytest.mark.parametrize("kind", ["glm_ocr", "qwen3_5"])
ONE_KIND = pytest.mark.parametrize(
    "kind", ["glm_ocr", pytest.param("qwen3_5", marks=pytest.mark.slow)]
)
OTHER_KIND = pytest.mark.parametrize(
    "kind", [pytest.param("glm_ocr", marks=pytest.mark.slow), "qwen3_5"]
)
"""By default all right guesses of GLM-OCR's are accepted where a step fails among them."""
ALL_KINDS = pytest.mark.parametrize(
    "kind",
    ["glm_ocr", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_5", "qwen3_5_moe"))],
)


@cache
def make_layer(kind: str) -> Any:
    layer = KINDS[kind].layer_class(model(kind).config.text_config).eval()
    layer.fill()
    return layer


@cache
def model(kind: str) -> TinyModel:
    row = TINY_FAMILIES[kind]
    # Normed twice is normed once only with a small epsilon.
    text = {KINDS[kind].key: 1, "rms_norm_eps": 1e-6}
    if kind != "glm_ocr":  # a layer of each kind
        text |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    return TinyModel(row, **{**row.served, "text": text})


def params_of_layer(kind: str) -> Params:
    config = model(kind).config
    tensors = make_layer(kind).named_tensors(config.text_config)
    return params_of_guesser(KINDS[kind].mtp_class, config, tensors)


def params_of_guesser(guesser_class: Any, config: Any, tensors: Mapping[str, Any]) -> Params:
    """Return the weights of what guesses, but for those that it has from the model."""
    _, abstract = build_abstract(guesser_class, config, dtype=jnp.float32)
    rules = guesser_class.rules(config)
    return params_of_tensors(tensors, abstract, rules, guesser_class.shared_names)


class Guesser:
    """What the layer guesses, computed whole for each token."""

    def __init__(self, kind: str, sample: Sample, answer: Sequence[int]) -> None:
        """Run HF's model over a prompt and the beginning of its answer."""
        reference, layer = model(kind).reference, make_layer(kind)
        text, seen = reference.model.language_model, {}

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            seen.update(kwargs)

        hook = text.register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            found = reference(
                **TINY_FAMILIES[kind].torch_inputs(reference, sample), output_hidden_states=True
            )
        hook.remove()
        self._text, self._layer, self._head = text, layer, reference.lm_head
        self._embeds: torch.Tensor = seen["inputs_embeds"][0]
        places = torch.arange(len(sample.token_ids)).expand(3, 1, -1)
        self._positions = places if seen["position_ids"] is None else seen["position_ids"][-3:]
        self._logits = found.logits[0]
        self._states = found.hidden_states[-1][0]
        if answer:
            self._run_on(answer)

    def _run_on(self, answer: Sequence[int]) -> None:
        """Run the model over the prompt and tokens behind it."""
        for token_id in answer:
            self._extend(token_id)
        with torch.no_grad():
            states = self._text(
                inputs_embeds=self._embeds[None], position_ids=self._positions
            ).last_hidden_state[0]
        self._states = states

    def _extend(self, token_id: int) -> None:
        embed = self._text.embed_tokens(torch.tensor([token_id])).detach()
        self._embeds = torch.cat([self._embeds, embed])
        self._positions = torch.cat(
            [
                self._positions,
                self._positions.max() + 1 + torch.zeros_like(self._positions[..., :1]),
            ],
            dim=-1,
        )

    def guess(self, last: int, number: int) -> list[int]:
        """Return what it says behind `last`, the token behind those that the model has read."""
        states, guessed = self._states, []
        for _ in range(number):
            self._extend(last)
            angles = self._text.rotary_emb(states, position_ids=self._positions[..., :-1])
            out = self._layer(self._embeds[1:], states, angles)
            with torch.no_grad():
                last = int(self._head(out[-1]).argmax())
            guessed.append(last)
            states = torch.cat([states, out[-1:]])
        return guessed


def start(kind: str, params: Any = None, draft_params: Any = None, **settings: Any) -> EngineCore:
    """Start an engine whose layer guesses; None: the weights of `model` and `make_layer`."""
    own = params_of_layer(kind) if draft_params is None else draft_params
    sizes: dict[str, Any] = {"num_blocks": KINDS[kind].num_blocks, **settings}
    return start_guessing(model(kind), MTP, params, own, **sizes)


def start_guessing(
    one: TinyModel,
    speculation: Mapping[str, Any],
    params: Params | None,
    draft_params: Params,
    *,
    draft: Mapping[str, Any] | None = None,
    **settings: Any,
) -> EngineCore:
    """Start a tiny model's engine, for which another guesses; `draft`: of whose `ModelConfig`."""
    row = one.family
    options: dict[str, Any] = {
        **{"max_embeds": row.max_embeds, "max_model_len": 96, "precompile": "none"},
        **{"speculative_config": speculation, **settings},
    }
    config = make_config(row.model_class, one.config, **options)
    if draft is not None:
        config = replace(config, draft=replace(config.model, **draft))
    return EngineCore(
        config,
        model_class=row.model_class,
        params=one.params if params is None else params,
        draft_params=draft_params,
    )


@contextmanager
def noting(core: EngineCore) -> Iterator[list[tuple[str, list[int], list[int]]]]:
    """Note each guess: the request, what of its answer was known, and the tokens."""
    draft, noted = core._draft, []
    assert draft is not None
    guess = draft.runner.guess

    def note(wanted: Any) -> list[list[int]]:
        found = guess(wanted)
        for one, tokens in zip(wanted, found, strict=True):
            known = one.request.known_token_ids[one.request.num_prompt_tokens :]
            noted.append((one.request.request_id, known.tolist(), tokens))
        return found

    draft.runner.guess = note  # type: ignore[method-assign]
    yield noted
    draft.runner.guess = guess  # type: ignore[method-assign]


def check_guesses_of_files(
    target: str,
    speculation: Mapping[str, Any],
    *,
    question: str = "What is this?",
    see: Callable[[EngineCore], None] = lambda core: None,
    **settings: Any,
) -> None:
    """Compare a checkpoint's answers with those of guesses, before and after weights are gone.

    `see` is called with each engine that guesses.
    """
    parts = [
        {"type": "image_pil", "image_pil": draw(84, 112, seed=3)},
        {"type": "text", "text": question},
    ]
    chats: Any = [[{"role": "user", "content": parts}]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers, noted = [], []
    for given in ({}, speculation):
        options: Any = {"speculative_config": given, "use_tqdm_on_load": False}
        with LLM(target, precompile="none", **options, **settings) as llm:
            if given:
                Eager(llm.engine)
            for _ in range(2 if given else 1):
                with noting(llm.engine) if given else nullcontext([]) as found:
                    (output,) = llm.chat(chats, params, use_tqdm=False)
                answers.append(output.outputs[0].token_ids)
                noted.append([tokens for _, _, tokens in found])
                if given:
                    see(llm.engine)
                    llm.sleep(level=2)
                    llm.wake_up()
    assert answers[1:] == answers[:1] * 2
    assert noted[1] == noted[2]
    assert len(noted[1]) > 3


ROOMY: dict[str, Any] = {"num_blocks": None}
PROMPTS: tuple[Parts, ...] = (
    (Words(4, 20),),
    (Words(0, 10), Media(0), Words(1, 9)),
    (Media(2), Words(5, 12)),
    (Words(0, 10), Media(1, "video"), Words(1, 9), Media(1), Words(7, 2)),
)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="preempted"),
        pytest.param(
            {**ROOMY, "max_num_batched_tokens": 7}, id="in chunks", marks=pytest.mark.slow
        ),
        pytest.param(ROOMY, id="whole", marks=pytest.mark.slow),
    ],
)
@ALL_KINDS
def test_it_guesses_as_its_reference(kind: str, settings: dict[str, Any]) -> None:
    if "max_num_batched_tokens" in settings and kind != "glm_ocr":
        settings = {**ROOMY, "max_num_batched_tokens": 64}  # a recurrent layer's chunk
    core = start(kind, **settings)
    Eager(core)
    samples = [model(kind).draw_sample(parts) for parts in PROMPTS]
    requests = [make_request(f"{n}", one, max_tokens=9) for n, one in enumerate(samples)]
    with noting(core) as noted:
        for _ in (False, True):  # the second time behind prefixes that are found
            for request in requests:
                core.add_request(request)
            drain(core)
    assert settings or core.num_preemptions
    assert {name for name, _, _ in noted} >= {"0", "1", "3"}
    assert len(noted) >= 16
    for name, known, tokens in {(name, tuple(a), tuple(b)) for name, a, b in noted}:
        guesser = Guesser(kind, samples[int(name)], known[:-1])
        assert guesser.guess(known[-1], len(tokens)) == [*tokens], (name, known)


# ---- answers -------------------------------------------------------------------------------------


def without_layers(params: Params) -> Params:
    """Return weights whose layers add nothing: the next token depends on the last one alone."""
    leaves = flatten_params(params)
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    return unflatten_params(
        {
            name: jnp.zeros_like(leaf)
            if name.startswith("language_model.layers") and name.endswith(silent)
            else leaf
            for name, leaf in leaves.items()
        }
    )


def reading_embeds(kind: str, norm: jax.Array) -> Params:
    """Return weights of a layer that passes the token's embedding on to the head."""
    leaves = flatten_params(without_layers(params_of_layer(kind)))
    width, one = len(norm), KINDS[kind]
    leaves[f"language_model.{one.joining}.weight"] = jnp.eye(width, 2 * width)
    # Gemma's norms, which Qwen3.5 has, add 1 to their weights.
    same = jnp.ones(width) if kind == "glm_ocr" else jnp.zeros(width)
    leaves[f"language_model.{one.norm}.weight"] = same
    leaves["language_model.norm.weight"] = norm
    return unflatten_params(leaves)


def make_right(kind: str) -> tuple[Params, Params]:
    """Return weights of a model, and of a layer that is always right."""
    params = without_layers(model(kind).params)
    return params, reading_embeds(kind, flatten_params(params)["language_model.norm.weight"])


SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 4, "top_p": 0.9})


def requests_of(kind: str, fields: dict[str, Any]) -> list[Any]:
    return ask_all(model(kind), PROMPTS, max_tokens=20, **fields)


def ask_all(one: TinyModel, prompts: Sequence[Parts], **fields: Any) -> list[Any]:
    samples = [one.draw_sample(parts) for parts in prompts]
    return [make_request(f"{n}", sample, **fields) for n, sample in enumerate(samples)]


def serve_without(core: EngineCore, requests: Sequence[Any]) -> list[list[int]]:
    """Return the answers of the same engine without guesses."""
    speculation, core._scheduler.speculation = core._scheduler.speculation, None
    core.reset_prefix_cache()
    answers = answer_all(core, requests)
    core.reset_prefix_cache()
    core._scheduler.speculation = speculation
    return answers


@pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=[pytest.mark.slow, TWO_DEVICES])],
)
@OTHER_KIND
def test_right_guesses_are_all_accepted(kind: str, size: int) -> None:
    """Sampled tokens, too: they are drawn by the requests' own seeds."""
    sizes = {} if size == 1 else ROOMY  # what holds one request on one device is too little
    core = start(kind, *make_right(kind), size=size, **sizes)
    eager = Eager(core)
    for fields in SAMPLINGS[:size]:
        expected = serve_without(core, requests_of(kind, fields))
        for _ in range(2):
            assert answer_all(core, requests_of(kind, fields)) == expected
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 80


@pytest.mark.slow  # as `test_draft.py` and `test_assistant.py` of other guesses
@ONE_KIND
def test_a_failed_step_and_sleep_leave_nothing_behind(kind: str) -> None:
    core = start(kind, *make_right(kind))
    eager = Eager(core)
    expected = serve_without(core, requests_of(kind, {}))
    draft, calls = core._draft, iter(range(99))
    assert draft is not None
    guess = draft.runner.guess

    def fail(wanted: Any) -> list[list[int]]:
        if next(calls) == 1:
            raise RuntimeError("the device fails")
        return guess(wanted)

    draft.runner.guess = fail  # type: ignore[method-assign]
    for request in requests_of(kind, {}):
        core.add_request(request)
    found = drain_through_failures(core)
    assert [found[name] for name in sorted(found)] == expected
    core.sleep()
    core.wake_up()
    assert answer_all(core, requests_of(kind, {})) == expected
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
@KIND
def test_mixed_requests_are_answered_as_alone(kind: str) -> None:
    """With penalties, bad words, log-probabilities, priorities, preemption and grammars."""
    forgetful = copy(model(kind))
    forgetful.params, layer = make_right(kind)
    compare_mixed(forgetful, 1, MTP, layer)


# ---- where there is one --------------------------------------------------------------------------


def write_checkpoint(kind: str, path: Path, *, has_layer: bool = True) -> Path:
    """Write a directory as published, whose texts never end."""
    row, one = TINY_FAMILIES[kind], KINDS[kind]
    folder = one.write_files(kind, path)
    edit_json(folder / "config.json", {f"text_config.{one.key}": 1})
    config = load_model_config(str(folder)).hf_config
    torch.manual_seed(0)
    reference = row.reference_class(config)
    row.fill(reference)
    reference.save_pretrained(folder)
    if has_layer:
        layer = one.layer_class(config.text_config)
        fill_by_name(layer, 5)
        whole = load_file(folder / "model.safetensors")
        for name, tensor in layer.named_tensors(config.text_config).items():
            whole[name] = tensor.detach().contiguous()
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@ALL_KINDS
def test_a_published_checkpoint_has_the_layer(kind: str, tmp_path: Path) -> None:
    """Its weights are read from its files, again after the engine has slept without them."""
    published = write_checkpoint(kind, tmp_path)
    held = set[str]()

    def see(core: EngineCore) -> None:
        assert core._draft is not None
        held.update(flatten_params(core._draft.runner.params))

    settings: Any = {"dtype": "float32", "max_model_len": 256}
    question = "Text Recognition:"
    check_guesses_of_files(str(published), MTP, question=question, see=see, **settings)
    # The table of tokens and the head are the model's.
    assert len(held) == KINDS[kind].num_arrays
    assert not any("embed_tokens" in name or "lm_head" in name for name in held)


@pytest.mark.parametrize(
    ("kind", "edit", "error", "says"),
    [
        (
            "glm_ocr",
            {"text_config.num_nextn_predict_layers": 0},
            ConfigError,
            "0 as `num_nextn_predict_layers`, and mmjax computes one",
        ),
        ("glm_ocr", {}, CheckpointError, "eh_proj"),
        ("qwen3_5", {"text_config.mtp_num_hidden_layers": 2}, ConfigError, "2 as `mtp_num_hidden"),
        ("qwen3_5", {}, CheckpointError, "fc"),
    ],
)
def test_a_checkpoint_without_the_layer_is_refused(
    tmp_path: Path, kind: str, edit: dict[str, Any], error: type[Exception], says: str
) -> None:
    folder = write_checkpoint(kind, tmp_path, has_layer=False)
    edit_json(folder / "config.json", edit)
    with pytest.raises(error, match=says):
        LLM(str(folder), speculative_config=MTP, use_tqdm_on_load=False, max_model_len=256)


def test_other_models_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="knows no such layer of `Gemma3ForConditionalGeneration`"
    ):
        LLM(speculative_config=MTP, use_tqdm_on_load=False, max_model_len=256)
