"""The persistent compile cache: its folder, damaged entries, a disk without room."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src import distributed
from jax.experimental.compilation_cache import compilation_cache

from mmjax.engine.device.compilation import Program, compile_programs
from mmjax.engine.device.compile_cache import (
    CheckedCache,
    default_cache_dir,
    enable_persistent_cache,
)
from tests.engine.conftest import CACHE_DIR

pytestmark = pytest.mark.usefixtures("restored_options")


def test_the_cache_is_a_folder_of_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "xla"
    enable_persistent_cache(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.values[CACHE_DIR] == str(folder)


@pytest.mark.parametrize(
    ("given", "caches"), [("/var/c", "/var/c"), ("", "/h/.cache"), ("c", "/h/.cache")]
)
def test_it_lies_where_the_users_caches_do(
    monkeypatch: pytest.MonkeyPatch, given: str, caches: str
) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert default_cache_dir() == Path(caches) / "mmjax" / "xla"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path("/h/.cache/mmjax/xla")


def test_a_folder_that_others_may_write_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.engine.device.compile_cache.logger.propagate", True)
    jax.config.update(CACHE_DIR, None)
    tmp_path.chmod(0o777)
    enable_persistent_cache(tmp_path)
    assert "nobody else may write it" in caplog.text
    assert jax.config.values[CACHE_DIR] is None


def test_a_folder_that_cannot_be_made_costs_the_cache_only(tmp_path: Path) -> None:
    jax.config.update(CACHE_DIR, None)
    (tmp_path / "file").touch()
    enable_persistent_cache(tmp_path / "file" / "xla")
    assert jax.config.values[CACHE_DIR] is None


def test_a_cache_that_is_set_up_already_stays(tmp_path: Path) -> None:
    jax.config.update(CACHE_DIR, str(tmp_path))
    enable_persistent_cache(None)
    assert jax.config.values[CACHE_DIR] == str(tmp_path)


# ---- entries -------------------------------------------------------------------------------------


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Return a function that returns what was warned of so far."""
    monkeypatch.setattr("mmjax.engine.device.compile_cache.logger.propagate", True)
    return lambda: [one.message for one in caplog.records if one.levelname == "WARNING"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A cache that JAX uses."""
    enable_persistent_cache(tmp_path / "xla")
    compilation_cache.reset_cache()
    yield tmp_path / "xla"
    compilation_cache.reset_cache()


def compile_one(caplog: pytest.LogCaptureFixture, size: int = 23) -> str:
    """Compile a program, run it, and return whether it was compiled or fetched."""
    caplog.set_level("INFO", "mmjax.engine.device.compilation")
    jitted = jax.jit(lambda x: x * 23.5)
    arguments = {"x": jax.ShapeDtypeStruct((size,), jnp.float32)}
    caplog.clear()
    compile_programs([Program("one", jitted, arguments)])
    assert jitted(x=jnp.ones(size)).tolist() == [23.5] * size
    (line,) = (record.message for record in caplog.records if " one in " in record.message)
    return line.split()[0]


def entries_in(folder: Path) -> list[Path]:
    """Return those of `compile_one`: making its array compiles, too."""
    return list(folder.glob("jit__lambda-*-cache"))


def entry_in(folder: Path) -> Path:
    (entry,) = entries_in(folder)
    return entry


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmjax.engine.device.compilation.logger.propagate", True)


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="truncated"),
        pytest.param(lambda data: data[:-1], id="a byte short"),
        pytest.param(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], id="a bit"),
        pytest.param(lambda data: b"nonsense" * 100, id="nonsense"),
    ],
)
def test_a_damaged_entry_is_found_and_made_again(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    warnings: Callable[[], list[str]],
    damage: Callable[[bytes], bytes],
) -> None:
    assert compile_one(caplog) == "compiled"
    assert compile_one(caplog) == "fetched"
    entry = entry_in(folder)
    entry.write_bytes(damage(entry.read_bytes()))
    assert compile_one(caplog) == "compiled"
    assert len(warnings()) == 1
    assert "damaged, and is made again" in warnings()[0]
    assert compile_one(caplog) == "fetched"
    assert warnings() == []


@pytest.mark.usefixtures("folder", "logged")
def test_each_of_several_processes_keeps_its_programs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host has a folder of its own, and on a CPU another process has other keys."""
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    assert compile_one(caplog) == "compiled"
    assert compile_one(caplog) == "fetched"


@pytest.mark.usefixtures("logged")
def test_entries_of_other_programs_are_used(
    folder: Path, caplog: pytest.LogCaptureFixture, warnings: Callable[[], list[str]]
) -> None:
    assert compile_one(caplog) == "compiled"
    for digest in folder.glob("*-blake3"):
        digest.unlink()
    assert compile_one(caplog) == "fetched"
    # Of those JAX finds what its own format shows, and it is written again, too.
    entry = entry_in(folder)
    entry.write_bytes(entry.read_bytes()[:-7])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache"):
        assert compile_one(caplog) == "compiled"
    assert compile_one(caplog) == "fetched"


def test_one_of_two_writers_of_an_entry_wins(tmp_path: Path) -> None:
    """Whose digest came last does not matter."""
    first, second = CheckedCache(tmp_path), CheckedCache(tmp_path)
    write = first._write

    def write_late(path: Path, data: bytes) -> None:
        second.put("key", b"of the second")
        write(path, data)

    first._write = write_late  # type: ignore[method-assign]
    first.put("key", b"of the first")
    assert first.get("key") == second.get("key") == b"of the first"
    assert not list(tmp_path.glob("*-new"))


def test_an_entry_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert CheckedCache(tmp_path).get("key") is None
    assert CheckedCache(tmp_path / "not" / "there").get("key") is None


# ---- disks ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_without_room_or_right_to_write_programs_are_compiled_with_one_warning(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
    number: int,
) -> None:
    def refuse(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(number, os.strerror(number))

    assert compile_one(caplog, 3) == "compiled"
    monkeypatch.setattr(Path, "write_bytes", refuse)
    seen: list[str] = []
    for size in (4, 5, 6):
        assert compile_one(caplog, size) == "compiled"
        seen += warnings()
    assert len(seen) == 1
    assert "is not written any more" in seen[0]
    # What is there is used, and nothing half written is.
    assert compile_one(caplog, 3) == "fetched"
    assert len(entries_in(folder)) == 1
    assert not list(folder.glob("*-new"))


def test_a_folder_that_cannot_be_read_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def refuse(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    cache = CheckedCache(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert [cache.get(key) for key in "abc"] == [None] * 3
    assert len(warnings()) == 1
    assert "cannot be read" in warnings()[0]
