"""Rules from names in checkpoint files to names in a module's tree."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """`re.sub(pattern, replacement, name)` where the pattern matches; None drops the tensor."""

    pattern: str
    replacement: str | None
    transform: "Change | None" = None
    """What becomes of the values; None: they stay as they are."""


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor of a file that is several of the tree's, cut along the first axis.

    A fused `qkv` is cut so that tensor parallelism cuts heads. The file's rows are groups of
    `sum(sizes)`, each of which has `sizes[i]` rows of part `i`: one group where queries, keys and
    values follow each other whole, a group a head where they are interleaved.
    """

    pattern: str
    replacements: Sequence[str]
    """What `re.sub` makes of the name, for each part."""
    sizes: Sequence[int]
    of_stack: bool = False
    """Whether it is a stack of matrices, `[E, out, in]` or `[E, in, out]`, each of which is cut
    along `out`, or of vectors, `[E, out]`; the parts are `[E, out, in]`, or `[E, out]`."""
    is_transposed: bool = False
    """Of a stack: whether it is `[E, in, out]` for certain, also where its matrices are square."""
    is_interleaved: bool = False
    """Of a stack: whether the parts, of one size, alternate row by row."""

    @classmethod
    def of_qkv(cls, pattern: str, layer: str, sizes: Sequence[int]) -> "Split":
        """Return how queries, keys and values in one tensor become those of an attention layer."""
        return cls(pattern, [f"{layer}{part}_proj." for part in "qkv"], sizes)

    def parts(self) -> Sequence["Change"]:
        """Return where each part stands."""
        total, num_parts = sum(self.sizes), len(self.sizes)
        starts = [sum(self.sizes[:number]) for number in range(num_parts)]
        placed = list(zip(starts, self.sizes, strict=True))
        if not self.of_stack:
            return [Part(start, start + size, total) for start, size in placed]
        kind = partial(StackPart, num_rows=total, is_transposed=self.is_transposed)
        if self.is_interleaved:
            return [kind(n, size, step=num_parts) for n, (_, size) in enumerate(placed)]
        return [kind(start, size) for start, size in placed]


class Change(ABC):
    """How a tensor of the tree is had of a file's."""

    __slots__ = ()

    @abstractmethod
    def apply(self, tensor: Any) -> Any:
        """Return the tensor that the tree has, of a file's as numpy or JAX has it."""

    def is_fit(self, shape: Sequence[int]) -> bool:
        """Return whether a file's tensor of this shape can be changed so."""
        return True

    def read(self, shape: Sequence[int], read: Callable[[Any], Any], index: Sequence[slice]) -> Any:
        """Return what the tree has at `index`; `read` gives what the file has at another."""
        return self.apply(read((slice(None),) * len(shape)))[tuple(index)]


@dataclass(frozen=True, slots=True)
class Part(Change):
    """Which rows of each group of a tensor: `[start, stop)` of `group_size`."""

    start: int
    stop: int
    group_size: int

    def apply(self, tensor: Any) -> Any:
        """Return these rows of every group, one behind the other."""
        groups = tensor.reshape(-1, self.group_size, *tensor.shape[1:])
        return groups[:, self.start : self.stop].reshape(-1, *tensor.shape[1:])

    def is_fit(self, shape: Sequence[int]) -> bool:
        return bool(shape) and shape[0] % self.group_size == 0

    def read(self, shape: Sequence[int], read: Callable[[Any], Any], index: Sequence[slice]) -> Any:
        return self.apply(read((slice(None), *index[1:])))[index[0]]


@dataclass(frozen=True, slots=True)
class StackPart(Change):
    """Some rows of each matrix of a stack, columns where a file has them transposed.

    Or some numbers of each vector of one.
    """

    start: int
    count: int
    num_rows: int
    """Of a whole matrix."""
    step: int = 1
    """How far one row is from the next."""
    is_transposed: bool = False
    """As in `Split`."""

    def apply(self, tensor: Any) -> Any:
        return self.read(tensor.shape, tensor.__getitem__, (slice(None),) * tensor.ndim)

    def is_fit(self, shape: Sequence[int]) -> bool:
        return len(shape) in (2, 3) and shape[self._axis(shape)] == self.num_rows

    def _axis(self, shape: Sequence[int]) -> int:
        """Return which axis of a file's tensor the rows are on."""
        if len(shape) == 2:
            return 1
        # Squares are taken as they are, as HF does, unless they are known to be transposed.
        return 2 if self.is_transposed or shape[1] != self.num_rows else 1

    def read(self, shape: Sequence[int], read: Callable[[Any], Any], index: Sequence[slice]) -> Any:
        matrices, rows, *columns = index
        start, stop, _ = rows.indices(self.count)
        # Files are read without steps.
        first, last = (self.start + row * self.step for row in (start, stop - 1))
        chosen = slice(first, last + 1)
        if self._axis(shape) == 1:
            return read((matrices, chosen, *columns))[:, :: self.step]
        return read((matrices, *columns, chosen))[..., :: self.step].swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class Transposition(Change):
    """A matrix of the tree is a file's with its two axes swapped: `[in, out]`, say."""

    def apply(self, tensor: Any) -> Any:
        return tensor.T

    def is_fit(self, shape: Sequence[int]) -> bool:
        return len(shape) == 2

    def read(self, shape: Sequence[int], read: Callable[[Any], Any], index: Sequence[slice]) -> Any:
        return read(tuple(index[::-1])).T


