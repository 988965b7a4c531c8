"""The command `mmjax`: thin, quick to start, and right about what it calls."""

import io
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mmjax.cli.api_client import ApiClient
from mmjax.cli.bench import Sample, summarize
from mmjax.cli.main import COMMANDS, main
from tests.cli.conftest import API_KEY
from tests.kit import draw


@pytest.fixture
def picture(tmp_path: Path) -> str:
    file = tmp_path / "picture.png"
    draw(30, 20, 1).save(file)
    return str(file)


@pytest.fixture
def ask(echo_address: str) -> Callable[..., int]:
    """Run a subcommand against the echo server."""

    def run(command: str, *argv: str) -> int:
        return main([command, "--url", echo_address, "--api-key", API_KEY, *argv])

    return run


# ---- the command ---------------------------------------------------------------------------------


def test_help_loads_nothing_slow() -> None:
    script = """
import sys
from mmjax.cli.main import main
assert main(["--help"]) == 0
print(sorted({"fastapi", "jax", "numpy", "prometheus_client", "transformers"} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main([]) == 0
    written = capsys.readouterr().out
    assert all(f"  {name} " in written for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mmjax {name} ")


def test_the_help_of_config_says_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", "--help"])
    written = capsys.readouterr().out
    assert "Print every setting that `mmjax serve` would have" in written
    assert "Serve a multimodal model" not in written


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sing"]) == 2
    assert "there is no command `sing`" in capsys.readouterr().err


def test_python_m_mmjax_is_the_same() -> None:
    command = [sys.executable, "-m", "mmjax", "config", "--dump", "--max-num-seqs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "max_num_seqs: 3  # flag --max-num-seqs\n" in done.stdout


# ---- chat ----------------------------------------------------------------------------------------


def test_chat_answers_a_question_about_a_picture(
    ask: Callable[..., int], picture: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("chat", "--image", picture, "a red", "circle") == 0
    assert "a red circle" in capsys.readouterr().out


def test_chat_remembers_what_was_said(
    ask: Callable[..., int],
    picture: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["red", f"/image {picture}", "green", "/new", "blue", "/image /no/such", "/quit", "no"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert ask("chat", "--max-tokens", "300") == 0
    written = capsys.readouterr()
    # The echo engine answers with the whole conversation.
    answers = written.out.split("model\n")
    assert "green" in written.out
    assert written.out.count("red") > 2, "the second answer repeats the first question and answer"
    assert "red" not in answers[-2] + answers[-1]
    assert "the image /no/such cannot be read" in written.err


def test_chat_finds_a_file_behind_several_spaces(
    ask: Callable[..., int],
    picture: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image  {picture}\nred"))
    assert ask("chat") == 0
    written = capsys.readouterr()
    assert "red" in written.out
    assert not written.err


def test_chat_tells_what_the_server_said(
    echo_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", f"{echo_address}/v1", "--api-key", "wrong", "red"]) == 1
    refused = capsys.readouterr().err
    assert "mmjax chat: 401: the API key is missing or wrong" in refused
    assert refused.rstrip().endswith(", by `--api-key` or MMJAX_API_KEY")
    assert main(["chat", "--url", "http://127.0.0.1:9", "red"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["chat", "--url", "127.0.0.1", "red"]) == 1
    assert "expected an address" in capsys.readouterr().err


class CutOff(BaseHTTPRequestHandler):
    """A server that ends in the middle of an answer, and lists no models."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html></html>")
        self.close_connection = True

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        event = b'data: {"choices": [{"delta": {"content": "a red"}}]}\n\n'
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None: ...


def test_chat_tells_that_an_answer_broke_off(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), CutOff) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["chat", "--url", url, "--lora", "tiny", "what?"]) == 1
        written = capsys.readouterr()
        assert main(["chat", "--url", url, "what?"]) == 1
        server.shutdown()
    assert "/v1/models names no model" in capsys.readouterr().err
    assert written.out.startswith("a red")
    assert "broke its answer off" in written.err


def test_the_memory_of_an_encode_worker_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["encode-worker", "--listen", "unix:///run/encoder", "--cache-gb", "nan"])
    assert "`--cache-gb` is nan; expected a number" in capsys.readouterr().err


