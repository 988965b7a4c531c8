"""Ray Data: a dataset of pictures and prompts, mapped over actors that have an engine each.

    dataset.map_batches(
        AnswerRows,
        fn_constructor_kwargs={"model": NAME, "sampling_params": {"max_tokens": 64}},
        batch_size=64, concurrency=2, num_gpus=1,
    )

Ray splits the dataset, feeds the actors, and writes the answers; this is a row's way to an engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmjax.errors import RequestError, RequestTypeError
from mmjax.llm.llm import LLM
from mmjax.params.sampling_params import SamplingParams


class AnswerRows:
    """Adds a column with the answer of each row, and one with its error; one of them is empty.

    Both are texts in every part of a dataset: of a column of None Parquet files have another type.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        prompt_column: str = "prompt",
        image_column: str | None = None,
        answer_column: str = "answer",
        error_column: str = "error",
        sampling_params: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Load an engine, in an actor of Ray's.

        Args:
            model: As `LLM` takes it.
            prompt_column: Texts, each the message of a user.
            image_column: A picture of each row, as `LLM` takes it (an array, a file's bytes, a
                path or a URL); None in a row: it has none.
            answer_column: The name of the answers' column.
            error_column: The name of the errors' column: a row that is refused stops no other.
            sampling_params: Fields of SamplingParams; None: the checkpoint's defaults.
            settings: Those of `LLM`.
        """
        self._prompt_column, self._image_column = prompt_column, image_column
        self._answer_column, self._error_column = answer_column, error_column
        self._params = None if sampling_params is None else SamplingParams(**sampling_params)
        self._llm = LLM(model, **settings)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of rows, by columns, with the two columns more."""
        prompts = batch[self._prompt_column]
        images = [None] * len(prompts)
        if self._image_column is not None:
            images = list(batch[self._image_column])
        rows = self._answer(list(zip(prompts, images, strict=True)))
        answers = np.array([answer for answer, _ in rows], dtype=object)
        errors = np.array([error for _, error in rows], dtype=object)
        return {**batch, self._answer_column: answers, self._error_column: errors}

    def _answer(self, asked: Sequence[tuple[Any, Any]]) -> list[tuple[str, str]]:
        """Return each row's answer or error; one that is refused is found by asking one by one."""
        try:
            chats = [self._write_chat(*row) for row in asked]
            outputs = self._llm.chat(chats, self._params, use_tqdm=False) if chats else []
        except RequestError as error:
            if len(asked) == 1:
                return [("", str(error))]
            return [row for one in asked for row in self._answer([one])]
        return [(output.outputs[0].text, "") for output in outputs]

    def _write_chat(self, prompt: Any, image: Any) -> list[dict[str, Any]]:
        if not isinstance(prompt, str):  # a null would be asked as the word "None"
            column, kind = self._prompt_column, type(prompt).__name__
            raise RequestTypeError(f"`{column}` of this row is of type `{kind}`; expected a text")
        parts: list[dict[str, Any]] = [{"type": "text", "text": str(prompt)}]
        if image is not None:
            parts.insert(0, {"type": "image_pil", "image_pil": image})
        return [{"role": "user", "content": parts}]
