"""One of two processes that serve together: `python -m tests.engine.one_of_two ID PORT [FOLDER]`.

With a folder, in which process 0 alone writes and reads, requests have adapters.
Process 0 prints its answers as JSON; process 1 computes along, and prints that it was let go.
"""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmjax.engine.core import EngineCore
from mmjax.engine.device.mesh import join_processes
from tests.engine.spread import (
    NUM_PROCESSES,
    adapted_config,
    params_with_heads,
    serve,
    serve_adapters,
    serve_embeds,
    spread_config,
)
from tests.engine.tiny import start_tiny
from tests.shared_programs import install_few_sizes


def main() -> None:
    """Start the engine, and serve or follow."""
    process_id, port = map(int, sys.argv[1:3])
    folder = Path(sys.argv[3]) if sys.argv[3:] else None
    install_few_sizes()
    config = (spread_config if folder is None else adapted_config)(
        2,
        tensor_parallel_size=4,
        coordinator_address=f"127.0.0.1:{port}",
        num_processes=NUM_PROCESSES,
        process_id=process_id,
    )
    # Also what broadcasts the arrays of a call is compiled then.
    config = replace(config, precompile="all")
    join_processes(config)  # before the parameters are made
    core = start_tiny(config, params_with_heads(2))
    if process_id:
        core.follow()
        print("let go", flush=True)
        return
    with contextlib.closing(core):
        core.step()  # nothing to do: the followers are told so
        report: dict[str, Any] = (
            serve_all(core) if folder is None else {"adapters": serve_adapters(core, folder, 2)}
        )
        report["compilations"] = core.compilations
    print(json.dumps(report), flush=True)


def serve_all(core: EngineCore) -> dict[str, Any]:
    """Return the answers without adapters."""
    report = {"greedy": serve(core), "drawn": serve(core, temperature=1.0, seed=7)}
    report["embeds"] = serve_embeds(core)
    return report | {"again": serve(core)}


if __name__ == "__main__":
    main()
