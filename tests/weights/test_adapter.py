"""Adapters as PEFT writes them: found by the checkpoint's rules, scaled, or refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mmjax.errors import CheckpointError
from mmjax.rounding import quantize_rows
from mmjax.weights.adapter import AdapterReader, fill_slot
from mmjax.weights.rules import Rule, Split

SLOTS, MAX_RANK = 3, 8
RULES = (
    Rule(r"^tower\.unread\.", None),
    Split(
        r"^model\.(.*)\.wqkv\.", [rf"language_model.\1.{part}_proj." for part in "qkv"], [2, 1, 1]
    ),
    Split(r"^model\.tables\.", ["language_model.embed_tokens.", "new_embed_tokens."], [10, 2]),
    Rule(r"^model\.", "language_model."),
    Rule(r"^lm_head\.", "language_model.lm_head."),
)
LAYERS = {
    "language_model.layers.0.q_proj": (4, 6),
    "language_model.layers.0.k_proj": (2, 6),
    "language_model.layers.0.v_proj": (2, 6),
    "language_model.layers.0.down": (6, 5),
    "tower.fc": (3, 3),
}
LM = "base_model.model.model.layers.0."


def make_reader(*, base: dict[str, np.ndarray] | None = None, **settings: Any) -> AdapterReader:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in LAYERS.items():
        shapes[f"{name}.lora.a"] = (SLOTS, MAX_RANK, columns)
        shapes[f"{name}.lora.b"] = (rows, SLOTS, MAX_RANK)
        shapes[f"{name}.lora.bias"] = (rows, SLOTS)
    shapes["language_model.embed_tokens.lora.a"] = (SLOTS, 10, MAX_RANK)
    shapes["language_model.embed_tokens.lora.b"] = (6, SLOTS, MAX_RANK)
    shapes["language_model.lora.a"] = (SLOTS, MAX_RANK, 6)
    shapes["language_model.lora.b"] = (10, SLOTS, MAX_RANK)
    shapes["language_model.lora.bias"] = (10, SLOTS)
    options = {"rules": RULES, "shapes": shapes, "dtype": np.float32, "max_rank": MAX_RANK}
    settings = {**options, "read_base": (base or {}).get, **settings}
    return AdapterReader(**settings)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def pair(layer: str, rows: int, columns: int, rank: int = 2) -> dict[str, np.ndarray]:
    return {
        f"{layer}.lora_A.weight": draw(rank, columns),
        f"{layer}.lora_B.weight": draw(rows, rank),
    }


def write(path: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config}
    (path / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, str(path / "adapter_model.safetensors"))
    return path


DOWN = pair(f"{LM}down", 6, 5)
LM_HEAD = "base_model.model.lm_head"
HEAD = pair(LM_HEAD, 10, 6)


def test_the_factor_is_in_b(tmp_path: Path) -> None:
    arrays = make_reader().read(write(tmp_path, DOWN)).arrays
    np.testing.assert_array_equal(
        arrays["language_model.layers.0.down.lora.a"], DOWN[f"{LM}down.lora_A.weight"]
    )
    np.testing.assert_allclose(
        arrays["language_model.layers.0.down.lora.b"], 3 * DOWN[f"{LM}down.lora_B.weight"]
    )
    assert len(arrays) == 2


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"alpha_pattern": {"down": 8}}, 4),
        ({"r": 5, "rank_pattern": {r"layers\.0\.down": 2}}, 3),
        ({"alpha_pattern": {r"^model\.layers\.\d+\.down": 10, "down": 8}}, 5),
    ],
)
def test_patterns_are_pefts(tmp_path: Path, config: dict[str, Any], factor: float) -> None:
    arrays = make_reader().read(write(tmp_path, DOWN, **config)).arrays
    np.testing.assert_allclose(
        arrays["language_model.layers.0.down.lora.b"],
        factor * DOWN[f"{LM}down.lora_B.weight"],
        rtol=1e-6,
    )


def test_a_fused_layer_is_cut_as_its_weight_is(tmp_path: Path) -> None:
    tensors = pair(f"{LM}wqkv", 8, 6)
    arrays = make_reader().read(write(tmp_path, tensors)).arrays
    b = 3 * tensors[f"{LM}wqkv.lora_B.weight"].reshape(2, 4, 2)
    for part, rows in {"q": slice(0, 2), "k": slice(2, 3), "v": slice(3, 4)}.items():
        layer = f"language_model.layers.0.{part}_proj.lora"
        np.testing.assert_allclose(arrays[f"{layer}.b"], b[:, rows].reshape(-1, 2))
        np.testing.assert_array_equal(arrays[f"{layer}.a"], tensors[f"{LM}wqkv.lora_A.weight"])


def test_embeddings_and_a_tied_head_have_adapters(tmp_path: Path) -> None:
    table = draw(10, 6)
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": draw(2, 10),
        "base_model.model.model.embed_tokens.lora_embedding_B": draw(6, 2),
        "base_model.model.model.embed_tokens.base_layer.weight": table,
        **pair("base_model.model.lm_head", 10, 6),
        "base_model.model.lm_head.base_layer.weight": table,
    }
    reader = make_reader(base={"language_model.embed_tokens.weight": table})
    arrays = reader.read(write(tmp_path, tensors)).arrays
    assert arrays["language_model.embed_tokens.lora.a"].shape == (10, 2)
    assert arrays["language_model.embed_tokens.lora.b"].shape == (6, 2)
    assert arrays["language_model.lora.b"].shape == (10, 2)
    rounded, _ = quantize_rows(table)
    make_reader(base={"language_model.embed_tokens.weight": rounded}).read(tmp_path)
    other = make_reader(base={"language_model.embed_tokens.weight": table + 1})
    with pytest.raises(CheckpointError, match="whole weight"):
        other.read(tmp_path)


def test_a_linear_layer_may_be_called_after_tokens(tmp_path: Path) -> None:
    """Fuyu's `vision_embed_tokens` is one, and not a table."""
    name = "vision_embed_tokens"
    shapes = {
        f"{name}.lora.a": (SLOTS, MAX_RANK, 5),
        f"{name}.lora.b": (6, SLOTS, MAX_RANK),
    }
    reader = make_reader(rules=(), shapes=shapes)
    tensors = pair(f"base_model.model.{name}", 6, 5)
    arrays = reader.read(write(tmp_path, tensors)).arrays
    np.testing.assert_array_equal(
        arrays[f"{name}.lora.a"], tensors[f"base_model.model.{name}.lora_A.weight"]
    )


