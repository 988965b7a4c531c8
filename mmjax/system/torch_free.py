"""Processes of mmjax that need no torch, where torch is installed."""

import sys
from typing import Any


def leave_torch_out() -> None:
    """Let nothing in this process import torch, unless something has.

    Transformers would import it wherever it is installed, with the first configuration that it
    reads: 190 MB in each process, and a second or two. Prompts and pixels are the same without it.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)
    if "transformers" in sys.modules:  # it has looked for torch, and remembers
        from transformers.utils.import_utils import is_torch_available

        is_torch_available.cache_clear()


def is_torch_left_out() -> bool:
    """Return whether this process has left torch out.

    One that has not may hold configurations with torch's dtypes, which nobody reads without it.
    """
    return sys.modules.get("torch", sys) is None
