"""`mmjax run-batch`: each line is answered once, whatever ends it, and errors stay apart."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from benchmarks import batches
from mmjax.cli.main import main
from mmjax.errors import ConfigError
from mmjax.server.batches.journal import Journal, LineError, LineResponse
from mmjax.server.batches.lines import InputLine, read_lines, summarize
from mmjax.server.batches.runner import run_lines

ROOT = Path(__file__).parents[2]
MAX_LINE_BYTES = 2000
END_S = 280.0
FEW_PROGRAMS = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
FEW_PROGRAMS += ("--precompile", "none")


def write_line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"a red circle {number}"}], "max_tokens": 4}
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
        **changes,
    }


def write_input(path: Path, lines: Iterable[dict[str, Any] | str]) -> Path:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[int]]:
    """Return what runs a batch over `in.jsonl`; it returns the lines that were answered."""

    def run(*, fails_at: int = 0, url: str | None = None, **options: Any) -> list[int]:
        source, asked = tmp_path / "in.jsonl", list[int]()
        summary = summarize(source, MAX_LINE_BYTES)
        journal = Journal(tmp_path / "out.jsonl", tmp_path / "errors.jsonl", summary)

        async def answer(line: InputLine) -> LineResponse:
            if line.number == fails_at:
                raise RuntimeError("killed")
            asked.append(line.number)
            status = 400 if b"wrong" in line.body else 200
            return LineResponse(status, "req_1", msgspec.Raw(b'{"number":%d}' % line.number))

        lines = read_lines(source, max_line_bytes=MAX_LINE_BYTES, is_done=journal.is_done, url=url)
        try:
            options = {"max_in_work": 2, **options}
            asyncio.run(run_lines(lines, journal, answer, **options))
        finally:
            journal.close()
        assert fails_at or journal.num_done == summary.num_requests
        return sorted(asked)

    return run


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


Run = Callable[..., list[int]]


def test_each_wrong_line_is_an_error_and_stops_no_other(tmp_path: Path, run: Run) -> None:
    wrong = {
        2: "nonsense",
        3: "",
        4: write_line(1),
        5: write_line(5, method="GET"),
        6: write_line(6, url="/v1/moderations"),
        7: write_line(7, custom_id=""),
        8: json.dumps({"custom_id": "line-8"}),
        9: write_line(9, more=1),
        10: "x" * (MAX_LINE_BYTES + 1),
        11: write_line(11, url="/v1/completions"),
        12: write_line(12, body={"wrong": 1}),
        13: "[" * 1900,
        14: '{"custom_id": "\\ud800"}',
    }
    write_input(tmp_path / "in.jsonl", [write_line(1), *wrong.values(), write_line(15)])
    assert run(url="/v1/chat/completions") == [1, 12, 15]
    answers, errors = read(tmp_path / "out.jsonl"), read(tmp_path / "errors.jsonl")
    assert sorted(one["custom_id"] for one in answers) == ["line-1", "line-15"]
    assert all(one["error"] is None and one["response"]["status_code"] == 200 for one in answers)
    by_number = {int(one["id"].rpartition("_")[2]): one for one in errors}
    assert by_number.keys() == wrong.keys() - {3}
    refused = by_number.pop(12)
    assert refused["response"]["status_code"] == 400
    assert refused["error"] is None
    assert all(one["response"] is None for one in by_number.values())
    words = {
        2: "not valid JSON",
        4: "a line before has the same `custom_id`",
        5: "'GET'",
        6: "/v1/moderations",
        8: "`url`",
        9: "`more`",
        10: "--max-request-bytes",
        11: "the batch's `endpoint` is /v1/chat/completions",
    }
    for number, text in words.items():
        assert text in by_number[number]["error"]["message"]
    known = {number for number, one in by_number.items() if one["custom_id"]}
    assert known == {4, 5, 6, 8, 9, 11}


@pytest.mark.parametrize("first", [json.dumps(write_line(1)), ""])
def test_a_mark_of_utf_8_is_no_part_of_the_first_line(tmp_path: Path, run: Run, first: str) -> None:
    """As some editors of Windows write it."""
    write_input(tmp_path / "in.jsonl", ["\ufeff" + first, write_line(2)])
    assert run() == ([1, 2] if first else [2])
    assert not (tmp_path / "errors.jsonl").exists()


@pytest.mark.parametrize("torn", ["", '{"id"', '{"id":"batch_req_0', "half"])
def test_a_run_goes_on_where_one_was_ended(tmp_path: Path, run: Run, torn: str) -> None:
    write_input(tmp_path / "in.jsonl", map(write_line, range(1, 31)))
    with pytest.raises(RuntimeError, match="killed"):
        run(fails_at=20)
    output = tmp_path / "out.jsonl"
    first = [int(one["id"].rpartition("_")[2]) for one in read(output)]
    assert 10 < len(first) < 30
    data = output.read_bytes()
    if torn == "half":
        output.write_bytes(data[:-10])
        first.pop()
    else:
        output.write_bytes(data + torn.encode())
    assert run() == sorted(set(range(1, 31)) - set(first))
    ids = [one["custom_id"] for one in read(output)]
    assert sorted(ids) == sorted(f"line-{number}" for number in range(1, 31))
    assert not (tmp_path / "errors.jsonl").exists()
    assert run() == []


@pytest.mark.parametrize("id_and_more", [b'"\xff"', b'"a", "more": ' + b"[" * 1800])
def test_a_wrong_line_whose_id_cannot_be_read_is_an_error(
    tmp_path: Path, run: Run, id_and_more: bytes
) -> None:
    # What is wrong is found before the id, by which the error would name the line.
    wrong = b'{"method": "GET", "custom_id": ' + id_and_more
    (tmp_path / "in.jsonl").write_bytes(wrong + b"\n" + json.dumps(write_line(2)).encode())
    assert run() == [2]
    (error,) = read(tmp_path / "errors.jsonl")
    assert (error["custom_id"], "'GET'" in error["error"]["message"]) == (None, True)


def test_lines_that_failed_are_done_again_once_their_file_is_gone(tmp_path: Path, run: Run) -> None:
    write_input(tmp_path / "in.jsonl", [write_line(1), write_line(2, body={"wrong": 1})])
    assert run() == [1, 2]
    assert run() == []
    (tmp_path / "errors.jsonl").unlink()
    assert run() == [2]
    assert len(read(tmp_path / "errors.jsonl")) == 1


@pytest.mark.parametrize(
    "content", [b"precious", b"precious\n", b"{}\n", b'{"id":"batch_req_x"}\n']
)
def test_a_file_of_something_else_is_left_as_it_is(
    tmp_path: Path, run: Run, content: bytes
) -> None:
    write_input(tmp_path / "in.jsonl", [write_line(1)])
    (tmp_path / "out.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="something else"):
        run()
    assert (tmp_path / "out.jsonl").read_bytes() == content


def test_another_input_is_refused(tmp_path: Path, run: Run) -> None:
    source = write_input(tmp_path / "in.jsonl", [write_line(1), write_line(2)])
    run()
    before = (tmp_path / "out.jsonl").read_bytes()
    source.write_bytes(source.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="was the input changed since"):
        run()
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_a_full_disk_tears_no_line(tmp_path: Path, run: Run) -> None:
    summary = summarize(
        write_input(tmp_path / "in.jsonl", map(write_line, range(1, 4))), MAX_LINE_BYTES
    )
    output = tmp_path / "out.jsonl"
    journal = Journal(output, tmp_path / "errors.jsonl", summary)
    answer = LineResponse(200, "r", msgspec.Raw(json.dumps("x" * 1000).encode()))
    journal.write([(InputLine(1, "line-1"), answer)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        with pytest.raises(ConfigError, match="cannot be written"):
            journal.write([(InputLine(n, f"line-{n}"), answer) for n in (2, 3)])
        journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [one["custom_id"] for one in read(output)] == ["line-1"]
    assert run() == [2, 3]


def test_a_line_that_is_damaged_in_the_middle_is_named(tmp_path: Path, run: Run) -> None:
    write_input(tmp_path / "in.jsonl", map(write_line, range(1, 4)))
    run(max_in_work=1)
    output = tmp_path / "out.jsonl"
    first, second, third = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first + second[:30] + b"\0" * 20 + b"\n" + third)
    with pytest.raises(ConfigError, match=r"line 2 of .* is damaged"):
        run()


def test_two_processes_do_not_write_one_output(tmp_path: Path, run: Run) -> None:
    summary = summarize(write_input(tmp_path / "in.jsonl", [write_line(1)]), MAX_LINE_BYTES)
    journal = Journal(tmp_path / "out.jsonl", tmp_path / "errors.jsonl", summary)
    with pytest.raises(ConfigError, match="another process"):
        run()
    journal.write([(InputLine(1, "line-1"), LineError("no"))])
    journal.close()
    assert run() == []


def test_no_more_than_so_many_lines_are_in_work(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", map(write_line, range(1, 101)))
    summary = summarize(source, MAX_LINE_BYTES)
    journal = Journal(tmp_path / "out.jsonl", tmp_path / "errors.jsonl", summary)
    num_read = num_in_work = most = 0

    async def answer(line: InputLine) -> LineResponse:
        nonlocal num_in_work, most
        num_in_work += 1
        most = max(most, num_in_work)
        await asyncio.sleep(0.001)
        num_in_work -= 1
        assert num_read <= journal.num_done + 8 + 2 * 16
        return LineResponse(200, "req_1", msgspec.Raw(b"{}"))

    def count() -> Iterable[InputLine]:
        nonlocal num_read
        for line in read_lines(source, max_line_bytes=MAX_LINE_BYTES, is_done=journal.is_done):
            num_read += 1
            yield line

    asyncio.run(run_lines(iter(count()), journal, answer, max_in_work=8))
    journal.close()
    assert (most, num_read) == (8, 100)


def test_results_that_come_together_are_written_together(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [write_line(n, **({"body": {"wrong": 1}} if n % 5 == 0 else {})) for n in range(1, 101)]
    write_input(tmp_path / "in.jsonl", lines)
    sizes, write = list[int](), Journal.write

    def count(journal: Journal, results: Any) -> None:
        sizes.append(len(results))
        write(journal, results)

    monkeypatch.setattr(Journal, "write", count)
    assert run(max_in_work=20) == list(range(1, 101))
    assert sum(sizes) == 100
    assert len(sizes) < 50
    assert max(sizes) <= 20
    found = [
        [int(one["id"].rpartition("_")[2]) for one in read(tmp_path / name)]
        for name in ("out.jsonl", "errors.jsonl")
    ]
    assert list(map(sorted, found)) == [
        [n for n in range(1, 101) if n % 5],
        list(range(5, 101, 5)),
    ]


# ---- the command ---------------------------------------------------------------------------------


def start(tmp_path: Path, *flags: str) -> subprocess.Popen[str]:
    files = (str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli.run_batch_echo", *files, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(process: subprocess.Popen[str], output: Path, num_lines: int, number: int) -> None:
    """Send a signal once so many lines are there; also to the engine, if it is a SIGKILL."""
    deadline = time.monotonic() + END_S
    while count_lines(output) < num_lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=END_S)
    psutil.wait_procs(children, timeout=END_S)


def check_answers(tmp_path: Path, total: int) -> None:
    counted = Counter(one["custom_id"] for one in read(tmp_path / "out.jsonl"))
    assert counted == {f"line-{number}": 1 for number in range(1, total + 1)}
    for one in read(tmp_path / "out.jsonl"):
        text = one["response"]["body"]["choices"][0]["message"]["content"]
        assert text, one


@pytest.mark.timeout(900)
def test_each_line_is_answered_once_whatever_kills_the_command(
    tmp_path: Path, tiny_gemma3: Path
) -> None:
    total = 300
    write_input(tmp_path / "in.jsonl", map(write_line, range(1, total + 1)))
    output = tmp_path / "out.jsonl"
    flags = (str(tiny_gemma3), *FEW_PROGRAMS, "--no-enable-standby-engine")
    for num_lines, number in ((40, signal.SIGKILL), (120, signal.SIGTERM)):
        process = start(tmp_path, *flags)
        kill_at(process, output, num_lines, number)
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        assert count_lines(output) < total
    done = start(tmp_path, *flags)
    said, log = done.communicate(timeout=END_S)
    assert done.returncode == 0, log
    assert f"{total} lines: {total} answered" in said
    check_answers(tmp_path, total)
    # Nothing is started for what is done.
    assert main(["run-batch", str(tmp_path / "in.jsonl"), str(output), *flags]) == 0


@pytest.mark.slow  # the default model answers some 200 lines a second
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_lines_and_ten_kills_in_flat_memory(tmp_path: Path) -> None:
    batches.write_input(tmp_path / "in.jsonl", 100_000)
    last = batches.run(tmp_path, 100_000, 10)[-1]
    working = [one.rss_mib for one in last if one.num_lines > last[0].num_lines]
    early = working[len(working) // 10]
    assert max(working) < early + 40.0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["in.jsonl"], "give the input and the output"),
        (["in.jsonl", "-o", "out.jsonl", "-i", "in.jsonl"], "give the input and the output"),
        (["in.jsonl", "in.jsonl"], "not three files"),
        (["nothing.jsonl", "out.jsonl"], "is no file"),
        (["in.jsonl", "nowhere/out.jsonl"], "cannot be written"),
        (["in.jsonl", "out.jsonl", "--nix"], "--nix"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_slow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_input(tmp_path / "in.jsonl", [write_line(1)])
    try:
        status = main(["run-batch", *argv])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert words in capsys.readouterr().err
