"""Run a model by the engine's functions, one request at a time, recording every block's output."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mmjax.config.engine_config import Quantization
from mmjax.engine.device import functions
from mmjax.engine.device.batch import BatchBuilder, StepSizes, sample_layout
from mmjax.engine.device.compilation import compiler_options
from mmjax.engine.device.encoder import EncoderRows, Encoders, PromptCalls
from mmjax.engine.device.functions import AdaptedModel, StepState
from mmjax.engine.device.mesh import Placement
from mmjax.engine.scheduling.buckets import StepBucket
from mmjax.engine.scheduling.outputs import ScheduledRequest
from mmjax.engine.scheduling.request import EncoderItem, Request
from mmjax.layers.attention.kv_cache import allocate
from mmjax.layers.module import (
    Params,
    bind,
    build_abstract,
    flatten_params,
    seeing_modules,
    unflatten_params,
)
from mmjax.layers.quantization import Layouts
from mmjax.models.host_inputs import EncoderSpec, HostInputs, Sees
from mmjax.models.interface import AdapterSizes, build_model
from mmjax.parity.compare import LOGITS
from mmjax.parity.reference import PROBED
from mmjax.rounding import cdiv, round_up
from mmjax.training.samples import Sample, make_request
from mmjax.weights.adapter import AdapterReader, fill_slot, read_adapter_config, slot_axis
from mmjax.weights.files.method import read_method
from mmjax.weights.layouts import read_layouts
from mmjax.weights.load import load_params

BLOCK_SIZE = 16
TILE = 64


class PagedModel:
    """A model with its parameters, for one request of at most `max_len` tokens at a time.

    Programs: one for the encoder (one unit), one for decoding, one per `prompt_step` prompt tokens.
    """

    def __init__(
        self,
        model_class: type,
        hf_config: Any,
        params: Params,
        max_len: int,
        dtype: Any = jnp.float32,
        quantization: Quantization | Layouts | None = None,
        *,
        prompt_step: int = TILE,
    ) -> None:
        assert prompt_step % TILE == 0, f"{prompt_step=} {TILE=}"
        self._parts = (model_class, hf_config, None, quantization)
        self.graphdef, abstract = build_abstract(build_model, *self._parts, dtype=dtype)
        self.dtype = dtype
        structure = bind(self.graphdef, abstract)
        self.model_class: Any = model_class
        self.host_inputs: HostInputs = self.model_class.host_inputs(hf_config)
        self.params = params
        self.cache_spec = structure.kv_cache_spec
        self.max_len = round_up(max_len, BLOCK_SIZE)
        self.max_encoder_len = structure.max_encoder_len
        self.sees: Sees = structure.sees
        self._prompt_step = prompt_step
        self._num_blocks = self.max_len // BLOCK_SIZE
        self._num_encoder_blocks = cdiv(self.max_encoder_len, BLOCK_SIZE)
        self._rows = EncoderRows(
            self.max_len + 2 * self.max_encoder_len, self.host_inputs.num_extra_rows
        )
        self.shape = functions.ModelShape.of(self.graphdef, params)
        self._placement = Placement()
        num_rows = self._rows.num_rows + self.host_inputs.num_extra_rows
        self._encoders = Encoders(self.host_inputs, self._placement, num_rows)
        self._prompt_calls = PromptCalls(max_len=self.max_encoder_len, num_rows=num_rows)
        self._builder = BatchBuilder(
            num_blocks=self._num_blocks + self._num_encoder_blocks,
            block_size=BLOCK_SIZE,
            sizes=StepSizes(
                self._num_blocks,
                self._num_encoder_blocks,
                self.host_inputs.attends_to_items,
                int(bool(self.cache_spec.states)),
            ),
            sample_layout=sample_layout(1),
            rows_of=self._rows.get,
            has_spans=self.sees != "past",
        )
        self._jit()

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts that begin alike share what is computed of their beginning."""
        is_apart = bool(self.max_encoder_len) and not self.host_inputs.attends_to_items
        return not is_apart and not self.cache_spec.states

    def _jit(self) -> None:
        graphdef = self.graphdef
        # Sums in the order of the engine's: where numbers are rounded to 8 bits, their last bits
        # may become a token.
        options = compiler_options(self._placement.platform)
        jit = partial(jax.jit, compiler_options=options)
        encode = partial(functions.encode, graphdef, None, functions.compute_whole)
        self._encode = jit(partial(_recorded, encode))
        encode_prompts = partial(functions.encode_prompts, graphdef, self._placement.gather)
        self._encode_prompts = jit(partial(_recorded, encode_prompts))
        step = partial(functions.step, graphdef, None, False)
        self._prefill = jit(partial(_recorded, step), static_argnames="layout")
        self._decode = jit(step, static_argnames="layout")
        self._logits = jit(lambda params, x: bind(graphdef, params).compute_logits(x))

    @classmethod
    def from_directory(
        cls,
        path: Path | str,
        model_class: Any,
        hf_config: Any,
        *,
        max_len: int,
        dtype: Any = jnp.float32,
        quantization: Quantization | None = None,
        prompt_step: int = TILE,
    ) -> "PagedModel":
        """Load a checkpoint, to compute in `dtype`."""
        rules = model_class.rules(hf_config)
        kept = quantization or read_layouts(Path(path), hf_config, rules)
        parts = (model_class, hf_config, None, kept)
        _, abstract = build_abstract(build_model, *parts, dtype=dtype)
        method = read_method(hf_config)
        params = load_params(path, abstract, rules, method=method, use_tqdm=False)
        return cls(model_class, hf_config, params, max_len, dtype, kept, prompt_step=prompt_step)

    def load_adapter(self, path: Path) -> None:
        """Compute with an adapter from now on, wherever it has weights."""
        rank = read_adapter_config(path)[0].max_rank
        sizes = AdapterSizes(1, rank, jnp.dtype(self.dtype), has_towers=True)
        graphdef, abstract = build_abstract(build_model, *self._parts, sizes, dtype=self.dtype)
        shapes = AdaptedModel.of(graphdef, abstract, has_towers=True).shapes
        leaves = flatten_params(self.params)
        reader = AdapterReader(
            rules=self.model_class.rules(self._parts[1]),
            shapes={name: leaf.shape for name, leaf in shapes.items()},
            dtype=jnp.dtype(self.dtype),
            max_rank=rank,
            read_base=lambda name: np.asarray(leaves[name]) if name in leaves else None,
            unadapted=self.model_class.unadapted,
        )
        arrays = reader.read(path).arrays
        for name, leaf in shapes.items():
            own = fill_slot(name, arrays.get(name), leaf.shape, leaf.dtype)
            leaves[name] = jnp.expand_dims(own, slot_axis(name))
            # One slot, which every row has.
            leaves[f"{name.rpartition('.')[0]}.slots"] = jnp.zeros(1, jnp.int32)
        self.graphdef, self.params = graphdef, unflatten_params(leaves)
        self._jit()

    def run(self, sample: Sample, *, by_modality: bool = False) -> dict[str, np.ndarray]:
        """Return every probed module's output and the logits at every prompt position.

        The encoders' are in the order of the prompt; or of images, then of videos.
        """
        request = self._make_request(sample, max_tokens=1)
        is_video = [any("video" in name for name in item.tensors) for item in sample.items]
        order = list(range(len(is_video)))
        if by_modality:
            order.sort(key=is_video.__getitem__)
        with jax.default_matmul_precision("highest"):
            pool, encoded = self._run_encoder(request, order)
            _, logits, outputs = self._run_step(request, pool, self._new_state())
        cut = {name: value[: sample.num_tokens] for name, value in outputs.items()}
        return encoded | cut | {LOGITS: logits}

    def generate(self, sample: Sample, max_tokens: int) -> tuple[int, ...]:
        """Return `max_tokens` greedy tokens, ignoring EOS."""
        return tuple(self.decode(sample, max_tokens).argmax(-1).tolist())

    def decode(self, sample: Sample, max_tokens: int) -> np.ndarray:
        """Return float32[max_tokens, V]: the logits that each greedy token was chosen by."""
        request, state = self._make_request(sample, max(max_tokens, 1)), self._new_state()
        chosen: list[np.ndarray] = []
        with jax.default_matmul_precision("highest"):
            pool, _ = self._run_encoder(request)
            while len(chosen) < request.max_tokens:
                state, logits, _ = self._run_step(request, pool, state)
                chosen.append(logits[-1])
                request.append_token(int(logits[-1].argmax()))
        return np.stack(chosen)

    def embed(self, sample: Sample) -> np.ndarray:
        """Return float32[rows, D]: the embeddings of all items, in the order of the prompt."""
        request = self._make_request(sample, max_tokens=1)
        with jax.default_matmul_precision("highest"):
            pool, _ = self._run_encoder(request)
        rows = [self._rows.get(item.identifier) for item in request.media_items]
        return np.asarray(pool[np.concatenate(rows)])

    def _make_request(self, sample: Sample, max_tokens: int) -> Request:
        request = make_request(
            sample,
            self.host_inputs,
            self.sees,
            identifiers=[f"item {number}" for number in range(len(sample.items))],
            max_tokens=max_tokens,
        )
        request.state_slots = (0,)
        return request

    def _new_state(self) -> StepState:
        num_blocks = self._num_blocks + self._num_encoder_blocks
        kv_cache = allocate(
            self.cache_spec,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=self.dtype,
            num_state_slots=1,
        )
        num_rows = round_up(self.max_len, self._prompt_step)
        return StepState(kv_cache, jnp.zeros((num_rows, self.shape.hidden_size), self.dtype))

    def _run_encoder(
        self, request: Request, order: Sequence[int] = ()
    ) -> tuple[Any, dict[str, np.ndarray]]:
        """Encode items one by one, and an encoder-decoder's prompt, into a pool.

        Returns the pool, and what every probed module gave; of the items, in this `order`.
        """
        self._rows.reset()
        num_rows = self._rows.num_rows + self.host_inputs.num_extra_rows
        pool = jnp.zeros((num_rows, self.shape.embed_width), self.dtype)
        if self.host_inputs.num_extra_rows:
            pool = functions.write_extra(self.graphdef, self.params, pool)
        recorded: list[dict[str, np.ndarray]] = []
        for item in request.media_items:
            places = self._encoders.allocate(item, self._rows)
            sizes = {
                calls.function: [
                    1 if isinstance(calls.spec, EncoderSpec) else calls.count_units(item)
                ]
                for calls in self._encoders.of(item)
            }
            of_item: list[dict[str, np.ndarray]] = []
            num_outputs = 0
            for call in self._encoders.fill([item], [places], sizes):
                arrays = {"inputs": call.inputs, "dst_rows": call.dst_rows}
                (pool, _), outputs = self._encode(params=self.params, pool=pool, **arrays)
                of_item.append(jax.device_get(outputs))
                num_outputs += len(call.dst_rows)
            recorded.append(_leave_out(_join(of_item), item, num_outputs))
        encoded = _join([recorded[place] for place in order])
        if request.encoder is not None:
            self._rows.allocate(request.encoder.identifier, request.encoder_len)
            (call,) = self._prompt_calls.fill([request.encoder], self._rows.get, [1])
            arguments = {"params": self.params, "pool": pool, **call._asdict()}
            (pool, _), outputs = self._encode_prompts(**arguments)
            # Hidden states are padded, as the prompt is.
            cut = {name: value[:, : request.encoder_len] for name, value in outputs.items()}
            encoded |= jax.device_get(cut)
        return pool, encoded

    def _run_step(
        self, request: Request, pool: Any, state: StepState
    ) -> tuple[StepState, np.ndarray, dict[str, np.ndarray]]:
        """Compute what is not computed: the prompt, or the last token.

        Returns the logits of each token, and of a prompt what every probed module gave.
        """
        start, end = request.num_computed_tokens, request.num_tokens
        is_prompt = start == 0
        bucket = StepBucket(
            round_up(end, self._prompt_step) if is_prompt else 1,
            1,
            TILE if is_prompt else 1,
            num_states=self.max_encoder_len if is_prompt else 0,
        )
        blocks = np.arange(self._num_blocks + self._num_encoder_blocks, dtype=np.int32)
        table, encoder_table = np.split(blocks, [self._num_blocks])
        window = ScheduledRequest(
            request, start, end - start, table, samples=True, encoder_table=encoder_table
        )
        packed, _ = self._builder.build_step([window], bucket)
        run = self._prefill if is_prompt else self._decode
        found = run(
            layout=self._builder.layout(bucket),
            params=self.params,
            state=state,
            pool=pool,
            previous=jnp.zeros(1, jnp.int32),
            packed=packed,
        )
        (state, _), outputs = found if is_prompt else (found, {})
        request.num_computed_tokens = end
        logits = self._logits(self.params, state.hidden[: bucket.num_tokens])
        return state, np.asarray(logits)[: end - start], jax.device_get(outputs)


