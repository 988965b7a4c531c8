"""`mmjax config`: each setting of a server, its value, and where it is from."""

from collections.abc import Sequence

from mmjax.server.flags import dump_config


def main(argv: Sequence[str], *, prog: str) -> int:
    """Print the settings that `mmjax serve` with the same arguments would have."""
    # `--dump` reads well, and is what the command does in any case.
    arguments = [one for one in argv if one not in ("--dump", "--dump-config")]
    print(dump_config(arguments, prog=prog), end="")
    return 0