def test_the_key_may_be_in_the_environment(
    echo_address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MMJAX_API_KEY", API_KEY)
    assert main(["chat", "--url", echo_address, "red"]) == 0


def test_chat_in_this_process_sends_the_same_messages(
    picture: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    class Fake:
        def __init__(self, model: str | None, **settings: Any) -> None:
            seen.append((model, settings))

        def stream_chat(self, messages: Any, params: Any, lora_request: Any) -> Any:
            seen.append((messages, params, lora_request))
            for piece in ("a ", "circle"):
                yield type("Output", (), {"outputs": [type("Text", (), {"text": piece})]})
                # What came is shown before the next is asked for.
                assert capsys.readouterr().out == piece

    monkeypatch.setattr("mmjax.llm.llm.LLM", Fake)
    argv = ["--model", "some/model", "--temperature", "0", "--system", "Be brief."]
    assert main(["chat", *argv, "--image", picture, "what?"]) == 0
    assert capsys.readouterr().out == "\n"
    (model, settings), (messages, params, adapter) = seen
    assert (adapter, settings) == (None, {"max_num_seqs": 1})
    assert (model, params.temperature, params.max_tokens) == ("some/model", 0, 512)
    system, question = messages
    assert system == {"role": "system", "content": "Be brief."}
    image, text = question["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "what?"}
    assert main(["chat", "--lora", "tiny_scenes/italian", "what?"]) == 0
    (_, settings), (*_, adapter) = seen[2:]
    assert settings["enable_lora"]
    assert adapter.lora_path.endswith("adapters/italian")


def bomb() -> bytes:
    """A PNG whose header promises 20000 x 20000 pixels."""
    chunk = b"IHDR" + (20_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    checksum = zlib.crc32(chunk).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0d" + chunk + checksum + b"\x00\x00\x00\x00IDAT"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--image", "no/such.png"], "no/such.png cannot be read (No such file or directory)"),
        (["--image", "adapter"], "adapter cannot be read (Is a directory)"),
        (["--image", "text.png"], "text.png cannot be used: Failed to load image of 4 bytes"),
        (["--image", "bomb.png"], "20000x20000 = 400000000 pixels, at most 50000000 are"),
        (["--lora", "./no/adapter"], "the adapter's directory `./no/adapter` does not exist"),
        (["--lora", "adapter"], "the adapter's directory `adapter` has no adapter_config.json"),
        (["--temperature", "-1"], "`temperature` is -1"),
    ],
)
def test_chat_refuses_its_arguments_before_a_model_is_loaded(
    argv: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("mmjax.llm.llm.LLM", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "text.png").write_text("text")
    (tmp_path / "bomb.png").write_bytes(bomb())
    assert main(["chat", *argv, "what?"]) == 1
    written = capsys.readouterr().err
    assert written.startswith("mmjax chat: ")
    assert words in written


@pytest.mark.parametrize(
    "words",
    [
        ["Qwen/Qwen3-VL-2B-Instruct", "What is it?"],
        ["Qwen/Qwen3-VL-2B-Instruct"],
        ["tiny_scenes", "What is it?"],
        ["DIRECTORY", "What is it?"],
    ],
)
def test_chat_takes_no_models_name_as_the_question(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path) if word == "DIRECTORY" else word for word in words]
    with pytest.raises(SystemExit) as caught:
        main(["chat", *words])
    assert caught.value.code == 2
    assert f"give `--model {words[0]}`" in capsys.readouterr().err


def test_chat_takes_a_question_with_a_slash(
    ask: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("chat", "yes/no: is it red?") == 0
    assert ask("chat", "Is", "it", "red/blue") == 0
    assert capsys.readouterr().out


def test_chat_names_a_servers_adapter(
    ask: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("chat", "--lora", "poet", "red") == 1
    assert "`poet`" in capsys.readouterr().err


# ---- explain, bench ------------------------------------------------------------------------------


def test_explain_shows_tokens_and_places(
    picture: str, tiny_gemma3: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["explain", "--model", str(tiny_gemma3), "--image", picture, "red", "circle"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("prompt, ")
    (row,) = [line for line in lines if line.endswith("image 0, embeddings")]
    assert " x4  image 0" in row
    assert lines[-1].startswith("image 0: places ")
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["num_embeds"] == 4


def test_explain_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "./no/such", "red"]) == 1
    assert "mmjax explain: model directory `./no/such` does not exist" in capsys.readouterr().err


def test_explain_looks_at_its_images_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "./no/such", "--image", "/no/such.png", "red"]) == 1
    assert "the image /no/such.png cannot be read" in capsys.readouterr().err


def test_explain_fetches_urls(tiny_gemma3: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `mmjax chat`; here no host is asked, for its address is this machine's."""
    url = "http://127.0.0.1:8000/red.png"
    assert main(["explain", "--model", str(tiny_gemma3), "--image", url, "red"]) == 1
    assert "has no public address" in capsys.readouterr().err


def test_bench_counts_what_it_asked_for(
    ask: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--num-requests", "6", "--concurrency", "3", "--max-tokens", "4")
    assert ask("bench", *sizes, "--image-size", "40x30", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["requests"] == 6
    ratio = figures["output_tokens_per_s"] / figures["requests_per_s"]
    assert ratio == pytest.approx(4, rel=0.1)
    assert 0 < figures["ttft_ms_p50"] <= figures["e2e_ms_p50"] <= figures["e2e_ms_p99"]
    assert ask("bench", *sizes, "--images", "0") == 0
    assert "ttft_ms_p50" in capsys.readouterr().out


def test_bench_says_that_the_server_still_compiles(
    ask: Callable[..., int],
    echo_address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert ApiClient(echo_address).count_programs_left() == 0
    assert ApiClient("http://127.0.0.1:9").count_programs_left() == 0
    sizes = ("--num-requests", "1", "--max-tokens", "2", "--images", "0")
    assert ask("bench", *sizes) == 0
    assert "to compile" not in capsys.readouterr().err
    monkeypatch.setattr(ApiClient, "count_programs_left", lambda self: 7)
    assert ask("bench", *sizes) == 0
    assert "the server has 7 programs to compile" in capsys.readouterr().err


def test_figures_of_a_bench() -> None:
    samples = [Sample(0.1, 0.4, 10, 4), Sample(0.2, 0.2, 20, 1)]
    assert samples[0].tpot_s == pytest.approx(0.1)
    figures = summarize(samples, 2.0)
    assert figures["requests_per_s"] == 1
    assert figures["prompt_tokens_per_s"] == 15
    assert figures["output_tokens_per_s"] == 2.5
    assert figures["ttft_ms_p50"] == 150
    assert figures["tpot_ms_p50"] == 50


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--num-requests", "0"], "'0' is not a number of at least 1"),
        (["--num-requests", "many"], "'many' is not a number of at least 1"),
        (["--image-size", "40"], "'40' is no size; give WxH, as in 640x480"),
        (["--image-size", "40x"], "'' is not a number of at least 1"),
        (["--images", "-1"], "'-1' is not a number of at least 0"),
    ],
)
def test_bench_refuses_wrong_sizes(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *argv])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_bench_serves_the_embedded_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--num-requests", "4", "--max-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 4
