"""Snapshots: from one mesh onto another, and refused where they do not fit."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mmjax.errors import CheckpointError, SnapshotDamagedError
from mmjax.layers.module import flatten_params, unflatten_params
from mmjax.weights.sharding import param_sharding
from mmjax.weights.snapshot import load_snapshot, save_snapshot
from tests.weights.checkpoints import SHAPES, abstract_tree, random_tensors


def make_mesh(axes: tuple[int, int] | None) -> Mesh | None:
    return axes and Mesh(np.array(jax.devices()).reshape(axes), ("data", "model"))


def make_params(axes: tuple[int, int] | None, dtype: Any = np.float32) -> dict[Any, Any]:
    mesh = make_mesh(axes)
    return unflatten_params(
        {
            name: jax.device_put(tensor, param_sharding(name, tensor.shape, mesh))
            for name, tensor in random_tensors(dtype=dtype).items()
        }
    )


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot saved from a 1x4 mesh."""
    path = tmp_path_factory.mktemp("snapshot") / "one"
    save_snapshot(path, make_params((1, 4)), source="a/b", architecture="A", revision="main")
    return path


@pytest.mark.parametrize("axes", [(1, 4), (2, 2), None])
def test_it_restores_onto_another_mesh(snapshot: Path, axes: tuple[int, int] | None):
    mesh = make_mesh(axes)
    leaves = flatten_params(load_snapshot(snapshot, abstract_tree(), mesh=mesh))
    for name, tensor in random_tensors().items():
        np.testing.assert_array_equal(leaves[name], tensor)
        assert leaves[name].sharding == param_sharding(name, tensor.shape, mesh)


def test_bfloat16_stays_bfloat16(tmp_path: Path):
    tree = make_params(None, jnp.bfloat16)
    save_snapshot(tmp_path / "s", tree, source="a/b", architecture="A")
    leaves = flatten_params(load_snapshot(tmp_path / "s", abstract_tree(dtype=jnp.bfloat16)))
    for name, leaf in flatten_params(tree).items():
        np.testing.assert_array_equal(leaves[name], leaf)


def test_it_says_what_it_was_made_of(snapshot: Path):
    metadata = json.loads((snapshot / "mmjax_snapshot.json").read_text())
    assert [metadata[key] for key in ("source", "revision", "dtype")] == ["a/b", "main", "float32"]


def test_it_is_never_written_over(snapshot: Path):
    with pytest.raises(CheckpointError, match="holds a snapshot already"):
        save_snapshot(snapshot, make_params(None), source="a/b", architecture="A")


def test_another_dtype_is_cast_to(snapshot: Path):
    leaves = flatten_params(load_snapshot(snapshot, abstract_tree(dtype=jnp.bfloat16)))
    for name, tensor in random_tensors().items():
        assert leaves[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(leaves[name], tensor.astype(jnp.bfloat16))


def test_another_tree_is_refused_with_all_problems(snapshot: Path):
    shapes = {**SHAPES, "language_model.norm.weight": (9,), "new.weight": (1,)}
    del shapes["language_model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="1 missing, 1 unexpected, 1 misshapen"):
        load_snapshot(snapshot, abstract_tree(shapes))


def test_an_unfinished_snapshot_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no finished snapshot"):
        load_snapshot(tmp_path, abstract_tree())


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"shapes": {}}', '{"shapes": 1}'])
def test_garbled_metadata_is_refused(tmp_path: Path, content: str):
    (tmp_path / "mmjax_snapshot.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not a snapshot's metadata"):
        load_snapshot(tmp_path, abstract_tree())


def test_another_schema_is_refused(tmp_path: Path):
    raw = {
        **{"source": "a/b", "revision": None, "architecture": "A", "dtype": "float32"},
        **{"schema_version": 0, "shapes": {}},
    }
    (tmp_path / "mmjax_snapshot.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="has schema 0; this mmjax reads 1"):
        load_snapshot(tmp_path, abstract_tree())


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in (path / "params").rglob("*") if file.is_file())


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "lost":
        file.unlink()
        return
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data) if how == "a bit" else bytes(data[:-1]))


@pytest.mark.parametrize("how", ["a bit", "the end", "lost"])
def test_damage_to_any_file_is_found(tmp_path: Path, how: str):
    path = tmp_path / "one"
    save_snapshot(path, make_params(None), source="a/b", architecture="A", revision="main")
    whole = {file: file.read_bytes() for file in files_of(path)}
    for file in [file for file, data in whole.items() if data]:
        damage(file, how)
        with pytest.raises(SnapshotDamagedError) as caught:
            load_snapshot(path, abstract_tree())
        assert f"`{file.relative_to(path)}`" in str(caught.value)
        assert "python -m mmjax.convert a/b" in str(caught.value)
        assert (caught.value.source, caught.value.revision) == ("a/b", "main")
        file.write_bytes(whole[file])
    load_snapshot(path, abstract_tree())


def test_processes_that_wait_for_each_other_agree_on_damage(tmp_path: Path):
    """Else those whose files are whole would wait for the others while they restore."""
    path, said = tmp_path / "one", []
    save_snapshot(path, make_params(None), source="a/b", architecture="A")

    def differ(is_whole: bool) -> bool:
        said.append(is_whole)
        return False

    with pytest.raises(SnapshotDamagedError, match=r"another process .*mmjax\.convert a/b"):
        load_snapshot(path, abstract_tree(), agree=differ)
    damage(next(file for file in files_of(path) if file.stat().st_size), "a bit")
    with pytest.raises(SnapshotDamagedError, match="has other bytes than were written"):
        load_snapshot(path, abstract_tree(), agree=differ)
    assert said == [True, False]


def test_one_of_an_earlier_version_is_read_unchecked(tmp_path: Path):
    path = tmp_path / "one"
    save_snapshot(path, make_params(None), source="a/b", architecture="A")
    file = path / "mmjax_snapshot.json"
    fields = json.loads(file.read_text())
    del fields["digests"]
    file.write_text(json.dumps(fields))
    load_snapshot(path, abstract_tree())
