"""A rollout engine for Tunix's trainers, which answers prompts with pictures as well.

    from functools import partial
    ClusterConfig(rollout_engine=partial(MMJaxRollout, model="google/gemma-3-4b-it"), ...)

Needs `mmjax[tunix]`. The trainer has its own model; its weights are written into the engine after
each of its steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from mmjax.errors import ConfigError
from mmjax.frontend.output.outputs import CompletionOutput, RequestOutput
from mmjax.frontend.requests.prompts import PromptType
from mmjax.integrations.tunix_weights import map_tunix_params
from mmjax.llm.llm import LLM
from mmjax.params.sampling_params import SamplingParams

_PADS_TOKENS = RolloutOutput.__annotations__["tokens"] is jax.Array
"""Whether answers are padded to one array, as until Tunix 0.1.5; a list of arrays from then on."""


class MMJaxRollout(BaseRollout):
    """Tunix's interface of a rollout engine, over an `LLM` in the trainer's process."""

    def __init__(
        self,
        *,
        model: str,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: jax.sharding.Mesh | None = None,
        rollout_config: RolloutConfig | Mapping[Any, RolloutConfig] | None = None,
        map_params: Callable[[Any], Mapping[str, Any]] = map_tunix_params,
        **settings: Any,
    ) -> None:
        """Load `model` onto the mesh's devices, with the actor's weights.

        Args:
            model: A directory or hub id, as of `LLM`: also the tower, where the actor has none.
            rollout_actor: The trainer's model; None: the checkpoint's weights until the first
                `update_params`. It may be a model's language model alone.
            tokenizer: Tunix's own; prompts are read by the checkpoint's.
            mesh: Where the engine lies; None: on the first device.
            rollout_config: Its `data_type` is the engine's `dtype`.
            map_params: From `nnx.state` of the trainer's model to weights by names that
                `LLM.update_weights` takes.
            settings: The others of `LLM`.
        """
        first = rollout_config
        if isinstance(rollout_config, Mapping):
            first = next(iter(rollout_config.values()))
        data_type = getattr(first, "data_type", None)
        if data_type is not None:
            settings.setdefault("dtype", jnp.dtype(data_type).name)
        settings.setdefault("use_tqdm_on_load", False)
        self.mesh = mesh
        self.llm = LLM(model, mesh=mesh, **settings)
        self._tokenizer = self.llm.get_tokenizer()
        self._map_params = map_params
        if rollout_actor is not None:
            self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self,
        prompts: Sequence[PromptType],
        rollout_config: RolloutConfig,
        **kwargs: Any,
    ) -> RolloutOutput:
        """Answer prompts: texts, or dicts as `{"prompt": ..., "multi_modal_data": {"image": ...}}`.

        A prompt's tokens are those behind expansion: an image is as many as it has embeddings.
        """
        params = [self._sampling(rollout_config, row) for row in range(len(prompts))]
        outputs = self.llm.generate(
            [self._read_prompt(prompt) for prompt in prompts], params, use_tqdm=False
        )
        answers = [output.outputs[0] for output in outputs]
        return RolloutOutput(
            text=[answer.text for answer in answers],
            logits=None,
            tokens=self._list_tokens(answers, rollout_config.max_tokens_to_generate),
            left_padded_prompt_tokens=self._pad_prompts(outputs, rollout_config.max_prompt_length),
            logprobs=[_list_logprobs(answer) for answer in answers],
        )

    def get_per_token_logps(
        self,
        prompt_tokens: jax.Array,
        completion_tokens: jax.Array,
        completion_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Return float32[B, T]: log-probabilities of answers' tokens, by the engine's weights.

        Those of padding are 0.

        Args:
            prompt_tokens: int[B, S], padded on the left; of prompts without media.
            completion_tokens: int[B, T], padded on the right.
            completion_mask: bool[B, T]; None: all but padding behind the last other token.
        """
        prompts, answers = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        is_real = answers != self.pad_id() if completion_mask is None else completion_mask
        lengths = [_length(row) for row in np.asarray(is_real, bool)]
        starts = [int(np.argmax(row != self.pad_id())) for row in prompts]
        rows = zip(prompts, starts, answers, lengths, strict=True)
        texts = [[*row[start:].tolist(), *ids[:end].tolist()] for row, start, ids, end in rows]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        found = np.zeros(answers.shape, np.float32)
        outputs = self.llm.generate(texts, params, use_tqdm=False)
        for row, (output, length) in enumerate(zip(outputs, lengths, strict=True)):
            positions = (output.prompt_logprobs or [])[len(texts[row]) - length :]
            for place, position in enumerate(positions):
                assert position is not None, "an answer has no embeddings of images"
                found[row, place] = next(iter(position.values())).logprob
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Write weights of the trainer's model into the engine, whole or some of them."""
        if nnx.LoRAParam in (filter_types or ()):
            raise ConfigError(
                "the trainer's model has LoRA's parameters, which Tunix gives alone, without what "
                "they are multiplied with; give `map_params` that merges them, or train all weights"
            )
        self.llm.update_weights(self._map_params(params))

    def pad_id(self) -> int:
        """Return the token that prompts and answers are padded with."""
        pad = self._tokenizer.pad_token_id
        return int(self.eos_id() if pad is None else pad)

    def eos_id(self) -> int:
        """Return the tokenizer's end token."""
        return int(self._tokenizer.eos_token_id)

    def model(self) -> None:
        """Return None: the engine has weights of its own, which Tunix then keeps in step."""

    # ---- parts ----------------------------------------------------------------------------------

    def _sampling(self, config: RolloutConfig, row: int) -> SamplingParams:
        seed = None if config.seed is None else int(np.asarray(config.seed).ravel()[-1]) + row
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else config.top_k,
            # Rows of one prompt are other answers.
            seed=seed,
            stop_token_ids=list(config.eos_tokens or ()),
            logprobs=0,
        )

    def _read_prompt(self, prompt: PromptType) -> PromptType:
        """Return a prompt as `LLM` takes it: numpy's texts are Python's.

        What a chat template begins with is not added again.
        """
        plain: Any = str(prompt) if isinstance(prompt, str) else prompt
        fields = {"prompt": plain} if isinstance(plain, str) else plain
        bos = self._tokenizer.bos_token
        text = fields.get("prompt") if isinstance(fields, Mapping) else None
        if not bos or not isinstance(text, str) or not text.startswith(bos):
            return plain
        return cast(PromptType, {**fields, "add_special_tokens": False})

    def _pad_prompts(self, outputs: Sequence[RequestOutput], width: int) -> Any:
        """Return int32[B, S]; `width`, or where a prompt is longer the next power of two."""
        longest = max(len(output.prompt_token_ids) for output in outputs)
        width = width if longest <= width else 1 << (longest - 1).bit_length()
        padded = np.full((len(outputs), width), self.pad_id(), np.int32)
        for row, output in enumerate(outputs):
            padded[row, width - len(output.prompt_token_ids) :] = output.prompt_token_ids
        return jnp.asarray(padded) if _PADS_TOKENS else padded

    def _list_tokens(self, answers: Sequence[CompletionOutput], width: int) -> Any:
        if not _PADS_TOKENS:
            return [np.array(answer.token_ids, np.int32) for answer in answers]
        padded = np.full((len(answers), width), self.pad_id(), np.int32)
        for row, answer in enumerate(answers):
            padded[row, : len(answer.token_ids)] = answer.token_ids
        return jnp.asarray(padded)


def _list_logprobs(answer: CompletionOutput) -> np.ndarray:
    positions = answer.logprobs or []
    return np.array([next(iter(one.values())).logprob for one in positions], np.float32)


def _length(is_real: np.ndarray) -> int:
    """Return the number of tokens up to the last real one."""
    return int(is_real.size - np.argmax(is_real[::-1])) if is_real.any() else 0
