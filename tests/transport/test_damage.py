"""Whatever happens to frames on their way: a WireError, and nothing else."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.fields import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from mmjax.processing.tensors.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from mmjax.transport.codec import VERSION, Message, WireError, decode, encode, read_remainder
from mmjax.transport.messages import EngineCoreRequest
from tests.transport.test_codec import MESSAGES as OTHERS


def _a_request() -> EngineCoreRequest:
    fields = {
        "pixel_values": (np.ones((2, 3), np.float32), MultiModalBatchedField()),
        "sizes": (
            [np.zeros(2, np.int64), np.zeros((0, 3), np.uint8)],
            MultiModalFlatField(slices=[], dim=0),
        ),
        "kind": (np.array(True), MultiModalSharedField(batch_size=1)),
    }
    item = MultiModalKwargsItem(
        {key: MultiModalFieldElem(data, field) for key, (data, field) in fields.items()}
    )
    mask = np.array([False, True, True])
    features = [
        MultiModalFeatureSpec(
            data=data,
            modality="image",
            identifier="x",
            mm_position=PlaceholderRange(offset, 3, mask),
            mm_hash="x",
        )
        for offset, data in ((1, item), (5, None))
    ]
    return EngineCoreRequest(
        request_id="a",
        prompt_token_ids=list(range(9)),
        mm_features=features,
        sampling_params=SamplingParams(stop=["."], logprobs=2),
        cache_salt="s",
    )


MESSAGES: list[Message] = [_a_request(), *OTHERS]


def _damage(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """Do one thing to the frames that no sender would."""
    place = rng.randrange(len(frames))
    frame = bytearray(frames[place])
    at = rng.randrange(len(frame) + 1)
    match rng.randrange(8):
        case 0 if frame:
            frame[at % len(frame)] = rng.randrange(256)
        case 1 if frame:
            frame[at % len(frame)] ^= 1 << rng.randrange(8)
        case 2:
            del frame[at:]
        case 3:
            frame[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 4:
            frame[at : at + rng.randrange(1, 9)] = b""
        case 5:
            return frames[:place] + frames[place + 1 :]
        case 6:
            return [*frames[:place], rng.randbytes(rng.randrange(9)), *frames[place:]]
        case _:
            return rng.sample(frames, len(frames))
    return [*frames[:place], bytes(frame), *frames[place + 1 :]]


def _decode_or_frame_error(frames: list[bytes]) -> bool:
    """Return whether the frames were a message; any exception but WireError fails the test."""
    try:
        decode(frames)
    except WireError as error:
        assert str(error)  # noqa: PT017 (any other exception fails the test, and must)
        remainder = read_remainder(frames)
        assert remainder is None or all(type(one) is str for one in remainder.request_ids)
        return False
    return True


def _damage_often(num_rounds: int, seed: int) -> int:
    rng = random.Random(seed)
    originals = [[bytes(frame) for frame in encode(message)] for message in MESSAGES]
    num_refused = 0
    for _ in range(num_rounds):
        frames = rng.choice(originals)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            frames = _damage(frames, rng) if frames else frames
        num_refused += not _decode_or_frame_error(frames)
    return num_refused


def test_CVE_2024_9052_damaged_frames_raise_only_frame_errors() -> None:
    assert _damage_often(20_000, seed=0) > 10_000


@pytest.mark.slow
def test_CVE_2024_9052_a_million_damaged_frames() -> None:
    assert _damage_often(1_000_000, seed=1) > 500_000


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_byte_of_every_header(message: Message) -> None:
    header, *rest = (bytes(frame) for frame in encode(message))
    for at in range(len(header)):
        for value in (0x00, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xCF, 0xDD, 0xDF, 0xFF):
            frames = [header[:at] + bytes([value]) + header[at + 1 :], *rest]
            _decode_or_frame_error(frames)
        assert not _decode_or_frame_error([header[:at], *rest])


@given(frames=st.lists(st.binary(max_size=64), max_size=3), has_version=st.booleans())
@settings(max_examples=300)
def test_random_frames_raise_only_frame_errors(frames: list[bytes], has_version: bool) -> None:
    if has_version and frames:
        frames[0] = bytes([VERSION]) + frames[0]
    _decode_or_frame_error(frames)
