"""The command `mmjax`: each subcommand is another module's `main`, imported when it is called.

Imports nothing slow: a spawned engine process imports this file again.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from mmjax import __version__
from mmjax.errors import MMJaxError
from mmjax.server.shutdown import leave
from mmjax.system.torch_free import leave_torch_out


class Command(NamedTuple):
    """A subcommand."""

    module: str
    """Whose `main(argv, prog=...)` returns the exit status."""
    help: str


COMMANDS = {
    "serve": Command("mmjax.serve", "serve a model over OpenAI's HTTP API"),
    "run-batch": Command("mmjax.cli.run_batch", "answer a file of requests into another file"),
    "encode-worker": Command("mmjax.cli.encode_worker", "encode media for engines elsewhere"),
    "chat": Command("mmjax.cli.chat", "talk to a model about pictures, in the terminal"),
    "bench": Command("mmjax.cli.bench", "measure a server: TTFT, TPOT, requests per second"),
    "models": Command("mmjax.cli.models", "list what is served; say whether a model fits here"),
    "explain": Command("mmjax.cli.explain", "show the tokens and the images of a prompt"),
    "config": Command("mmjax.server.flags", "show each setting's value, and where it is from"),
    "convert": Command("mmjax.convert", "convert a checkpoint to a snapshot"),
    "parity": Command("mmjax.parity.__main__", "compare a model with HF's (needs torch)"),
}

_USAGE = """usage: mmjax COMMAND [ARGUMENT ...]

{commands}

`mmjax COMMAND --help` says what a command takes. `mmjax --version` prints {version}."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "--version":
        print(__version__)
        return 0
    if name in ("--help", "-h"):
        print(_usage())
        return 0
    if name not in COMMANDS:
        print(f"{_usage()}\nmmjax: error: there is no command `{name}`", file=sys.stderr)
        return 2
    prog = f"mmjax {name}"
    try:
        return import_module(COMMANDS[name].module).main(rest, prog=prog)
    except MMJaxError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1


def run() -> NoReturn:
    """Run a subcommand, and end the process."""
    if sys.argv[1:2] != ["parity"]:
        leave_torch_out()
    leave(main())


def _usage() -> str:
    rows = "\n".join(f"  {name:<15}{one.help}" for name, one in COMMANDS.items())
    return _USAGE.format(commands=rows, version=__version__)
