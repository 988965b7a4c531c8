"""`mmjax.serve` with an engine that echoes: the whole of P0, in a process, without jax."""

import sys
import time
from typing import Any

from mmjax.frontend.engine_client.supervisor import Supervisor
from mmjax.frontend.prompt.input_processor import InputProcessor
from mmjax.frontend.requests.request import GenerateRequest
from mmjax.serve import leave, main

STUCK_TOKEN = 11
"""A prompt that ends with it is never processed to its end."""

_prepare = InputProcessor.prepare


def _prepare_or_stick(self: InputProcessor, request: GenerateRequest, **kwargs: Any) -> Any:
    prompt = request.prompt
    if isinstance(prompt, dict) and STUCK_TOKEN in prompt.get("prompt_token_ids", ()):
        print("stuck", flush=True)
        time.sleep(3600)
    return _prepare(self, request, **kwargs)


if __name__ == "__main__":
    # Here alone: whoever imports a name of this file keeps the real ones.
    InputProcessor.prepare = _prepare_or_stick
    (Supervisor.__init__.__kwdefaults__ or {})["main"] = "tests.echo_engine:run_item_engine"
    leave(main(sys.argv[1:]))
