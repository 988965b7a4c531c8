"""What a worker process does with media: it reads headers, and decodes images, videos and clips."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from mmjax.decoders.audio_file import (
    decode_audio,
    decode_sound,
    read_audio_header,
    read_sound_header,
)
from mmjax.decoders.image_file import BYTES_PER_PIXEL, decode_image, read_image_header
from mmjax.decoders.limits import MediaLimits
from mmjax.decoders.shared_memory import SharedMemory
from mmjax.decoders.video_file import VideoSampling, decode_video, read_video_header

SHARED_MODE = "RGBX"
"""How an image lies in the shared memory."""


def _read_image_header(data: bytes, memory: SharedMemory, **limits: int) -> dict[str, Any]:
    return {"header": read_image_header(data, MediaLimits(**limits))}


def _decode_image(data: bytes, memory: SharedMemory, **limits: int) -> dict[str, Any]:
    image, header = decode_image(data, MediaLimits(**limits))
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
    data: bytes, memory: SharedMemory, sampling: tuple[int, float], **limits: int
) -> dict[str, Any]:
    return {"header": read_video_header(data, MediaLimits(**limits), VideoSampling(*sampling))}


def _decode_video(
    data: bytes, memory: SharedMemory, sampling: tuple[int, float], **limits: int
) -> dict[str, Any]:
    sizes: list[tuple[int, int]] = []

    def put(place: int, pixels: np.ndarray) -> None:
        sizes.append((pixels.shape[1], pixels.shape[0]))
        memory.write(pixels.reshape(-1).data, place * pixels.nbytes)

    wanted = VideoSampling(*sampling)
    header, indices = decode_video(data, MediaLimits(**limits), wanted, put=put)
    return {"header": header, "size": sizes[0], "indices": indices}


def _read_audio_header(data: bytes, memory: SharedMemory, **limits: int) -> dict[str, Any]:
    return {"header": read_audio_header(data, MediaLimits(**limits))}


def _decode_audio(data: bytes, memory: SharedMemory, rate: int, **limits: int) -> dict[str, Any]:
    return _share(decode_audio(data, MediaLimits(**limits), rate), memory)


def _read_video_sound(data: bytes, memory: SharedMemory, **limits: int) -> dict[str, Any]:
    return {"header": read_sound_header(data, MediaLimits(**limits))}


def _decode_video_sound(
    data: bytes, memory: SharedMemory, rate: int, **limits: int
) -> dict[str, Any]:
    return _share(decode_sound(data, MediaLimits(**limits), rate), memory)


def _share(samples: np.ndarray, memory: SharedMemory) -> dict[str, Any]:
    memory.write(np.ascontiguousarray(samples, np.float32).view(np.uint8).data)
    return {"num_samples": len(samples)}


OPERATIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "read_image_header": _read_image_header,
    "decode_image": _decode_image,
    "read_video_header": _read_video_header,
    "decode_video": _decode_video,
    "read_audio_header": _read_audio_header,
    "decode_audio": _decode_audio,
    "read_video_sound": _read_video_sound,
    "decode_video_sound": _decode_video_sound,
}
"""Called with the file, the shared memory, the job's options, and the limits."""
