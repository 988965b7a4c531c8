"""The cache in shared memory between processes: killed readers, dead writers, files left behind."""

import gc
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from mmjax.cache.media.shared_cache import ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache
from mmjax.cache.media.shared_directory import SharedDirectory
from mmjax.errors import ConfigError
from mmjax.params.sampling_params import SamplingParams
from mmjax.processing.tensors.inputs import ItemData, SharedItem
from mmjax.transport.codec import decode, encode
from mmjax.transport.messages import EngineCoreRequest
from tests.cache.shm_kit import PAGE, feature, make_item, put, read

# ---- readers that die --------------------------------------------------------------------------


def read_and_hold(name: str, directory: Path, pipe: Connection) -> None:
    """Be P1: answer every message with the first and last byte of its items; hold them all."""
    receiver = ShmObjectStoreReceiverCache(name, directory=directory)
    held = []
    pipe.send("attached")
    while frames := pipe.recv():
        message = decode(frames)
        assert isinstance(message, EngineCoreRequest)
        features = receiver.get_and_update_features(message.mm_features)
        arrays = [one.tensors["x"].data for one in features if one.tensors is not None]
        pipe.send([(int(array[0]), int(array[-1]), array.size) for array in arrays])
        held.append(features)


class Reader:
    """P1 in a process of its own."""

    def __init__(self, sender: ShmObjectStoreSenderCache, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (sender.name, directory, theirs)
        self.process = context.Process(target=read_and_hold, args=arguments)
        self.process.start()
        theirs.close()
        assert self.pipe.recv() == "attached"

    def send(self, items: list[ItemData]) -> list[tuple[int, int, int]]:
        message = EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1],
            mm_features=[
                feature(item, item.mm_hash if isinstance(item, SharedItem) else str(n))
                for n, item in enumerate(items)
            ],
            sampling_params=SamplingParams(),
        )
        self.pipe.send([bytes(frame) for frame in encode(message)])
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def reading(sender: ShmObjectStoreSenderCache, directory: Path) -> Iterator[Reader]:
    reader = Reader(sender, directory)
    try:
        yield reader
    finally:
        reader.kill()


def test_a_reader_is_killed_and_the_next_one_reads_on(tmp_path: Path):
    sender = ShmObjectStoreSenderCache(4 * PAGE, directory=tmp_path)
    with reading(sender, tmp_path) as reader:
        # It holds them all: more than the cache.
        for value in range(6):
            handle = put(sender, str(value), value=value)
            assert isinstance(handle, SharedItem)
            assert reader.send([handle]) == [(value, value, PAGE)]
    sender.reset_readers()
    with reading(sender, tmp_path) as reader:
        handles = [put(sender, str(value), value=99) for value in range(2, 6)]
        assert reader.send(handles) == [(value, value, PAGE) for value in range(2, 6)]
    sender.close()
    assert not list(tmp_path.iterdir())


# ---- writers that die --------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from mmjax.cache.media.shared_cache import ShmObjectStoreSenderCache
from mmjax.processing.tensors.inputs import SharedItem
from tests.cache.shm_kit import put
sender = ShmObjectStoreSenderCache(2**20, name="victim", directory=Path(sys.argv[1]))
put(sender, "a")
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""


def start_writer(directory: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-W", "error", "-c", WRITER, str(directory), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=os.environ)


def test_a_dead_writers_file_goes_at_the_next_start_and_a_living_ones_stays(tmp_path: Path):
    with start_writer(tmp_path, 60) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        with pytest.raises(ConfigError, match=r"`.*victim` cannot be made: File exists"):
            ShmObjectStoreSenderCache(PAGE, name="victim", directory=tmp_path)
        reader = ShmObjectStoreReceiverCache("victim", directory=tmp_path)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    # The reader that is left keeps nothing alive.
    sender = ShmObjectStoreSenderCache(PAGE, name="victim", directory=tmp_path)
    assert isinstance(put(sender, "a"), SharedItem)
    reader.close()
    sender.close()
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_writer_that_ends_without_closing_leaves_no_file_and_says_nothing(tmp_path: Path):
    with start_writer(tmp_path, 0) as writer:
        stdout, stderr = writer.communicate(timeout=60)
    assert (stdout, stderr, writer.returncode) == ("ready\n", "", 0)
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_its_parents_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It runs what its parent has to run at its end."""
    directory = SharedDirectory.create("name", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        directory.close()
    assert directory.path.exists()


def test_a_forgotten_writer_takes_its_file_along(tmp_path: Path):
    sender = ShmObjectStoreSenderCache(PAGE, directory=tmp_path)
    assert sender.path.parent == tmp_path
    del sender
    gc.collect()
    assert not list(tmp_path.iterdir())


# ---- files -------------------------------------------------------------------------------------


def test_files_are_this_users_alone():
    sender = ShmObjectStoreSenderCache(PAGE)
    put(sender, "a")
    (file,) = sender.path.iterdir()
    for path, mode in ((file, 0o600), (sender.path, 0o700), (sender.path.parent, 0o700)):
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == mode
        assert status.st_uid == os.geteuid()
    reader = ShmObjectStoreReceiverCache(sender.name)
    assert read(reader, put(sender, "a")) == make_item()
    sender.close()
    reader.close()
    assert not sender.path.exists()


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a\0", "ä", "a" * 129])
def test_a_name_is_a_name(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="`mm_shm_name` is"):
        ShmObjectStoreReceiverCache(name, directory=tmp_path)
    with pytest.raises(ConfigError, match="`mm_shm_name` is"):
        ShmObjectStoreSenderCache(PAGE, name=name, directory=tmp_path)


def test_what_others_could_write_is_refused(tmp_path: Path):
    sender = ShmObjectStoreSenderCache(PAGE, directory=tmp_path)
    os.chmod(sender.path, 0o740)
    with pytest.raises(ConfigError, match="mode 740"):
        ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    os.chmod(sender.path, 0o700)
    os.chmod(tmp_path, 0o750)
    with pytest.raises(ConfigError, match="mode 750"):
        ShmObjectStoreSenderCache(PAGE, directory=tmp_path)
    with pytest.raises(ConfigError, match="mode 750"):
        ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    os.chmod(tmp_path, 0o700)
    sender.close()


def test_a_link_is_not_followed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory):
    target = tmp_path_factory.mktemp("precious")
    (target / "file").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ConfigError, match="must be a directory"):
        ShmObjectStoreReceiverCache("link", directory=tmp_path)
    # Nor removed as what a dead writer left.
    with pytest.raises(ConfigError, match="File exists"):
        ShmObjectStoreSenderCache(PAGE, name="link", directory=tmp_path)
    assert (target / "file").read_bytes() == b"precious"


def test_a_directory_that_is_not_there_is_named(tmp_path: Path):
    for directory in (None, tmp_path):
        with pytest.raises(ConfigError, match="`absent` is not there"):
            ShmObjectStoreReceiverCache("absent", directory=directory)


def test_a_file_is_no_directory(tmp_path: Path):
    (tmp_path / "odd").touch(0o600)
    with pytest.raises(ConfigError, match="must be a directory"):
        ShmObjectStoreReceiverCache("odd", directory=tmp_path)
