"""Loading: equal arrays from every layout and dtype, slice by slice, and one report of problems."""

import json
import sys
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax.errors import CheckpointError
from mmjax.layers.module import flatten_params
from mmjax.system.allocator import return_pages_of_files
from mmjax.weights.files.safetensors import StoredTensor, check_weight_files
from mmjax.weights.load import load_params
from mmjax.weights.rules import Rule, Split, Stack
from tests.weights.checkpoints import SHAPES, abstract_tree, random_tensors, write_checkpoint

EMBEDDING = "language_model.embed_tokens.weight"


def load(
    path: Path, shapes: Any = SHAPES, rules: Any = (), *, dtype: Any = jnp.float32, **kwargs: Any
) -> dict[str, Any]:
    kwargs = {"use_tqdm": False, **kwargs}
    return flatten_params(load_params(path, abstract_tree(shapes, dtype), rules, **kwargs))


@pytest.mark.parametrize("num_shards", [None, 1, 3])
def test_every_tensor_arrives(tmp_path: Path, num_shards: int | None):
    tensors = random_tensors()
    leaves = load(write_checkpoint(tmp_path, tensors, num_shards=num_shards))
    assert leaves.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(leaves[name], tensor)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_was_read_of_a_file_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"layers.{n}.weight": np.full((1024, 4096), n, np.float32) for n in range(4)}
    path = write_checkpoint(tmp_path, tensors)
    resident = []

    def unload(folder: Path) -> None:
        before = resident_bytes(path)
        return_pages_of_files(folder)
        resident.append((before, resident_bytes(path)))

    monkeypatch.setattr("mmjax.weights.load.return_pages_of_files", unload)
    monkeypatch.setattr("mmjax.weights.load._UNLOADED_BYTES", 2**24)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    leaves = load(path, shapes)
    assert len(resident) == 4
    for before, after in resident:
        assert before >= 2**24
        assert after < 2**20
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(leaves[name], tensor)


