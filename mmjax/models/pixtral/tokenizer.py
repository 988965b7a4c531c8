"""Mistral 3's tokenizers: of tokenizer.json, or of tekken.json where that is all there is."""

from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.parts import read_json
from mmjax.processing.tokenizer_file import TEKKEN_FILE, TOKENIZER_FILE, read_tekken


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory; `CheckpointError` where it has none.

    The published tokenizer.json of Mistral Small 3.1 cuts texts by another expression than its
    tekken.json, which the model was trained with: transformers puts that in its place if asked.
    """
    # On use only: it brings an installed torch along.
    from transformers import AutoTokenizer

    if (path / TOKENIZER_FILE).is_file():
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, fix_mistral_regex=True)
    if not (path / TEKKEN_FILE).is_file():
        raise CheckpointError(
            f"`{path}` has neither {TOKENIZER_FILE} nor {TEKKEN_FILE}; is the directory complete?"
        )
    tokenizer = read_tekken(path)
    tokenizer.chat_template = read_json(path / "tokenizer_config.json").get("chat_template")
    return tokenizer
