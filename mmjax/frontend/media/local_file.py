"""Files of `file:` URLs: regular files within one directory that the operator allows."""

import os
import stat
from pathlib import Path
from urllib.parse import unquote

from mmjax.errors import RequestValueError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def read_local_file(url: str, root: Path | None, max_bytes: int, *, param: str) -> bytes:
    """Return a file's content; one message for whatever is wrong: it tells of no other file."""
    if root is None:
        raise RequestValueError.about(
            param,
            "is a `file:` URL, which this server does not read; start it with "
            "`--allowed-local-media-path`, or send the file itself as a base64 `data:` URL",
        )
    try:
        data, size = _read(_path_of(url), root, max_bytes)
    except (OSError, ValueError):
        raise RequestValueError.about(
            param,
            "names no readable file within `--allowed-local-media-path`; write `file:///path`, "
            "with the whole path",
        ) from None
    if len(data) > max_bytes:
        num_bytes = max(size, len(data))
        raise RequestValueError.about(
            param, f"has {num_bytes} bytes, at most {max_bytes} are accepted; give a smaller file"
        )
    return data


def _path_of(url: str) -> str:
    rest = url.partition(":")[2]
    for start in ("//localhost/", "///"):
        if rest.startswith(start):
            return "/" + unquote(rest.removeprefix(start), errors="strict")
    raise ValueError("no path")


def _read(path: str, root: Path, max_bytes: int) -> tuple[bytes, int]:
    """Open a file below `root` after links are resolved; read one byte more than allowed.

    Also returns its size.

    NOTE: opened directory by directory, following no link: what is opened is what was checked, also
    where somebody replaces a directory by a link meanwhile.
    """
    top = os.path.realpath(root)
    parts = Path(os.path.realpath(path, strict=True)).relative_to(top).parts
    if not parts:
        raise ValueError("a directory")
    directory = os.open(top, _DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        descriptor = os.open(parts[-1], _FILE, dir_fd=directory)
    finally:
        os.close(directory)
    with open(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        # The files of /proc are regular, too, and have no size.
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            raise ValueError("no regular file")
        return file.read(min(status.st_size, max_bytes) + 1), status.st_size
