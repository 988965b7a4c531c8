"""A failure inside processing is a 500 that hides it; a client's own mistake names a field."""

import logging
from typing import Any

import pytest

from tests.server.conftest import MakeServer
from tests.server.test_bad_input import error_of, image_message

INSIDES = "HF's own words, at 0x7f3a"


def test_what_hf_raises_is_a_500_that_tells_nothing_of_it(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError(INSIDES)

    processor = server.engine_client.input_processor
    hf_processor = processor._pool.first.info.get_hf_processor()
    monkeypatch.setattr(type(hf_processor), "__call__", fail)
    error = error_of(server.chat(messages=[image_message()]), 500)
    assert error["code"] == "internal_error"
    assert INSIDES not in str(error)
    assert "Gemma3Processor" not in str(error)


def test_what_a_clients_kwargs_break_is_a_400_that_names_them(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server = make_server(trusts_mm_kwargs=True)
    for kwargs, param in (
        ({"do_pan_and_scn": True}, "mm_processor_kwargs.do_pan_and_scn"),
        ({"size": "huge"}, "mm_processor_kwargs"),
        ({"pan_and_scan_max_num_crops": 1000}, "mm_processor_kwargs.pan_and_scan_max_num_crops"),
    ):
        answer = server.chat(messages=[image_message()], mm_processor_kwargs=kwargs)
        error = error_of(answer, 400)
        assert error["param"] == param
        assert "Gemma3" not in error["message"]
    assert "dropped" not in caplog.text
