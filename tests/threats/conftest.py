"""The server over the echo engine, for tests of threats."""

from tests.server.conftest import (
    make_server,
    roomy_input_processor,
    server,
    server_input_processor,
)

__all__ = ["make_server", "roomy_input_processor", "server", "server_input_processor"]
