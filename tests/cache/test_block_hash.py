"""Block hashes: the keys beside the tokens, and that different prefixes never look alike."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.cache import (
    NONE_HASH,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    iter_block_hashes,
)
from mmjax.cache.kv.block_hash import BlockHashAlgorithm, ExtraKey, make_none_hash
from mmjax.processing import MultiModalFeatureSpec, PlaceholderRange


@dataclass
class Adapter:
    lora_name: str
    lora_path: str | None = None


@dataclass
class Prompt:
    """A request, as far as its blocks' hashes depend on it."""

    prompt_token_ids: Sequence[int] = ()
    mm_features: list[MultiModalFeatureSpec] = field(default_factory=list)
    cache_salt: str | None = None
    lora_name: str | None = None
    lora_request: Adapter | None = None
    positions_key: str = ""
    seen_ahead: tuple[int, str] | None = None


def image(identifier: str, offset: int, length: int, is_embed: np.ndarray | None = None):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset, length, is_embed),
        mm_hash="not the key",
    )


TWO_IMAGES = Prompt(range(20), [image("one", 0, 5), image("two", 10, 5)])


@pytest.mark.parametrize(
    ("start", "end", "first", "keys", "following"),
    [
        (0, 5, 0, (("mm", "one", 0),), 1),
        (3, 8, 0, (("mm", "one", -3),), 1),  # the image began 3 tokens before the block
        (6, 10, 0, None, 1),  # behind the one, before the other
        (0, 15, 0, (("mm", "one", 0), ("mm", "two", 10)), 2),
        (0, 4, 0, (("mm", "one", 0),), 0),  # the next block has more of it
        (8, 12, 0, (("mm", "two", 2),), 1),
        (12, 16, 1, (("mm", "two", -2),), 2),
        (12, 16, -1, (("mm", "two", -2),), 2),  # -1: the last one
        (0, 4, -2, (("mm", "one", 0),), 0),
        (16, 20, -1, None, 2),
        (16, 20, 0, None, 2),
        (16, 20, 2, None, 2),
    ],
)
def test_a_block_names_the_items_that_it_overlaps(
    start: int,
    end: int,
    first: int,
    keys: tuple[ExtraKey, ...] | None,
    following: int,
):
    assert generate_block_hash_extra_keys(TWO_IMAGES, start, end, first) == (keys, following)


def test_a_text_needs_no_keys():
    assert generate_block_hash_extra_keys(Prompt(), 0, 5, 0) == (None, 0)
    assert generate_block_hash_extra_keys(Prompt(), 5, 9, -1) == (None, 0)


def test_the_adapter_comes_first_and_the_salt_last():
    prompt = Prompt(range(8), [image("one", 0, 5)], cache_salt="salt", lora_name="adapter")
    keys, following = generate_block_hash_extra_keys(prompt, 0, 4, 0)
    assert keys == (("lora", "adapter"), ("mm", "one", 0), ("cache_salt", "salt"))
    assert following == 0
    keys, following = generate_block_hash_extra_keys(prompt, 4, 8, following)
    assert keys == (("lora", "adapter"), ("mm", "one", -4))  # later blocks have it from the first
    assert following == 1
    salted = Prompt(range(8), cache_salt="salt")
    assert generate_block_hash_extra_keys(salted, 0, 1, 0) == ((("cache_salt", "salt"),), 0)
    assert generate_block_hash_extra_keys(salted, 1, 2, 0) == (None, 0)
    assert generate_block_hash_extra_keys(Prompt(cache_salt=""), 0, 1, 0) == (None, 0)


def test_positions_that_depend_on_the_whole_prompt_are_in_the_first_block():
    prompt = Prompt(range(8), positions_key="ntk 1")
    assert generate_block_hash_extra_keys(prompt, 0, 4, 0) == ((("positions", "ntk 1"),), 0)
    assert generate_block_hash_extra_keys(prompt, 4, 8, 0) == (None, 0)
    others = [Prompt(range(8), positions_key=key) for key in ("", "ntk 1", "ntk 2")]
    hashes = [tuple(iter_block_hashes(other, 4)) for other in others]
    assert len(set(hashes)) == 3
    assert set(hashes[0]).isdisjoint(hashes[1])


