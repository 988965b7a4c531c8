"""What prompts have become that were to be vectors, under vLLM's names; and how alike they are."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from jaxtyping import Float

from mmjax.frontend.output.outputs import RequestOutput

OutputT = TypeVar("OutputT")


@dataclass(slots=True, kw_only=True)
class PoolingOutput:
    """A prompt's vectors."""

    data: np.ndarray
    """float32[tokens, D] of `token_embed`, float32[D] of `embed`."""


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True, kw_only=True)
class ScoringOutput:
    """How alike two prompts are."""

    score: float


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput(Generic[OutputT]):
    """A prompt, and what it has become."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    """With placeholders expanded."""
    num_cached_tokens: int = 0
    """Those found in the prefix cache."""
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput, outputs: OutputT) -> "PoolingRequestOutput[OutputT]":
        """Return the output of a request with what it has become."""
        return cls(
            request_id=output.request_id,
            outputs=outputs,
            prompt_token_ids=output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
        )


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
"""Of two prompts; its tokens are those of both."""


def vectors_of(output: RequestOutput) -> Float[np.ndarray, "_vectors _D"]:
    """Return the vectors of a finished request for them."""
    assert output.vectors is not None, f"{output.request_id=} was for text"
    return output.vectors


def score_vectors(query: Float[np.ndarray, "N D"], document: Float[np.ndarray, "M D"]) -> float:
    """Return how alike prompts are: of each vector of the first the best product with the second's.

    The late interaction (MaxSim) of `score_retrieval` of HF's processors, without padding (arXiv
    2407.01449); of one vector each their inner product, and so the cosine of normalised ones.
    """
    return float((query @ document.T).max(axis=1).sum())
