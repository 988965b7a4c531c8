"""What tests of families share: samples as the engine's requests, and what it must answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmjax.config import ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.parity.arrays import PagedModel, Sample
from mmjax.processing.tensors.fields import MultiModalBatchedField, MultiModalFieldElem
from mmjax.processing.tensors.inputs import MultiModalFeatureSpec, MultiModalKwargsItem
from mmjax.sampling_params import SamplingParams
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.tiny import drain, engine_config, tokens_of

MAX_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model with its parameters, to be served by engines of several settings."""

    model_class: Any
    hf_config: Any
    params: Any
    max_embeds: int
    """Of one picture."""

    def engine(
        self, *, num_blocks: int | None = None, size: int = 1, **settings: Any
    ) -> EngineCore:
        """Start an engine; `size` is `tensor_parallel_size`, None blocks are enough for all."""
        sizes = {"max_model_len": 80, "max_num_batched_tokens": 64, "max_num_seqs": 3}
        settings = sizes | settings
        config = engine_config(**settings)
        spec = self.model_class(self.hf_config, dtype="float32").kv_cache_spec
        room = None if num_blocks is None else num_blocks * config.cache.block_size * spec.width * 4
        config = replace(
            config,
            model=replace(config.model, hf_config=self.hf_config),
            cache=replace(config.cache, kv_cache_memory_bytes=room),
            parallel=ParallelConfig(tensor_parallel_size=size),
            max_embeds_per_item={"image": self.max_embeds},
        )
        return EngineCore.from_model(self.model_class, self.params, config)

    def answer_alone(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return the greedy answers of one pass over each whole prompt, without an engine."""
        model = PagedModel(self.model_class, self.hf_config, self.params, 256)
        return [list(model.generate(sample, MAX_TOKENS)) for sample in samples]


def make_request(request_id: str, sample: Sample) -> EngineCoreRequest:
    """Return the sample as the engine gets it; equal pictures have equal names."""
    features = []
    for place, tensors in sample.items:
        elems = {
            key: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
            for key, value in tensors.items()
        }
        name = f"picture {hash(tuple(value.tobytes() for value in tensors.values()))}"
        features.append(
            MultiModalFeatureSpec(
                data=MultiModalKwargsItem(elems),
                modality="image",
                identifier=name,
                mm_position=place,
                mm_hash=name,
            )
        )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=sample.token_ids.tolist(),
        mm_features=features,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    )


def ask(image: Any, text: str) -> Any:
    """Return a conversation that asks about a picture, or without one."""
    parts: list[Any] = [{"type": "text", "text": text}]
    if image is not None:
        parts.insert(0, {"type": "image_pil", "image_pil": image})
    return [{"role": "user", "content": parts}]


def serve(core: EngineCore, samples: Sequence[Sample]) -> list[list[int]]:
    """Serve all samples at once; return their answers."""
    for number, sample in enumerate(samples):
        core.add_request(make_request(str(number), sample))
    news = drain(core)
    return [tokens_of(news[str(number)]) for number in range(len(samples))]


def check_engine(
    core: EngineCore, samples: Sequence[Sample], expected: Sequence[Sequence[int]]
) -> None:
    """Serve all at once, and each again with its beginning in the cache; nothing is compiled."""
    assert serve(core, samples) == expected
    for sample, answer in zip(samples, expected, strict=True):
        assert serve(core, [sample]) == [answer]
    assert core.stats().prefix_cache_hits > 0
    assert core.compilations == 0
