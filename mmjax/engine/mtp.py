"""A layer that guesses for the model whose checkpoint it is in (`MtpTextModel`), or an assistant.

It reads the states that the engine's steps leave, which are kept by slot, and has the tables of
tokens and of items, and the head, from the engine's model. An assistant (`Gemma4Assistant`) has a
checkpoint and a head of its own, and reads the engine's KV cache in place of keys. So has an
EAGLE-3 head (`Eagle3Head`), which reads states of several layers.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from jaxtyping import Array

from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.compilation import CompiledPrograms
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.engine.draft import DraftRunner, make_window
from mmjax.engine.model import LoadedModel, describe_model, load_params
from mmjax.engine.scheduling.buckets import StepBucket, next_bucket
from mmjax.engine.scheduling.outputs import ScheduledRequest, SchedulerOutput, WantedGuess
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import ConfigError
from mmjax.layers.module import Params, bind, flatten_params, unflatten_params
from mmjax.models.eagle3.model import ARCHITECTURES, check_sizes
from mmjax.models.host_inputs import Sees
from mmjax.weights.files.safetensors import is_snapshot
from mmjax.weights.sharding import Device


class MtpRunner(DraftRunner):
    """Runs the layer over the requests of the engine's steps, behind these."""

    slot_lag: ClassVar[int] = 1

    def __init__(
        self,
        programs: Programs,
        compiled: CompiledPrograms,
        params: dict[Any, Any],
        *,
        num_blocks: int,
        engine: ModelRunner,
    ) -> None:
        self._engine = engine
        self._keep_sizes = sorted({bucket.num_tokens for bucket in programs.buckets.steps})
        super().__init__(programs, compiled, params, num_blocks=num_blocks, has_spans=False)
        self._builder.rows_of = engine.rows.get

    @property
    def pool(self) -> Array:
        """The engine's, which has encoded all items."""
        return self._engine.pool

    def make_arrays(self) -> None:
        """Allocate the cache, and compile what keeps states: no step will."""
        super().make_arrays()
        self._make_pool()
        for size in self._keep_sizes:
            for hidden in (self.hidden, self._engine.hidden):
                self._call_keep(hidden, self._empty_keep(size))

    def _make_pool(self) -> None:
        """Drop the own one: the engine's is read."""
        self._pool.delete()
        self._pool = self._placement.put(np.zeros((0, 1), np.float32))

    def _encode_items(self, items: Sequence[EncoderItem]) -> None:
        """Encode nothing."""

    def select_params(self, function: str) -> dict[str, Array]:
        """Return the layer's own, and the engine's as they are now."""
        own = flatten_params(self.params)
        held = self._engine.select_params("step") | self._engine.select_params("sample")
        names = self._programs.find_read_by(function)
        return {name: own[name] if name in own else held[name] for name in names}

    # ---- states --------------------------------------------------------------------------------

    def compute(self, output: SchedulerOutput) -> None:
        """Keep the states of a step, and compute its parts of prompts."""
        self._keep_step(output)
        super().compute(output)

    def _keep_step(self, output: SchedulerOutput) -> None:
        if self.is_ready and output.requests:
            rows = np.arange(output.num_tokens, dtype=np.int32)
            self._keep(self._engine.hidden, output.requests, rows)

    def _sample_windows(self, windows: Sequence[ScheduledRequest]) -> Array:
        """Compute and sample; what follows on a guess reads the layer's own state of it."""
        drawn = super()._sample_windows(windows)
        rows = np.flatnonzero([window.samples for window in windows]).astype(np.int32)
        self._keep(self.hidden, [window for window in windows if window.samples], rows)
        return drawn

    def _count_kept(self, wanted: WantedGuess) -> int:
        """Return the tokens before the guess: those in it were computed of other states."""
        return wanted.request.num_tokens

    def _keep(self, hidden: Array, windows: Sequence[ScheduledRequest], rows: np.ndarray) -> None:
        """Keep rows of states, which are those of the windows' tokens in their order."""
        packed = self._empty_keep(next_bucket(self._keep_sizes, len(rows)))
        block_size = self._programs.block_size
        places = [np.arange(one.start, one.end) for one in windows]
        tables = zip(windows, places, strict=True)
        packed[0, : len(rows)] = rows
        packed[1, : len(rows)] = np.concatenate(
            [one.block_table[own // block_size] for one, own in tables]
        )
        packed[2, : len(rows)] = np.concatenate(places) % block_size
        self._call_keep(hidden, packed)

    def _call_keep(self, hidden: Array, packed: np.ndarray) -> None:
        kv_cache = self._programs.keep_states(
            self._state.kv_cache, hidden, self._placement.put(packed)
        )
        self._state = self._state._replace(kv_cache=kv_cache)

    def _empty_keep(self, size: int) -> np.ndarray:
        packed = np.zeros((3, size), np.int32)
        packed[1] = self._num_blocks
        return packed


class Eagle3Runner(MtpRunner):
    """Runs a head that reads states of several layers, and of the items their placeholders."""

    @property
    def pool(self) -> Array:
        """Rows of nothing, as wide as its embeddings: the engine's may be wider."""
        return self._pool

    def _make_pool(self) -> None:
        """Keep the one that is allocated."""

    def _call_keep(self, hidden: Array, packed: np.ndarray) -> None:
        if hidden is self.hidden:
            super()._call_keep(hidden, packed)
            return
        own = flatten_params(self.params)
        kv_cache = self._programs.join_states(
            params={name: own[name] for name in own if name.startswith(_JOINING)},
            kv_cache=self._state.kv_cache,
            hidden=hidden,
            packed=self._placement.put(packed),
        )
        self._state = self._state._replace(kv_cache=kv_cache)


_JOINING = ("language_model.fc.", "language_model.input_norm.")
"""How names of the parameters begin that `Eagle3TextModel.join_states` reads."""


class AssistantRunner(MtpRunner):
    """Runs an assistant, which computes no prompt: its layers read the engine's keys."""

    def __init__(
        self,
        programs: Programs,
        compiled: CompiledPrograms,
        params: dict[Any, Any],
        *,
        num_blocks: int,
        engine: ModelRunner,
        lent: Sequence[int],
    ) -> None:
        """`lent`: which of the engine's caches it reads."""
        self._lent = lent
        super().__init__(programs, compiled, params, num_blocks=num_blocks, engine=engine)

    def compute(self, output: SchedulerOutput) -> None:
        """Keep the states of a step."""
        self._keep_step(output)

    def _run_step(self, bucket: StepBucket, packed: np.ndarray) -> Array:
        """Run a step over the engine's caches, which come back as they were."""
        engine, num_lent = self._engine, len(self._lent)
        caches = list(engine._state.kv_cache)
        lent = (caches[place] for place in self._lent)
        self._state = self._state._replace(kv_cache=(*lent, *self._state.kv_cache))
        rest = super()._run_step(bucket, packed)
        given = self._state.kv_cache
        for place, cache in zip(self._lent, given[:num_lent], strict=True):
            caches[place] = cache
        engine._state = engine._state._replace(kv_cache=tuple(caches))
        self._state = self._state._replace(kv_cache=given[num_lent:])
        return rest

    def _compute_lacking(self, wanted: Sequence[WantedGuess]) -> list[ScheduledRequest]:
        """Return the windows of the last tokens: nothing before them is computed."""
        return [make_window(one, self._place_guess(one, 0)) for one in wanted]

    def _place_guess(self, wanted: WantedGuess, number: int) -> int:
        """Return where the last known token is: all of a guess are computed there."""
        return wanted.request.num_tokens - 1

    def _sample_windows(self, windows: Sequence[ScheduledRequest]) -> Array:
        """Compute and sample; what follows on a guess reads, in the same slot, its state."""
        drawn = DraftRunner._sample_windows(self, windows)
        slots = [msgspec.structs.replace(window, start=window.start - 1) for window in windows]
        self._keep(self.hidden, slots, np.arange(len(windows), dtype=np.int32))
        return drawn


# ---- where there is one --------------------------------------------------------------------------


def check_mtp(config: EngineConfig, model_class: Any, *, sees: Sees) -> None:
    """Raise ConfigError where no layer of the checkpoint guesses tokens; `sees`: as planned."""
    key, reason = model_class.mtp_layers_key, None
    num_layers = getattr(config.model.hf_config.get_text_config(), key, None) or 0
    if model_class.mtp_class is None:
        reason = (
            f"mmjax knows no such layer of `{model_class.__name__}`; it does of GLM-OCR and Qwen3.5"
        )
    elif num_layers != 1:
        reason = f"its config.json has {num_layers} as `{key}`, and mmjax computes one layer"
    elif is_snapshot(config.model.path):
        reason = "a snapshot has only what the model computes with; give the files it was made of"
    elif config.parallel.num_processes > 1:
        reason = f"the model is sharded over {config.parallel.num_processes} processes"
    elif sees != "past":
        reason = "its prompts' tokens see later ones"
    if reason is not None:
        raise ConfigError(
            f"`speculative_config` has 'mtp' as its `method`, but no layer of "
            f"`{config.model.model}` can guess here: {reason}. The method 'ngram' can"
        )


def check_eagle3(config: EngineConfig, model: LoadedModel) -> None:
    """Raise ConfigError where an EAGLE-3 head cannot guess, CheckpointError for another model's."""
    draft, text = config.draft, bind(model.graphdef, model.params).language_model
    assert draft is not None, "there is no head"
    _check_alone(config, f"EAGLE-3 head `{draft.model}`")
    check_sizes(draft.hf_config, text.embed_tokens.weight.shape)


def _check_alone(config: EngineConfig, name: str) -> None:
    if config.parallel.num_processes > 1:
        raise ConfigError(
            f"`speculative_config` names the {name}, which cannot guess here: the model is sharded "
            f"over {config.parallel.num_processes} processes. The method 'ngram' can"
        )


def load_beside(
    config: EngineConfig,
    layer_class: Any,
    model: LoadedModel,
    params: Params | None,
    devices: Sequence[Device] | None,
) -> LoadedModel:
    """Load what guesses for a model, and give it what it shares with that.

    `params`: in place of its own in the checkpoint.
    """
    layer = describe_model(config, layer_class, devices)
    described, held = flatten_params(layer.params), flatten_params(model.params)
    shared = find_shared(layer)
    own = unflatten_params({name: described[name] for name in described.keys() - shared})
    loaded = load_params(config, layer._replace(params=own, placement=model.placement), params)
    leaves = flatten_params(loaded.params) | {name: held[name] for name in shared}
    return loaded._replace(params=unflatten_params(leaves))


def find_shared(layer: LoadedModel) -> frozenset[str]:
    """Return the names of the parameters that the engine's model holds."""
    names = tuple(layer.model_class.shared_names)
    return frozenset(name for name in flatten_params(layer.params) if name.startswith(names))


def is_assistant(config: EngineConfig, model_class: Any) -> bool:
    """Return whether the draft is an assistant of the model.

    Raises ConfigError where it must be one and is not, and where none is served.
    """
    draft, method = config.draft, config.speculation and config.speculation.method
    assert draft is not None, "there is no draft model"
    if method == "eagle3":
        raise ConfigError(
            f"`speculative_config` has 'eagle3' as its `method`, and `{draft.model}` is a "
            f"`{draft.architecture}`; give an EAGLE-3 head: mmjax knows {', '.join(ARCHITECTURES)}"
        )
    if draft.architecture in model_class.assistant_architectures:
        _check_alone(config, f"assistant `{draft.model}`")
        return True
    if method == "mtp":
        known = ", ".join(f"`{one}`" for one in model_class.assistant_architectures) or "none"
        raise ConfigError(
            f"`speculative_config` has 'mtp' as its `method`, and `{draft.model}` is a "
            f"`{draft.architecture}`; of `{model_class.__name__}` mmjax knows as assistants: "
            f"{known}. Leave `model` out, or give the method 'draft_model'"
        )
    return False


def find_lent(layer: LoadedModel, model: LoadedModel) -> tuple[int, ...]:
    """Return which of a model's caches an assistant reads; CheckpointError for another's."""
    own, engine = (bind(one.graphdef, one.params) for one in (layer, model))
    return own.find_lent(engine)
