"""`mmjax run-batch` with an engine that echoes: the whole of P0, without jax."""

import sys

from mmjax.cli.main import main
from mmjax.server.shutdown import leave
from mmjax.system.torch_free import leave_torch_out

if __name__ == "__main__":
    leave_torch_out()  # as `mmjax` does
    # Imported here: it loads transformers, which must not have found torch.
    from mmjax.frontend.engine_client.supervisor import Supervisor

    (Supervisor.__init__.__kwdefaults__ or {})["main"] = "tests.echo_engine:run_item_engine"
    leave(main(["run-batch", *sys.argv[1:]]))
