"""`python -m mmjax.serve [MODEL]`: the HTTP server (this process, P0) and the engine (P1).

NOTE: no slow imports at the top: the spawned engine process imports this file again.
"""

import asyncio
import contextlib
import errno
import gc
import math
import os
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmjax.allocator import return_large_blocks
from mmjax.config import EngineConfig, ServerConfig
from mmjax.errors import ConfigError, MMJaxError
from mmjax.logger import configure_http_logging, configure_logging, get_logger, reporting
from mmjax.server.flags import parse_flags, to_engine_config, to_server_config
from mmjax.server.shutdown import Interrupted, Shutdown, leave

logger = get_logger("mmjax.serve")  # __name__ is `__main__` here


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m mmjax.serve") -> int:
    """Serve until told to stop; return the exit status."""
    shutdown = Shutdown()
    shutdown.install()
    try:
        flags = parse_flags(argv, prog=prog)
        configure_logging(flags.log_level, process="P0", log_format=flags.log_format)
        return_large_blocks()
        logger.info("reading the configuration of %s", flags.model or "the embedded default")
        server_config = to_server_config(flags)
        configure_http_logging(
            process="P0",
            quiet_paths=server_config.disable_access_log_for_endpoints,
            log_format=flags.log_format,
        )
        shutdown.timeout_s = server_config.shutdown_timeout_s
        with reporting(logger, lambda: "reading the configuration"):
            engine_config = to_engine_config(flags)
        if engine_config.parallel.process_id:
            shutdown.uninstall()
            return _follow(engine_config)
        _check_certificate(server_config)
        with contextlib.closing(_listen(server_config)) as listener:
            return _serve(engine_config, server_config, listener, shutdown)
    except MMJaxError as error:
        print(f"mmjax.serve: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"mmjax.serve: {interrupted}", file=sys.stderr)
        return interrupted.exit_status


def _follow(engine: EngineConfig) -> int:
    """Run the engine of another host; only process 0 receives requests."""
    # Imported here: it loads jax.
    from mmjax.engine.process import follow_engine
    from mmjax.frontend.media_budget import with_encoder_budget
    from mmjax.models.registry import with_model_class

    # As process 0 does: shapes follow from it, and must be the same.
    follow_engine(with_encoder_budget(replace(engine, model=with_model_class(engine.model))))
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


def _serve(
    engine: EngineConfig, server: ServerConfig, listener: socket.socket, shutdown: Shutdown
) -> int:
    from mmjax.frontend.engine_client.supervisor import Supervisor

    # P1 imports JAX while this process imports transformers and reads the configuration.
    supervisor = Supervisor(
        hang_timeout_s=_find_hang_timeout(engine, server),
        has_standby=server.enable_standby_engine,
        log_level=engine.log_level,
        log_format=engine.log_format,
    )
    logger.info("started the engine process (pid %s): weights, then compilation", supervisor.pid)
    try:
        with reporting(logger, lambda: "loading the tokenizer and the processor"):
            app = _start(engine, server, supervisor)
    except BaseException:
        asyncio.run(supervisor.close())
        raise
    return asyncio.run(_run(app, server, supervisor, listener, shutdown))


def _find_hang_timeout(engine: EngineConfig, server: ServerConfig) -> float:
    """Return the seconds after which P1 hangs; a step of several hosts waits for the slowest."""
    least = 60.0 if engine.parallel.num_processes > 1 else 0.0
    return max(server.engine_hang_timeout_s, least)


def _start(engine: EngineConfig, server: ServerConfig, supervisor: Any) -> Any:
    """Configure P1, and return the application."""
    from mmjax.cache import config_with_segment, processor_cache_from_config
    from mmjax.frontend.media_budget import with_encoder_budget
    from mmjax.models.registry import with_model_class

    engine = with_encoder_budget(replace(engine, model=with_model_class(engine.model)))
    cache = processor_cache_from_config(engine.model.mm)
    supervisor.configure(engine.with_mm(config_with_segment(engine.model.mm, cache)))
    return _make_app(engine, server, supervisor, cache)


def _make_app(engine: EngineConfig, server: ServerConfig, supervisor: Any, cache: Any) -> Any:
    from mmjax.frontend.engine_client.client import AsyncEngineClient
    from mmjax.frontend.media.connector import MediaConnector
    from mmjax.frontend.prompt.chat import ChatParser
    from mmjax.frontend.prompt.input_processor import InputProcessor
    from mmjax.server.app import create_app

    start = time.perf_counter()
    input_processor = InputProcessor(
        engine.model,
        cache=cache,
        connector=MediaConnector.with_workers(engine.model.mm, os.cpu_count() or 1),
        enable_prefix_caching=engine.cache.enable_prefix_caching,
    )
    input_processor.warm_up()
    client = AsyncEngineClient(
        input_processor,
        supervisor,
        engine.scheduler,
        num_workers=server.renderer_num_workers,
        quarantine_s=server.request_quarantine_s,
    )
    app = create_app(client, ChatParser.for_model(input_processor), server)
    # Exclude what is loaded from garbage collection, whose passes would block the event loop.
    gc.collect()
    gc.freeze()
    logger.info("tokenizer and processor are ready after %.1f s", time.perf_counter() - start)
    return app


async def _run(
    app: Any, config: ServerConfig, supervisor: Any, listener: socket.socket, shutdown: Shutdown
) -> int:
    import uvicorn

    from mmjax.server.connections import limited_protocol
    from mmjax.server.draining import DrainingServer

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
    results = await asyncio.gather(announcing, return_exceptions=True)
    return 1 if any(isinstance(result, MMJaxError) for result in results) else 0


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
    except MMJaxError as error:
        print(f"mmjax.serve: {error}", file=sys.stderr)
        server.should_exit = True
        raise
    num_compiled = ready.num_programs - ready.num_programs_left
    logger.info("serving: %d of %d programs are compiled", num_compiled, ready.num_programs)
    print(f"mmjax serving {app.state.model_name} at {address}", flush=True)


if __name__ == "__main__":
    leave(main())
