"""Messages survive the wire, and nothing else does."""

import gc
import weakref
from typing import get_args

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

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
from mmjax.processing.tensors.wire_forms import WireArray, pack_item, unpack_item
from mmjax.transport.codec import VERSION, Message, WireError, decode, encode
from mmjax.transport.messages import (
    AbortRequests,
    AdapterLoaded,
    CacheMiss,
    ControlEngine,
    EngineChanged,
    EngineCoreRequest,
    Heartbeat,
    LoadAdapter,
    Ready,
    RequestFailed,
    RequestOutputDelta,
    Shutdown,
    StepOutput,
    TokenLogprobs,
    UnloadAdapter,
)

# beartype checks one random element of a list: hypothesis sees that, and it changes nothing here.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")

DTYPES = ("bool", "int8", "int64", "uint8", "uint32", "float16", "float32", "float64")

arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        elements=hnp.from_dtype(np.dtype(dtype), allow_nan=False),  # NaN never equals itself
    )
)
tensors = st.recursive(arrays, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
fields = st.one_of(
    st.builds(MultiModalBatchedField, keep_on_cpu=st.booleans()),
    st.builds(MultiModalSharedField, batch_size=st.integers(1, 9)),
    st.builds(MultiModalFlatField, slices=st.just([]), dim=st.integers(0, 2)),
)
items = st.dictionaries(st.text(max_size=8), st.builds(MultiModalFieldElem, tensors, fields)).map(
    MultiModalKwargsItem
)


@st.composite
def positions(draw: st.DrawFn) -> PlaceholderRange:
    length = draw(st.integers(0, 12))
    mask = draw(st.none() | hnp.arrays(np.bool_, (length,)))
    return PlaceholderRange(draw(st.integers(0, 99)), length, mask)


features = st.builds(
    MultiModalFeatureSpec,
    data=st.none() | items,
    modality=st.sampled_from(("image", "video")),
    identifier=st.text(max_size=8),
    mm_position=positions(),
    mm_hash=st.none() | st.text(max_size=8),
)
requests = st.builds(
    EngineCoreRequest,
    request_id=st.text(max_size=8),
    prompt_token_ids=st.lists(st.integers(0, 2**31), max_size=8),
    mm_features=st.lists(features, max_size=2),
    sampling_params=st.builds(
        SamplingParams, temperature=st.floats(0, 2), stop=st.lists(st.text(min_size=1), max_size=2)
    ),
    eos_token_ids=st.lists(st.integers(0, 9), max_size=2),
    cache_salt=st.none() | st.text(min_size=1, max_size=4),
    lora_name=st.none() | st.text(max_size=4),
    encoder_prompt_token_ids=st.none() | st.lists(st.integers(0, 99), max_size=3),
)


def over_the_wire(message: Message) -> Message:
    """Decode from copies, as another process would."""
    return decode([bytes(frame) for frame in encode(message)])


@given(request=requests)
@settings(max_examples=50)
def test_requests_come_back_equal(request: EngineCoreRequest) -> None:
    back = over_the_wire(request)
    assert isinstance(back, EngineCoreRequest)
    assert back == request
    for mine, theirs in zip(request.mm_features, back.mm_features, strict=True):
        assert _fields_of(mine) == _fields_of(theirs)


def _fields_of(feature: MultiModalFeatureSpec) -> dict[str, object]:
    """Fields themselves: an element's equality looks only at their classes."""
    return {key: elem.field for key, elem in (feature.tensors or {}).items()}


MESSAGES: list[Message] = [
    LoadAdapter(lora_name="poet", lora_path="/adapters/poet"),
    UnloadAdapter(lora_name="poet"),
    AdapterLoaded(lora_name="poet"),
    AdapterLoaded(
        lora_name="poet", error=RequestFailed(request_id="poet", message="its file is damaged")
    ),
    ControlEngine(number=3, action="load_weights", mode="keep", path="/step", weights_version=4),
    EngineChanged(number=3, weights_version=4, is_sleeping=False, is_paused=True),
    AbortRequests(request_ids=["a", "b"]),
    Shutdown(),
    StepOutput(
        deltas=[
            RequestOutputDelta(
                request_id="a",
                new_token_ids=[1],
                new_logprobs=[
                    TokenLogprobs(token_ids=[1, 2], logprobs=[-0.5, -1.0], sampled_rank=1)
                ],
                finish_reason="stop",
                stop_reason=7,
                num_cached_tokens=3,
            )
        ]
    ),
    RequestFailed(request_id="a", message="no", param="prompt", status=400),
    CacheMiss(request_id="a", mm_hashes=["b", "c"]),
    Ready(num_kv_blocks=3, num_programs=4, startup_seconds={"load": 0.5}),
    Heartbeat(num_running=1, num_waiting=2, kv_cache_usage=0.5, num_compilations=0),
]
"""At least one of every kind."""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_other_messages_come_back_equal(message: Message) -> None:
    assert over_the_wire(message) == message


def test_every_kind_of_message_was_tried() -> None:
    assert {*map(type, MESSAGES), EngineCoreRequest} == set(get_args(Message))


def _request(array: np.ndarray) -> EngineCoreRequest:
    item = MultiModalKwargsItem(
        {"pixel_values": MultiModalFieldElem(array, MultiModalBatchedField())}
    )
    feature = MultiModalFeatureSpec(
        data=item, modality="image", identifier="x", mm_position=PlaceholderRange(0, 2)
    )
    return EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[0, 0],
        mm_features=[feature],
        sampling_params=SamplingParams(),
    )


