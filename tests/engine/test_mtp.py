"""A layer of the checkpoint that guesses tokens ahead: as its reference does, and never an answer.

HF has no class of it. Its reference is what vLLM's `glm_ocr_mtp.py` computes, of HF's own modules.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.glm_ocr import modeling_glm_ocr as hf

from mmjax import LLM, SamplingParams
from mmjax.engine.core import EngineCore
from mmjax.errors import CheckpointError, ConfigError
from mmjax.layers.module import Params, build_abstract, flatten_params, unflatten_params
from mmjax.models.glm4v.model import GlmOcrMtp
from mmjax.models.model_source import load_model_config
from mmjax.parity.arrays import Sample
from mmjax.weights.rules import Place, map_tensor
from tests.engine.test_draft import Eager, compare_mixed
from tests.engine.tiny import drain, drain_through_failures
from tests.families import TINY_FAMILIES
from tests.families.directories import edit_json
from tests.families.glm4v import write_files
from tests.families.tiny import Media, Parts, TinyModel, Words
from tests.kit import draw, fill_by_name
from tests.models.served import make_config, make_request, serve

NUM_GUESSED = 3
TWO_DEVICES = pytest.mark.skipif(
    len(jax.devices()) < 2, reason="needs two devices; CPUs have virtual ones"
)
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": NUM_GUESSED}
ROW = TINY_FAMILIES["glm_ocr"]


class TorchLayer(torch.nn.Module):
    """The layer behind the last, of HF's modules, by the names that published files have."""

    def __init__(self, text_config: Any) -> None:
        super().__init__()
        width, eps = text_config.hidden_size, text_config.rms_norm_eps
        self.enorm = hf.GlmOcrRMSNorm(width, eps=eps)
        self.hnorm = hf.GlmOcrRMSNorm(width, eps=eps)
        self.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
        self.norm_of_head = hf.GlmOcrRMSNorm(width, eps=eps)
        self.block = hf.GlmOcrTextDecoderLayer(text_config, 0)

    def named_tensors(self, number: int) -> dict[str, torch.Tensor]:
        """Return its tensors as files have them."""
        prefix = f"model.language_model.layers.{number}."
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
        return self.block(x[None], position_embeddings=angles, attention_mask=hidden)[0]


@cache
def make_layer() -> TorchLayer:
    layer = TorchLayer(model().config.text_config).eval()
    fill_by_name(layer, 5)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter += 1.0
    return layer


@cache
def model() -> TinyModel:
    return TinyModel(ROW, **{**ROW.served, "text": {"num_nextn_predict_layers": 1}})


def params_of_layer(layer: TorchLayer) -> Params:
    config = model().config
    _, abstract = build_abstract(GlmOcrMtp, config, dtype=jnp.float32)
    leaves = {}
    for name, tensor in layer.named_tensors(config.text_config.num_hidden_layers).items():
        for mapped, part in map_tensor(name, GlmOcrMtp.rules(config)):
            assert not isinstance(part, Place), "HF keeps no experts apart"
            array = tensor.detach().numpy()
            leaves[mapped] = jnp.asarray(array if part is None else part.apply(array))
    shapes = {name: leaf.shape for name, leaf in flatten_params(abstract).items()}
    assert {name: shapes[name] for name in leaves} == {n: one.shape for n, one in leaves.items()}
    assert {name.split(".")[1] for name in shapes.keys() - leaves} == {"embed_tokens", "lm_head"}
    return unflatten_params(leaves)


class Guesser:
    """What the layer guesses, computed whole for each token."""

    def __init__(self, sample: Sample, answer: Sequence[int]) -> None:
        """Run HF's model over a prompt and the beginning of its answer."""
        reference, layer = model().reference, make_layer()
        text, seen = reference.model.language_model, {}

        def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            seen.update(kwargs)

        hook = text.register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            found = reference(**ROW.torch_inputs(reference, sample), output_hidden_states=True)
        hook.remove()
        self._text, self._layer, self._head = text, layer, reference.lm_head
        self._embeds: torch.Tensor = seen["inputs_embeds"][0]
        places = torch.arange(len(sample.token_ids)).expand(3, 1, -1)
        self._positions = places if seen["position_ids"] is None else seen["position_ids"][-3:]
        self._logits = found.logits[0]
        self._states = found.hidden_states[-1][0]
        for token_id in answer:
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        """Run the model over one token more."""
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
                last = int(self._head(self._layer.norm_of_head(out[-1])).argmax())
            guessed.append(last)
            states = torch.cat([states, out[-1:]])
        return guessed


