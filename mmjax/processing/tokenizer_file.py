"""Tokenizers as tokenizer.json has them where HF makes others, of tekken.json, or of ranks."""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mmjax.errors import CheckpointError

TOKENIZER_FILE, TEKKEN_FILE = "tokenizer.json", "tekken.json"
_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


class _Parts(msgspec.Struct):
    """What is read of tokenizer.json: all but its vocabulary."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def keep_as_written(tokenizer: Any, path: Path) -> Any:
    """Return a directory's tokenizer, of its tokenizer.json alone where HF's class obeys it not.

    A class such as `GPT2Tokenizer`, which SmolVLM's and Granite-Docling's files name, takes the
    vocabulary of the file, and cuts every text as GPT-2 did.
    """
    file = path / TOKENIZER_FILE
    made = getattr(tokenizer, "backend_tokenizer", None)
    if made is None or "__init__" not in vars(type(tokenizer)) or not file.is_file():
        return tokenizer
    written = _load_parts(file)
    if all(_describe(made, name) == _describe(written, name) for name in _Parts.__struct_fields__):
        return tokenizer
    # On use only: it brings an installed torch along.
    from transformers import PreTrainedTokenizerFast

    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    named = {name: getattr(tokenizer, name) for name in names}
    known = {name: token for name, token in named.items() if token in tokenizer.get_vocab()}
    return PreTrainedTokenizerFast.from_pretrained(path, **known)


def _load_parts(file: Path) -> Any:
    """Return a tokenizer of no words, with the file's other parts."""
    from tokenizers import Tokenizer

    parts = msgspec.to_builtins(msgspec.json.decode(file.read_bytes(), type=_Parts))
    whole = {"version": "1.0", "added_tokens": [], "model": _NO_MODEL, **parts}
    return Tokenizer.from_str(msgspec.json.encode(whole).decode())


def _describe(tokenizer: Any, name: str) -> bytes | None:
    part = getattr(tokenizer, name)
    return None if part is None else part.__getstate__()


def read_tekken(path: Path) -> Any:
    """Return the tokenizer of a directory's tekken.json, Mistral's; it has no chat template.

    `CheckpointError` for a file that is none.
    """
    # On use only: it brings an installed torch along.
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    file = path / TEKKEN_FILE
    try:
        tokenizer = convert_tekken_tokenizer(str(file), chat_template="")
    except (ImportError, KeyError) as error:
        raise CheckpointError(
            f"`{file}` is no vocabulary of Mistral's with its `special_tokens`: {error!r}"
        ) from error
    # What `mistral-common` would give where it is installed has other names of parts.
    tokenizer.chat_template = None
    tokenizer.add_bos_token = True
    return tokenizer


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the ranks of byte strings in a file of `tiktoken`; `CheckpointError` for none."""
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


def build_ranked(
    ranks: Mapping[bytes, int], pattern: str, others: Sequence[tuple[str, bool]]
) -> Any:
    """Return a tokenizer of the `tokenizers` library, of ranks as `tiktoken` has them.

    Args:
        ranks: Of byte strings.
        pattern: What a text is cut into before pairs are merged.
        others: Tokens that follow them, and whether each is special.
    """
    from tokenizers import AddedToken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter("", pattern)
    # HF's own asks the library `tiktoken` to read a file.
    converter.load_tiktoken_bpe = lambda tiktoken_url: dict(ranks)
    tokenizer = converter.converted()
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=special) for token, special in others]
    )
    return tokenizer
