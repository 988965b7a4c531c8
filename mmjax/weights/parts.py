"""A checkpoint whose other tensors are in the directories of those that it was trained from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from mmjax.weights.files.safetensors import StoredTensor, open_safetensors
from mmjax.weights.rules import RuleTypes, map_tensor


@contextmanager
def open_with_parts(
    path: Path, parts: Mapping[str, Path], rules: Sequence[RuleTypes]
) -> Iterator[dict[str, StoredTensor]]:
    """Open the files of a directory and of its parts; yield `{name: tensor}`.

    Args:
        path: The directory.
        parts: Other directories, by what their tensors' names begin with here. A tensor is left
            out where `path` has what becomes of it.
        rules: From names here to those in the tree.
    """
    with ExitStack() as stack:
        tensors = dict(stack.enter_context(open_safetensors(path)))
        own = {mapped for name in tensors for mapped, _ in map_tensor(name, rules)}
        for prefix, directory in parts.items():
            for tensor in stack.enter_context(open_safetensors(directory)).values():
                name = prefix + tensor.name
                if own.isdisjoint(mapped for mapped, _ in map_tensor(name, rules)):
                    file = str(directory.resolve() / tensor.file)
                    tensors[name] = replace(tensor, name=name, file=file)
        yield tensors
