"""What tests of the engine share."""

from collections.abc import Iterator

import jax
import pytest

CACHE_DIR = "jax_compilation_cache_dir"
OPTIONS = (
    CACHE_DIR,
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def restored_options() -> Iterator[None]:
    """Leave JAX's options of its compilation cache as they were."""
    before = {name: jax.config.values[name] for name in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
