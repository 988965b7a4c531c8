"""Streamed text is the whole text, cut where nothing has to be taken back."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mmjax.frontend.output.detokenizer import (
    IncrementalDetokenizer,
    OutputText,
    StopChecker,
    TokenDecoder,
)
from tests.kit import EOS, TURN_END, gemma_tokenizer

TOKENIZER = gemma_tokenizer()
GOLDEN = Path(__file__).parents[1] / "golden"
TEXTS = st.lists(
    st.sampled_from(["a", " ", "red ", "é", "日", "🎈", "\n", "\n\n", "x=1;", "\u0000", "Zürich"])
    | st.characters(codec="utf-8"),
    max_size=24,
).map("".join)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def pieces(ids: list[int], tokenizer: Any = TOKENIZER, **kwargs: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(TokenDecoder(tokenizer), **kwargs)
    return [*map(detokenizer.append, ids), detokenizer.flush()]


@given(text=TEXTS)
@settings(max_examples=100)
def test_the_pieces_are_the_text(text: str) -> None:
    ids = encode(text)
    shown = pieces(ids)
    assert "".join(shown) == TOKENIZER.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in shown)


@given(ids=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=24))
@settings(max_examples=100)
def test_any_ids(ids: list[int]) -> None:
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    # NOTE: the whole shows a run of bytes as valid or as replaced, all of it; the stream has
    # shown the valid beginning of a run by the time that its bad byte comes.
    assert "".join(pieces(ids)) == whole or "\ufffd" in whole


def test_a_character_waits_for_its_last_byte() -> None:
    ids = encode("🎈")
    assert len(ids) == 4
    assert pieces(ids) == ["", "", "", "🎈", ""]


CUT_OFF: dict[str, Any] = {
    "byte fallback": TOKENIZER,
    "byte level": AutoTokenizer.from_pretrained(GOLDEN / "qwen2_vl"),
    "a space before": AutoTokenizer.from_pretrained(GOLDEN / "llava"),
}


@pytest.mark.parametrize("name", CUT_OFF)
@pytest.mark.parametrize(
    "text", ["🎈", "aé 日🎈", "é\ufffd", "\ufffd日", " Zürich", "\ufffd\ufffd"]
)
def test_a_text_ends_before_a_character_that_is_cut_off(name: str, text: str) -> None:
    """Each text ends with its last whole character; one that is U+FFFD itself stays."""
    tokenizer = CUT_OFF[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    context = tokenizer.encode("a", add_special_tokens=False)
    for end in range(len(ids) + 1):
        whole = b"".join(bytes_of(tokenizer, number) for number in ids[:end])
        shown = pieces(ids[:end], tokenizer, context=context)
        assert "".join(shown) == whole.decode(errors="ignore")


def bytes_of(tokenizer: Any, number: int) -> bytes:
    name = tokenizer.convert_ids_to_tokens(number)
    if "ByteLevel" in type(tokenizer.backend_tokenizer.decoder).__name__:
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        return bytes(b if (b := ord(c)) < 256 else hidden[b - 256] for c in name)
    return bytes([int(name[3:5], 16)]) if name[:3] == "<0x" else name.replace("▁", " ").encode()


def test_bytes_that_no_character_begins_with_are_shown_at_the_end() -> None:
    last = encode("🎈")[-1:]
    assert pieces([*encode("a"), *last]) == ["a", "", "\ufffd"]


@pytest.mark.parametrize("name", CUT_OFF)
def test_an_answer_goes_on_with_the_character_that_the_prompt_broke_off(name: str) -> None:
    tokenizer = CUT_OFF[name]
    ids = tokenizer.encode("a🎈a", add_special_tokens=False)
    begin = next(n for n, number in enumerate(ids) if bytes_of(tokenizer, number)[-1] >= 0x80) + 1
    assert "".join(pieces(ids[begin:], tokenizer, context=ids[:begin])) == "🎈a"


def test_bytes_without_end_do_not_wait_for_ever() -> None:
    lone = encode("🎈")[:1]
    shown = pieces(lone * 100)
    assert any(shown[:64])
    assert "".join(shown) == "\ufffd" * 99, "the last may begin a character"


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*encode("red"), TOKENIZER.convert_tokens_to_ids(TURN_END)]
    assert "".join(pieces(ids)) == "red"
    assert "".join(pieces(ids, skip_special_tokens=False)) == f"red{TURN_END}"


def test_many_skipped_tokens_cost_nothing() -> None:
    end = TOKENIZER.convert_tokens_to_ids(EOS)
    assert "".join(pieces([*encode("a"), *([end] * 20_000), *encode("b")])) == "ab"


class StrippingTokenizer:
    """Decodes like sentencepiece with a dummy prefix: the first space of a text goes."""

    all_special_ids = ()

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(" word" if i else "s" for i in ids).removeprefix(" ")


def test_a_leading_space_depends_on_what_stands_before() -> None:
    alone = IncrementalDetokenizer(TokenDecoder(StrippingTokenizer()))
    assert [*map(alone.append, (1, 1, 0))] == ["word", " word", "s"]
    after_prompt = IncrementalDetokenizer(TokenDecoder(StrippingTokenizer()), context=[1, 1])
    assert [*map(after_prompt.append, (1, 0))] == [" word", "s"]


class Shouting(type(TOKENIZER)):  # pyrefly: ignore[invalid-inheritance]
    def _decode(self, *args: Any, **kwargs: Any) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("name", CUT_OFF)
@pytest.mark.parametrize("skips", [False, True])
def test_texts_are_those_of_hfs_decode(name: str, skips: bool) -> None:
    tokenizer = CUT_OFF[name]
    decoder = TokenDecoder(tokenizer)
    texts = ["a red circle , isn't it ?", " aé 日🎈", "\n\n x"]
    every = [*(tokenizer.encode(text) for text in texts), [*tokenizer.all_special_ids], []]
    for ids in every:
        for end in range(len(ids) + 1):
            whole = tokenizer.decode(
                ids[:end], skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            assert decoder.decode(ids[:end], skip_special_tokens=skips) == whole


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself() -> None:
    tokenizer = Shouting(tokenizer_object=TOKENIZER.backend_tokenizer)
    decoder = TokenDecoder(tokenizer)
    assert decoder.decode(encode("red"), skip_special_tokens=True) == "RED"


# ---- stop strings --------------------------------------------------------------------------------


def run(chunks: list[str], stop: list[str], **kwargs: Any) -> tuple[list[str], str | None]:
    checker = StopChecker(stop, **kwargs)
    shown: list[str] = []
    for chunk in chunks:
        text, found = checker.push(chunk)
        shown.append(text)
        if found is not None:
            return shown, found
    return [*shown, checker.release()], None


@pytest.mark.parametrize(
    ("chunks", "stop", "expected"),
    [
        (["ab", "cd"], [], (["ab", "cd", ""], None)),
        (["ab", "cd"], ["x"], (["ab", "cd", ""], None)),
        (["aE", "ND", "x"], ["END"], (["a", ""], "END")),
        (["aE", "Nx"], ["END"], (["a", "ENx", ""], None)),
        (["aE", "N"], ["END"], (["a", "", "EN"], None)),
        (["aEEND"], ["END"], (["aE"], "END")),
        (["abab", "c"], ["ababd", "babc"], (["", "a"], "babc")),
        # The stop string that ends first wins, wherever the text was cut.
        (["xabcd"], ["abcd", "bc"], (["xa"], "bc")),
        (["xab", "cd"], ["abcd", "bc"], (["x", "a"], "bc")),
    ],
)
def test_nothing_of_a_stop_string_is_shown(
    chunks: list[str], stop: list[str], expected: tuple[list[str], str | None]
) -> None:
    assert run(chunks, stop) == expected


def test_the_stop_string_is_shown_when_asked_for() -> None:
    assert run(["aE", "NDx"], ["END"], include_in_output=True) == (["a", "END"], "END")


@given(
    text=st.text("ab", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_chunks_do_not_change_what_is_shown(text: str, cuts: list[int], stop: list[str]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    chunks = [text[a:b] for a, b in pairwise(edges)]
    shown, found = run(chunks, stop)
    whole, found_whole = run([text], stop)
    assert ("".join(shown), found) == ("".join(whole), found_whole)
    ends = [text.find(item) + len(item) for item in stop if item in text]
    assert (found is not None) == bool(ends)
    if found is not None:
        assert "".join(shown) == text[: min(ends) - len(found)]


@given(
    text=st.text("ab", max_size=20),
    num_early=st.integers(0, 20),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_must_end_where_one_may(text: str, num_early: int, stop: list[str]) -> None:
    early, late = text[:num_early], text[num_early:]
    checker = StopChecker(stop)
    first, _ = checker.push(early, may_stop=False)
    second, found = checker.push(late)
    shown = first + second + ("" if found else checker.release())
    ends = {end: s for s in stop for end in range(len(s), len(text) + 1) if text[:end].endswith(s)}
    late_ends = [end for end in ends if end > len(early)]
    assert (found is not None) == bool(late_ends)
    if found is None:
        assert shown == text
    else:
        assert text[: min(late_ends)].endswith(found)
        assert shown == text[: min(late_ends) - len(found)]


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    checker = StopChecker(["a" * 200_000 + "b"])
    for _ in range(50):
        assert checker.push("a" * 4_000) == ("", None)
    assert checker.push("a") == ("a", None)
    assert checker.push("b")[1] is not None


def test_output_text_stops_inside_a_token() -> None:
    text = OutputText(IncrementalDetokenizer(TokenDecoder(TOKENIZER)), StopChecker(["red"]))
    assert [*map(text.append, encode("a red "))] == ["a ", ""]
    assert text.stop_string == "red"
    assert text.text == "a "


def test_output_text_releases_at_the_end() -> None:
    text = OutputText(IncrementalDetokenizer(TokenDecoder(TOKENIZER)), StopChecker(["red!"]))
    assert "".join(map(text.append, encode("a red"))) == "a "
    assert text.finish() == "red"
    assert text.text == "a red"
