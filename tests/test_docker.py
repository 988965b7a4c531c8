"""The images' files, as far as they can be checked without Docker."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from mmjax.cli.main import COMMANDS
from mmjax.server.flags import parse_flags

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples" / "docker").glob("Dockerfile.*[!e]"))


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions, with continued lines joined, without comments."""
    text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


def values(file: Path, name: str) -> list[str]:
    return [rest for one, rest in instructions(file) if one == name]


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [file.name for file in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_is_built_of_what_is_here(file: Path) -> None:
    for image in values(file, "FROM"):
        assert re.match(r"python:3\.\d+\.\d+-[a-z]+-[a-z]+( AS \w+)?$", image), image
    ignored = (file.parent / f"{file.name}.dockerignore").read_text(encoding="utf-8").splitlines()
    for copied in values(file, "COPY"):
        *sources, _ = shlex.split(copied)
        if sources[0].startswith("--from="):
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            is_sent = any(
                f"{source}/".startswith(f"{line[1:]}/") for line in ignored if line.startswith("!")
            )
            assert is_sent, f"{source} is not sent to the builder"
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", file.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert ("cuda" in extras) == (file.suffix == ".cuda")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_all_that_the_wheel_is_built_of_is_copied(file: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        *(hook["path"] for hook in wheel["hooks"].values()),
        *project["project"]["license-files"],
        project["project"]["readme"],
    }
    rows = [shlex.split(row) for row in values(file, "COPY") if not row.startswith("--from=")]
    assert needed <= {source for *sources, _ in rows for source in sources}


def test_the_kernels_are_compiled_where_they_were_installed() -> None:
    (file,) = (one for one in FILES if one.suffix == ".cpu")
    steps = instructions(file)
    (built,) = (i for i, (_, rest) in enumerate(steps) if "mmjax.layers.cpu.build" in rest)
    (installed,) = (i for i, (_, rest) in enumerate(steps) if "pip install" in rest)
    assert installed < built
    # Python looks into the working directory first: there must be no other mmjax.
    assert [rest for name, rest in steps[:built] if name == "WORKDIR"][-1] == "/"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_runs_as_nobody_special_and_is_watched(file: Path) -> None:
    (user,) = values(file, "USER")
    assert int(user) > 0
    names = [name for name, _ in instructions(file)]
    assert names.index("USER") < names.index("ENTRYPOINT")
    (check,) = values(file, "HEALTHCHECK")
    assert "http://127.0.0.1:8000/health" in check
    json.loads(check[check.index("[") :])
    (port,) = values(file, "EXPOSE")
    (entry,) = values(file, "ENTRYPOINT")
    program, command, *argv = json.loads(entry)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert program in scripts["project"]["scripts"]
    assert command in COMMANDS
    flags = parse_flags(argv)
    assert (flags.host, str(flags.port)) == ("0.0.0.0", port)
