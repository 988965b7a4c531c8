"""Engines of one structure share, in a test process, what their programs were compiled to.

And they have fewer of them: of the sizes of steps each fourth, and of samples the largest, since
others differ by padding (`tests/engine/test_sampler.py` has their rows alone).

Tests start hundreds of engines, most of them alike but for their weights and requests. A program is
another's where all is equal that it is traced from: the function, the model's graph, the devices,
and the shapes of its arguments. As of one that JAX fetches from its compile cache, an event tells
that it was compiled, so that an engine's `compilations` counts the same.
"""

import gc
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from tests.how_compiled import EMITTERS, environment

is_paused = False
"""Whether nothing is shared, since a test may replace a part of what programs are traced from."""
has_all_sizes = False
"""Whether engines have programs of all sizes, as a test is of them, and in the slow run."""
_compiled: dict[Any, Any] = {}
_read: dict[Any, frozenset[str]] = {}
"""Names of the parameters that a function reads, by what it is traced from."""
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


_graphs: list[tuple[Any, object]] = []
"""Graphs of the models that were met, which cannot be hashed, and what stands for each in keys."""


_is_optimized = os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") != "1"


def optimize(*, is_whole: bool) -> None:
    """Choose whether programs are compiled with all optimizations, in processes of tests too."""
    global _is_optimized
    if is_whole == _is_optimized:
        return
    _is_optimized = is_whole
    forget()
    jax.config.update("jax_disable_most_optimizations", not is_whole)
    os.environ.update(environment(os.environ.get("XLA_FLAGS", ""), is_served=is_whole))


def forget() -> None:
    """Drop all programs that no engine holds, and what JAX keeps of others."""
    _compiled.clear()
    _read.clear()
    _graphs.clear()
    jax.clear_caches()
    gc.collect()


def _find(graph: Any) -> object:
    """Return what stands for a graph, and for those that equal it."""
    for known, key in _graphs:
        if known == graph:
            return key
    _graphs.append((graph, object()))
    return _graphs[-1][1]


class _Lowered:
    """A lowered program, or one that was compiled before."""

    def __init__(self, key: Any, lowered: Any, compiled: Any) -> None:
        self._key, self._lowered, self._compiled = key, lowered, compiled

    def compile(self) -> Any:
        if self._compiled is None:
            self._compiled = _compiled[self._key] = self._lowered.compile()
        else:
            jax.monitoring.record_event_duration_secs(_COMPILE_EVENT, 0.0)
        return self._compiled


class _Shared:
    """A jitted function whose compiled programs are shared."""

    def __init__(self, jitted: Any, key: Any) -> None:
        self._jitted, self._key = jitted, key

    def lower(self, **arguments: Any) -> Any:
        if is_paused:
            return self._jitted.lower(**arguments)
        leaves, tree = jax.tree.flatten(arguments)
        key = (self._key, tree, *leaves)
        compiled = _compiled.get(key)
        lowered = self._jitted.lower(**arguments) if compiled is None else None
        return _Lowered(key, lowered, compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def thin_out(sizes: Sequence[int]) -> set[int]:
    """Return the smallest of sorted sizes, those four times as large as the last, and the largest.

    1, 2, 4, 8, 16, 24: 1, 4, 16, 24.
    """
    kept = [sizes[0]]
    for size in sizes:
        if size >= 4 * kept[-1]:
            kept.append(size)
    return {*kept, sizes[-1]}


def install() -> None:
    """Let the engines of this process share their programs, and have fewer of them."""
    install_few_sizes()
    _install_sharing()
    _install_emitters()


def install_few_sizes() -> None:
    """Let the engines of this process have fewer programs."""
    from mmjax.engine import start
    from mmjax.engine.scheduling.buckets import Buckets

    class FewBuckets:
        """What makes an engine's buckets."""

        @staticmethod
        def create(*, num_guessed: int = 0, **sizes: Any) -> Buckets:
            buckets = Buckets.create(num_guessed=num_guessed, **sizes)
            if has_all_sizes:
                return buckets
            tokens = thin_out([one.num_tokens for one in buckets.mixed])
            # A request alone with all its guesses has a size of its own.
            rows = thin_out([one.num_tokens for one in buckets.decode]) | {1 + num_guessed}
            # Of packed patches, of which no call has one alone, each size is a test's.
            is_whole = buckets.encode[:1] != (1,)
            encode = buckets.encode if is_whole else tuple(sorted(thin_out(buckets.encode)))
            return replace(
                buckets,
                mixed=tuple(one for one in buckets.mixed if one.num_tokens in tokens),
                decode=tuple(one for one in buckets.decode if one.num_tokens in rows),
                sample=buckets.sample[-1:],
                encode=encode,
            )

    start.Buckets = FewBuckets  # type: ignore[misc, assignment]


def _install_emitters() -> None:
    """Choose them for each program: a process reads `XLA_FLAGS` once."""
    from jax._src import compiler

    make = compiler.get_compile_options

    def make_with_emitters(*args: Any, **kwargs: Any) -> Any:
        options = make(*args, **kwargs)
        if jax.default_backend() == "cpu":
            options.env_option_overrides = [
                *options.env_option_overrides,
                (EMITTERS, _is_optimized),
            ]
        return options

    compiler.get_compile_options = make_with_emitters


def _install_sharing() -> None:
    # NOTE: not imported with this module: jaxtyping must see the package's first import.
    from mmjax.engine.device.programs import Programs, _kind
    from mmjax.models.host_inputs import PackedEncoderSpec

    jit, find_read, find_read_by = Programs._jit, Programs._find_read, Programs.find_read_by

    def find_read_by_shared(self: Programs, function: str) -> frozenset[str]:
        if is_paused:
            return find_read_by(self, function)
        # Whatever the sizes of the caches, and of the steps.
        kinds = frozenset(_kind(key.size) for key in self.buckets.keys if key.function == function)
        key = (self._functions[function]._key, kinds)
        if key not in _read:
            _read[key] = find_read_by(self, function)
        return _read[key]

    def find_read_shared(self: Programs, function: str, bucket: int) -> frozenset[str]:
        if is_paused:
            return find_read(self, function, bucket)
        key = self._functions[function]._key
        if key not in _read:
            _read[key] = find_read(self, function, bucket)
        return _read[key]

    def jit_shared(self: Programs, model: Any, logprobs_mode: Any) -> None:
        jit(self, model, logprobs_mode)
        adapted = self.adapted
        traced_from = (
            _find(self._shape.graphdef),
            adapted
            and (_find(adapted.graphdef), adapted.has_towers, tuple(adapted.shapes.items())),
            isinstance(self.host_inputs.encoder_spec, PackedEncoderSpec),
            self.placement.home,
            self._is_small(self.placement, model, is_tower=False),
            self.keeps_rows,
            tuple(self.alignment_heads),
            bool(self._unread),
            logprobs_mode,
            *jax.tree.leaves(self._shardings),
        )
        shared: Any = {
            name: _Shared(one, (name, traced_from)) for name, one in self._functions.items()
        }
        self._functions = shared

    Programs._jit = jit_shared
    Programs._find_read, Programs.find_read_by = find_read_shared, find_read_by_shared
