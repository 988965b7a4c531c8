"""What every test runs under: the CPU, strict arrays, no network, warnings as errors.

`MMJAX_TEST_PLATFORM=cuda` in the environment runs tests on a GPU (docs/performance.md).
"""

import asyncio
import gc
import inspect
import itertools
import os
import platform
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from tests.how_compiled import environment

# NOTE: before anything imports jax. Set in the environment, so that the processes a test starts
# (an engine, a server) live under the same rules as the test itself.
PLATFORM = os.environ.get("MMJAX_TEST_PLATFORM", "cpu")
os.environ.update(
    JAX_PLATFORMS=PLATFORM,
    JAX_NUMPY_DTYPE_PROMOTION="strict",
    JAX_NUMPY_RANK_PROMOTION="raise",
    JAX_DEFAULT_MATMUL_PRECISION="highest",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_VERBOSITY="error",
)
FOUR_DEVICES = "--xla_force_host_platform_device_count=4"
if FOUR_DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FOUR_DEVICES}".strip()
# But where a test's programs are compiled as they are served (`as_served`).
os.environ.update(environment(os.environ["XLA_FLAGS"], is_served=PLATFORM != "cpu"))
# Torch's threads wait for each other by spinning: beside workers, or any other load, a tiny model
# on two of them takes twenty times as long as on one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else each worker and each of the servers that tests start compiles every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _share_compiled_programs() -> None:
    """Keep compiled programs between workers, the servers that tests start, and runs.

    In a folder that only this user can write: what lies there is machine code that jax loads and
    runs. Hence its owner is checked, and its name carries the machine's kind.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mmjax"
    folder = root / f"tests-{version('jax')}-{platform.machine()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


_share_compiled_programs()

FIRST_WORKER_S = 180.0
"""How long other workers wait for the first at most."""


def _find_collected_mark() -> Path:
    """Return the file that says that a worker of this run has collected all tests."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    return Path(tempfile.gettempdir()) / f"mmjax-tests-{run}-collected"


def _wait_for_bytecode() -> None:
    """Let one worker collect first where tests have no bytecode yet: the others then read its.

    Side by side each would compile all of it, which is half of what collecting costs.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:  # the process that starts workers, which inherit this
        has_bytecode = any(Path(__file__).parent.glob("__pycache__/test_*-pytest-*.pyc"))
        os.environ["MMJAX_TESTS_HAVE_BYTECODE"] = str(has_bytecode)
    elif worker != "gw0" and os.environ.get("MMJAX_TESTS_HAVE_BYTECODE") == "False":
        deadline = time.monotonic() + FIRST_WORKER_S
        while not _find_collected_mark().exists() and time.monotonic() < deadline:
            time.sleep(0.1)


_wait_for_bytecode()

import pytest  # noqa: E402 (the environment comes first)
from hypothesis import HealthCheck, settings  # noqa: E402

from tests import shape_checks, shared_programs  # noqa: E402

shape_checks.install()

from tests.kit import is_slow_run, tiny_gemma3_checkpoint  # noqa: E402

# How long an example takes says more of the machine's load than of the code.
PROFILE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("random", PROFILE)
# The same examples at every run, so that a change alone turns a run red; `make test-slow` draws
# new ones.
settings.register_profile("mmjax", PROFILE, derandomize=True)
settings.load_profile("mmjax")


MAX_RESIDENT_BYTES = 5 * 2**29
"""Of a worker, before it forgets its compiled programs: four of them, and the servers that tests
start, are to fit into 12 GB."""
MAX_MAPPINGS = 2**15
"""The same of its memory mappings, of which a program has some: with 65,530 of them XLA ends the
process (Linux's `vm.max_map_count`)."""
TESTS_BETWEEN_LOOKS = 32
"""A file of laws has hundreds of slow rows, with some hundred mappings each."""
_num_tests = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _forget_after_module() -> Iterator[None]:
    yield
    forget_if_large()


def forget_if_large() -> None:
    """Keep a worker from growing with every program that its tests ever compiled."""
    memory = Path("/proc/self")
    if not memory.exists():  # not Linux
        return
    num_pages = int((memory / "statm").read_text(encoding="ascii").split()[1])
    is_large = num_pages * os.sysconf("SC_PAGE_SIZE") > MAX_RESIDENT_BYTES
    if is_large or (memory / "maps").read_bytes().count(b"\n") > MAX_MAPPINGS:
        shared_programs.forget()


@pytest.fixture(scope="session", autouse=True)
def _share_programs() -> None:
    """Let engines that are alike share their programs."""
    shared_programs.install()


@pytest.fixture(scope="session", autouse=True)
def _freeze_imports() -> None:
    """Let no collection of garbage look at half a million objects of what was imported."""
    gc.collect()
    gc.freeze()


def _is_as_served(item: pytest.Item) -> bool:
    """Return whether a test's programs are compiled as those that users run.

    Those of slow tests, of the slow run, and of tests of bits and of the checkpoint that comes with
    the package (`as_served`) are. Compiling takes a third of the default run's processor time, and
    half of that without most optimizations. Whether a model is HF's, who is preempted, and what a
    crash loses does not depend on which instructions LLVM chooses; the last bits of a sum do.
    """
    marks = (item.get_closest_marker(name) for name in ("slow", "as_served"))
    return is_slow_run() or PLATFORM != "cpu" or any(marks)


SHORT = ("cache", "families", "frontend", "layout", "processing", "server", "threats", "transport")
"""Folders whose files take seconds each, but for the tests of the page, which start browsers."""


@lru_cache(1)  # tests come file by file
def _find_turn(path: Path) -> int:
    """Return when a test's file is taken: laws of all families first, short files last."""
    folder = path.parent.relative_to(Path(__file__).parent)
    if folder.parts and folder.parts[0] in SHORT and folder.name != "page":
        return 2
    return 0 if "laws" in path.stem else 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let workers, which take files in this order, end together.

    pytest-randomly has shuffled files before, so that some wait while others compute. By the number
    of tests, which is xdist's order, files that wait for servers would be the last, all at once.
    """
    items.sort(key=lambda item: (_find_turn(item.path), _is_as_served(item)))


def pytest_collection_finish() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        _find_collected_mark().touch()


def pytest_sessionfinish() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        _find_collected_mark().unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    fixtures = set(getattr(item, "fixturenames", ()))
    shared_programs.is_paused = not fixtures.isdisjoint({"monkeypatch", "own_programs"})
    shared_programs.optimize(is_whole=_is_as_served(item))
    shared_programs.has_all_sizes = is_slow_run() or "all_sizes" in fixtures
    if next(_num_tests) % TESTS_BETWEEN_LOOKS == 0:
        forget_if_large()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def own_programs() -> None:
    """For a test whose engines share no programs with others."""


@pytest.fixture(scope="session")
def all_sizes() -> None:
    """For a test whose engines have programs of all sizes."""


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Gemma 3 checkpoint directory in the hub's layout; read it, never change it."""
    return tiny_gemma3_checkpoint(tmp_path_factory.mktemp("tiny_gemma3"))


@pytest.fixture(scope="session")
def default_checkpoint() -> Path:
    """The trained default that the repository carries."""
    return Path(__file__).parent.parent / "checkpoints" / "tiny_scenes" / "model"
