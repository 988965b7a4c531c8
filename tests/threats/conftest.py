"""The server over the echo engine, for tests of threats."""

from tests.server.conftest import make_server, server, server_input_processor

__all__ = ["make_server", "server", "server_input_processor"]