def resident_bytes(folder: Path) -> int:
    """Return how much of the files in a folder is in this process's memory."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        first, *rest = line.split()
        if "-" in first:
            is_inside = str(folder) in line
        elif first == "Rss:" and is_inside:
            total += int(rest[0]) * 1024
    return total


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_any_floating_dtype_becomes_the_one_asked_for(tmp_path: Path, stored: str, wanted: str):
    tensors = random_tensors(dtype=jnp.dtype(stored))
    leaves = load(write_checkpoint(tmp_path, tensors), dtype=jnp.dtype(wanted))
    for name, tensor in tensors.items():
        assert leaves[name].dtype == jnp.dtype(wanted)
        np.testing.assert_array_equal(leaves[name], tensor.astype(jnp.dtype(wanted)))


def test_each_parameter_gets_the_dtype_that_its_module_declares(tmp_path: Path):
    tensors = random_tensors()
    tree = abstract_tree(dtype=jnp.bfloat16)
    kept = jax.ShapeDtypeStruct((8,), jnp.float32)  # a router, say
    tree["language_model"]["norm"]["weight"] = kept
    leaves = flatten_params(
        load_params(write_checkpoint(tmp_path, tensors), tree, (), use_tqdm=False)
    )
    dtypes = {name: str(leaf.dtype) for name, leaf in leaves.items()}
    assert dtypes.pop("language_model.norm.weight") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}


ATTENTION = "language_model.layers.0.self_attn"
QKV = Split(
    r"attention\.wqkv\.",
    [rf"{ATTENTION}.{name}." for name in ("q_proj", "k_proj", "v_proj")],
    (4, 2, 2),
)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_fused_tensor_is_cut_into_its_parts(tmp_path: Path, num_groups: int, kind: str):
    """As a view of [groups, 4 + 2 + 2, ...] cuts it; on a mesh each device reads its own rows."""
    width = (6,) if kind == "weight" else ()
    fused = np.random.default_rng(1).normal(size=(8 * num_groups, *width)).astype(np.float32)
    path = write_checkpoint(tmp_path, {f"attention.wqkv.{kind}": fused})
    sizes = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    shapes = {
        f"{ATTENTION}.{name}.{kind}": (size * num_groups, *width) for name, size in sizes.items()
    }
    groups = fused.reshape(num_groups, 8, *width)
    parts = np.split(groups, [4, 6], axis=1)
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    for where in (None, mesh):
        leaves = load(path, shapes, (QKV,), mesh=where)
        for name, part in zip(sizes, parts, strict=True):
            expected = part.reshape(-1, *width)
            np.testing.assert_array_equal(leaves[f"{ATTENTION}.{name}.{kind}"], expected)


def test_a_fused_tensor_that_cannot_be_cut_is_reported(tmp_path: Path):
    path = write_checkpoint(tmp_path, {"attention.wqkv.weight": np.zeros((9, 6), np.float32)})
    with pytest.raises(CheckpointError, match=r"wqkv.* must have shape \(4, 6\); got \(9, 6\)"):
        load(path, {f"{ATTENTION}.q_proj.weight": (4, 6)}, (QKV,))


EXPERTS = "language_model.layers.0.mlp.experts.up_proj"
STACK = Stack(r"^moe\.(?P<index>\d+)\.up$", EXPERTS)


def write_experts(path: Path, numbers: Iterable[int], width: int = 6) -> tuple[Path, np.ndarray]:
    experts = np.random.default_rng(2).normal(size=(12, 4, width)).astype(np.float32)
    return write_checkpoint(path, {f"moe.{n}.up": experts[n] for n in numbers}), experts


def test_experts_are_stacked_in_the_order_of_their_numbers(tmp_path: Path):
    """Not of their names: 10 comes behind 9. On a mesh each device reads its part of each."""
    path, experts = write_experts(tmp_path, range(12))
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model"))
    for where, rows in ((None, 4), (mesh, 2)):
        leaf = load(path, {EXPERTS: (12, 4, 6)}, (STACK,), mesh=where)[EXPERTS]
        np.testing.assert_array_equal(leaf, experts)
        assert leaf.addressable_data(0).shape == (12, rows, 6)


def test_experts_that_do_not_fit_are_reported_by_their_numbers(tmp_path: Path):
    path, _ = write_experts(tmp_path, [0, 1, 3])
    with pytest.raises(CheckpointError, match=r"1 missing[^!]*experts\.up_proj\[2\]`"):
        load(path, {EXPERTS: (4, 4, 6)}, (STACK,))
    with pytest.raises(CheckpointError, match=r"1 missing, 1 unexpected[^!]*`moe\.3\.up`"):
        load(path, {EXPERTS: (3, 4, 6)}, (STACK,))
    with pytest.raises(CheckpointError, match=r"`moe\.3\.up` .* must have shape \(4, 7\)"):
        load(path, {EXPERTS: (4, 4, 7)}, (STACK,))


def test_a_tensor_without_axes_loads(tmp_path: Path):
    path = write_checkpoint(tmp_path, {"scale": np.array(2.5, np.float32)})
    assert load(path, {"scale": ()})["scale"] == 2.5


@pytest.mark.parametrize("axes", [(1, 4), (2, 2), (4, 1)])
def test_shards_lie_where_the_plan_says(tmp_path: Path, axes: tuple[int, int]):
    tensors = random_tensors()
    mesh = Mesh(np.array(jax.devices()).reshape(axes), ("data", "model"))
    leaves = load(write_checkpoint(tmp_path, tensors), mesh=mesh)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(leaves[name], tensor)
    rows = 16 // axes[1]
    assert leaves[EMBEDDING].addressable_data(0).shape == (rows, 8)


def test_each_part_is_read_once_whatever_the_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tensors = random_tensors()
    path = write_checkpoint(tmp_path, tensors)
    num_bytes = []
    read = StoredTensor.read

    def count(tensor: StoredTensor, index: Any) -> np.ndarray:
        part = read(tensor, index)
        num_bytes.append(part.nbytes)
        return part

    monkeypatch.setattr(StoredTensor, "read", count)
    load(path, mesh=Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model")))
    assert sum(num_bytes) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(num_bytes) == tensors[EMBEDDING].nbytes // 2


def test_the_host_never_holds_a_second_copy(tmp_path: Path):
    shapes = {f"layers.{i}.mlp.up_proj.weight": (512, 512) for i in range(24)}
    path = write_checkpoint(tmp_path, random_tensors(shapes))
    one = 512 * 512 * 4
    load(path, shapes, dtype=jnp.bfloat16)
    tracemalloc.start()
    try:
        leaves = load(path, shapes, dtype=jnp.bfloat16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # On the CPU an array may be the numpy buffer that it was made of: one copy, in bfloat16.
    assert peak < sum(leaf.nbytes for leaf in leaves.values()) + 3 * one


def test_rules_rename_and_drop(tmp_path: Path):
    tensors = {"model.norm.weight": np.ones(8, np.float32), "head.weight": np.ones(2, np.float32)}
    rules = (Rule(r"^head\.", None), Rule(r"^model\.", "language_model."))
    leaves = load(write_checkpoint(tmp_path, tensors), {"language_model.norm.weight": (8,)}, rules)
    assert leaves.keys() == {"language_model.norm.weight"}


def test_all_problems_come_in_one_report(tmp_path: Path):
    tensors = random_tensors()
    del tensors["language_model.norm.weight"]
    del tensors["language_model.layers.0.mlp.fc1.bias"]
    tensors["language_model.layers.0.mlp.up_proj.weight"] = np.zeros((5, 8), np.float32)
    tensors["language_model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 8), np.int8)
    tensors["language_model.layers.7.extra.weight"] = np.zeros(3, np.float32)
    with pytest.raises(CheckpointError) as error:
        load(write_checkpoint(tmp_path, tensors))
    text = str(error.value)
    assert "2 missing, 1 unexpected, 2 misshapen; is the revision right?" in text
    assert "`language_model.layers.0.mlp.fc1.bias`\n  `language_model.norm.weight`" in text
    assert "`language_model.layers.7.extra.weight` (in model.safetensors)" in text
    assert "must have shape (6, 8); got (5, 8)" in text
    assert "got I8: is it a quantised checkpoint" in text


def test_a_long_report_is_cut(tmp_path: Path):
    shapes = {f"layers.{i:03}.weight": (1,) for i in range(200)}
    with pytest.raises(CheckpointError, match=r"200 missing(.|\n)*and 180 more"):
        load(write_checkpoint(tmp_path, {}), shapes)


def test_two_tensors_for_one_place_are_refused(tmp_path: Path):
    tensors = {"a.weight": np.ones(2, np.float32), "b.weight": np.ones(2, np.float32)}
    with pytest.raises(CheckpointError, match="are both `weight`"):
        load(write_checkpoint(tmp_path, tensors), {"weight": (2,)}, (Rule(r"^[ab]\.", ""),))


def test_a_tied_head_is_left_out(tmp_path: Path):
    tensors = random_tensors()
    tensors["lm_head.weight"] = tensors[EMBEDDING].copy()
    assert load(write_checkpoint(tmp_path, tensors)).keys() == SHAPES.keys()


@pytest.mark.parametrize("is_narrower", [False, True])
def test_a_head_of_its_own_is_never_dropped_in_silence(tmp_path: Path, is_narrower: bool):
    tensors = random_tensors()
    head = tensors[EMBEDDING] + np.float32(0.5)
    tensors["lm_head.weight"] = head[:-1] if is_narrower else head
    with pytest.raises(CheckpointError, match="set `tie_word_embeddings` to false"):
        load(write_checkpoint(tmp_path, tensors))


def test_missing_shards_are_named(tmp_path: Path):
    write_checkpoint(tmp_path, random_tensors(), num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 .*model-00002-of-00003"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "holds no weights"),
        ({"pytorch_model.bin": b"\x80\x04."}, r"pickles \(pytorch_model.bin\), which can run code"),
        ({"model-00001-of-00002.safetensors": b""}, "but neither `model.safetensors` nor"),
        ({"model.safetensors": b"version https://git-lfs"}, "Git LFS pointer"),
        ({"model.safetensors.index.json": b"{}"}, "is not an index"),
        ({"model.safetensors.index.json": b"[]"}, "is not an index"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": 1}}'}, "must map tensors"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../b.safetensors"}}'},
            "expected names of files beside it",
        ),
    ],
)
def test_an_unreadable_directory_says_why(tmp_path: Path, files: dict[str, bytes], match: str):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path)


def cut(file: Path, size: int) -> str:
    with file.open("rb+") as opened:
        opened.truncate(size)
    return f"`{file}` has {size} bytes, of"


def test_all_files_are_checked_before_any_is_read(tmp_path: Path):
    write_checkpoint(tmp_path, random_tensors(), num_shards=3)
    first, whole, last = sorted(tmp_path.glob("*.safetensors"))
    check_weight_files(tmp_path)
    size = last.stat().st_size
    words = [cut(first, 20), cut(last, size - 1)]
    with pytest.raises(CheckpointError) as caught:
        check_weight_files(tmp_path)
    assert all(word in str(caught.value) for word in words)
    assert f"{size - 1} bytes, of {size} that its header declares" in str(caught.value)
    assert whole.name not in str(caught.value)
    with pytest.raises(CheckpointError, match=f"{first.name}` has 20 bytes, of at least"):
        load(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        check_weight_files(tmp_path)


def test_a_directory_that_is_not_there(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "absent")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path):
    write_checkpoint(tmp_path, random_tensors(), num_shards=2)
    write_checkpoint(tmp_path / "again", random_tensors())
    first = tmp_path / "model-00001-of-00002.safetensors"
    first.write_bytes((tmp_path / "again" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="remove the files that are not this checkpoint's"):
        load(tmp_path)


def test_an_index_that_promises_too_much_is_a_missing_tensor(tmp_path: Path):
    tensors = random_tensors()
    del tensors["language_model.norm.weight"]
    write_checkpoint(tmp_path, tensors, num_shards=2)
    file = tmp_path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["language_model.norm.weight"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="1 missing"):
        load(tmp_path)


def test_the_bar_counts_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mmjax.system.progress.has_bars", lambda: True)
    tensors = random_tensors()
    load(write_checkpoint(tmp_path, tensors), use_tqdm=True)
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert f"{total / 1000:.2f}k/{total / 1000:.2f}k" in capsys.readouterr().err
