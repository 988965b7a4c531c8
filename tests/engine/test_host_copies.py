"""Host copies of adapters: each load is told of, however few copies are kept."""

from pathlib import Path

from mmjax.engine.scheduling.adapters import Adapters
from mmjax.errors import CheckpointError
from mmjax.weights.adapter import Adapter


def read(path: Path) -> Adapter:
    if path.name == "bad":
        raise CheckpointError("it is bad")
    return Adapter(arrays={}, digest=path.name.encode())


def test_all_loads_are_told_of_though_one_copy_is_kept() -> None:
    adapters = Adapters(read, max_cpu_loras=1)
    for name in ("a", "bad", "b", "c"):
        adapters.load(name, Path(name))
        adapters.wait()
    told = dict(adapters.pop_loaded())
    assert told.keys() == {"a", "bad", "b", "c"}
    assert [name for name, error in told.items() if error is not None] == ["bad"]
    assert not adapters.is_loading
    assert [one.lora_name for one in adapters._kept.values()] == ["c"]
    adapters.close()


def test_one_that_is_unloaded_before_it_was_told_of_is_forgotten() -> None:
    adapters = Adapters(read, max_cpu_loras=1)
    for name in ("a", "bad"):
        adapters.load(name, Path(name))
        adapters.wait()
        adapters.unload(name)
    assert [name for name, _ in adapters.pop_loaded()] == ["a", "bad"]
    assert not adapters.is_loading
    assert not adapters._kept
    adapters.close()


def test_the_copy_that_a_request_uses_stays() -> None:
    """Else nobody would read it again, and its request would wait for ever."""
    adapters = Adapters(read, max_cpu_loras=1)
    for name in ("a", "b"):
        adapters.load(name, Path(name))
        adapters.wait()
    adapters.pop_loaded()
    for name in ("a", "b"):
        adapter = adapters.find(name)
        adapter.num_users += 1
        adapters.use(adapter)
        adapters.wait()
    assert adapters.find("b").is_ready
    adapters.close()


def test_the_copy_that_takes_the_place_of_a_used_one_stays() -> None:
    """Though the one before, which is still kept, and it are too many."""
    adapters = Adapters(read, max_cpu_loras=1)
    adapters.load("a", Path("a"))
    adapters.wait()
    adapters.pop_loaded()
    adapters.find("a").num_users += 1
    new = adapters.replace("a", Adapter(arrays={}, digest=b"new"))
    assert (new.is_ready, new.num_users) == (True, 1)
    assert [*adapters._kept.values()] == [new]
    adapters.close()


def test_a_copy_that_could_not_be_read_is_read_again_for_the_next_request() -> None:
    """Its files may have been out of reach for a moment."""
    faults = [None, None, OSError("no route to host"), None]

    def read_sometimes(path: Path) -> Adapter:
        if (fault := faults.pop(0)) is not None:
            raise fault
        return read(path)

    adapters = Adapters(read_sometimes, max_cpu_loras=1)
    for name in ("a", "b"):
        adapters.load(name, Path(name))
        adapters.wait()
        adapters.pop_loaded()
    adapter = adapters.find("a")
    found = []
    for _ in range(2):
        adapter.num_users += 1
        adapters.use(adapter)
        adapters.wait()
        found.append((adapter.is_ready, adapter.error is None))
        adapter.num_users -= 1
    assert found == [(False, False), (True, True)]
    adapters.close()
