"""Lists as OpenAI's client asks for them: their limits, and items without ids."""

import io
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import MakeServer, Server


def test_input_items_without_ids_and_types_get_some(server: Server) -> None:
    client = server.openai()
    nothing = {"id": None, "type": None}
    given: Any = [{"role": "user", "content": text, **nothing} for text in ("a", "b", "c")]
    made = client.responses.create(model="tiny", input=given)
    page = client.responses.input_items.list(made.id, order="asc", limit=2)
    assert all(item.id for item in page.data)
    assert [item.content[0].text for item in page] == ["a", "b", "c"]  # type: ignore[union-attr]


def test_files_come_by_ten_thousands(make_server: MakeServer, tmp_path: Path) -> None:
    client = make_server(batch_dir=tmp_path).openai()
    for number in range(3):
        client.files.create(file=(f"{number}.jsonl", io.BytesIO(b"{}")), purpose="batch")
    assert len(client.files.list(limit=10_000).data) == 3
    assert len(client.files.list(limit=2).data) == 2
    for limit in (0, 10_001):
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.files.list(limit=limit)
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)
