"""The store on disk: laws over puts, gets and evictions, damage, other processes, full disks."""

import errno
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmjax.cache import disk_store
from mmjax.cache.disk_store import DiskStore
from mmjax.errors import ConfigError
from tests.cache.logs import find_records

LIMIT = 2**20


@contextmanager
def opened(
    directory: Path, max_bytes: int = LIMIT, namespace: bytes = b"model"
) -> Iterator[DiskStore]:
    store = DiskStore(directory, max_bytes, namespace)
    try:
        yield store
    finally:
        store.close()


def put(store: DiskStore, key: bytes, content: bytes) -> None:
    store.put(key, [content[:3], memoryview(content)[3:]])
    store.flush()


def file_size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def only_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


# ---- what was put is found ---------------------------------------------------------------------


def test_a_later_store_finds_what_was_put(tmp_path: Path):
    directory = tmp_path / "made" / "here"
    with opened(directory) as store:
        for key in (b"", b"key", b"k" * 1000):
            store.put(key, [b"of ", key])
        store.put(b"nothing", [])
    with opened(directory) as store:
        for key in (b"", b"key", b"k" * 1000):
            assert store.get(key) == b"of " + key
        assert store.get(b"nothing") == b""
        assert store.get(b"other") is None
        assert (store.stats.hits, store.stats.misses) == (4, 1)
        assert store.stats.bytes_read == 4 * 3 + 3 + 1000 - 3
    with opened(directory, namespace=b"another model") as store:
        assert store.get(b"key") is None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_a_content_may_be_read_into_memory_that_is_there(tmp_path: Path):
    memory = memoryview(bytearray(b"." * 9))
    with opened(tmp_path) as store:
        put(store, b"key", b"content")
        found = store.get(b"key", memory[1:8])
        assert found == b"content"
        assert found.readonly
        assert memory == b".content."
        assert store.get(b"key", memory[:0]) is None
        assert not list(tmp_path.iterdir())  # it is not what its reader has written
        assert (store.stats.hits, store.stats.damaged) == (1, 1)


def test_a_file_is_written_once(tmp_path: Path):
    with opened(tmp_path) as store:
        put(store, b"key", b"content")
        inode = only_file(tmp_path).stat().st_ino
        put(store, b"key", b"content")
        assert only_file(tmp_path).stat().st_ino == inode
        assert store.stats.bytes_written == len(b"content")


