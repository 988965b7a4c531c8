"""What a cache that outlives its process depends on, as bytes: another version finds nothing."""

import inspect
import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from blake3 import blake3

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz"}


def fingerprint(*parts: object) -> bytes:
    """Return a digest of the parts' `repr`, and of this package's code."""
    return blake3(repr((_digest_code(), *parts)).encode()).digest()


def digest_class(model_class: type) -> str:
    """Return the name of a class and a digest of its file, which may be another package's."""
    file = inspect.getsourcefile(model_class)
    code = b"" if file is None else Path(file).read_bytes()
    return f"{model_class.__module__}.{model_class.__qualname__} {blake3(code).hexdigest()}"


def digest_settings(*directories: Path) -> str:
    """Return a digest of a checkpoint's files but its weights: configurations, vocabularies."""
    return " ".join(
        _digest_files(
            path, (one for one in path.iterdir() if one.suffix not in _WEIGHTS and one.is_file())
        )
        for path in directories
    )


def describe_libraries(*names: str) -> list[str]:
    """Return the versions of packages."""
    return [f"{name} {version(name)}" for name in names]


def describe_cpu() -> list[str]:
    """Return what the host's programs are compiled for: sums differ in their last bits by it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    found = (line for line in lines if line.startswith(("flags", "Features", "model name")))
    return [platform.machine(), *sorted(set(found))]


@cache
def _digest_code() -> str:
    root = Path(__file__).parents[1]
    files = (one for one in root.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
    return _digest_files(root, files)


def _digest_files(root: Path, paths: Iterable[Path]) -> str:
    hasher = blake3()
    for path in sorted(paths):
        name = path.relative_to(root).as_posix().encode()
        hasher.update(repr((name, path.stat().st_size)).encode())
        hasher.update_mmap(path)
    return hasher.hexdigest()