def start(params: Any = None, draft_params: Any = None, **settings: Any) -> EngineCore:
    """Start an engine whose layer guesses; None: the weights of `model` and `make_layer`."""
    one = model()
    config = make_config(
        ROW.model_class,
        one.config,
        max_embeds=ROW.max_embeds,
        **{"speculative_config": MTP, "max_model_len": 96, "precompile": "none", **settings},
    )
    return EngineCore(
        config,
        model_class=ROW.model_class,
        params=one.params if params is None else params,
        draft_params=params_of_layer(make_layer()) if draft_params is None else draft_params,
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


PROMPTS: tuple[Parts, ...] = (
    (Words(4, 20),),
    (Words(0, 10), Media(0), Words(1, 9)),
    (Media(2), Words(5, 12)),
    (Words(0, 10), Media(1, "video"), Words(1, 9), Media(1), Words(7, 2)),
)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="whole"),
        pytest.param({"max_num_batched_tokens": 7}, id="in chunks", marks=pytest.mark.slow),
        pytest.param({"num_blocks": 24}, id="preempted"),
    ],
)
def test_it_guesses_as_its_reference(settings: dict[str, Any]) -> None:
    core = start(**settings)
    Eager(core)
    samples = [model().draw_sample(parts) for parts in PROMPTS]
    requests = [make_request(f"{n}", one, max_tokens=9) for n, one in enumerate(samples)]
    with noting(core) as noted:
        for again in (False, True):  # the second time behind prefixes that are found
            for request in requests:
                core.add_request(request)
            drain(core)
            assert again or settings.get("num_blocks") is None or core.num_preemptions
    assert {name for name, _, _ in noted} >= {"0", "1", "3"}
    assert len(noted) >= 16
    for name, known, tokens in noted:
        guesser = Guesser(samples[int(name)], known[:-1])
        assert guesser.guess(known[-1], len(tokens)) == tokens, (name, known)


# ---- answers -------------------------------------------------------------------------------------


def without_layers(params: Params) -> Params:
    """Return weights whose layers add nothing: the next token depends on the last one alone."""
    leaves = flatten_params(params)
    silent = ("o_proj.weight", "down_proj.weight")
    return unflatten_params(
        {
            name: jnp.zeros_like(leaf)
            if name.startswith("language_model.layers") and name.endswith(silent)
            else leaf
            for name, leaf in leaves.items()
        }
    )


def reading_embeds(params: Params, norm: jax.Array) -> Params:
    """Return weights of a layer that passes the token's embedding on to the head."""
    leaves = flatten_params(without_layers(params))
    width = len(norm)
    leaves["language_model.eh_proj.weight"] = jnp.eye(width, 2 * width)
    leaves["language_model.enorm.weight"] = jnp.ones(width)
    leaves["language_model.norm.weight"] = norm
    return unflatten_params(leaves)


def make_right() -> tuple[Params, Params]:
    """Return weights of a model, and of a layer that is always right."""
    params = without_layers(model().params)
    norm = flatten_params(params)["language_model.norm.weight"]
    return params, reading_embeds(params_of_layer(make_layer()), norm)


SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 4, "top_p": 0.9})


def requests_of(fields: dict[str, Any]) -> list[Any]:
    samples = [model().draw_sample(parts) for parts in PROMPTS]
    return [make_request(f"{n}", one, max_tokens=20, **fields) for n, one in enumerate(samples)]


def serve_without(core: EngineCore, fields: dict[str, Any]) -> list[list[int]]:
    """Return the answers of the same engine without guesses."""
    speculation, core._scheduler.speculation = core._scheduler.speculation, None
    core.reset_prefix_cache()
    answers = serve(core, requests_of(fields))
    core.reset_prefix_cache()
    core._scheduler.speculation = speculation
    return answers


@pytest.mark.parametrize(
    "size",
    [1, pytest.param(2, marks=[pytest.mark.slow, TWO_DEVICES])],
)
def test_right_guesses_are_all_accepted(size: int) -> None:
    """Sampled tokens, too: they are drawn by the requests' own seeds."""
    core = start(*make_right(), size=size)
    eager = Eager(core)
    for fields in SAMPLINGS[:size]:
        expected = serve_without(core, fields)
        for _ in range(2):
            assert serve(core, requests_of(fields)) == expected
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 80