def test_biases_are_what_they_change(tmp_path: Path) -> None:
    tensors = {**DOWN, f"{LM}down.base_layer.bias": draw(6), f"{LM}down.lora_B.bias": draw(6)}
    base = draw(6, 1)[:, 0]
    reader = make_reader(base={"language_model.layers.0.down.bias": base})
    arrays = reader.read(write(tmp_path, tensors)).arrays
    np.testing.assert_allclose(
        arrays["language_model.layers.0.down.lora.bias"], 3 * draw(6) + draw(6) - base, rtol=1e-5
    )
    with pytest.raises(CheckpointError, match="bias"):
        make_reader().read(tmp_path)


def test_what_is_not_computed_is_not_read(tmp_path: Path) -> None:
    tensors = {**DOWN, **pair("base_model.model.tower.unread.fc", 9, 9)}
    assert len(make_reader().read(write(tmp_path, tensors)).arrays) == 2
    tensors = {**DOWN, **pair("base_model.model.tower.fc", 3, 3)}
    assert len(make_reader(left_out=["tower"]).read(write(tmp_path, tensors)).arrays) == 2


CONFIGS = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "peft_type": "IA3",
    "init_lora_weights": "pissa",
    "target_parameters": ["experts"],
    "layer_replication": [[0, 1]],
    "r": 0,
    "lora_alpha": None,
    "rank_pattern": {"(a+)+b": 3},
    "alpha_pattern": {"down": "x"},
}


