"""`python -m mmjax.serve [MODEL]`: the HTTP server (this process, P0) and the engine (P1).

NOTE: no slow imports at the top: the spawned engine process imports this file again.
"""

import argparse
import asyncio
import contextlib
import errno
import ipaddress
import math
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmjax.config.engine_config import EngineConfig, ServerConfig
from mmjax.errors import ConfigError, MMJaxError
from mmjax.server.flags import check_alone, parse_flags, to_engine_config, to_server_config
from mmjax.server.shutdown import Interrupted, Shutdown, leave
from mmjax.server.start import ended_on_error, make_app, start_engine
from mmjax.system.allocator import return_large_blocks
from mmjax.system.logger import configure_http_logging, configure_logging, get_logger, reporting
from mmjax.system.torch_free import leave_torch_out

logger = get_logger("mmjax.serve")  # __name__ is `__main__` here

_SWITCH_INTERVAL_S = 0.0005


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m mmjax.serve") -> int:
    """Serve until told to stop; return the exit status."""
    shutdown = Shutdown()
    shutdown.install()
    try:
        flags = parse_flags(argv, prog=prog)
        configure_logging(flags.log_level, process="P0", log_format=flags.log_format)
        return_large_blocks()
        server_config = to_server_config(flags)
        configure_http_logging(process="P0", log_format=flags.log_format)
        shutdown.timeout_s = server_config.shutdown_timeout_s
        if flags.distributed_process_id:
            shutdown.uninstall()
            return _follow(_read_configuration(flags))
        _check_certificate(server_config)
        check_alone(flags)
        with contextlib.closing(_listen(server_config)) as listener:
            _warn_if_open(server_config, listener)
            return _serve(flags, server_config, listener, shutdown)
    except MMJaxError as error:
        print(f"mmjax.serve: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"mmjax.serve: {interrupted}", file=sys.stderr)
        return interrupted.exit_status


def _read_configuration(flags: argparse.Namespace) -> EngineConfig:
    logger.info("reading the configuration of %s", flags.model or "the embedded default")
    with reporting(logger, lambda: "reading the configuration"):
        return to_engine_config(flags)


def _follow(engine: EngineConfig) -> int:
    """Run the engine of another host; only process 0 receives requests."""
    # Imported here: it loads jax.
    from mmjax.engine.process import follow_engine
    from mmjax.frontend.media_budget import as_engine_process_config

    follow_engine(as_engine_process_config(engine))
    return 0


def _check_certificate(config: ServerConfig) -> None:
    """Load the certificate before anything slow."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificate {config.ssl_certfile} with the key {config.ssl_keyfile} cannot be "
            f"used ({error.strerror or error}); give PEM files that belong together"
        ) from error


def _listen(config: ServerConfig) -> socket.socket:
    """Bind the port before anything slow, so that a port in use is an error at once."""
    if config.uds is not None:
        return _listen_at(config.uds)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # NOTE: asyncio sets TCP_NODELAY only where the protocol is named; without it, an answer on a
    # kept-alive connection waits 40 ms for the client's acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {config.host}:{config.port} ({error.strerror}); "
            "is it in use? give another `--port`"
        ) from error
    return listener


def _listen_at(path: Path) -> socket.socket:
    """Bind a Unix domain socket; one that a server left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            # Nobody listens there: else `connect` succeeds.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            path.unlink()
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen at {path} ({error.strerror or error}); give another `--uds`"
        ) from error
    return listener


def _warn_if_open(config: ServerConfig, listener: socket.socket) -> None:
    """Warn where other machines may reach the server, and no request needs a key."""
    if config.uds is not None or config.api_keys:
        return
    address = ipaddress.ip_address(listener.getsockname()[0])
    if not address.is_loopback:
        logger.warning(
            "listening at %s without an API key: whoever reaches the port may use the server; give "
            "`--api-key` or MMJAX_API_KEY, or let no other machine reach it",
            address,
        )


def _serve(
    flags: argparse.Namespace, server: ServerConfig, listener: socket.socket, shutdown: Shutdown
) -> int:
    # The event loop gives the GIL away with each call of the system, and threads that process
    # pictures would keep it for 5 ms each time.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    supervisor = start_engine(
        server,
        num_processes=flags.distributed_num_processes,
        log_level=flags.log_level,
        log_format=flags.log_format,
    )
    with ended_on_error(supervisor):
        engine = _read_configuration(flags)
    app, _ = make_app(engine, server, supervisor)
    return asyncio.run(_run(app, server, supervisor, listener, shutdown))


async def _run(
    app: Any, config: ServerConfig, supervisor: Any, listener: socket.socket, shutdown: Shutdown
) -> int:
    import uvicorn

    from mmjax.server.connections import DrainingServer, limited_protocol

    server = DrainingServer(
        uvicorn.Config(
            app,
            log_config=None,
            # h11 limits the size of a request's head; httptools does not.
            http=limited_protocol(
                max_connections=config.max_num_connections,
                head_timeout_s=config.request_head_timeout_s,
            ),
            h11_max_incomplete_event_size=config.h11_max_incomplete_event_size,
            ws="none",
            root_path=config.root_path,
            log_level=config.uvicorn_log_level,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout_s),
        ),
        shutdown=shutdown,
        reader=app.state.request_reader,
    )
    address = _address(config, listener)
    announcing = asyncio.create_task(_announce(app, supervisor, server, address))
    await server.serve(sockets=[listener])
    if config.uds is not None:
        config.uds.unlink(missing_ok=True)
    announcing.cancel()
    # Told last, behind what uvicorn logs of its end.
    (result,) = await asyncio.gather(announcing, return_exceptions=True)
    if isinstance(result, MMJaxError):
        raise result
    return 0


def _address(config: ServerConfig, listener: socket.socket) -> str:
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_keyfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _announce(app: Any, supervisor: Any, server: Any, address: str) -> None:
    """Log the server's address once it is ready; end it if the engine's start failed."""
    try:
        ready = await supervisor.wait_ready()
    except MMJaxError:
        server.should_exit = True
        raise
    num_compiled = ready.num_programs - ready.num_programs_left
    logger.info("serving: %d of %d programs are compiled", num_compiled, ready.num_programs)
    print(f"mmjax serving {app.state.model_name} at {address}", flush=True)


if __name__ == "__main__":
    leave_torch_out()
    leave(main())
