"""A response that an operator has ended is not completed."""

from typing import Any

import msgspec
import pytest

from mmjax.transport.messages import RequestOutputDelta
from tests.echo_engine import EchoEngine
from tests.server.conftest import Server


@pytest.mark.parametrize("stream", [False, True])
def test_its_status_says_so(server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    client: Any = server.openai()
    step = EchoEngine.step

    def step_and_abort(self: EchoEngine) -> list[RequestOutputDelta]:
        deltas = step(self)
        for index, delta in enumerate(deltas):
            running = self.running.get(delta.request_id)
            if running is not None and running.num_sent == 3:
                # As `/update_weights` with `mode` abort.
                deltas[index] = msgspec.structs.replace(delta, finish_reason="abort")
                del self.running[delta.request_id]
        return deltas

    monkeypatch.setattr(EchoEngine, "step", step_and_abort)
    made = client.responses.create(model="tiny", input="a red circle", stream=stream)
    events = list(made) if stream else []
    response = events[-1].response if stream else made
    assert response.status == "cancelled"
    assert response.usage.output_tokens == 3
    assert not events or events[-1].type == "response.incomplete"
    follow_up = {"input": "and?", "previous_response_id": response.id}
    refused = server.http.post("/v1/responses", json=follow_up)
    assert refused.status_code == 400
    assert "cancelled" in refused.json()["error"]["message"]
