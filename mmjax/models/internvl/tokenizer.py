"""Tokenizers of InternVL's original layout, whose code is not run: of SentencePiece's files.

Checkpoints before InternLM2, InternLM3, Phi-3 and Yi have `tokenizer.model` alone, which
transformers reads where the library `sentencepiece` is installed, or by remote code.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmjax.errors import CheckpointError
from mmjax.processing.image_processors.parts import read_json

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_SETTINGS = (
    *("add_eos_token", "additional_special_tokens", "bos_token", "chat_template"),
    *("clean_up_tokenization_spaces", "eos_token", "model_max_length", "pad_token", "unk_token"),
)
"""Keys of tokenizer_config.json that hold of any tokenizer."""
_BPE, _NORMAL, _USER_DEFINED = 2, 1, 4
"""Of SentencePiece's kinds of models, and of pieces."""


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a checkpoint's directory: HF's, or one of tokenizer.model.

    `CheckpointError` where it has no vocabulary, or none that is read.
    """
    # On use only: they bring an installed torch along.
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

    found = next((name for name in _FILES if (path / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"`{path}` has no tokenizer.json; is the directory complete?")
    if found != _FILES[-1]:
        # Else transformers would read config.json, whose type it does not know.
        config = PreTrainedConfig()
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, config=config)
    settings = read_json(path / "tokenizer_config.json")
    added = _read_added_tokens(path, settings)
    kept = {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
    kept = {
        name: value["content"] if isinstance(value, dict) else value for name, value in kept.items()
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_build(path / found, added, is_legacy=settings.get("legacy") is not False),
        add_bos_token=settings.get("add_bos_token", True),
        **kept,
    )


def _read_added_tokens(path: Path, settings: Mapping[str, Any]) -> dict[int, Any]:
    """Return the tokens that a checkpoint adds to the file's, or that have a place there."""
    from tokenizers import AddedToken

    names = read_json(path / "added_tokens.json")
    added = {
        number: AddedToken(name, special=True, normalized=False) for name, number in names.items()
    }
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        options = {key: value for key, value in token.items() if key != "__type"}
        added[int(number)] = AddedToken(**options)
    return dict(sorted(added.items()))


def _build(file: Path, added: Mapping[int, Any], *, is_legacy: bool) -> Any:
    """Return the tokenizer of a SentencePiece model, and of the tokens beside it.

    `is_legacy`: whether every text between such tokens begins as a whole text does, with a space.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers.convert_slow_tokenizer import generate_merges

    proto = _read_proto(file)
    names = [
        added[number].content if number in added else piece.piece
        for number, piece in enumerate(proto.pieces)
    ]
    vocab = {name: number for number, name in enumerate(names)}
    pairs = list(zip(names, proto.pieces, strict=True))
    whole = {name for name, piece in pairs if piece.type != _NORMAL} | {
        token.content for token in added.values()
    }
    merges = generate_merges(vocab, [(name, piece.score) for name, piece in pairs], whole)
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=proto.trainer_spec.unk_piece,
            fuse_unk=True,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    _add_spaces(tokenizer, proto.normalizer_spec, is_legacy=is_legacy)
    stripped = [decoders.Strip(" ", left=1)] * proto.normalizer_spec.add_dummy_prefix
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    tokenizer.add_tokens(
        [
            AddedToken(name, normalized=False)
            for number, (name, piece) in enumerate(pairs)
            if piece.type == _USER_DEFINED and number not in added
        ]
    )
    for number, token in added.items():
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise CheckpointError(
                f"`{token.content}` is token {number} of `{file.parent}`, and its place in "
                f"`{file.name}` is {tokenizer.token_to_id(token.content)}: one is missing before it"
            )
    return tokenizer


def _add_spaces(tokenizer: Any, spec: Any, *, is_legacy: bool) -> None:
    """Have a tokenizer write spaces as the file's pieces have them."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        around, between = Regex(r"\A +| +\z"), Regex(" {2,}")
        steps += [normalizers.Replace(around, ""), normalizers.Replace(between, " ")]
    if spec.add_dummy_prefix and not is_legacy:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first", split=False
        )
    else:
        steps += [normalizers.Prepend(_SPACE)] * spec.add_dummy_prefix
        steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)


def _read_proto(file: Path) -> Any:
    """Return what the file holds; `CheckpointError` for what is no BPE model of SentencePiece."""
    from google.protobuf.message import DecodeError
    from transformers.convert_slow_tokenizer import import_protobuf

    messages: Any = import_protobuf()
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except DecodeError as error:
        raise CheckpointError(f"`{file}` is no model of SentencePiece: {error}") from error
    if proto.trainer_spec.model_type != _BPE:
        raise CheckpointError(
            f"`model_type` of `{file}` is {proto.trainer_spec.model_type}; mmjax reads {_BPE}, "
            "SentencePiece's models of pairs (BPE)"
        )
    return proto
