"""Arrays that replace parameters while an engine runs: matched with the tree, then placed.

Validates before placing: one error lists all unexpected, missing and misshapen arrays.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mmjax.layers.cpu.groups import ORDER, SCALE, ZERO
from mmjax.layers.module import is_left_out
from mmjax.layers.quantization import INT4, find_quantized, quantize
from mmjax.weights.load import EMBEDDING, TIED_HEAD, TensorProblems, find_shape
from mmjax.weights.rules import Change, Place, RuleTypes, map_tensor

_SOURCE = "the given weights"
_REMEDY = "give names and shapes as `params` has them, or the checkpoint's own"


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """An array that was given, and which part of it is meant."""

    name: str
    """As it was given."""
    array: Any
    """Of JAX or numpy."""
    change: Change | Place | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of what is meant, without computing it; None: the array has no such part."""
        change, whole = self.change, tuple(self.array.shape)
        if change is None or isinstance(change, Place):
            return whole
        try:
            return find_shape(change, whole) if change.is_fit(whole) else None
        except (TypeError, ValueError, IndexError):
            return None

    def read(self) -> Any:
        """Return what is meant, where the array is."""
        if self.change is None or isinstance(self.change, Place):
            return self.array
        return self.change.apply(self.array)


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """What takes the place of one parameter."""

    name: str
    sources: Sequence[Given]
    """One; of a stack, one for each place of its first axis."""
    scales: str | None = None
    """The parameter that gets the scales, where it is quantised here."""

    def read(self) -> Any:
        """Return the whole array, on its own devices, or on the host."""
        if len(self.sources) == 1 and not isinstance(self.sources[0].change, Place):
            return self.sources[0].read()
        parts = [one.read() for one in self.sources]
        stack = jnp.stack if any(isinstance(one, jax.Array) for one in parts) else np.stack
        return stack(parts)


def match_update(
    params: Mapping[Any, Any],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    rules: Sequence[RuleTypes],
    *,
    prefix: str = "",
    left_out: Sequence[str] = (),
    current: Mapping[str, jax.Array] | None = None,
    ignore: Callable[[str], None] = lambda name: None,
) -> list[Replacement]:
    """Return what takes the place of which parameters; CheckpointError if any does not fit.

    Args:
        params: Arrays of JAX or numpy, nested or by dotted names: all of them have names of the
            tree, or all of them the names of a checkpoint's files, which `rules` map. Any number.
        expected: Every parameter of the tree.
        rules: From names in the files to names in the tree.
        prefix: What each name has before it, such as `language_model`.
        left_out: Attributes of the model that are not computed: what is given for them is ignored.
        current: The present parameters, for a head that must equal a table that is not given.
        ignore: Called with the name of each that is ignored.
    """
    arrays = flatten_given(params, prefix)
    problems = TensorProblems()
    if not arrays:
        problems.missing.append("at least one array")
    single: dict[str, Given] = {}
    stacks: dict[str, dict[int, Given]] = {}
    heads: list[Given] = []
    for name, given in _map_names(arrays, expected, rules, left_out):
        if is_left_out(name, left_out):
            ignore(given.name)
            continue
        if isinstance(given.change, Place) and name in expected:
            stacks.setdefault(name, {})[given.change.index] = given
        elif name in single:
            problems.misfits.append(f"`{given.name}` and `{single[name].name}` are both `{name}`")
        elif name in expected:
            single[name] = given
        elif name.endswith(TIED_HEAD):
            heads.append(given)
        else:
            problems.unexpected.append(f"`{given.name}`")
    found = [*_match_single(single, expected, problems), *_match_stacks(stacks, expected, problems)]
    problems.raise_if_any(_SOURCE, _REMEDY)
    for head in heads:
        _check_tied(head, single, current or {}, problems)
    problems.raise_if_any(_SOURCE, _REMEDY)
    return found


