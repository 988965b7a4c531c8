"""Encoder outputs on disk: a later engine answers with them as with its own, or not at all."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from mmjax.config.engine_config import LoRAConfig, ParallelConfig
from mmjax.engine.core import EngineCore
from mmjax.engine.device.runner import ModelRunner
from mmjax.errors import ConfigError
from mmjax.layers.module import flatten_params, unflatten_params
from mmjax.transport.messages import EngineCoreRequest
from tests.engine.adapters import make_tensors, tower_layers, write_adapter
from tests.engine.tiny import (
    answer,
    answer_all,
    drain,
    engine_config,
    image_feature,
    message,
    report,
    start_tiny,
    tiny_engine,
    tiny_params,
    tokens_of,
)
from tests.families import served_model
from tests.families.default_run import rows
from tests.families.tiny import Media, Words
from tests.models.served import make_request, start_engine

PICTURES = [(0, 1), (1, 2), (2, 9), (3, 1)]
"""Seeds and crops; more than one encoder call has are divided over two."""
SIZES: dict[str, Any] = {
    "encoder_cache_size": 40,
    "max_num_encoder_input_tokens": 64,
    "max_num_batched_tokens": 16,
}
"""Of all engines of the tiny model, so that they have the same few programs."""


def start(directory: Path | None = None, **settings: Any) -> EngineCore:
    """Start an engine of the tiny model, which keeps what it encodes in a directory."""
    return tiny_engine(**SIZES, encoder_cache_dir=directory, **settings)


def ask(number: int, picture: tuple[int, int]) -> EngineCoreRequest:
    return message(f"{number}", [[2, 10 + number % 7], picture, [40]], logprobs=1, max_tokens=3)


def count_encoder_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    run = ModelRunner._run_encode

    def note(self: ModelRunner, call: Any) -> None:
        calls.append(call)
        run(self, call)

    monkeypatch.setattr(ModelRunner, "_run_encode", note)
    return calls


def damage(directory: Path) -> None:
    """Flip a bit in the middle of every file."""
    for path in directory.iterdir():
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def test_answers_over_evictions_restarts_and_damage_are_those_without(tmp_path: Path):
    """The law: the store changes nothing but who computes."""
    rng = random.Random(0)
    plain = start()
    hits = 0
    for life in range(4):
        core = start(tmp_path)
        for _ in range(4):
            batch = [ask(n, rng.choice(PICTURES)) for n in range(rng.randint(1, 3))]
            assert report(core, batch) == report(plain, batch)
        assert core.compilations == 0
        hits += core.stats().encoder_disk_hits
        if life % 2:
            core.close()
        # Else it is as if it were killed: what it had not written is lost.
        elif life == 2:
            rows = core._runner.stored_rows
            assert rows is not None
            rows._store.flush()
            damage(tmp_path)
    assert hits > 5


def test_a_later_engine_encodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with closing(start(tmp_path)) as first:
        expected = report(first, [ask(0, PICTURES[2])])
        stats = first.stats()
    assert (stats.encoder_disk_hits, stats.encoder_disk_queries) == (0, 1)
    calls = count_encoder_calls(monkeypatch)
    with closing(start(tmp_path)) as core:
        core.add_request(ask(0, PICTURES[2]))
        news = drain(core)["0"]
        stats = core.stats()
    assert tokens_of(news) == expected[0][0]
    assert calls == []
    assert (news[0].encoded, news[0].found_on_disk) == ([], ["picture-2-9"])
    assert (stats.encoder_disk_hits, stats.encoder_disk_queries) == (1, 1)
    assert stats.encoder_disk_read_bytes == 9 * 4 * 32 * 4


def test_a_damaged_file_is_encoded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with closing(start(tmp_path)) as first:
        expected = report(first, [ask(0, PICTURES[0])])
    damage(tmp_path)
    with closing(start(tmp_path)) as core:
        assert report(core, [ask(0, PICTURES[0])]) == expected
        assert core.stats().encoder_disk_hits == 0
    assert len([one for one in caplog.messages if "damaged" in one]) == 1
    with closing(start(tmp_path)) as again:
        assert report(again, [ask(0, PICTURES[0])]) == expected
        assert again.stats().encoder_disk_hits == 1


def test_an_id_that_stands_for_another_picture_finds_nothing(tmp_path: Path):
    """A caller's own ids are good for one process: tomorrow's picture may have today's."""
    with closing(start(tmp_path)) as first:
        answer(first, ask(0, PICTURES[0]))
    other = ask(0, PICTURES[3])
    name = "picture-0-1"
    features = [replace(image_feature(3, 2), identifier=name, mm_hash=name)]
    renamed = msgspec.structs.replace(other, mm_features=features)
    with closing(start(tmp_path)) as core:
        assert answer(core, renamed) == answer(start(), other)
        assert core.stats().encoder_disk_hits == 0


