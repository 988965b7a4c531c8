"""`mmjax encode-worker`: encode pictures, clips and videos for engines, and do nothing else."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmjax.server.flags import parse_flags, to_engine_config
from mmjax.server.shutdown import Interrupted, Shutdown
from mmjax.system.logger import configure_logging

_GIB = 2**30


def main(argv: Sequence[str], *, prog: str) -> int:
    """Encode until told to stop; return the exit status."""
    shutdown = Shutdown()
    shutdown.install()
    options, rest = _parse(argv, prog)
    # Imported here: they load jax.
    from mmjax.engine.encode_worker import EncodeWorker
    from mmjax.engine.start import start_encoder
    from mmjax.frontend.media_budget import as_engine_process_config
    from mmjax.transport.encoder_link import find_endpoint, make_key, read_key

    if options.make_key is not None:
        make_key(options.make_key)
        print(f"{prog}: a new key is in {options.make_key}")
        return 0
    try:
        flags = parse_flags(rest, prog=prog)
        configure_logging(flags.log_level, process="encoder", log_format=flags.log_format)
        key = None if options.key is None else read_key(options.key)
        find_endpoint(options.listen, has_key=key is not None)
        config = as_engine_process_config(to_engine_config(flags))
        parts = start_encoder(config)
        max_bytes = int(options.cache_gb * _GIB)
        worker = EncodeWorker(parts, options.listen, key, max_bytes=max_bytes)
        worker.start()
        shutdown.drain_with(worker.stop)
        print(f"mmjax encodes for {config.model.public_name} at {options.listen}", flush=True)
        worker.run()
    except Interrupted as interrupted:
        print(f"{prog}: {interrupted}")
        return interrupted.exit_status
    return 0


def _parse(argv: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    """Return the worker's own arguments, and those that are an engine's."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        usage="%(prog)s [MODEL] --listen ADDRESS [--FLAG VALUE ...]",
        epilog="All other flags are those of `mmjax serve --help`, and should be the engines'; "
        "those of a port mean nothing.",
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("--listen", metavar="ADDRESS", help="unix:///PATH, or tcp://HOST:PORT")
    add("--key", type=Path, metavar="FILE", help="key that engines must have, too")
    add("--make-key", type=Path, metavar="FILE", help="write a new key to a file, and exit")
    add(
        "--cache-gb",
        type=float,
        default=1.0,
        metavar="NUMBER",
        help="memory, in GiB, for outputs that are kept (default: %(default)s)",
    )
    options, rest = parser.parse_known_args(argv)
    if options.listen is None and options.make_key is None:
        parser.error("give `--listen`, as in `--listen unix:///run/mmjax/encoder`")
    if not 0 <= options.cache_gb < math.inf:
        parser.error(f"`--cache-gb` is {options.cache_gb}; expected a number of at least 0")
    return options, rest
