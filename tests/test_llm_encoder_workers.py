"""`mmjax encode-worker` over a checkpoint, and `LLM` that has it encode."""

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from mmjax.cli.encode_worker import main
from mmjax.layers.module import flatten_params
from tests.test_llm_disk_caches import ask, encoded, start


@pytest.mark.slow  # two processes; `tests/engine/test_encoder_workers.py` has a worker by default
def test_pictures_are_encoded_by_a_worker_behind_a_key(
    tiny_gemma3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    images = [encoded(seed) for seed in range(2)]
    with start(tiny_gemma3) as plain:
        expected = [ask(plain, [image])[0] for image in images]
    key = tmp_path / "key"
    assert main(["--make-key", str(key)], prog="mmjax encode-worker") == 0
    assert str(key) in capsys.readouterr().out
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mmjax", "encode-worker", str(tiny_gemma3)]
    command += ["--listen", address, "--key", str(key)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        workers = {"encoder_workers": [address], "encoder_workers_key": key}
        with start(tiny_gemma3, **workers) as llm:
            answers = [ask(llm, [image]) for image in images]
            assert answers == [(answer, [("computed", "worker")]) for answer in expected]
            assert ask(llm, [images[0]])[1] == [("processor_cache", "encoder_cache")]
            assert not [name for name in flatten_params(llm.engine.params) if "vision" in name]
    finally:
        worker.terminate()
        out, _ = worker.communicate(timeout=60)
    assert f"at {address}" in out
    assert worker.returncode == 0