@given(
    st.lists(
        st.tuples(st.sampled_from("pgr"), st.integers(0, 7), st.integers(0, 1500)), max_size=40
    )
)
def test_random_puts_gets_and_restarts(actions: list[tuple[str, int, int]]):
    """What is found equals what was put, and the files never exceed the limit."""
    directory = Path(tempfile.mkdtemp())
    limit = 4000
    try:
        store = DiskStore(directory, limit, b"")
        for action, number, size in actions:
            key = b"%d of %d" % (number, size % 3)
            content = key * (1 + size // len(key))
            if action == "p":
                put(store, key, content)
            elif action == "g":
                found = store.get(key)
                assert found is None or bytes(found) == key * (len(found) // len(key))
            else:
                store.close()
                store = DiskStore(directory, limit, b"")
            assert file_size(directory) <= limit
            assert store.stats.damaged == 0
        store.close()
    finally:
        shutil.rmtree(directory)


def test_the_least_recently_used_go_first(tmp_path: Path):
    content = bytes(900)
    with opened(tmp_path, 4 * 1100) as store:
        for key in (b"a", b"b", b"c"):
            put(store, key, content)
        # The clock of a file system may be coarse.
        for age, path in enumerate(sorted(tmp_path.iterdir(), key=lambda p: p.stat().st_mtime_ns)):
            os.utime(path, (1000 + age, 1000 + age))
        assert store.get(b"a") is not None
        for key in (b"d", b"e"):
            put(store, key, content)
        found = {key for key in (b"a", b"b", b"c", b"d", b"e") if store.get(key) is not None}
        assert found == {b"a", b"c", b"d", b"e"}
        put(store, b"too large", bytes(4 * 1100))
        assert store.stats.dropped == 1
        assert store.get(b"e") is not None


def test_a_full_queue_drops_and_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_store, "MAX_PENDING_BYTES", 4096)
    store = DiskStore(tmp_path, LIMIT, b"")
    # The writer cannot begin.
    with store._changed:
        for number in range(10):
            store.put(b"%d" % number, [bytes(900)])
    store.close()
    found = [number for number in range(10) if store.get(b"%d" % number) is not None]
    assert found == [0, 1, 2]
    assert store.stats.dropped == 7
    store.put(b"late", [b""])
    assert store.stats.dropped == 8


# ---- damage ------------------------------------------------------------------------------------


def test_damage_of_any_byte_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with opened(tmp_path) as store:
        put(store, b"key", bytes(range(50)))
        path = only_file(tmp_path)
        whole = path.read_bytes()
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            caplog.clear()
            assert store.get(b"key") is None
            (record,) = find_records(caplog)
            assert "damaged" in record.getMessage()
            assert not path.exists()
        assert store.stats.damaged == len(whole)
        put(store, b"key", bytes(range(50)))
        assert store.get(b"key") == bytes(range(50))


def test_a_truncated_or_longer_file_is_a_miss(tmp_path: Path):
    with opened(tmp_path) as store:
        put(store, b"key", bytes(200))
        path = only_file(tmp_path)
        whole = path.read_bytes()
        wrong = [whole[:size] for size in range(len(whole))]
        for memory in (None, memoryview(bytearray(200))):
            for content in [*wrong, whole + b"\0", bytes(LIMIT + 1)]:
                path.write_bytes(content)
                assert store.get(b"key", memory) is None
                assert not path.exists()


def test_a_file_of_another_key_or_namespace_is_a_miss(tmp_path: Path):
    with opened(tmp_path / "other", namespace=b"other") as other:
        put(other, b"key", b"theirs")
    with opened(tmp_path / "another") as other:
        put(other, b"another key", b"theirs")
    with opened(tmp_path / "ours") as store:
        put(store, b"key", b"ours")
        path = only_file(tmp_path / "ours")
        for folder in ("other", "another"):
            shutil.copy(only_file(tmp_path / folder), path)
            assert store.get(b"key") is None
            assert not path.exists()


def test_disk_files_that_are_links_or_pipes_are_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    directory, secret = tmp_path / "store", tmp_path / "secret"
    with opened(directory, 1000) as store:
        put(store, b"key", b"content")
        path = only_file(directory)
        path.rename(secret)
        path.symlink_to(secret)
        (directory / "notes.txt").write_text("a user's")
        assert store.get(b"key") is None
        assert store.get(b"key") is None
        assert len(find_records(caplog)) == 1
        assert path.is_symlink()
        # A put takes the link's place, and does not follow it.
        before = secret.read_bytes()
        put(store, b"key", b"content")
        assert not path.is_symlink()
        assert secret.read_bytes() == before
        path.unlink()
        os.mkfifo(path)
        assert store.get(b"key") is None
        # Making room removes nobody else's files.
        for number in range(10):
            put(store, b"%d" % number, bytes(300))
        assert path.exists()
        assert (directory / "notes.txt").read_text() == "a user's"


def test_a_directory_must_be_ours_alone(tmp_path: Path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("shared", "link", "file"):
        with pytest.raises(ConfigError, match=f"{name}` .*directory"):
            DiskStore(tmp_path / name, LIMIT, b"")


def test_what_a_killed_process_did_not_finish_is_removed(tmp_path: Path):
    old, new = (tmp_path / f"{digit * 32}.mmjax-new" for digit in "ab")
    for path in (old, new):
        path.write_bytes(bytes(100))
    os.utime(old, (1, 1))
    # Another process's counts, and stays even where all others must go.
    with opened(tmp_path, 600) as store:
        put(store, b"key", bytes(200))
        put(store, b"another key", bytes(200))
    assert len(list(tmp_path.iterdir())) == 2
    assert not old.exists()
    assert new.exists()


# ---- disks that do not take more ---------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "write", "rename", "unlink"])
def test_a_full_or_read_only_disk_is_only_read(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    real = getattr(os, call)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC if call == "write" else errno.EROFS, "no room")

    # Only where it is full does a write remove another file.
    with opened(tmp_path, 1000 if call == "unlink" else LIMIT) as store:
        put(store, b"key", bytes(500))
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            for number in range(3):
                put(store, b"%d" % number, bytes(500))
        put(store, b"late", bytes(5))
        assert store.get(b"key") == bytes(500)
        assert store.stats.dropped == 4
        (record,) = find_records(caplog)
        assert "only read" in record.getMessage()
    assert len(list(tmp_path.iterdir())) == 1


def test_whatever_a_write_raises_later_ones_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any) -> None:
        raise MemoryError

    with opened(tmp_path) as store:
        with monkeypatch.context() as patched:
            patched.setattr(store, "_write_file", fail)
            put(store, b"key", bytes(5))
        put(store, b"late", bytes(5))
        assert store.get(b"key") is None
        assert store.get(b"late") == bytes(5)
        assert store.stats.dropped == 1
        (record,) = find_records(caplog)
        assert "was not written" in record.getMessage()


# ---- several processes -------------------------------------------------------------------------


def write_and_read(directory: Path, seed: int, num_rounds: int) -> None:
    """Put and get keys that other processes put and evict, too; every answer must be right."""
    store = DiskStore(directory, 64 * 1024, b"")
    num_found = 0
    for number in range(num_rounds):
        key = b"%d" % ((number * seed) % 37)
        store.put(key, [key * 500])
        found = store.get(b"%d" % ((number + seed) % 37))
        if found is not None:
            num_found += 1
            assert found == (b"%d" % ((number + seed) % 37)) * 500
        if number % 8 == 0:
            store.flush()
    store.close()
    assert num_found
    assert store.stats.damaged == 0
    assert not store._is_read_only


def test_processes_share_a_directory(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=write_and_read, args=(tmp_path, seed, 600)) for seed in (5, 7)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert file_size(tmp_path) <= 64 * 1024 * (1 + 2 / 32)
    assert all(path.suffix == ".mmjax" for path in tmp_path.iterdir())
