"""Compiles the kernels in C++ into a wheel where `MMJAX_BUILD_KERNELS=1` is set, as releases do.

Without it a wheel is pure Python. A checkout is not built by this: `make` runs
`python -m mmjax.layers.cpu.build`, with the JAX that is installed already.
"""

import os
import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

IS_ASKED_FOR = os.environ.get("MMJAX_BUILD_KERNELS") == "1"


class KernelsHook(BuildHookInterface):
    """Adds the compiled library, and names the platform in the wheel's tag."""

    def dependencies(self) -> list[str]:
        """Return what compiling needs: the headers that jaxlib has, and what names the library."""
        return ["jax>=0.10.2", "blake3>=1.0"] if IS_ASKED_FOR else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless an editable installation is made."""
        if not IS_ASKED_FOR or version == "editable":
            return
        sys.path.insert(0, self.root)
        from mmjax.layers.cpu.build import build

        library = build()
        build_data["force_include"][str(library)] = str(library.relative_to(self.root))
        build_data["pure_python"] = False
        # The library has no Python in it: one serves every version.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
