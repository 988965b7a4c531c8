"""Where adapters may be loaded from, and what their files may hold."""

import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmjax.config.engine_config import LoRAConfig
from mmjax.errors import CheckpointError
from mmjax.weights.adapter import AdapterReader
from tests.server.conftest import MakeServer, Server
from tests.weights.test_adapter import DOWN, make_reader, write

FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_PATHS, NUM_DAMAGES, NUM_DAMAGES_SLOW = 300, 300, 20_000
THERE = ("poet", "inner", "deep", "sql", "..", ".")
STEPS = (
    *("..", ".", "", "~", "poet", "deep", "sql", "inner", "outer", "loop", "half", "outside"),
    *("%2e%2e", "..\\", "poet\0", "*", "$HOME", "file:", "．．", "x" * 300),
)


def make_files(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in FILES:
        (path / name).write_bytes(b"")
    return path


@pytest.fixture
def lora_dir(tmp_path: Path) -> Path:
    """Adapters, links to some inside and outside, a link to itself, files that are links."""
    root, outside = tmp_path / "adapters", make_files(tmp_path / "outside")
    make_files(root / "poet")
    make_files(root / "deep" / "sql")
    make_files(tmp_path / "adapters-of-others" / "poet")
    (root / "inner").symlink_to(root / "deep" / "sql")
    (root / "outer").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "half").mkdir()
    (root / "half" / FILES[0]).write_bytes(b"")
    (root / "half" / FILES[1]).symlink_to(outside / FILES[1])
    return root


@pytest.fixture
def server(make_server: MakeServer, lora_dir: Path) -> Server:
    lora = LoRAConfig(enable_lora=True, allow_runtime_lora_updating=True, lora_dir=lora_dir)
    return make_server(lora=lora)


def draw_path(rng: random.Random, root: Path) -> str:
    steps = [rng.choice(rng.choice((STEPS, THERE))) for _ in range(rng.choice((1, 1, 2, 2, 3, 5)))]
    start = rng.choice(("", "", "", "/", f"{root}/", f"{root}-of-others/", f"{root.parent}/"))
    return start + "/".join(steps)


def lies_below(root: Path, text: str) -> bool:
    """Whether a path is an adapter below `root`, by the operating system's own resolution."""
    whole = os.path.join(root, text)
    if "\0" in whole or not all(os.path.exists(os.path.join(whole, name)) for name in FILES):
        return False
    ends = [os.path.realpath(whole), *(os.path.realpath(os.path.join(whole, n)) for n in FILES)]
    return all(end == str(root) or end.startswith(f"{root}{os.sep}") for end in ends)


def test_adapter_paths_never_lead_out_of_the_directory(server: Server, lora_dir: Path) -> None:
    rng, num_loaded = random.Random(0), 0
    for _ in range(NUM_PATHS):
        path = draw_path(rng, lora_dir)
        body = {"lora_name": "x", "lora_path": path}
        response = server.http.post("/v1/load_lora_adapter", json=body)
        assert (response.status_code == 200) == lies_below(lora_dir, path), path
        if response.status_code == 200:
            num_loaded += 1
            (loaded,) = server.supervisor.engine.adapters.values()
            assert Path(loaded).is_relative_to(lora_dir)
            assert Path(loaded).resolve() == Path(loaded), "links are resolved once"
            server.http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
        else:
            assert response.status_code == 400
            assert str(lora_dir) not in response.text.replace(json.dumps(path)[1:-1], "")
    assert num_loaded > 10


def test_adapter_paths_are_taken_only_where_that_is_allowed(
    make_server: MakeServer, lora_dir: Path
) -> None:
    closed = make_server(lora=LoRAConfig(enable_lora=True, lora_dir=lora_dir))
    keyed = make_server(
        lora=LoRAConfig(enable_lora=True, allow_runtime_lora_updating=True, lora_dir=lora_dir),
        api_keys=("secret",),
    )
    body = {"lora_name": "x", "lora_path": "poet"}
    for server, status in ((closed, 404), (keyed, 401)):
        for verb in ("load", "unload"):
            response = server.http.post(f"/v1/{verb}_lora_adapter", json=body)
            assert response.status_code == status
        assert server.supervisor.engine.adapters == {}


