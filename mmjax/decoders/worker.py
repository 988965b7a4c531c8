"""A decoding process: reads files from shared memory, writes pixels there, and nothing else.

`python -m mmjax.decoders.worker SOCKET MEMORY NUM_BYTES`, started by `mmjax.decoders.workers`. A
fault in a decoder ends this process, which has no secrets, no connections and limited memory.
"""

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmjax.decoders.image_file import BYTES_PER_PIXEL, decode_image, read_image_header
from mmjax.decoders.limits import MediaLimits
from mmjax.decoders.shared_memory import SharedMemory
from mmjax.decoders.video_file import VideoSampling, decode_video, read_video_header
from mmjax.errors import MediaError, RequestError
from mmjax.system.niceness import give_way

MAX_MESSAGE_BYTES = 128 * 2**10
"""The places of a video's frames are in one."""

SHARED_MODE = "RGBX"
"""Of an image in the shared memory."""

_MAX_OPEN_FILES = 64
_MAX_ERROR_CHARS = 1000
_PAGES_OF_DATA = 5
"""Place in /proc/self/statm."""


def main(argv: list[str]) -> None:
    """Serve one request after another until the server closes the socket."""
    # Of a service manager, which sends it to all processes: the server ends this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    give_way()
    channel = socket.socket(fileno=int(argv[0]))
    memory = SharedMemory(int(argv[1]))
    limit_resources(int(argv[2]))
    channel.send(b"{}")
    while request := channel.recv(MAX_MESSAGE_BYTES):
        reply = _answer(json.loads(request), memory)
        channel.send(json.dumps(reply).encode())
        if reply.get("error") == "memory":
            return


def limit_resources(num_bytes: int) -> None:
    """Allow `num_bytes` of memory beyond what is used now, few files, and no core dump."""
    statm = Path("/proc/self/statm").read_text(encoding="ascii").split()
    data = int(statm[_PAGES_OF_DATA]) * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))


def _answer(request: Mapping[str, Any], memory: SharedMemory) -> dict[str, Any]:
    data = _read(memory.descriptor, request["num_bytes"])
    limits = MediaLimits(**request["limits"])
    try:
        return _OPERATIONS[request["operation"]](data, limits, memory, **request["options"])
    except MemoryError:
        return {"error": "memory"}
    except RequestError as error:
        kind = "media" if isinstance(error, MediaError) else "value"
        if isinstance(error.__cause__, MemoryError):
            return {"error": "memory"}
        return {"error": kind, "message": str(error)[:_MAX_ERROR_CHARS]}


def _read(memory: int, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    view, place = memoryview(data), 0
    while place < num_bytes:
        place += os.preadv(memory, [view[place:]], place)
    return bytes(data)


def _read_header(data: bytes, limits: MediaLimits, memory: SharedMemory) -> dict[str, Any]:
    return {"header": read_image_header(data, limits)}


def _decode_image(data: bytes, limits: MediaLimits, memory: SharedMemory) -> dict[str, Any]:
    image, header = decode_image(data, limits)
    num_bytes = image.width * image.height * BYTES_PER_PIXEL
    memory.grow(num_bytes)
    with memory.view(num_bytes) as shared:
        # As they lie in Pillow's memory: one copy, a quarter of the time that packing them takes.
        buffer = np.frombuffer(shared, np.uint8)
        pixels = Image.frombuffer(SHARED_MODE, image.size, buffer, "raw", SHARED_MODE, 0, 1)
        # Not `Image.paste`, which writes to a copy of what was a buffer.
        pixels.im.paste(image.im, (0, 0, *image.size))
        del pixels, buffer
    return {"header": header, "size": image.size}


def _read_video_header(
    data: bytes, limits: MediaLimits, memory: SharedMemory, sampling: list[float]
) -> dict[str, Any]:
    return {"header": read_video_header(data, limits, _sampling(sampling))}


def _decode_video(
    data: bytes, limits: MediaLimits, memory: SharedMemory, sampling: list[float]
) -> dict[str, Any]:
    sizes: list[tuple[int, int]] = []

    def put(place: int, pixels: np.ndarray) -> None:
        sizes.append((pixels.shape[1], pixels.shape[0]))
        view, start = pixels.reshape(-1).data, place * pixels.nbytes
        while view:
            count = os.pwrite(memory.descriptor, view, start)
            view, start = view[count:], start + count

    header, indices = decode_video(data, limits, _sampling(sampling), put=put)
    return {"header": header, "size": sizes[0], "indices": indices}


def _sampling(values: list[float]) -> VideoSampling:
    return VideoSampling(int(values[0]), values[1])


_OPERATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "read_header": _read_header,
    "decode_image": _decode_image,
    "read_video_header": _read_video_header,
    "decode_video": _decode_video,
}
"""Called with the file, the limits, the shared memory, and the options of the request."""


if __name__ == "__main__":
    main(sys.argv[1:])
