"""What the caches log, of all that is logged while a test runs."""

import logging

import pytest


def find_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the caches' own: another test's engine may log from a thread meanwhile."""
    return [one for one in caplog.records if one.name.startswith("mmjax.cache.")]
