"""A layer that guesses for the model whose checkpoint it is in (`MtpTextModel`).

It reads the states that the engine's steps leave, which are kept by slot, and has the tables of
tokens and of items, and the head, from the engine's model.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array

from mmjax.config.engine_config import EngineConfig
from mmjax.engine.device.compilation import CompiledPrograms
from mmjax.engine.device.programs import Programs
from mmjax.engine.device.runner import ModelRunner
from mmjax.engine.draft import DraftRunner
from mmjax.engine.model import LoadedModel, describe_model, load_params
from mmjax.engine.scheduling.buckets import next_bucket
from mmjax.engine.scheduling.outputs import ScheduledRequest, SchedulerOutput, WantedGuess
from mmjax.engine.scheduling.request import EncoderItem
from mmjax.errors import ConfigError
from mmjax.layers.module import Params, flatten_params, unflatten_params
from mmjax.models.host_inputs import Sees
from mmjax.weights.files.safetensors import is_snapshot
from mmjax.weights.sharding import Device

_SHARED = ("language_model.embed_tokens.", "language_model.lm_head.")
"""How names of parameters begin that the engine's model holds."""


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
        self._pool.delete()
        self._pool = self._placement.put(np.zeros((0, 1), np.float32))
        for size in self._keep_sizes:
            self._call_keep(self.hidden, self._empty_keep(size))

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
        if self.is_ready and output.requests:
            rows = np.arange(output.num_tokens, dtype=np.int32)
            self._keep(self._engine.hidden, output.requests, rows)
        super().compute(output)

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


def load_mtp(
    config: EngineConfig,
    model: LoadedModel,
    params: Params | None,
    devices: Sequence[Device] | None,
) -> LoadedModel:
    """Load the layer that guesses for a model, and give it what it shares with that.

    `params`: in place of the layer's own in the checkpoint.
    """
    layer = describe_model(config, model.model_class.mtp_class, devices)
    described, held = flatten_params(layer.params), flatten_params(model.params)
    shared = find_shared(layer.params)
    own = unflatten_params({name: described[name] for name in described.keys() - shared})
    loaded = load_params(config, layer._replace(params=own, placement=model.placement), params)
    leaves = flatten_params(loaded.params) | {name: held[name] for name in shared}
    return loaded._replace(params=unflatten_params(leaves))


def find_shared(params: Params) -> frozenset[str]:
    """Return the names of the parameters that the engine's model holds."""
    return frozenset(name for name in flatten_params(params) if name.startswith(_SHARED))
