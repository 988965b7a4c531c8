"""Kimi's tokenizers: of tokenizer.json, or of tiktoken.model, which is what is published."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.parts import read_json
from mmjax.processing.tokenizer_file import TOKENIZER_FILE, build_ranked, read_ranks

TIKTOKEN_FILE = "tiktoken.model"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What a text is cut into before pairs are merged (tokenization_kimi.py, `pat_str`)."""


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory; `CheckpointError` where it has none.

    Transformers reads tiktoken.model where `tiktoken` is installed, and cuts texts by the
    expression of another model, which has no words of Chinese characters alone.
    """
    # On use only: it brings an installed torch along.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (path / TOKENIZER_FILE).is_file():
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    file = path / TIKTOKEN_FILE
    if not file.is_file():
        raise CheckpointError(
            f"`{path}` has neither {TOKENIZER_FILE} nor {TIKTOKEN_FILE}; is the directory complete?"
        )
    settings = read_json(path / "tokenizer_config.json")
    added = settings.get("added_tokens_decoder") or {}
    tokens = tuple(
        (int(number), one["content"], bool(one.get("special", True)))
        for number, one in added.items()
    )
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    given = {name: settings[name] for name in names if settings.get(name)}
    return PreTrainedTokenizerFast(
        tokenizer_object=_build(file, file.stat().st_mtime_ns, tokens),
        clean_up_tokenization_spaces=False,
        chat_template=settings.get("chat_template"),
        **{name: one["content"] if isinstance(one, dict) else one for name, one in given.items()},
    )


@lru_cache(maxsize=2)
def _build(file: Path, modified: int, tokens: tuple[tuple[int, str, bool], ...]) -> Any:
    # `modified` names the file's content.
    ranks = read_ranks(file)
    named = {number: (content, is_special) for number, content, is_special in tokens}
    numbers = range(len(ranks), max(named, default=len(ranks) - 1) + 1)
    others = [named.get(n, (f"<|reserved_token_{n}|>", True)) for n in numbers]
    return build_ranked(ranks, _PATTERN, others)
