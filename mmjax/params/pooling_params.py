"""How a prompt's hidden states become vectors, under vLLM's names."""

from typing import Literal, get_args

import msgspec

from mmjax.errors import RequestTypeError, RequestValueError

PoolingTask = Literal["embed", "token_embed"]
PoolingType = Literal["LAST", "MEAN"]
MAX_DIMENSIONS = 2**16


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a request for vectors asks for; None: as the model and `--pooler-config` say."""

    task: PoolingTask | None = None
    """embed: one vector for the prompt; token_embed: one for each of its tokens."""
    dimensions: int | None = None
    """The first of a vector that are kept, of a model that was trained so."""
    use_activation: bool | None = None
    """Whether vectors are divided by their length."""
    pooling_type: PoolingType | None = None
    """What becomes one vector: the last token's state, or the mean of all."""

    def __post_init__(self) -> None:
        for name, known in (("task", PoolingTask), ("pooling_type", PoolingType)):
            value = getattr(self, name)
            if value is not None and value not in get_args(known):
                raise RequestValueError(
                    f"`{name}` is {value!r}; expected one of {', '.join(get_args(known))}",
                    param=name,
                )
        if self.dimensions is not None and type(self.dimensions) is not int:
            raise RequestTypeError.about("dimensions", f"is {self.dimensions!r}; give an integer")
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise RequestTypeError.about(
                "use_activation", f"is {self.use_activation!r}; give true or false"
            )
        if self.dimensions is not None and not 1 <= self.dimensions <= MAX_DIMENSIONS:
            raise RequestValueError(
                f"`dimensions` is {self.dimensions}; expected 1 to {MAX_DIMENSIONS}",
                param="dimensions",
            )

    @property
    def reads_all(self) -> bool:
        """Whether the states of all tokens are read, and not the last one's alone."""
        return self.task == "token_embed" or self.pooling_type == "MEAN"