@pytest.mark.parametrize("key", CONFIGS)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, key: str) -> None:
    write(tmp_path, DOWN, **{key: CONFIGS[key]})
    with pytest.raises(CheckpointError, match=key) as caught:
        make_reader().read(tmp_path)
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "config", "text"),
    [
        (pair(f"{LM}down", 6, 5, 9), {"r": 9}, "--max-lora-rank"),
        (pair(f"{LM}down", 6, 5, 3), {}, "their rank is 2"),
        (pair(f"{LM}down", 6, 4), {}, "expected"),
        (pair(f"{LM}down", 7, 5), {}, "expected"),
        (pair(f"{LM}wqkv", 7, 6), {}, "7 rows"),
        (pair("base_model.model.model.tables", 6, 12), {}, "leave `embed_tokens` out"),
        (pair(f"{LM}up", 6, 5), {}, r"model\.layers\.0\.up"),
        ({f"{LM}down.lora_A.weight": draw(2, 5)}, {}, "two matrices"),
        ({f"{LM}down.lora_magnitude_vector": draw(2, 5)}, {}, "no part of an adapter"),
        ({"other": draw(2)}, {}, "no part of an adapter"),
        # As DeepSpeed's ZeRO-3 leaves weights that nobody gathered.
        ({**DOWN, f"{LM}down.lora_B.weight": draw(0, 2)}, {}, r"shape \(0, 2\); expected \(6, 2\)"),
        ({**HEAD, f"{LM_HEAD}.base_layer.weight": draw(0)}, {}, "whole weight of `lm_head`"),
        (
            {**DOWN, f"{LM}down.lora_B.bias": draw(1), f"{LM}down.base_layer.bias": draw(6)},
            {},
            r"lora_B\.bias` .* shape \(1,\); expected \(6,\)",
        ),
        ({**DOWN, f"{LM}norm.bias": draw(6)}, {}, r"layers\.0\.norm"),
        ({name: value * np.nan for name, value in DOWN.items()}, {}, "not finite"),
        ({name: value.astype(np.int8) for name, value in DOWN.items()}, {}, "I8"),
        ({}, {}, "nothing that this model computes with"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], config: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        make_reader().read(write(tmp_path, tensors, **config))


def test_numbers_that_overflow_the_served_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {name: value * 1e6 for name, value in DOWN.items()}
    with pytest.raises(CheckpointError, match="float16"):
        make_reader(dtype=np.float16).read(write(tmp_path, tensors))


def test_a_layer_that_shared_embeddings_go_through_is_refused(tmp_path: Path) -> None:
    write(tmp_path, pair("base_model.model.tower.fc", 3, 3))
    shapes = {name: s for name, s in make_reader().shapes.items() if not name.startswith("tower")}
    with pytest.raises(CheckpointError, match=r"`tower\.fc`.* leave it out of `target_modules`"):
        make_reader(shapes=shapes, unadapted=("tower",)).read(tmp_path)


def test_a_tower_needs_its_flag(tmp_path: Path) -> None:
    write(tmp_path, pair("base_model.model.tower.fc", 3, 3))
    assert make_reader().read(tmp_path).arrays
    shapes = {name: s for name, s in make_reader().shapes.items() if not name.startswith("tower")}
    with pytest.raises(CheckpointError, match="--enable-tower-connector-lora"):
        make_reader(shapes=shapes, has_towers=False).read(tmp_path)


def test_damaged_files_are_refused_without_their_path(tmp_path: Path) -> None:
    write(tmp_path, DOWN)
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole = weights.read_bytes()
    for damage in (whole[:20], b"", whole[:-7]):
        weights.write_bytes(damage)
        with pytest.raises(CheckpointError, match="adapter_model") as caught:
            make_reader().read(tmp_path)
        assert str(tmp_path) not in str(caught.value)
    weights.unlink()
    with pytest.raises(CheckpointError, match="adapter_model"):
        make_reader().read(tmp_path)
    for text in ("{", "[]", '{"peft_type": "LORA", "pad": "' + "x" * 2**20 + '"}'):
        config.write_text(text)
        with pytest.raises(CheckpointError, match="adapter_config"):
            make_reader().read(tmp_path)
    config.unlink()
    with pytest.raises(CheckpointError, match="adapter_config"):
        make_reader().read(tmp_path)


def test_a_digest_is_of_both_files(tmp_path: Path) -> None:
    first = make_reader().read(write(tmp_path, DOWN)).digest
    assert make_reader().read(write(tmp_path, DOWN)).digest == first
    assert make_reader().read(write(tmp_path, DOWN, lora_alpha=7)).digest != first
    other = {name: value + 1 for name, value in DOWN.items()}
    assert make_reader().read(write(tmp_path, other)).digest != first


def test_a_slot_has_zeros_up_to_its_rank() -> None:
    value = draw(2, 5)
    filled = fill_slot("x.lora.a", value, (SLOTS, MAX_RANK, 5), np.float32)
    assert filled.shape == (MAX_RANK, 5)
    np.testing.assert_array_equal(filled[:2], value)
    assert not filled[2:].any()
    assert not fill_slot("x.lora.b", None, (4, SLOTS, MAX_RANK), np.float32).any()
