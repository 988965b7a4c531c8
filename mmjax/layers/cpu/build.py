"""`python -m mmjax.layers.cpu.build` compiles the kernels in C++, where there is a compiler.

The compiler is `$CXX`, else `c++`, `g++` or `clang++`.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from mmjax.layers.cpu.library import SOURCES, library_path

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")
_INSTRUCTIONS = {
    "amx.cc": _AMX,
    "amx_attention.cc": _AMX,
    "amx_integers.cc": (*_AMX, "-mfma"),
    "amx_paged_attention.cc": _AMX,
    "avx2.cc": ("-mavx2", "-mfma"),
    "avx512.cc": _AVX512,
    "avx512_bf16.cc": _AVX512_BF16,
    "avx512_vnni.cc": _AVX512_VNNI,
}
"""Flags of the files that have an instruction set each; which one runs is chosen at run time."""
_FLAGS = ("-std=c++17", "-O3", "-pthread")
_MACHINES = ("x86_64", "AMD64")


class BuildError(Exception):
    """The kernels cannot be compiled here; says why."""


def find_compiler() -> str:
    """Return the C++ compiler. Raises `BuildError` where there is none."""
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler was found: install g++ or clang++, or set CXX")


def build() -> Path:
    """Compile the library of the sources as they stand; return its file. Raises `BuildError`."""
    if platform.machine() not in _MACHINES:
        raise BuildError(f"there are no kernels for {platform.machine()}, for {_MACHINES[0]} alone")
    library = library_path()
    with tempfile.TemporaryDirectory(dir=SOURCES) as folder:
        linked = Path(folder) / library.name
        compile_sources(sorted(SOURCES.glob("*.cc")), linked, ("-fPIC",), ("-shared",))
        for old in SOURCES.glob("*.so"):
            old.unlink()
        os.replace(linked, library)
    return library


def compile_sources(
    sources: Sequence[Path], out: Path, flags: Sequence[str], link_flags: Sequence[str]
) -> None:
    """Compile each of `sources` with the flags of its instruction set, and link them to `out`."""
    compiler = find_compiler()
    headers = ("-I", str(SOURCES), "-isystem", jax.ffi.include_dir())

    def compile_one(source: Path) -> str:
        compiled = str(out.parent / f"{source.stem}.o")
        options = (*_FLAGS, *flags, *_INSTRUCTIONS.get(source.name, ()), *headers)
        _call(compiler, *options, "-c", str(source), "-o", compiled)
        return compiled

    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(compile_one, sources))
    _call(compiler, *link_flags, *compiled, "-o", str(out))


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-2000:]}")


def main() -> int:
    """Build; print what was built, or why nothing was."""
    try:
        library = build()
    except (BuildError, OSError) as error:
        print(f"mmjax: the kernels for CPUs were not compiled: {error}", file=sys.stderr)
        return 1
    print(f"mmjax: compiled {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
