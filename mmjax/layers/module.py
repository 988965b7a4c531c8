"""NNX modules as structure only: built abstractly, bound to a nested dict of arrays.

A module is never initialised. `build_abstract` returns its graphdef and its parameters' shapes;
`bind` merges arrays into it under jit. No `nnx.State` crosses a jit boundary: flattening it in
Python takes milliseconds a step.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
from flax import nnx

Params = Mapping[str, Any]
"""Nested dict of `jax.Array`; a list of submodules is a dict with int keys."""


def build_abstract(build: Callable[..., nnx.Module], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return the graph of `build(*args, **kwargs)` and its parameters as `ShapeDtypeStruct`s."""
    abstract = nnx.eval_shape(lambda: build(*args, **kwargs))
    graphdef, state = nnx.split(abstract)
    return graphdef, nnx.to_pure_dict(state)


_see_module: ContextVar[Callable[[nnx.Module], None] | None] = ContextVar("see", default=None)


def bind(graphdef: Any, params: Params) -> Any:
    """Return the module of `graphdef` with `params`; call it under jit."""
    module = nnx.merge(graphdef, params)
    if (see := _see_module.get()) is not None:
        see(module)
    return module


@contextmanager
def seeing_modules(see: Callable[[nnx.Module], None]) -> Iterator[None]:
    """Let `see` look into every module that is bound.

    `call_block` then calls the blocks themselves, which are traced one by one.
    """
    token = _see_module.set(see)
    try:
        yield
    finally:
        _see_module.reset(token)


def call_block(block: nnx.Module, *args: Any) -> Any:
    """Return `block(*args)`; blocks that are alike are traced and lowered only once.

    Tracing a block takes as long as loading its compiled code. XLA inlines the calls: what it
    compiles is the same. Arguments are pytrees of arrays.
    """
    if _see_module.get() is not None:
        return block(*args)
    graphdef, state = nnx.split(block)
    call = partial(_call_block, graphdef)
    return (jax.checkpoint(call) if _is_remat.get() else call)(nnx.to_pure_dict(state), *args)


@contextmanager
def rematerializing() -> Iterator[None]:
    """Let gradients through `call_block` keep a block's inputs alone, and compute it again."""
    token = _is_remat.set(True)
    try:
        yield
    finally:
        _is_remat.reset(token)


_is_remat: ContextVar[bool] = ContextVar("remat", default=False)


@partial(jax.jit, static_argnums=0)
def _call_block(graphdef: Any, params: Params, *args: Any) -> Any:
    return bind(graphdef, params)(*args)


def flatten_params(params: Params) -> dict[str, Any]:
    """Return `{dotted name: leaf}`, such as `language_model.layers.0.mlp.up_proj.weight`."""
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in paths}


def unflatten_params(leaves: Mapping[str, Any]) -> dict[Any, Any]:
    """Undo `flatten_params`: segments of digits become int keys."""
    tree: dict[Any, Any] = {}
    for name, leaf in leaves.items():
        set_param(tree, name, leaf)
    return tree


def is_left_out(name: str, left_out: Collection[str]) -> bool:
    """Return whether a parameter, or the attribute of the model that it is in, is left out."""
    return name.partition(".")[0] in left_out or name in left_out


def set_param(tree: dict[Any, Any], name: str, leaf: Any) -> None:
    """Put a leaf into a tree, in place, under its dotted name."""
    *parents, last = [int(part) if part.isdigit() else part for part in name.split(".")]
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = leaf