def test_a_failed_step_and_sleep_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    core = start(*make_right())
    eager = Eager(core)
    expected = serve_without(core, {})
    draft, calls = core._draft, iter(range(99))
    assert draft is not None
    guess = draft.runner.guess

    def fail(wanted: Any) -> list[list[int]]:
        if next(calls) == 1:
            raise RuntimeError("the device fails")
        return guess(wanted)

    monkeypatch.setattr(draft.runner, "guess", fail)
    for request in requests_of({}):
        core.add_request(request)
    found = drain_through_failures(core)
    assert [found[name] for name in sorted(found)] == expected
    core.sleep()
    core.wake_up()
    assert serve(core, requests_of({})) == expected
    assert eager.num_accepted_tokens == eager.num_draft_tokens > 50


@pytest.mark.timeout(600)
def test_mixed_requests_are_answered_as_alone() -> None:
    """With penalties, bad words, log-probabilities, priorities, preemption and grammars."""
    forgetful = copy(model())
    forgetful.params, layer = make_right()
    compare_mixed(forgetful, 1, MTP, layer)


# ---- where there is one --------------------------------------------------------------------------


def write_checkpoint(path: Path, *, has_layer: bool = True) -> Path:
    """Write a directory as published, whose texts never end."""
    folder = write_files("glm_ocr", path)
    edit_json(folder / "config.json", {"text_config.num_nextn_predict_layers": 1})
    config = load_model_config(str(folder)).hf_config
    torch.manual_seed(0)
    reference = ROW.reference_class(config)
    ROW.fill(reference)
    reference.save_pretrained(folder)
    if has_layer:
        layer = TorchLayer(config.text_config)
        fill_by_name(layer, 5)
        whole = load_file(folder / "model.safetensors")
        for name, tensor in layer.named_tensors(config.text_config.num_hidden_layers).items():
            whole[name] = tensor.detach().contiguous()
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("glm_ocr"))


def test_a_published_checkpoint_has_the_layer(published: Path) -> None:
    """Its weights are read from its files, again after the engine has slept without them."""
    question = [{"type": "text", "text": "Text Recognition:"}]
    image = {"type": "image_pil", "image_pil": draw(84, 112, seed=3)}
    chats: Any = [[{"role": "user", "content": [image, *question]}]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers, noted, held = [], [], set[str]()
    for given in ({}, MTP):
        options: dict[str, Any] = {"speculative_config": given, "use_tqdm_on_load": False}
        with LLM(str(published), dtype="float32", max_model_len=256, **options) as llm:
            if given:
                Eager(llm.engine)
            for _ in range(2 if given else 1):
                with noting(llm.engine) if given else nullcontext([]) as found:
                    (output,) = llm.chat(chats, params, use_tqdm=False)
                answers.append(output.outputs[0].token_ids)
                noted.append([tokens for _, _, tokens in found])
                draft = llm.engine._draft
                if draft is not None:
                    held |= flatten_params(draft.runner.params).keys()
                    llm.sleep(level=2)
                    llm.wake_up()
    assert answers[1:] == answers[:1] * 2
    assert noted[1] == noted[2]
    assert len(noted[1]) > 3
    # The table of tokens and the head are the model's.
    assert len(held) == 15
    assert not any("embed_tokens" in name or "lm_head" in name for name in held)


@pytest.mark.parametrize(
    ("edit", "error", "says"),
    [
        ({"text_config.num_nextn_predict_layers": 0}, ConfigError, "num_nextn_predict_layers"),
        ({}, CheckpointError, "eh_proj"),
    ],
    ids=["config", "files"],
)
def test_a_checkpoint_without_the_layer_is_refused(
    tmp_path: Path, edit: dict[str, Any], error: type[Exception], says: str
) -> None:
    folder = write_checkpoint(tmp_path, has_layer=False)
    edit_json(folder / "config.json", edit)
    with pytest.raises(error, match=says):
        LLM(str(folder), speculative_config=MTP, use_tqdm_on_load=False, max_model_len=256)


def test_other_models_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="knows no such layer of `Gemma3ForConditionalGeneration`"
    ):
        LLM(speculative_config=MTP, use_tqdm_on_load=False, max_model_len=256)
