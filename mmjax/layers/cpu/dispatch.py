"""Choose at lowering between a kernel and XLA's programs.

A primitive of JAX, since only lowering knows the platform and over how many devices a program
runs: XLA does not know how to divide a kernel among devices.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from mmjax.layers.cpu.library import find_kernels
from mmjax.layers.gpu.capability import compiles_triton

Form = Callable[..., Array]
"""One way to compute an array of others."""

_kernel_p = Primitive("mmjax_kernel")


def by_platform(
    *args: Any,
    kernel: Form,
    cpu: Form,
    default: Form,
    gpu: Form | None = None,
    tpu: Form | None = None,
) -> Array:
    """Return `kernel(*args)` on one CPU that has the kernels; `args` are pytrees of arrays.

    `cpu`: on other CPUs, and over several; `gpu`: on one GPU of CUDA for which Triton compiles;
    `tpu`: on TPUs, one or several; `default`: on all other platforms, under `vmap` and where
    gradients are taken. All give an array of one shape and dtype.
    """
    leaves, tree = jax.tree.flatten(args)

    def of_leaves(form: Form) -> Form:
        return lambda *leaves: form(*jax.tree.unflatten(tree, leaves))

    others = {"gpu": gpu or default, "tpu": tpu or default}
    forms = {"kernel": kernel, "cpu": cpu, "default": default, **others}
    return _kernel_p.bind(*leaves, **{name: of_leaves(form) for name, form in forms.items()})


def _compute(*args: Array, kernel: Form, cpu: Form, default: Form, **_: Any) -> Array:
    if jax.default_backend() != "cpu":
        return default(*args)
    return (kernel if find_kernels() is not None else cpu)(*args)


def _abstract(*avals: Any, kernel: Form, **_: Any) -> Any:
    shapes = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)
    out = jax.eval_shape(kernel, *shapes)  # the least to trace
    return ShapedArray(out.shape, out.dtype)


def _lower(form: Form, ctx: Any, *args: Any) -> Any:
    return mlir.lower_fun(form, multiple_results=False)(ctx, *args)


def _lower_elsewhere(ctx: Any, *args: Any, default: Form, **_: Any) -> Any:
    return _lower(default, ctx, *args)


def _lower_for_cpu(ctx: Any, *args: Any, kernel: Form, cpu: Form, **_: Any) -> Any:
    has_kernel = _is_alone(ctx) and find_kernels() is not None
    return _lower(kernel if has_kernel else cpu, ctx, *args)


def _lower_for_cuda(ctx: Any, *args: Any, gpu: Form, default: Form, **_: Any) -> Any:
    has_kernel = _is_alone(ctx) and compiles_triton()
    return _lower(gpu if has_kernel else default, ctx, *args)


def _lower_for_tpu(ctx: Any, *args: Any, tpu: Form, **_: Any) -> Any:
    return _lower(tpu, ctx, *args)


def _is_alone(ctx: Any) -> bool:
    """Return whether the program runs on one device."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) == 1


def _batch(args: Any, axes: Any, *, default: Form, **_: Any) -> Any:
    return jax.vmap(default, axes)(*args), 0


def _differentiate(primals: Any, tangents: Any, *, default: Form, **_: Any) -> Any:
    return jax.jvp(default, primals, tuple(map(ad.instantiate_zeros, tangents)))


_kernel_p.def_impl(_compute)
_kernel_p.def_abstract_eval(_abstract)
batching.primitive_batchers[_kernel_p] = _batch
ad.primitive_jvps[_kernel_p] = _differentiate
mlir.register_lowering(_kernel_p, _lower_elsewhere)
mlir.register_lowering(_kernel_p, _lower_for_cpu, platform="cpu")
mlir.register_lowering(_kernel_p, _lower_for_cuda, platform="cuda")
mlir.register_lowering(_kernel_p, _lower_for_tpu, platform="tpu")
