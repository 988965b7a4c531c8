"""Let kernels for CUDA be lowered where no GPU is."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

_GPU_INFO = "jax._src.pallas.triton.gpu_info"


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Lower as for an H100: from JAX 0.11 on a kernel asks which GPU it is for."""
    if find_spec(_GPU_INFO) is None:
        yield
        return
    gpu_info: Any = import_module(_GPU_INFO)
    h100 = gpu_info.get_gpu_info_from_version(gpu_info.GpuVersion.H100)
    # Tests that lower for both have a TPU as the device.
    kinds = ("cpu", "TPU v5 lite")
    with patch.dict(gpu_info.registry, dict.fromkeys(kinds, lambda: h100)):
        yield
