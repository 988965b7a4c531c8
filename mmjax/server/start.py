"""Starts the engine process (P1), and makes the HTTP application that serves through it.

NOTE: no slow imports at the top: the spawned engine process imports this file again.
"""

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from mmjax.config.engine_config import EngineConfig, ServerConfig
from mmjax.system.logger import LogFormat, LogLevel, get_logger, reporting

logger = get_logger(__name__)


def make_app(engine: EngineConfig, server: ServerConfig, supervisor: Any = None) -> tuple[Any, Any]:
    """Start P1; return the ASGI application (a FastAPI) and P1's `Supervisor`.

    The application's lifespan connects to P1, and ends it. P1 loads and compiles meanwhile:
    `supervisor.wait_ready` waits for that, within the lifespan. Reads the tokenizer, which takes
    seconds: call it outside of a running event loop, for example by `asyncio.to_thread`. If that
    fails, P1 is ended here. `supervisor` is that of `start_engine`, if it was called before.
    """
    if supervisor is None:
        supervisor = start_engine(
            server,
            num_processes=engine.parallel.num_processes,
            log_level=engine.log_level,
            log_format=engine.log_format,
        )
    waiting = reporting(logger, lambda: "loading the tokenizer and the processor")
    with ended_on_error(supervisor), waiting:
        return _connect(engine, server, supervisor), supervisor


def start_engine(
    server: ServerConfig, *, num_processes: int, log_level: LogLevel, log_format: LogFormat
) -> Any:
    """Start P1, which imports JAX while this process imports transformers; return its supervisor.

    P1 waits for its configuration, which `make_app` sends.
    """
    from mmjax.frontend.engine_client.supervisor import Supervisor

    supervisor = Supervisor(
        # A step of several hosts waits for the slowest.
        hang_timeout_s=max(server.engine_hang_timeout_s, 60.0 if num_processes > 1 else 0.0),
        has_standby=server.enable_standby_engine,
        log_level=log_level,
        log_format=log_format,
    )
    logger.info("started the engine process (pid %s): weights, then compilation", supervisor.pid)
    return supervisor


@contextlib.contextmanager
def ended_on_error(supervisor: Any) -> Iterator[None]:
    """End P1 if the body raises."""
    try:
        yield
    except BaseException:
        asyncio.run(supervisor.close())
        raise


def _connect(engine: EngineConfig, server: ServerConfig, supervisor: Any) -> Any:
    """Configure P1, and return the application."""
    from mmjax.cache import config_with_directory, processor_cache_from_config
    from mmjax.cache.media.shared_directory import remove_dead_directories
    from mmjax.frontend.media_budget import as_engine_process_config

    remove_dead_directories()
    engine = as_engine_process_config(engine)
    cache = processor_cache_from_config(engine.model.mm)
    supervisor.configure(engine.with_mm(config_with_directory(engine.model.mm, cache)))
    # P1 loads and compiles meanwhile.
    from mmjax.frontend.engine_client.client import AsyncEngineClient
    from mmjax.frontend.media.connector import MediaConnector
    from mmjax.frontend.prompt.chat import ChatParser
    from mmjax.frontend.prompt.input_processor import InputProcessor
    from mmjax.server.app import create_app

    start = time.perf_counter()
    input_processor = InputProcessor(
        engine.model,
        cache=cache,
        make_connector=partial(MediaConnector.with_workers, num_cores=os.cpu_count() or 1),
        enable_prefix_caching=engine.cache.finds_items,
        enable_tower_connector_lora=engine.lora.enable_tower_connector_lora,
    )
    input_processor.warm_up(server.renderer_num_workers)
    client = AsyncEngineClient(
        input_processor,
        supervisor,
        engine.scheduler,
        lora=engine.lora,
        num_workers=server.renderer_num_workers,
        quarantine_s=server.request_quarantine_s,
    )
    app = create_app(client, ChatParser.for_model(input_processor), server, engine.lora)
    # Exclude what is loaded from garbage collection, whose passes would block the event loop.
    gc.collect()
    gc.freeze()
    logger.info("tokenizer and processor are ready after %.1f s", time.perf_counter() - start)
    return app
