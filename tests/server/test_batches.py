"""/v1/files and /v1/batches: by OpenAI's client, across restarts, and what is refused."""

import errno
import io
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from mmjax.config.engine_config import SchedulerConfig
from mmjax.errors import ConfigError, RequestError
from mmjax.server.batches.service import UploadedForm
from mmjax.server.batches.store import BatchStore
from mmjax.server.middleware import key_digests
from tests.echo_engine import EchoSupervisor
from tests.kit import draw
from tests.server.conftest import MakeServer, Server
from tests.server.test_form import FORM, write_part

WAIT_S = 60.0
CHAT = "/v1/chat/completions"


def write_lines(num_lines: int, **fields: Any) -> bytes:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"messages": [{"role": "user", "content": f"a circle {number}"}], **fields},
        }
        for number in range(num_lines)
    ]
    return b"\n".join(json.dumps(line).encode() for line in lines)


def upload(client: openai.OpenAI, data: bytes) -> Any:
    return client.files.create(
        file=("../../lines.jsonl", io.BytesIO(data)),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )


def create(client: openai.OpenAI, data: bytes, **fields: Any) -> Any:
    return client.batches.create(
        input_file_id=upload(client, data).id,
        endpoint=CHAT,
        completion_window="24h",
        **fields,
    )


