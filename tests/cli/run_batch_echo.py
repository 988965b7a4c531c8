"""`mmjax run-batch` with an engine that echoes: the whole of P0, without jax."""

import sys

from mmjax.cli.main import main
from mmjax.frontend.engine_client.supervisor import Supervisor
from mmjax.server.shutdown import leave

if __name__ == "__main__":
    (Supervisor.__init__.__kwdefaults__ or {})["main"] = "tests.echo_engine:run_item_engine"
    leave(main(["run-batch", *sys.argv[1:]]))
