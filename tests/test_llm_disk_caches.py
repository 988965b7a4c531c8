"""Caches on disk: a later process neither decodes nor encodes a picture that an earlier one saw."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmjax import LLM, SamplingParams
from mmjax.errors import ConfigError
from tests.kit import draw

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
FEW: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 64}


def encoded(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def directories(root: Path) -> dict[str, Any]:
    return {"encoder_cache_dir": root / "rows", "mm_processor_cache_dir": root / "items"}


def start(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), use_tqdm_on_load=False, **FEW, **settings)


def ask(llm: LLM, image: Any, **prompt: Any) -> tuple[Any, list[tuple[str, str]]]:
    """Return an answer with its log-probabilities, and where each item came from."""
    given = {"prompt": "<start_of_image> what", "multi_modal_data": {"image": image}, **prompt}
    (output,) = llm.generate(given, GREEDY, use_tqdm=False)
    (completion,) = output.outputs
    sources = [(item.processing, item.encoding) for item in output.items]
    return (completion.token_ids, completion.logprobs), sources


def test_a_restart_decodes_and_encodes_nothing(tiny_gemma3: Path, tmp_path: Path):
    images = [encoded(seed) for seed in range(3)]
    with start(tiny_gemma3) as plain:
        expected = [ask(plain, [image])[0] for image in images]
    for number in range(2):
        # Not by the fixture, whose tests compile their engines' programs anew.
        with (
            start(tiny_gemma3, **directories(tmp_path)) as llm,
            pytest.MonkeyPatch.context() as patch,
        ):
            if number:
                refuse_to_decode(patch)
            answers = [ask(llm, [image]) for image in images]
            source = "disk" if number else "computed"
            assert answers == [(answer, [(source, source)]) for answer in expected]
            # The caches in memory come first.
            assert ask(llm, [images[0]])[1] == [("processor_cache", "encoder_cache")]


def refuse_to_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a picture is decoded")

    monkeypatch.setattr(Image.Image, "load", refuse)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)


def test_damaged_and_foreign_files_change_no_answer(
    tiny_gemma3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    image, other = encoded(0), encoded(1)
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        expected = ask(llm, [image])[0]
    for folder in ("rows", "items"):
        (path,) = (tmp_path / folder).iterdir()
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        assert ask(llm, [image]) == (expected, [("computed", "computed")])
        # A file of one picture in the place of another's.
        assert ask(llm, [other])[0] != expected
    damaged = [line for line in caplog.messages if "damaged" in line]
    assert len(damaged) == 2
    for folder in ("rows", "items"):
        one, two = sorted((tmp_path / folder).iterdir())
        content = one.read_bytes()
        one.write_bytes(two.read_bytes())
        two.write_bytes(content)
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        assert ask(llm, [image]) == (expected, [("computed", "computed")])


def test_ids_and_salts_find_only_their_own(tiny_gemma3: Path, tmp_path: Path):
    image, other = encoded(0), encoded(1)
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        mine = ask(llm, [image], multi_modal_uuids={"image": ["mine"]}, cache_salt="a")[0]
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        # Tomorrow's picture may have today's id.
        ids = {"multi_modal_uuids": {"image": ["mine"]}, "cache_salt": "a"}
        answer, sources = ask(llm, [other], **ids)
        assert answer != mine
        assert sources == [("computed", "computed")]
        salted = {"multi_modal_uuids": {"image": ["mine"]}, "cache_salt": "b"}
        assert ask(llm, [image], **salted) == (mine, [("computed", "computed")])
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        assert ask(llm, [image], **salted) == (mine, [("disk", "disk")])


def test_other_settings_of_the_processor_find_nothing(tiny_gemma3: Path, tmp_path: Path):
    image = draw(40, 30)
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        assert ask(llm, [image])[1] == [("computed", "computed")]
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        # A picture without a file is known by its pixels.
        assert ask(llm, [image])[1] == [("disk", "disk")]
    kwargs = {"image_mean": [0.1, 0.1, 0.1]}
    with start(tiny_gemma3, mm_processor_kwargs=kwargs, **directories(tmp_path)) as llm:
        assert ask(llm, [image])[1] == [("computed", "computed")]


def test_outputs_are_found_without_the_caches_in_memory(tiny_gemma3: Path, tmp_path: Path):
    alone = {"mm_processor_cache_gb": 0, "enable_prefix_caching": False}
    with start(tiny_gemma3, encoder_cache_dir=tmp_path, **alone) as llm:
        for seed in range(2):
            assert ask(llm, [encoded(seed)])[1] == [("computed", "computed")]
    with start(tiny_gemma3, encoder_cache_dir=tmp_path, **alone) as llm:
        assert ask(llm, [encoded(1)])[1] == [("computed", "disk")]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow  # a process of its own; that engines end unclosed is in tests/engine, too
def test_a_killed_process_leaves_what_it_wrote(tiny_gemma3: Path, tmp_path: Path):
    """And nothing that is not whole."""
    script = f"""
import os, signal
from pathlib import Path
from tests.test_llm_disk_caches import *
llm = start(Path({str(tiny_gemma3)!r}), **directories(Path({str(tmp_path)!r})))
for seed in range(3):
    ask(llm, [encoded(seed)])
llm._input_processor.item_store._store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    with start(tiny_gemma3, **directories(tmp_path)) as llm:
        found = [ask(llm, [encoded(seed)]) for seed in range(3)]
    with start(tiny_gemma3) as plain:
        expected = [ask(plain, [encoded(seed)])[0] for seed in range(3)]
    assert [answer for answer, _ in found] == expected
    assert [sources[0][0] for _, sources in found] == ["disk"] * 3


def test_a_store_without_a_cache_is_refused(tiny_gemma3: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="mm_processor_cache_gb"):
        start(tiny_gemma3, mm_processor_cache_dir=tmp_path, mm_processor_cache_gb=0)