def with_other_tower(seed: float) -> Any:
    leaves = flatten_params(tiny_params()[1])
    name = next(one for one in leaves if "vision_tower" in one)
    return unflatten_params({**leaves, name: leaves[name] * jnp.float32(seed)})


def make_engine(params: Any, directory: Path, **groups: Any) -> EngineCore:
    config = replace(engine_config(**SIZES, encoder_cache_dir=directory), **groups)
    return start_tiny(config, params)


def test_other_weights_of_the_tower_find_nothing(tmp_path: Path):
    with closing(make_engine(tiny_params()[1], tmp_path)) as first:
        answer(first, ask(0, PICTURES[0]))
        # From here on it neither keeps nor finds: its tower has no name on disk.
        first.replace_weights(first.match_weights(with_other_tower(2.0)))
        answer(first, ask(1, PICTURES[1]))
        assert first.stats().encoder_disk_queries == 1
    assert len(list(tmp_path.iterdir())) == 1
    with closing(make_engine(with_other_tower(2.0), tmp_path)) as core:
        answer(core, ask(0, PICTURES[0]))
        assert core.stats().encoder_disk_hits == 0
    leaves = flatten_params(tiny_params()[1])
    name = next(one for one in leaves if "language_model" in one and "embed" not in one)
    other_text = unflatten_params({**leaves, name: leaves[name] * jnp.float32(2.0)})
    with closing(make_engine(other_text, tmp_path)) as core:
        answer(core, ask(0, PICTURES[0]))
        assert core.stats().encoder_disk_hits == 1


def test_what_an_adapter_encodes_is_not_kept(tmp_path: Path):
    path = write_adapter(tmp_path / "tower", tensors=make_tensors(3, layers=tower_layers()))
    lora = LoRAConfig(enable_lora=True, max_lora_rank=8, enable_tower_connector_lora=True)
    store = tmp_path / "store"
    with closing(make_engine(tiny_params()[1], store, lora=lora)) as core:
        core.load_adapter("tower", path)
        core.wait_loaded()
        answer(core, msgspec.structs.replace(ask(0, PICTURES[0]), lora_name="tower"))
        assert core.stats().encoder_disk_queries == 0
        answer(core, ask(1, PICTURES[1]))
    assert len(list(store.iterdir())) == 1


@pytest.mark.parametrize("name", rows("rows of encoders on disk", ("qwen2_vl", "deepseek_ocr2")))
def test_rows_of_packed_and_of_chosen_outputs(name: str, tmp_path: Path):
    """Of packs of patches, and where embeddings are some of an encoder's outputs, in any order."""
    model = served_model(name)
    (modality, *_) = model.family.max_embeds
    requests = [
        make_request(str(n), model.draw_sample((Words(1, 3), Media(n, modality), Words(2, 5))))
        for n in range(2)
    ]
    sizes = {"max_num_batched_tokens": max(16, model.family.longest_run)}
    with closing(start_engine(model, **sizes, encoder_cache_dir=tmp_path)) as first:
        expected = answer_all(first, requests)
    with closing(start_engine(model, **sizes, encoder_cache_dir=tmp_path)) as core:
        assert answer_all(core, requests) == expected
        assert core.stats().encoder_disk_hits == len(requests)
    assert answer_all(start_engine(model, **sizes), requests) == expected


def test_several_processes_are_refused(tmp_path: Path):
    config = engine_config(encoder_cache_dir=tmp_path)
    parallel = ParallelConfig(
        tensor_parallel_size=2, num_processes=2, process_id=0, coordinator_address="localhost:1"
    )
    with pytest.raises(ConfigError, match="encoder_cache_dir"):
        EngineCore(replace(config, parallel=parallel), params=tiny_params()[1])


def test_a_directory_that_cannot_be_one_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmjax.engine.start.join_processes", pytest.fail)
    config = engine_config(encoder_cache_dir=Path("/dev/null/x"))
    with pytest.raises(ConfigError, match="cannot be a cache's directory"):
        EngineCore(config, params=tiny_params()[1])


def test_bfloat16_rows_are_kept_bit_for_bit(tmp_path: Path):
    """On the CPU the pool holds them as integers."""
    config = engine_config(**SIZES, encoder_cache_dir=tmp_path)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    params = {name: leaf.astype(jnp.bfloat16) for name, leaf in flat().items()}
    answers = []
    for number in range(2):
        with closing(start_tiny(config, unflatten_params(params))) as core:
            answers.append(report(core, [ask(0, PICTURES[1])]))
            embeds = core.read_embeds("picture-1-2")
            assert core.stats().encoder_disk_hits == number
            assert embeds is not None
            answers[-1].append(np.asarray(embeds).tobytes())
    assert answers[0] == answers[1]


def flat() -> Any:
    return flatten_params(tiny_params()[1])