def wait_for(client: openai.OpenAI, batch: Any, *statuses: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while (found := client.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def wait_for_answers(client: openai.OpenAI, batch: Any, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        counts = client.batches.retrieve(batch.id).request_counts
        if counts is not None and counts.completed >= number:
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read(client: openai.OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_by_openais_client(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(batch_dir=tmp_path / "batches")
    client = server.openai()
    data = write_lines(40, max_tokens=3) + b"\nnonsense\n"
    batch = create(client, data, metadata={"a": "b"})
    assert (batch.status, batch.request_counts.total) == ("validating", 0)
    done = wait_for(client, batch, "completed")
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
    assert done.metadata == {"a": "b"}
    answers, errors = read(client, done.output_file_id), read(client, done.error_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(40))
    first = next(one for one in answers if one["custom_id"] == "line-7")
    body = {"messages": [{"role": "user", "content": "a circle 7"}], "max_tokens": 3}
    over_http = server.http.post(CHAT, json=body).json()
    assert first["response"]["body"]["choices"] == over_http["choices"]
    assert "not valid JSON" in errors[0]["error"]["message"]

    source = client.files.retrieve(done.input_file_id)
    assert (source.filename, source.bytes) == ("../../lines.jsonl", len(data))
    assert client.files.content(source.id).content == data
    listed = {one.id for one in client.files.list()}
    assert listed == {source.id, done.output_file_id, done.error_file_id}
    assert [one.id for one in client.files.list(purpose="batch")] == [source.id]
    assert [one.id for one in client.batches.list(limit=1)] == [batch.id]
    for file_id in listed:
        assert client.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(source.id)
    names = {path.name for path in (tmp_path / "batches").iterdir()}
    assert names == {"lock", f"{batch.id}.json"}


def test_a_batch_goes_on_after_a_restart(make_server: MakeServer, tmp_path: Path) -> None:
    slow = make_server(batch_dir=tmp_path, supervisor=EchoSupervisor(delay_s=0.02))
    batch = create(slow.openai(), write_lines(120, max_tokens=2))
    wait_for_answers(slow.openai(), batch, 20)
    with pytest.raises(ConfigError, match="another server's"):
        make_server(batch_dir=tmp_path)
    slow.http.__exit__()
    assert slow.supervisor.engine.num_steps
    fast = make_server(batch_dir=tmp_path)
    done = wait_for(fast.openai(), batch, "completed")
    answers = read(fast.openai(), done.output_file_id)
    assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(120))
    assert len(fast.supervisor.engine.added) <= 100


def test_a_cancelled_batch_keeps_what_it_has(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(batch_dir=tmp_path, supervisor=EchoSupervisor(delay_s=0.02))
    client = server.openai()
    running = create(client, write_lines(5000, max_tokens=2))
    waiting = create(client, write_lines(5))
    wait_for_answers(client, running, 5)
    with pytest.raises(openai.BadRequestError, match="reads this file"):
        client.files.delete(running.input_file_id)
    assert client.batches.cancel(waiting.id).status == "cancelled"
    assert client.batches.cancel(running.id).status in ("cancelling", "cancelled")
    done = wait_for(client, running, "cancelled")
    assert 5 <= len(read(client, done.output_file_id)) == done.request_counts.completed < 5000
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(running.id)
    # The next one has its turn.
    wait_for(client, create(client, write_lines(3, max_tokens=2)), "completed")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_other_requests_come_first(make_server: MakeServer, tmp_path: Path, policy: Any) -> None:
    server = make_server(
        batch_dir=tmp_path,
        supervisor=EchoSupervisor(delay_s=0.01),
        scheduler=SchedulerConfig(max_num_seqs=4, scheduling_policy=policy),
    )
    client = server.openai()
    batch = create(client, write_lines(400, max_tokens=2))
    wait_for_answers(client, batch, 5)
    most = max(server.engine_client.capacity.num_seqs for _ in range(1000))
    assert most <= (3 if policy == "fcfs" else 8)
    assert server.chat(max_tokens=2).status_code == 200
    priorities = {one.priority for one in server.supervisor.engine.added}
    assert priorities == ({0} if policy == "fcfs" else {0, 2**31 - 1})


def test_a_full_disk_holds_up_no_batch_behind(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, full = BatchStore._write, set[str]()

    def write_where_there_is_room(store: BatchStore, item_id: str, record: Any) -> None:
        if getattr(record.shown, "status", "") in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(store, item_id, record)

    monkeypatch.setattr(BatchStore, "_write", write_where_there_is_room)
    client = make_server(batch_dir=tmp_path).openai()
    for status in ("in_progress", "completed"):
        full |= {status, "failed"}
        lost = wait_for(client, create(client, write_lines(2, max_tokens=1)), "failed", "completed")
        assert lost.status == ("failed" if status == "in_progress" else status)
        full.clear()
        wait_for(client, create(client, write_lines(2, max_tokens=1)), "completed")


def test_another_key_sees_nothing(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(batch_dir=tmp_path, api_keys=("mine", "other"))
    mine, other = server.openai("mine"), server.openai("other")
    batch = create(mine, write_lines(3, max_tokens=2))
    done = wait_for(mine, batch, "completed")
    for look in (
        lambda: other.files.retrieve(done.input_file_id),
        lambda: other.files.content(done.output_file_id),
        lambda: other.files.delete(done.output_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            look()
    with pytest.raises(openai.NotFoundError, match="no such file"):
        other.batches.create(
            input_file_id=done.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    assert list(other.files.list()) == list(other.batches.list()) == []
    with pytest.raises(openai.AuthenticationError):
        server.openai("none").files.list()
    # Its lines have the salt of its key, as its requests do.
    salts = {one.cache_salt for one in server.supervisor.engine.added}
    assert salts == {f"api key {key_digests(['mine'])[0]}"}


def test_a_key_that_was_taken_away_has_no_work_done(
    make_server: MakeServer, tmp_path: Path
) -> None:
    slow = make_server(batch_dir=tmp_path, api_keys=("a", "b"), supervisor=EchoSupervisor(0.05))
    batch = create(slow.openai("a"), write_lines(500))
    wait_for(slow.openai("a"), batch, "in_progress")
    slow.http.__exit__()
    after = make_server(batch_dir=tmp_path, api_keys=("b",))
    time.sleep(0.2)
    assert not after.supervisor.engine.added
    (path,) = tmp_path.glob("batch_*.json")
    assert json.loads(path.read_bytes())["shown"]["status"] == "failed"


def test_what_is_refused(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(batch_dir=tmp_path, max_batch_file_bytes=4000, max_batch_dir_bytes=6000)
    client = server.openai()
    with pytest.raises(openai.APIStatusError, match="max-batch-file-bytes") as caught:
        upload(client, b"x" * 4001)
    assert caught.value.status_code == 413
    assert server.http.post("/v1/files", content=b"x" * (2**20 + 5000)).status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"{}", purpose="assistants")
    assert server.http.post("/v1/files", json={}).status_code == 400
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="../lock", endpoint=CHAT, completion_window="24h")
    for path in ("/v1/files/lock", "/v1/files/..%2flock/content", "/v1/batches/x"):
        assert server.http.get(path).status_code == 404
    for name in ("expires[anchor]", "expires_after[", "[a]", "purpose[a]"):
        form = {"purpose": "batch", name: "x"}
        refused = server.http.post("/v1/files", data=form, files={"file": b"{}"})
        assert refused.status_code == 400, name
    file = upload(client, b"x" * 3000)
    for changes in ({"endpoint": "/v1/moderations"}, {"completion_window": "1h"}, {"more": 1}):
        body = {"input_file_id": file.id, "endpoint": CHAT, **changes}
        assert server.http.post("/v1/batches", json=body).status_code == 400
    with pytest.raises(openai.RateLimitError, match="max-batch-dir-bytes"):
        upload(client, b"x" * 3500)
    empty = create(client, b"\n \n")
    found = wait_for(client, empty, "failed")
    assert found.errors.data[0].code == "empty_file"
    assert not list(tmp_path.glob("file-*.draft"))


def test_batches_that_wait_are_no_more_than_are_kept(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmjax.server.batches.store.MAX_OBJECTS", 3)
    slow = make_server(batch_dir=tmp_path, supervisor=EchoSupervisor(delay_s=0.05))
    client = slow.openai()
    body = {"input_file_id": upload(client, write_lines(200)).id, "endpoint": CHAT}
    answers = [slow.http.post("/v1/batches", json=body) for _ in range(5)]
    assert [one.status_code for one in answers] == [200, 200, 200, 429, 429]
    client.batches.cancel(answers[2].json()["id"])
    assert slow.http.post("/v1/batches", json=body).status_code == 200


def test_without_its_flag_there_are_no_such_routes(server: Server) -> None:
    for path in ("/v1/files", "/v1/files/file-1", "/v1/files/file-1/content", "/v1/batches"):
        found = server.http.get(path)
        assert found.status_code == 404
        assert "`--batch-dir`" in found.json()["error"]["message"]


def test_a_picture_of_a_file_is_read_where_requests_may_read_it(
    make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(batch_dir=tmp_path / "batches")
    draw(40, 30).save(tmp_path / "one.png")
    image = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/one.png"}}
    messages = [{"role": "user", "content": [image]}]
    over_http = server.http.post(CHAT, json={"messages": messages})
    batch = create(server.openai(), write_lines(1, messages=messages))
    done = wait_for(server.openai(), batch, "completed")
    (error,) = read(server.openai(), done.error_file_id)
    assert error["response"]["status_code"] == over_http.status_code == 400
    assert error["response"]["body"] == over_http.json()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_form_in_pieces_is_read_as_a_whole_one(size: int) -> None:
    content = b"a\r\n--mar\r\n--\r\n" * 20
    body = b"preamble\r\n" + write_part("purpose", b"batch")
    body += write_part("file", content, '; filename="\xc3\xbc"') + b"--mark--\r\nend"
    file = io.BytesIO()
    form = UploadedForm(FORM, file, max_bytes=len(content), max_lines=60)
    for start in range(0, len(body), size):
        form.feed(body[start : start + size])
    form.finish()
    assert file.getvalue() == content
    assert (form.fields, form.num_bytes) == ({"purpose": "batch"}, len(content))
    assert form.num_lines == 60


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cut off"),
        (write_part("file", b"x", '; filename="x"'), "cut off"),
        (b"--mark" + b"x" * 10, "cut off"),
        (b"--mark\r\n" + b"x" * 5000, "cut off"),
        (b"--mark--", "`file` is missing"),
        (write_part("file", b"x") + b"--mark--", "`file` is missing"),
        (write_part("other", b"x", '; filename="x"'), "is a file"),
        (write_part("file", b"x" * 11, '; filename="x"') + b"--mark--", "--max-batch-file-bytes"),
        (write_part("file", b"\n" * 4, '; filename="x"') + b"--mark--", "3 lines"),
        (write_part("a", b"x") * 2, "given twice"),
        (write_part("a", b"x" * 70_000), "65536 bytes"),
        (b"".join(write_part(f"a{n}", b"") for n in range(70)), "64 parts"),
    ],
)
def test_a_wrong_form_is_refused(body: bytes, words: str) -> None:
    form = UploadedForm(FORM, io.BytesIO(), max_bytes=10, max_lines=3)

    def read_whole() -> None:
        form.feed(body)
        form.finish()

    with pytest.raises(RequestError, match=words):
        read_whole()
