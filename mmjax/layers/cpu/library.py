"""The kernels in C++ of `kernels/`: where their compiled library stands, and how JAX finds them."""

import ctypes
import platform
from functools import cache
from pathlib import Path

import blake3
import jax

from mmjax.system.logger import get_logger

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "kernels"
_IN_GROUPS = tuple(
    f"{dtype}_{code}" for dtype in ("float32", "bfloat16") for code in ("uint4", "uint8", "float8")
)
TARGETS = (
    *(
        f"mmjax_product_{dtypes}"
        for dtypes in ("float32", "bfloat16", "int8", "float32_int8", "bfloat16_int8", *_IN_GROUPS)
    ),
    *(f"mmjax_groups_{dtypes}" for dtypes in ("float32", "bfloat16", *_IN_GROUPS)),
    *(
        f"mmjax_{name}_{dtype}"
        for name in ("attention", "norm", "rotation")
        for dtype in ("float32", "bfloat16")
    ),
    *(f"mmjax_{name}_attention_bfloat16" for name in ("whole", "segment")),
)
"""The kernels, by the names that JAX and the library know them by; they end with the dtypes of what
is multiplied: of both, or of inputs and weights."""


def library_path() -> Path:
    """Return the library's file, which is named by the sources that it was compiled from."""
    digest = blake3.blake3()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cc", ".h"):
            digest.update(source.read_bytes())
    return SOURCES / f"mmjax-kernels-{platform.machine()}-{digest.hexdigest(8)}.so"


@cache
def find_kernels() -> str | None:
    """Register the kernels; return the instruction set that they use here, None if there are none.

    There are none where the library was not compiled, and on CPUs that have no instruction set
    that it knows.
    """
    path = library_path()
    if not path.is_file():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("the kernels for CPUs were compiled for another system: %s", error)
        return None
    library.mmjax_instruction_set.restype = ctypes.c_char_p
    name: bytes | None = library.mmjax_instruction_set()
    if name is None:
        return None
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return name.decode()


def report_kernels() -> None:
    """Log which kernels serve, or what it costs that none do."""
    if (name := find_kernels()) is not None:
        logger.info("kernels for decoding on this CPU: %s", name)
        return
    logger.info(
        "no kernels for decoding on this CPU: a token may take twice as long; where a C++ compiler "
        "is installed, `python -m mmjax.layers.cpu.build` compiles them for x86-64 with AVX2"
    )