class Trap:
    """A pickle of it makes a file where it is opened."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> Any:
        return Path.touch, (self.sprung,)


@pytest.mark.parametrize("name", ["adapter_model.bin", *FILES])
def test_adapter_files_that_are_pickles_are_not_opened(tmp_path: Path, name: str) -> None:
    path, sprung = tmp_path / "adapter", tmp_path / "sprung"
    path.mkdir()
    write(path, DOWN)
    if name not in FILES:
        (path / FILES[1]).unlink()
    (path / name).write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(CheckpointError, match="adapter_"):
        make_reader().read(path)
    assert not sprung.exists()


CONFIGS: dict[str, Any] = {
    "deep": "[" * 100_000,
    "deep object": '{"a":' * 50_000,
    "digits": '{"peft_type": "LORA", "r": ' + "9" * 5_000 + ', "lora_alpha": 1}',
    "long alpha": '{"peft_type": "LORA", "r": 2, "lora_alpha": ' + "9" * 400 + "}",
    "infinite alpha": '{"peft_type": "LORA", "r": 2, "lora_alpha": Infinity}',
    "no alpha": '{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}',
    "large alpha": '{"peft_type": "LORA", "r": 2, "lora_alpha": 1e30}',
    "negative rank": '{"peft_type": "LORA", "r": -2, "lora_alpha": 1}',
    "a list": '{"peft_type": "LORA", "r": [2], "lora_alpha": 1}',
    "a pattern": json.dumps(
        {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "rank_pattern": {".*.*.*.*x": 2}}
    ),
    "a long kind": '{"peft_type": "' + "x" * 100_000 + '"}',
    "a long list": '{"peft_type": "LORA", "r": [' + "1," * 100_000 + '1], "lora_alpha": 1}',
    "a long pattern": json.dumps(
        {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "alpha_pattern": {"x" * 100_000: None}}
    ),
    "an encoding": "\ufeff{}".encode("utf-16"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_adapter_files_with_strange_settings_are_refused(tmp_path: Path, name: str) -> None:
    tensors = {key: np.float32(1e10) * value for key, value in DOWN.items()}
    write(tmp_path, tensors)
    text = CONFIGS[name]
    (tmp_path / FILES[0]).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError) as caught:
        make_reader().read(tmp_path)
    assert len(str(caught.value)) < 1000


def _flip(rng: random.Random, raw: bytearray) -> bytearray:
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return raw


def _cut(rng: random.Random, raw: bytearray) -> bytearray:
    return raw[: rng.randrange(len(raw))]


def _insert(rng: random.Random, raw: bytearray) -> bytearray:
    place = rng.randrange(len(raw))
    return raw[:place] + rng.randbytes(rng.randint(1, 20)) + raw[place:]


def _grow_header(rng: random.Random, raw: bytearray) -> bytearray:
    raw[:8] = rng.choice((0, 1, 100, 2**31, 2**62, 2**64 - 1)).to_bytes(8, "little")
    return raw


DAMAGES: tuple[Callable[[random.Random, bytearray], bytearray], ...] = (
    *(_flip, _flip, _cut, _insert, _grow_header),
)


def read_or_refuse(reader: AdapterReader, path: Path) -> str | None:
    """Return why an adapter is refused; None: it is whole."""
    try:
        arrays = reader.read(path).arrays
    except CheckpointError as error:
        return str(error)
    for name, array in arrays.items():
        assert name in reader.shapes
        assert np.isfinite(array).all()
    return None


@pytest.mark.parametrize(
    "count", [NUM_DAMAGES, pytest.param(NUM_DAMAGES_SLOW, marks=pytest.mark.slow)], ids=str
)
def test_adapter_files_that_are_damaged_are_refused_whole(tmp_path: Path, count: int) -> None:
    rng, num_refused = random.Random(1), 0
    reader = make_reader()
    write(tmp_path, DOWN)
    whole = {name: (tmp_path / name).read_bytes() for name in FILES}
    for _ in range(count):
        for name in FILES:
            (tmp_path / name).write_bytes(whole[name])
        name = rng.choice(FILES)
        (tmp_path / name).write_bytes(rng.choice(DAMAGES)(rng, bytearray(whole[name])))
        refusal = read_or_refuse(reader, tmp_path)
        num_refused += refusal is not None
        assert str(tmp_path) not in (refusal or "")
    assert num_refused > count // 3
