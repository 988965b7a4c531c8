"""An engine that serves while it compiles, in a process of its own: what memory it has at the end.

`python -m tests.engine.staged_memory tiny|default FOLDER`; FOLDER: of an empty compile cache. The
last line of its output has bytes: resident when it is ready, at the end, and of free pages that it
could still return then.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmjax.config.engine_config import EngineConfig
from mmjax.engine.core import EngineCore
from mmjax.frontend.media_budget import as_engine_process_config
from mmjax.server.flags import parse_flags, to_engine_config
from mmjax.system.allocator import return_free_pages
from tests.engine.tiny import (
    Gemma3ForConditionalGeneration,
    drain,
    engine_config,
    message,
    tiny_params,
)


def make_engine(kind: str, cache: Path) -> EngineCore:
    """Return the engine with its first programs."""
    staged: dict[str, Any] = {"precompile": "smallest", "compilation_cache_dir": cache}
    if kind == "tiny":
        config = engine_config(max_num_seqs=4, max_num_batched_tokens=256)
        model_class, params = Gemma3ForConditionalGeneration, tiny_params()[1]
        return EngineCore(replace(config, **staged), model_class=model_class, params=params)
    config: EngineConfig = to_engine_config(parse_flags([]))
    return EngineCore(as_engine_process_config(replace(config, **staged)))


def measure(core: EngineCore) -> int:
    """Return the process's resident bytes."""
    return sum(core.stats().memory_bytes.values())


def main(kind: str, folder: str) -> None:
    """Serve until all is compiled; print what was measured."""
    core = make_engine(kind, Path(folder))
    found = {"ready": measure(core), "num_later": core.num_programs_left, "num_requests": 0}
    thread: Any = core._programs._thread
    while thread.is_alive():
        number = found["num_requests"] = found["num_requests"] + 1
        core.add_request(message(f"{number}", [[2, 5, number % 50]], max_tokens=2))
        drain(core)
        time.sleep(0.05)
    found["end"] = measure(core)
    return_free_pages()
    found["free"] = found["end"] - measure(core)
    found |= {"left": core.num_programs_left, "compilations": core.compilations}
    core.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
