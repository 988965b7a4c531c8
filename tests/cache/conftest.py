"""Both halves of a small cache in shared memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mmjax.cache.media.shared_cache import ShmObjectStoreReceiverCache, ShmObjectStoreSenderCache
from tests.cache.shm_kit import PAGE


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[ShmObjectStoreSenderCache]:
    sender = ShmObjectStoreSenderCache(4 * PAGE, max_object_bytes=3 * PAGE, directory=tmp_path)
    yield sender
    sender.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def receiver(
    sender: ShmObjectStoreSenderCache, tmp_path: Path
) -> Iterator[ShmObjectStoreReceiverCache]:
    receiver = ShmObjectStoreReceiverCache(sender.name, directory=tmp_path)
    yield receiver
    receiver.close()
