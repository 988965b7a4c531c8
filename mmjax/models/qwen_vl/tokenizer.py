"""Qwen's tokenizer from `qwen.tiktoken`: ranks of byte strings, as the `tokenizers` library's."""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError

IMG_START, IMG_END, IMG_PAD = "<img>", "</img>", "<imgpad>"
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = (
    *(END_OF_TEXT, IM_START, IM_END),
    *(f"<|extra_{number}|>" for number in range(205)),
    *("<ref>", "</ref>", "<box>", "</box>", "<quad>", "</quad>", IMG_START, IMG_END, IMG_PAD),
)
"""In the order of their ids, which begin behind the last rank."""
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""What a text is cut into before pairs are merged (tokenization_qwen.py, PAT_STR)."""


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory: of tokenizer.json, or qwen.tiktoken.

    `CheckpointError` where it has neither, or a line that is no rank.
    """
    # On use only: it brings an installed torch along.
    from transformers import PreTrainedTokenizerFast

    fast: dict[str, Any] = {"tokenizer_file": str(path / "tokenizer.json")}
    if not (path / "tokenizer.json").is_file():
        file = path / "qwen.tiktoken"
        if not file.is_file():
            raise CheckpointError(f"`{path}` has neither tokenizer.json nor qwen.tiktoken")
        fast = {"tokenizer_object": _build(file, file.stat().st_mtime_ns)}
    return PreTrainedTokenizerFast(
        **fast, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


@lru_cache(maxsize=2)
def _build(file: Path, modified: int) -> Any:
    # `modified` names the file's content.
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    ranks = _read_ranks(file)
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(spell(left), spell(right)) for left, right in _find_merges(ranks)]
    vocab = {spell(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL_TOKENS])
    return tokenizer


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise CheckpointError(
                f"line {number} of `{file.name}` is not a token in base64 and its rank"
            ) from error
    return ranks


def _find_merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield, in the order of ranks, the two tokens that each longer token is merged of."""
    for token, rank in sorted(ranks.items(), key=lambda entry: entry[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(parts[i] + parts[i + 1], rank) for i in range(len(parts) - 1)]
            lowest = min(pairs)
            if lowest >= rank:
                break
            place = pairs.index(lowest)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _byte_letters() -> list[str]:
    """Return the printable character that stands for each byte in a vocabulary (GPT-2's)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]
