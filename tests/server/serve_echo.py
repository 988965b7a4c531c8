"""`mmjax.serve` with an engine that echoes: the whole of P0, in a process, without jax."""

import sys
import time
from typing import Any

from mmjax.serve import leave, main
from mmjax.system.torch_free import leave_torch_out

STUCK_TOKEN = 11
"""A prompt that ends with it is never processed to its end."""


def _replace_engine() -> None:
    """Let P1 echo, and a prompt stick, in this process alone."""
    # Imported here: both load transformers, which must not have found torch; and P1 imports this
    # file again.
    from mmjax.frontend.engine_client.supervisor import Supervisor
    from mmjax.frontend.prompt.input_processor import InputProcessor

    prepare: Any = InputProcessor.prepare

    def prepare_or_stick(self: InputProcessor, request: Any, **kwargs: Any) -> Any:
        prompt = request.prompt
        if isinstance(prompt, dict) and STUCK_TOKEN in prompt.get("prompt_token_ids", ()):
            print("stuck", flush=True)
            time.sleep(3600)
        return prepare(self, request, **kwargs)

    InputProcessor.prepare = prepare_or_stick
    (Supervisor.__init__.__kwdefaults__ or {})["main"] = "tests.echo_engine:run_item_engine"


if __name__ == "__main__":
    leave_torch_out()  # as `mmjax.serve` does
    _replace_engine()
    leave(main(sys.argv[1:]))