@dataclass(frozen=True, slots=True)
class Squeeze(Change):
    """A tensor of the tree is a file's without its first axes, which are of one."""

    num_axes: int = 1

    def apply(self, tensor: Any) -> Any:
        return tensor[(0,) * self.num_axes]

    def is_fit(self, shape: Sequence[int]) -> bool:
        return set(shape[: self.num_axes]) == {1}

    def read(self, shape: Sequence[int], read: Callable[[Any], Any], index: Sequence[slice]) -> Any:
        return self.apply(read((*(slice(None),) * self.num_axes, *index)))


@dataclass(frozen=True, slots=True)
class Turn(Change):
    """A tensor of the tree is what `function` makes of a file's, or of one of those stacked in it.

    `function` takes numpy's arrays and JAX's, and is traced to find the shape.
    """

    function: Callable[[Any], Any]
    index: int | None = None
    """The place of the tensor on the file's `axis`; None: it stands alone."""
    count: int = 1
    """Of those that are stacked there."""
    axis: int = 1
    of_rows: bool = False
    """Whether `function` only orders rows anew, which those of an adapter's B are, too."""

    def apply(self, tensor: Any) -> Any:
        if self.index is None:
            return self.function(tensor)
        return self.function(tensor[(slice(None),) * self.axis + (self.index,)])

    def is_fit(self, shape: Sequence[int]) -> bool:
        return self.index is None or (len(shape) > self.axis and shape[self.axis] == self.count)


@dataclass(frozen=True, slots=True)
class Unstack:
    """A tensor of a file that is several of the tree's, side by side on its `axis`.

    So a trainer that scans its layers keeps them.
    """

    pattern: str
    names: Sequence[str]
    """What the match expands to, in the order of that axis."""
    function: Callable[[Any], Any]
    """Of `Turn`, for each of them."""
    axis: int = 1


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors of a file that are one of the tree's along a new first axis, such as one an expert.

    The pattern's group `index` is a tensor's place on that axis.
    """

    pattern: str
    replacement: str
    """What `re.sub` makes of the name: the same for all of them."""
    first: int = 0
    """The index of the first of them."""


@dataclass(frozen=True, slots=True)
class Join:
    """Tensors of a file that follow each other on the first axis of one of the tree's."""

    patterns: Sequence[str]
    """Of each, in that order."""
    replacement: str
    """What `re.sub` makes of each name: the same for all of them."""
    function: Callable[[Any], Any]
    """Of `Turn`, for each of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where on the first axis of the tree's tensor one of a `Stack`, or of a `Join`, stands."""

    index: int
    joined: int = 0
    """How many follow each other; 0: they are stacked."""
    turn: Change | None = None
    """What becomes of it before; None: it is as in the file."""


RuleTypes = Rule | Split | Stack | Unstack | Join


def map_tensor(
    name: str, rules: Sequence[RuleTypes]
) -> Iterator[tuple[str, Change | Place | None]]:
    """Yield the tree's name of a file's tensor, or of each of its parts: the first match decides.

    With it comes which part of the file's tensor is meant, its place in the tree's, or how it is
    turned; None: it is the whole tensor as it is. A name that no rule matches stays as it is;
    nothing is yielded of a tensor that is not loaded.
    """
    for rule in rules:
        if isinstance(rule, Join):
            index = next((n for n, one in enumerate(rule.patterns) if re.search(one, name)), None)
            if index is None:
                continue
            place = Place(index, len(rule.patterns), Turn(rule.function))
            yield re.sub(rule.patterns[index], rule.replacement, name), place
            return
        found = re.search(rule.pattern, name)
        if not found:
            continue
        if isinstance(rule, Stack):
            place = Place(int(found.group("index")) - rule.first)
            yield re.sub(rule.pattern, rule.replacement, name), place
        elif isinstance(rule, Unstack):
            for index, replacement in enumerate(rule.names):
                yield (
                    found.expand(replacement),
                    Turn(rule.function, index, len(rule.names), rule.axis),
                )
        elif isinstance(rule, Split):
            for replacement, part in zip(rule.replacements, rule.parts(), strict=True):
                yield re.sub(rule.pattern, replacement, name), part
        elif rule.replacement is not None:
            yield re.sub(rule.pattern, rule.replacement, name), rule.transform
        return
    yield name, None


def apply_rules(name: str, rules: Sequence[RuleTypes]) -> str | None:
    """Return the tree's name of a file's tensor (of its first part); None: it is not loaded."""
    return next((mapped for mapped, _ in map_tensor(name, rules)), None)
