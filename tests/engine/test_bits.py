"""A small model's states, bit for bit: whatever program computes a token, and beside whom.

Answers alone would hide a difference until two tokens tie; every row of every step is compared.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3Config

from mmjax.engine.scheduling.buckets import StepBucket
from mmjax.engine.scheduling.outputs import SchedulerOutput
from tests.engine.test_schedules import Bench
from tests.engine.tiny import tiny_config

Prefix = tuple[bool, tuple[int, ...], tuple[str, ...]]
"""Whether pictures are causal, the tokens up to one, and the pictures that begin among them."""


class RecordingBench(Bench):
    """Keeps each token's state, by what it depends on, and the programs that computed it.

    No overlap and no prefix cache: the host knows every token, and every token is computed.
    """

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config, num_prompts=12)
        self.states: dict[Prefix, dict[bytes, set[StepBucket]]] = {}
        self._is_causal = False
        self._dispatch = self.core._runner.dispatch
        self.core._runner.dispatch = self._record  # type: ignore[method-assign]

    def _configure(self, rng: Random) -> bool:
        self._is_causal = super()._configure(rng)
        self.core._block_hasher = None
        scheduler = replace(self.core.config.scheduler, async_scheduling=False)
        self.core.config = replace(self.core.config, scheduler=scheduler)
        return self._is_causal

    def _record(self, output: SchedulerOutput):
        in_flight = self._dispatch(output)
        if in_flight is None:
            return None
        runner = self.core._runner
        bucket = runner.buckets.step_bucket(
            output.num_tokens,
            len(output.requests),
            has_spans=runner._builder.needs_spans(output.requests),
        )
        states = np.asarray(runner._state.hidden)[: output.num_tokens]
        for prefix, state in zip(self._prefixes(output), states, strict=True):
            self.states.setdefault(prefix, {}).setdefault(state.tobytes(), set()).add(bucket)
        return in_flight

    def _prefixes(self, output: SchedulerOutput) -> Iterator[Prefix]:
        for scheduled in output.requests:
            request = scheduled.request
            for place in range(scheduled.start, scheduled.end):
                pictures = tuple(item.identifier for item in request.items if item.start <= place)
                yield self._is_causal, tuple(request.token_ids[: place + 1].tolist()), pictures


def gemma3(head_dim: int) -> Gemma3Config:
    """Return the tiny model with other heads, and without its third layer."""
    config: dict[str, Any] = tiny_config().to_dict()
    text = config["text_config"]
    text.update(head_dim=head_dim, query_pre_attn_scalar=head_dim, num_hidden_layers=2)
    text["layer_types"] = text["layer_types"][:2]
    return Gemma3Config.from_dict(config)


DECODERS = {
    "gemma3": (tiny_config(), 60),
    **{f"gemma3, heads of {width}": (gemma3(width), 20) for width in (32, 64, 128)},
}
"""Of each decoder: a config that is small in the sense of docs/determinism.md, and how many
schedules. Heads of many widths, for kernels are chosen by them."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("config", "num_schedules"), DECODERS.values(), ids=DECODERS)
def test_a_token_has_one_state(config: Gemma3Config, num_schedules: int) -> None:
    bench = RecordingBench(config)
    for seed in range(num_schedules):
        bench.run(seed)
    programs = {
        bucket for found in bench.states.values() for some in found.values() for bucket in some
    }
    shared = [found for found in bench.states.values() if len(set().union(*found.values())) > 1]
    assert len({(bucket.num_tokens, bucket.num_requests) for bucket in programs}) >= 7
    assert len(shared) > 300
    several = {prefix: found for prefix, found in bench.states.items() if len(found) > 1}
    assert not several, f"{len(several)} of {len(bench.states)}: {next(iter(several.values()))}"
