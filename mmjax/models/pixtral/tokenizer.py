"""Mistral 3's tokenizers: of tokenizer.json, or of tekken.json where that is all there is."""

from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.parts import read_json

TEKKEN_FILE = "tekken.json"


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory; `CheckpointError` where it has none.

    The published tokenizer.json of Mistral Small 3.1 cuts texts by another expression than its
    tekken.json, which the model was trained with: transformers puts that in its place if asked.
    """
    # On use only: they bring an installed torch along.
    from transformers import AutoTokenizer
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    file = path / TEKKEN_FILE
    if (path / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, fix_mistral_regex=True)
    if not file.is_file():
        raise CheckpointError(
            f"`{path}` has neither tokenizer.json nor {TEKKEN_FILE}; is the directory complete?"
        )
    try:
        tokenizer = convert_tekken_tokenizer(str(file), chat_template="")
    except (ImportError, KeyError) as error:
        raise CheckpointError(
            f"`{file}` is no vocabulary of Mistral's with its `special_tokens`: {error!r}"
        ) from error
    tokenizer.chat_template = read_json(path / "tokenizer_config.json").get("chat_template")
    tokenizer.add_bos_token = True
    return tokenizer