def _array_of(message: Message) -> np.ndarray:
    assert isinstance(message, EngineCoreRequest)
    data = message.mm_features[0].tensors
    assert data is not None
    return data["pixel_values"].data


def test_arrays_are_neither_copied_out_nor_in() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    frames = encode(_request(array))
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.uint8), array)
    back = _array_of(decode(frames))
    assert np.shares_memory(back, array)
    with pytest.raises(ValueError, match="read-only"):
        back[0, 0] = 1


def test_an_array_that_stands_twice_is_sent_once() -> None:
    array = np.arange(6, dtype=np.int32)
    request = _request(array)
    twice = msgspec.structs.replace(request, mm_features=request.mm_features * 2)
    frames = encode(twice)
    assert len(frames) == 2
    back = decode(frames)
    assert back == twice


def test_strided_and_bfloat16_arrays() -> None:
    strided = np.arange(24).reshape(4, 6)[::2, ::3]
    np.testing.assert_array_equal(_array_of(over_the_wire(_request(strided))), strided)
    half = np.arange(4).astype(ml_dtypes.bfloat16)
    back = _array_of(over_the_wire(_request(half)))
    assert back.dtype == half.dtype
    np.testing.assert_array_equal(back, half)


@pytest.mark.parametrize(
    "dtype", [np.dtype("O"), np.dtype("U3"), np.dtype("complex64"), np.dtype(">i4")]
)
def test_other_dtypes_are_not_sent(dtype: np.dtype) -> None:
    with pytest.raises(WireError, match="no wire form"):
        encode(_request(np.zeros(2, dtype)))


# ---- what is not a message -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "empty"),
        ([b""], "empty"),
        ([b"\x00abc"], "version 0"),
        ([bytes([VERSION])], "cannot be decoded"),
        ([bytes([VERSION]) + b"\xc1"], "cannot be decoded"),
        ([bytes([VERSION]) + msgspec.msgpack.encode({"type": "Unknown"})], "cannot be decoded"),
        ([bytes([VERSION]) + b"\x91" * 5000], "cannot be decoded"),
        # The start of a pickle: refused like any other first byte.
        ([b"\x80\x04\x95"], "version 128"),
    ],
)
def test_malformed_frames_are_named(frames: list[bytes], match: str) -> None:
    with pytest.raises(WireError, match=match):
        decode(frames)


def _header_of(message: Message) -> dict:
    return msgspec.msgpack.decode(bytes(encode(message)[0])[1:])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "object"}, "unknown dtype"),
        ({"dtype": "float64"}, "frame of 48 bytes"),
        ({"shape": [10**9, 10**9]}, "frame of 48 bytes"),
        ({"shape": [-3, -4]}, "shape"),
        ({"place": 0}, "frame 0 of 2"),
        ({"place": -1}, "frame -1 of 2"),
        ({"place": 2}, "frame 2 of 2"),
    ],
)
def test_CVE_2026_105754_forged_arrays_are_refused(change: dict, match: str) -> None:
    request = _request(np.zeros((3, 4), np.float32))
    header = _header_of(request)
    header["mm_features"][0]["data"]["pixel_values"]["data"].update(change)
    frames = [bytes([VERSION]) + msgspec.msgpack.encode(header), bytes(encode(request)[1])]
    with pytest.raises(WireError, match=match):
        decode(frames)


def test_a_mask_must_fit_its_placeholder() -> None:
    request = _request(np.zeros(2, np.float32))
    header = _header_of(request)
    header["mm_features"][0]["mm_position"]["is_embed"] = {
        "type": "array",
        "dtype": "bool",
        "shape": [3],
        "place": 2,
    }
    frames = [
        bytes([VERSION]) + msgspec.msgpack.encode(header),
        bytes(encode(request)[1]),
        b"\x01\x00\x01",
    ]
    with pytest.raises(WireError, match="is_embed"):
        decode(frames)


def test_a_bool_is_0_or_1() -> None:
    frames = encode(_request(np.array([True, False, True])))
    with pytest.raises(WireError, match="bools"):
        decode([frames[0], b"\x01\x00\x02"])


@pytest.mark.parametrize(
    "change",
    [{"cache_salt": "\ud800"}, {"prompt_token_ids": [2**70]}, {"eos_token_ids": [object()]}],
    ids=["surrogate", "large", "object"],
)
def test_what_cannot_be_written_is_a_frame_error(change: dict) -> None:
    request = msgspec.structs.replace(_request(np.zeros(2)), **change)
    with pytest.raises(WireError, match="cannot be encoded"):
        encode(request)


def test_bad_sampling_values_are_a_frame_error() -> None:
    header = _header_of(_request(np.zeros(2, np.float32)))
    header["sampling_params"]["temperature"] = -1.0
    with pytest.raises(WireError, match="temperature"):
        decode([bytes([VERSION]) + msgspec.msgpack.encode(header), b"\x00" * 8])


class Memory:
    """What an item is read from."""

    def read(self, array: WireArray) -> np.ndarray:
        return np.ones(array.shape, array.dtype)


def test_no_cycle_keeps_the_memory_that_an_item_was_read_from() -> None:
    """Else shared memory stays mapped, and its file open, until the garbage collector comes by."""
    field = MultiModalBatchedField()
    item = MultiModalKwargsItem({"pixels": MultiModalFieldElem([np.ones(2)], field)})
    wire = pack_item(item, lambda array: WireArray(str(array.dtype), list(array.shape), 0))
    memory = Memory()
    left = weakref.ref(memory)
    gc.disable()
    try:
        unpack_item(wire, memory.read)
        del memory
        assert left() is None
    finally:
        gc.enable()
