"""Requests that schemathesis makes from the API's schema: no 5xx, and only what is described."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from mmjax.frontend.prompt.input_processor import InputProcessor
from tests.server.conftest import Server, servers

NEVER_DOCUMENTED = {"405"}
"""Of methods that an address does not take: the schema has no place for them."""


@pytest.fixture(scope="module")
def described_server(
    server_input_processor: InputProcessor, roomy_input_processor: InputProcessor
) -> Iterator[Server]:
    with servers(server_input_processor, roomy_input_processor) as make:
        yield make(max_num_stored_responses=8)


@pytest.fixture(scope="module")
def any_case(described_server: Server) -> st.SearchStrategy[Any]:
    """Any request of the schema, right and wrong."""
    schema = schemathesis.openapi.from_dict(described_server.app.openapi())
    results = list(schema.get_all_operations())
    operations = [one.ok() for one in results if isinstance(one, Ok)]
    assert len(operations) == len(results)
    modes = schemathesis.GenerationMode
    return st.one_of(
        [
            one.as_strategy(generation_mode=mode)
            for one in operations
            for mode in (modes.POSITIVE, modes.NEGATIVE)
        ]
    )


def check(server: Server, case: Any) -> None:
    kwargs = case.as_transport_kwargs(base_url="http://testserver")
    # No route reads cookies; raw bytes have another name in this client.
    del kwargs["cookies"]
    if "data" in kwargs:
        kwargs["content"] = kwargs.pop("data")
    response = server.http.request(**kwargs)
    described = case.operation.definition.raw["responses"].keys()
    assert response.status_code < 500, (kwargs, response.text)
    assert str(response.status_code) in {*described, *NEVER_DOCUMENTED}, (kwargs, response.text)
    assert server.engine_client.num_requests == 0


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)
@given(data=st.data())
def test_no_request_of_the_schema_is_the_servers_fault(
    described_server: Server, any_case: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    check(described_server, data.draw(any_case))
