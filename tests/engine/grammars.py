"""What tests of grammars share: a tokenizer of single letters, structures, constrained requests."""

from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmjax.engine.core import EngineCore
from mmjax.engine.scheduling.logit_rules import Grammars
from mmjax.params.sampling_params import StructuredOutputsParams
from mmjax.params.structured_outputs import make_grammar
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import EOS, VOCAB_SIZE, message, text

LETTERS = [chr(code) for code in range(34, 34 + VOCAB_SIZE - 4)]
"""Token n + 2 is the n-th of them, from " to }; 0 and 1 are special."""


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "<eos>": EOS, **{letter: n + 2 for n, letter in enumerate(LETTERS)}}
    byte_level = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level, eos_token="<eos>", pad_token="<pad>"
    )


def text_of(token_ids: list[int]) -> str:
    return "".join(LETTERS[token_id - 2] for token_id in token_ids if token_id != EOS)


def prompt(seed: int, length: int = 12) -> list[int]:
    return text(seed, length)


def constrained(
    name: str, structure: StructuredOutputsParams, *, seed: int = 1, **sampling: Any
) -> EngineCoreRequest:
    """Return a request as P0 sends it."""
    request = message(
        name,
        [prompt(seed)],
        eos=[EOS],
        **{"max_tokens": 40, "structured_outputs": structure, "seed": seed, **sampling},
    )
    return msgspec.structs.replace(request, grammar=make_grammar(structure))


def choice(*texts: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=texts)


def regex(pattern: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=pattern)


def install_tokenizer(core: EngineCore) -> EngineCore:
    core._grammars = Grammars(tokenizer, core._requests.limits.vocab_size)
    return core