def flatten_given(params: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the arrays of nested mappings by dotted names; variables of flax as their arrays.

    TypeError for what is no array of JAX or numpy, ValueError for one that is deleted.
    """
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat |= flatten_given(value, name)
            continue
        array = value.get_value() if hasattr(value, "get_value") else value
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"`{name}` of the given weights is a `{type(array).__name__}`; expected an array "
                "of JAX or numpy (of torch: `jax.dlpack.from_dlpack(tensor.detach())`)"
            )
        if isinstance(array, jax.Array) and array.is_deleted():
            raise ValueError(f"`{name}` of the given weights was deleted, or donated before")
        flat[name] = array
    return flat


def _map_names(
    arrays: Mapping[str, Any],
    expected: Mapping[str, Any],
    rules: Sequence[RuleTypes],
    left_out: Sequence[str],
) -> Iterator[tuple[str, Given]]:
    """Yield each array, or part of one, under its name in the tree."""
    # A tree of all the model may be given to an engine that leaves its towers out.
    are_own = all(name in expected or is_left_out(name, left_out) for name in arrays)
    for name, array in arrays.items():
        if are_own:
            yield name, Given(name, array)
            continue
        for mapped, change in map_tensor(name, rules):
            yield mapped, Given(name, array, change)


def _match_single(
    single: Mapping[str, Given],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    problems: TensorProblems,
) -> Iterator[Replacement]:
    quantized = find_quantized(expected)
    for name, given in single.items():
        # Codes of FP8 are floats, too.
        is_whole = _is_floating(given.array) and given.array.dtype != expected[name].dtype
        scales = quantized.get(name) if is_whole else None
        if scales is None:
            problems.misfits += _find_misfit(given, expected[name])
            pair = quantized.get(name)
            if pair is not None and pair not in single:
                problems.missing.append(f"`{pair}`, the scales of `{given.name}`")
        else:
            problems.misfits += _find_quantized_misfit(given, expected[name], expected[scales])
            if scales in single:
                problems.misfits.append(
                    f"`{single[scales].name}` stands beside `{given.name}`, which is not quantised"
                )
            # Those of the checkpoint's codes would stay.
            kept = [f"`{name}{one}`" for one in (ZERO, ORDER) if name + one in expected]
            if kept:
                problems.misfits.append(
                    f"`{given.name}` is not quantised, and the model has {' and '.join(kept)} of "
                    "the checkpoint's: give its codes with all that belongs to them"
                )
        yield Replacement(name, [given], scales)


def _match_stacks(
    stacks: Mapping[str, Mapping[int, Given]],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    problems: TensorProblems,
) -> Iterator[Replacement]:
    for name, placed in stacks.items():
        count, *rest = expected[name].shape
        part = jax.ShapeDtypeStruct(tuple(rest), expected[name].dtype)
        problems.missing += [f"`{name}[{index}]`" for index in range(count) if index not in placed]
        for index, given in placed.items():
            if index >= count:
                problems.unexpected.append(f"`{given.name}`")
            problems.misfits += _find_misfit(given, part)
        yield Replacement(name, [placed[index] for index in sorted(placed)])


def _is_floating(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def _find_misfit(given: Given, leaf: jax.ShapeDtypeStruct) -> list[str]:
    if given.shape != tuple(leaf.shape):
        shown = tuple(given.array.shape) if given.shape is None else given.shape
        return [f"`{given.name}` must have shape {tuple(leaf.shape)}; got {shown}"]
    # Of floats of 8 bits, what is given would not have the scales.
    both_float = _is_floating(given.array) and _is_floating(leaf) and leaf.dtype.itemsize > 1
    if not both_float and given.array.dtype != leaf.dtype:
        return [f"`{given.name}` must be of dtype {leaf.dtype}; got {given.array.dtype}"]
    return []


def _find_quantized_misfit(
    given: Given, codes: jax.ShapeDtypeStruct, scales: jax.ShapeDtypeStruct
) -> list[str]:
    """Return what is wrong with a matrix that is to be quantised."""
    shape = given.shape
    if shape is None or len(shape) != 2:
        return [f"`{given.name}` must be a matrix; got {tuple(given.array.shape)}"]
    if codes.dtype == jnp.int8:
        made = (shape, shape[:1])
    else:
        described = INT4.describe(shape)
        made = tuple(described[""][0]), tuple(described[SCALE][0])
    if made != (tuple(codes.shape), tuple(scales.shape)):
        return [
            f"`{given.name}`, quantised, must have shapes {tuple(codes.shape)} and "
            f"{tuple(scales.shape)}; got {made[0]} and {made[1]}"
        ]
    return []


def _check_tied(
    head: Given,
    single: Mapping[str, Given],
    current: Mapping[str, jax.Array],
    problems: TensorProblems,
) -> None:
    """Note a head that differs from the table of embeddings, which the model has in its place."""
    table = next((one.array for name, one in single.items() if name.endswith(EMBEDDING)), None)
    if table is None:
        table = next((one for name, one in current.items() if name.endswith(EMBEDDING)), None)
    if table is head.array:
        return
    # A quantised table that is not given is not compared: it is not known what it was made of.
    if table is not None and table.shape == head.array.shape and _is_floating(table):
        given = head.array
        if isinstance(given, jax.Array) and isinstance(table, jax.Array):
            given = jax.device_put(given, table.sharding)
        if bool((given.astype(table.dtype) == table).all()):
            return
    problems.misfits.append(
        f"`{head.name}` differs from the token embedding, but config.json says that they are tied"
    )


# ---- placing -------------------------------------------------------------------------------------


def place_update(
    replacements: Sequence[Replacement],
    expected: Mapping[str, jax.ShapeDtypeStruct],
    current: Mapping[str, jax.Array],
    *,
    donate: bool,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield the new parameters one by one, each placed as the tree has it.

    What is an array of JAX stays on its devices, or goes from there to the others; but for a matrix
    that is quantised, as at the start, on the host.

    Args:
        replacements: What `match_update` returned.
        expected: Shape, dtype and sharding of each parameter.
        current: The present parameters: one that is given as its own replacement stays.
        donate: Whether the given arrays are the engine's from now on, and gone for the caller.
            Else each is copied, so that the caller may change or donate it later.
    """
    given = [[one.array for one in each.sources] for each in replacements]
    uses = Counter(id(array) for arrays in given for array in arrays)
    # What is in its place, or is taken as it is, is not freed.
    kept = {id(array) for array in current.values()}
    stays = {one.name for one in replacements if one.sources[0].array is current.get(one.name)}
    # Each is freed when another takes its place.
    del current
    for each, arrays in zip(replacements, given, strict=True):
        if each.name in stays:
            yield each.name, each.sources[0].array
            continue
        for name, array in _read(each, expected[each.name].dtype):
            if donate and uses[id(array)] == 1 and _is_placed(array, expected[name]):
                kept.add(id(array))
                yield name, array
            else:
                is_given = any(array is one for one in arrays)
                if is_given and array.dtype == expected[name].dtype:
                    # Moved: JAX may share its buffer on a device that both are on.
                    kept.add(id(array))
                placed = _place(array, expected[name], may_alias=not is_given)
                # Else what is made would run ahead of what is freed.
                yield name, jax.block_until_ready(placed)
        uses.subtract(map(id, arrays))
        for array in arrays if donate else ():
            is_over = not uses[id(array)] and id(array) not in kept
            if is_over and isinstance(array, jax.Array) and not array.is_deleted():
                array.delete()


def _read(replacement: Replacement, dtype: Any) -> Iterator[tuple[str, Any]]:
    """Yield the array of a parameter, or, quantised, its codes and its scales."""
    whole = replacement.read()
    if replacement.scales is None:
        yield replacement.name, whole
    else:
        names = (replacement.name, replacement.scales)
        yield from zip(names, quantize(np.asarray(whole), dtype), strict=True)


def _is_placed(array: Any, leaf: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array is as the parameter is, on the same devices."""
    if not isinstance(array, jax.Array) or array.dtype != leaf.dtype:
        return False
    assert leaf.sharding is not None, "parameters have shardings"
    return array.sharding.is_equivalent_to(leaf.sharding, array.ndim)


def _place(array: Any, leaf: jax.ShapeDtypeStruct, *, may_alias: bool) -> jax.Array:
    """Return an array in a parameter's dtype and sharding.

    `may_alias`: whether that may be the same buffer; one of numpy's is never.
    """
    if array.dtype != leaf.dtype:
        array, may_alias = array.astype(leaf.dtype), True
    elif not isinstance(array, jax.Array):
        # On a CPU, JAX takes an array of numpy's as it is, whatever `may_alias` says.
        array = np.array(array)
    return jax.device_put(array, leaf.sharding, may_alias=may_alias)