def test_what_is_seen_ahead_is_in_the_block_that_sees_it_first():
    prompt = Prompt(range(8), seen_ahead=(5, "digest"))
    found = [generate_block_hash_extra_keys(prompt, start, start + 2, 0) for start in (2, 4, 6)]
    assert [keys for keys, _ in found] == [None, (("ahead", "digest"),), None]
    others = [Prompt(range(12), seen_ahead=one) for one in (None, (5, "a"), (5, "b"), (0, "a"))]
    hashes = [list(iter_block_hashes(other, 4)) for other in others]
    assert len({tuple(one) for one in hashes}) == 4
    assert hashes[0][0] == hashes[1][0] == hashes[2][0], "which sees nothing ahead"
    assert len({one[2] for one in hashes}) == 4, "through its parents"


def test_an_adapter_may_have_a_path():
    adapter = Prompt(lora_request=Adapter("a", "/adapters/a"))
    assert generate_block_hash_extra_keys(adapter, 4, 8, 0)[0] == (("lora", "a", "/adapters/a"),)
    adapter = Prompt(lora_request=Adapter("a"))
    assert generate_block_hash_extra_keys(adapter, 4, 8, 0)[0] == (("lora", "a"),)


# ---- against a reference -----------------------------------------------------------------------


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Sorted by offset; some empty, some touching, some overlapping, one inside another."""
    features = []
    offset = 0
    for index in range(draw(st.integers(0, 6))):
        offset += draw(st.integers(0, 6))
        length = draw(st.integers(0, 12))
        mask = draw(st.sampled_from([None, np.zeros(length, bool), np.ones(length, bool)]))
        features.append(image(f"i{index % 3}", offset, length, mask))
        offset += draw(st.sampled_from([0, length, length, max(length - 1, 0)]))
    salt = draw(st.sampled_from([None, "salt"]))
    name = draw(st.sampled_from([None, "adapter"]))
    return Prompt(range(draw(st.integers(0, 64))), features, salt, name)


def slow_keys(prompt: Prompt, start: int, end: int) -> tuple[ExtraKey, ...] | None:
    """Look at every token of every feature."""
    keys: list[ExtraKey] = [] if prompt.lora_name is None else [("lora", prompt.lora_name)]
    for feature in prompt.mm_features:
        position = feature.mm_position
        tokens = set(range(position.offset, position.offset + position.length))
        if tokens & set(range(start, end)):
            keys.append(("mm", feature.identifier, position.offset - start))
    if start == 0 and prompt.cache_salt is not None:
        keys.append(("cache_salt", prompt.cache_salt))
    return tuple(keys) or None


@settings(max_examples=300, deadline=None)
@given(prompts(), st.integers(1, 20))
def test_going_on_from_block_to_block_finds_what_beginning_anew_does(prompt: Prompt, size: int):
    mm_idx = 0
    for start in range(0, len(prompt.prompt_token_ids) - size + 1, size):
        found, following = generate_block_hash_extra_keys(prompt, start, start + size, mm_idx)
        assert found == slow_keys(prompt, start, start + size)
        assert mm_idx <= following <= len(prompt.mm_features)
        mm_idx = following
        for feature in prompt.mm_features[:following]:
            position = feature.mm_position
            assert position.offset + position.length <= start + size  # nothing of it is to come


@settings(max_examples=100, deadline=None)
@given(prompts(), st.integers(1, 20), st.integers(0, 9))
def test_hashes_continue_where_they_ended(prompt: Prompt, size: int, known: int):
    whole = list(iter_block_hashes(prompt, size))
    assert len(whole) == len(prompt.prompt_token_ids) // size
    assert len(set(whole)) == len(whole)
    rest = list(iter_block_hashes(prompt, size, previous=whole[:known]))
    assert whole[:known] + rest == whole
    parent, naive = NONE_HASH, []
    for start in range(0, len(whole) * size, size):
        tokens = prompt.prompt_token_ids[start : start + size]
        parent = hash_block_tokens(parent, tokens, slow_keys(prompt, start, start + size))
        naive.append(parent)
    assert naive == whole


# ---- what a hash tells apart -------------------------------------------------------------------


def hashes(prompt: Prompt, size: int = 4) -> list[bytes]:
    return list(iter_block_hashes(prompt, size))


def num_equal(a: list[bytes], b: list[bytes]) -> int:
    """Return how many blocks at the start are equal; none may be after them."""
    equal = [x == y for x, y in zip(a, b, strict=True)]
    count = equal.index(False) if False in equal else len(equal)
    assert not any(equal[count:])
    return count


def test_another_image_changes_every_block_from_its_first_on():
    text = [7] * 20
    cat, dog = Prompt(text, [image("cat", 9, 6)]), Prompt(text, [image("dog", 9, 6)])
    assert num_equal(hashes(cat), hashes(dog)) == 2
    assert num_equal(hashes(cat), hashes(Prompt(text))) == 2
    assert num_equal(hashes(cat), hashes(cat)) == 5


def test_the_place_of_an_image_matters():
    text = [7] * 20
    here, there = Prompt(text, [image("cat", 9, 6)]), Prompt(text, [image("cat", 10, 6)])
    assert num_equal(hashes(here), hashes(there)) == 2


def test_what_the_tokens_do_not_say_keeps_requests_apart():
    text = list(range(16))
    everyone = [
        Prompt(text),
        Prompt([*text[:-1], 99]),
        Prompt(text, cache_salt="a"),
        Prompt(text, cache_salt="b"),
        Prompt(text, lora_name="a"),
        Prompt(text, lora_request=Adapter("a", "b")),
        Prompt(text, [image("a", 0, 4)]),
        Prompt(text, [image("a", 0, 4)], cache_salt="a"),
        Prompt(text, [image("a", 0, 2), image("a", 2, 2)]),
    ]
    first = [hashes(prompt)[0] for prompt in everyone]
    assert first[0] == first[1]
    assert len(set(first)) == len(everyone) - 1
    assert len({hashes(prompt)[-1] for prompt in everyone}) == len(everyone)


def test_only_full_blocks_are_hashed():
    assert hashes(Prompt(range(3))) == []
    assert len(hashes(Prompt(range(11)))) == 2
    assert hashes(Prompt(range(11))) == hashes(Prompt(range(8)))


def test_output_tokens_are_hashed_like_prompt_tokens():
    prompt = Prompt(range(6), [image("a", 2, 3)])
    grown = np.arange(16, dtype=np.int32)
    known = hashes(prompt)
    later = list(iter_block_hashes(prompt, 4, token_ids=grown, previous=known))
    assert known + later == hashes(Prompt(range(16), prompt.mm_features))


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_frames_cannot_run_into_each_other(algorithm: BlockHashAlgorithm):
    parent = bytes(32)
    seen = {
        hash_block_tokens(None, [1, 2], None, algorithm),
        hash_block_tokens(parent, [1, 2], None, algorithm),
        hash_block_tokens(parent, [12], None, algorithm),
        hash_block_tokens(parent, [1, 2], (), algorithm),
        hash_block_tokens(parent, [1, 2], (("lora", "a"),), algorithm),
        hash_block_tokens(parent, [1, 2], (("cache_salt", "a"),), algorithm),
        hash_block_tokens(parent, [1, 2], (("lora", "a"), ("cache_salt", "b")), algorithm),
        hash_block_tokens(parent, [1, 2], (("lora", "acache_salt", "b"),), algorithm),
        hash_block_tokens(parent, [1, 2], (("mm", "a", 1),), algorithm),
        hash_block_tokens(parent, [1, 2], (("mm", "a", -1),), algorithm),
        hash_block_tokens(parent, [1, 2], (("lora", "a", "1"),), algorithm),
    }
    assert len(seen) == 11
    assert {len(one) for one in seen} == {32}
    as_array = hash_block_tokens(None, np.array([1, 2], np.int32), None, algorithm)
    assert as_array == hash_block_tokens(NONE_HASH, (1, 2), None, algorithm)


def test_seeds_and_algorithms_share_no_hash():
    prompt = Prompt(range(8))
    other = make_none_hash("another cache")
    seeded = list(iter_block_hashes(prompt, 4, none_hash=other))
    blake = list(iter_block_hashes(prompt, 4, algorithm="blake3"))
    assert len({*hashes(prompt), *seeded, *blake}) == 6
    assert make_none_hash() == NONE_HASH != other


def test_every_process_says_the_same():
    code = "from mmjax.cache import hash_block_tokens as h; print(h(None, [1, 2], None).hex())"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hash_block_tokens(None, [1, 2]).hex()