def _join(outputs: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the outputs of several calls as those of one."""
    names = dict.fromkeys(name for one in outputs for name in one)
    return {name: np.concatenate([one[name] for one in outputs if name in one]) for name in names}


def _leave_out(
    outputs: dict[str, np.ndarray], item: EncoderItem, num_outputs: int
) -> dict[str, np.ndarray]:
    """Return an item's outputs without the encoder's rows that are no embedding of it."""
    if item.rows is None:
        return outputs
    kept = np.unique(item.rows[item.rows >= 0])
    return {
        name: value[kept] if len(value) == num_outputs else value for name, value in outputs.items()
    }


def _recorded(function: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """Return what a function gives, and the outputs of the modules that it binds."""
    with record() as outputs:
        result = function(*args, **arguments)
    return result, outputs


@contextmanager
def record(module: nnx.Module | None = None) -> Iterator[dict[str, Any]]:
    """Record the outputs of all probed modules while the body traces; yield `{name: output}`.

    Of `module`, and of those that the body binds. Wraps `__call__` of their classes meanwhile, so
    that models need no debug outputs.
    """
    outputs: dict[str, Any] = {}
    names: dict[int, tuple[str, nnx.Module]] = {}
    originals: dict[type, Any] = {}

    def see(bound: nnx.Module) -> None:
        for path, child in nnx.iter_modules(bound):
            name, cls = ".".join(str(part) for part in path), type(child)
            if PROBED.search(name):
                names[id(child)] = (name, child)
                if cls not in originals:
                    originals[cls] = cls.__call__
                    cls.__call__ = _recording(cls.__call__, names, outputs)

    if module is not None:
        see(module)
    try:
        with seeing_modules(see):
            yield outputs
    finally:
        for cls, original in originals.items():
            cls.__call__ = original


def _recording(
    original: Callable[..., Any], names: Mapping[int, Sequence[Any]], outputs: dict[str, Any]
) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if id(self) in names:
            # The first call's, as of HF's module: of DeepSeek-OCR 2's tower, that of the views.
            first = result[0] if isinstance(result, tuple) else result
            outputs.setdefault(names[id(self)][0], first)
        return result

    return call
