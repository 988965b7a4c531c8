"""The laws of the house, on the tree as it is: floors, sizes, names, words, what P0 may load."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from mmjax.layers.cpu.library import library_path
from mmjax.models.model_source import ADAPTER_FILES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mmjax"
CODE = ("mmjax", "tests", "checkpoints", "benchmarks", "docs", "examples")
FILES = sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py"))

MAX_LINES, MAX_FUNCTION, MAX_POSITIONAL, MAX_NESTING = 750, 60, 6, 4
"""A class has no limit of its own: it is never split, nor tied by inheritance, to pass one."""
MAX_PROCESSING_LEVELS = 10
"""Of modules that import each other, the package itself with its public names at the top."""
SUBJECTLESS = {"utils", "util", "common", "helpers", "helper", "misc", "base"}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("os", "system")}
TOP_LEVEL = {
    ".ci",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "benchmarks",
    "checkpoints",
    "constraints",
    "docs",
    "examples",
    "hatch_build.py",
    "mmjax",
    "pyproject.toml",
    "tests",
}


def _contract(name: str) -> dict[str, Any]:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (one for one in linter["contracts"] if one["id"] == name)
    return contract


def _jax_free() -> list[str]:
    """Return what P0 may import, as the contract has it; a package stands for all within it."""
    names = []
    for pattern in _contract("jax-free")["source_modules"]:
        found = [
            *ROOT.glob(pattern.replace(".", "/")),
            *ROOT.glob(f"{pattern.replace('.', '/')}.py"),
        ]
        assert found, f"the contract names `{pattern}`, which is not there"
        names += [".".join(one.relative_to(ROOT).with_suffix("").parts) for one in found]
    # These two load more on use: neither the package nor the command may do so before.
    return ["mmjax", "mmjax.serve", *names]


IN_P0 = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    if name != "mmjax" and hasattr(module, "__path__"):
        for found in pkgutil.walk_packages(module.__path__, name + "."):
            importlib.import_module(found.name)
heavy = {"jax", "jaxlib", "flax", "optax", "orbax"}
print(",".join(sorted(heavy & sys.modules.keys())))
"""


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def walk(kind: type | tuple[type, ...], files: Iterable[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of `kind` in some files, with `path:line`."""
    for file in files:
        path = file.relative_to(ROOT)
        for node in ast.walk(parse(file)):
            if isinstance(node, kind):
                yield f"{path}:{getattr(node, 'lineno', 1)}", node


def nesting(node: ast.AST) -> int:
    """Return how deep blocks stand in one another; an `elif` stands no deeper than its `if`."""
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
    deepest = 0
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
            ):
                continue
            is_elif = isinstance(node, ast.If) and name == "orelse" and isinstance(child, ast.If)
            own = int(isinstance(child, blocks) and not is_elif)
            deepest = max(deepest, own + nesting(child))
    return deepest


def length(node: ast.AST) -> int:
    """Return the lines of a definition, its docstring and decorators left out."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def test_import_floors_hold():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _floors() -> dict[str, int]:
    """Return each package's floor, as the contract has it; 0 is the lowest."""
    layers = reversed(_contract("floors")["layers"])
    return {name: floor for floor, row in enumerate(layers) for name in re.findall(r"\w+", row)}


def _named_modules(file: Path) -> Iterator[str]:
    """Yield the packages of mmjax that texts of a file name, whole or as the start of a name."""
    if re.search(r"[\"']mmjax\.", file.read_text(encoding="utf-8")) is None:
        return  # to parse takes longest
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.fullmatch(r"mmjax\.(\w+)[\w.]*(:\w*)?", node.value)
            if found is not None:
                yield found[1]


def test_no_module_reaches_above_its_floor_by_a_name():
    """`import_module` of a text is an import that the contracts do not see."""
    floors = _floors()
    assert floors["models"] > floors["processing"]
    found = {
        (str(file.relative_to(PACKAGE)), name)
        for package, floor in floors.items()
        for file in (*PACKAGE.glob(f"{package}.py"), *PACKAGE.glob(f"{package}/**/*.py"))
        for name in _named_modules(file)
        if name != package and floors.get(name, -1) >= floor
    }
    # P1's main: P0 starts it in a process of its own, and must not import it.
    assert found == {("frontend/engine_client/supervisor.py", "engine")}


def test_processing_is_not_deep():
    """Whoever follows an import within `mmjax.processing` is at the bottom after ten modules."""
    imports = {name: _imports_within(file) for name, file in _modules("processing").items()}
    chains: dict[str, list[str]] = {}

    def chain_from(name: str) -> list[str]:
        if name not in chains:
            below = [chain_from(one) for one in sorted(imports[name] - {name})]
            chains[name] = [name, *max(below, key=len, default=[])]
        return chains[name]

    longest = max(map(chain_from, imports), key=len)
    assert len(longest) <= MAX_PROCESSING_LEVELS, "\n".join(longest)


def test_no_class_is_spread_over_files():
    """A base class that a single class has, in a file that is read for it alone, is half of one."""
    importers: dict[str, list[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mmjax"):
                for alias in node.names:
                    importers.setdefault(alias.name, []).append(str(file.relative_to(ROOT)))
    found = []
    for place, node in walk(ast.ClassDef, (PACKAGE / "processing").rglob("*.py")):
        assert isinstance(node, ast.ClassDef)
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [base.id for base in bases if isinstance(base, ast.Name)]
        path = place.partition(":")[0]
        found += [f"{place} {node.name}({name})" for name in names if importers.get(name) == [path]]
    assert found == []


def _modules(folder: str) -> dict[str, Path]:
    """Return the modules and packages of a folder of `mmjax`, by their names."""
    found = {}
    for file in (PACKAGE / folder).rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _imports_within(file: Path) -> set[str]:
    """Return the modules of `mmjax.processing` that a file imports, anywhere in it."""
    known = _modules("processing")
    names = set()
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & known.keys()


def test_p0_never_loads_jax():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_P0, *_jax_free()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.strip()
    assert not loaded, f"the host half loads {loaded}"


def test_shapes_are_checked_in_tests():
    from mmjax.layers.linear import linear

    x, weight = jnp.ones((2, 3)), jnp.ones((5, 4))
    with pytest.raises(TypeCheckError):
        linear(x, weight)


def test_arrays_are_strict_in_tests():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.add(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(Exception, match="promotion"):
        jnp.add(jnp.ones(2, jnp.float32), jnp.ones(2, jnp.int32))


def test_no_file_is_too_long():
    counts = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {str(f.relative_to(ROOT)): n for f, n in counts.items() if n > MAX_LINES} == {}


class Look(NamedTuple):
    """What a look at a file's tree finds: to parse all files takes seconds, to keep all memory."""

    is_silent: bool
    """Whether it has code and no docstring."""
    definitions: list[str]
    """Those that are too long or too deep."""
    hidden: list[str]
    """Imports that hide annotations."""


@cache
def look_at(file: Path) -> Look:
    path, text = file.relative_to(ROOT), file.read_text(encoding="utf-8")
    tree = ast.parse(text, filename=str(file))
    definitions, hidden = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _hides_annotations(node):
            hidden.append(f"{path}:{node.lineno}")
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        positional = [
            a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("cls", "self")
        ]
        figures = (length(node), len(positional), nesting(node))
        bounds = (MAX_FUNCTION, MAX_POSITIONAL, MAX_NESTING)
        if any(a > b for a, b in zip(figures, bounds, strict=True)):
            place = f"{path}:{node.lineno} {node.name}"
            definitions.append(f"{place}: lines, positional parameters, nesting {figures}")
    is_silent = bool(text.strip()) and ast.get_docstring(tree) is None
    return Look(is_silent, definitions, hidden)


def _hides_annotations(node: ast.ImportFrom) -> bool:
    return (node.module == "__future__" and node.names[0].name == "annotations") or any(
        alias.name == "TYPE_CHECKING" for alias in node.names
    )


def test_no_definition_is_too_long_or_too_deep():
    assert [one for file in FILES for one in look_at(file).definitions] == []


def test_every_file_is_named_for_its_subject():
    assert [str(f) for f in FILES if f.stem in SUBJECTLESS] == []


def test_every_module_says_what_it_is():
    assert [str(file.relative_to(ROOT)) for file in FILES if look_at(file).is_silent] == []


def test_no_annotation_is_hidden():
    """`from __future__ import annotations` breaks shape checks; TYPE_CHECKING hides circles."""
    assert [place for file in FILES for place in look_at(file).hidden] == []


def _names_forbidden(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in FORBIDDEN_MODULES for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in FORBIDDEN_MODULES
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in FORBIDDEN_CALLS
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return (node.value.id, node.attr) in FORBIDDEN_ATTRIBUTES
    if isinstance(node, ast.keyword):
        return node.arg in ("allow_pickle", "shell")
    return False


def test_CVE_2024_9052_nothing_in_the_package_can_run_what_it_reads():
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.keyword)
    assert [p for p, node in walk(kinds, PACKAGE.rglob("*.py")) if _names_forbidden(node)] == []


def test_no_work_is_left_in_comments():
    mark = re.compile(
        r"#.*\b(TO[D]O|FIX[M]E|X[X]X|HA[C]K)\b|# (noqa|type: ignore|pyrefly: ignore)\s*$"
    )
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in FILES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if mark.search(line)
    ]
    assert found == []


def test_every_tracked_file_passes_the_commit_hook(tracked: list[str]):
    command = [sys.executable, "tests/check_files.py", *tracked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_link_of_the_documentation_leads_somewhere():
    command = [sys.executable, "docs/check_links.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_top_level_holds_what_it_should(tracked: list[str]):
    assert {name.split("/")[0] for name in tracked} - TOP_LEVEL == set()


def test_torch_is_a_dependency_of_what_compares_with_it_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    with_torch = {name for name, needs in extras.items() if any("torch" in n for n in needs)}
    assert with_torch == {"dev", "parity"}


@pytest.mark.slow
def test_the_wheel_carries_the_default(tmp_path: Path, default_checkpoint: Path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("mmjax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    folder = "mmjax/_checkpoints/tiny_scenes"
    carried = {f"{folder}/{f.name}" for f in default_checkpoint.iterdir()}
    carried |= {f"{folder}/adapters/italian/{name}" for name in ADAPTER_FILES}
    assert carried <= names
    assert not {name for name in names if name.startswith(("tests/", "checkpoints/"))}
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "server" / "page").rglob("*")]
    source = {str(file.relative_to(ROOT)) for file in files if file.is_file()}
    assert source <= names
    assert wheel.name.endswith("-py3-none-any.whl")
    assert np.all([archive.getinfo(name).file_size < 16 * 2**20 for name in carried])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="this machine has no C++ compiler")
def test_a_releases_wheel_has_the_kernels_compiled(tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    environment = {**os.environ, "MMJAX_BUILD_KERNELS": "1"}
    command = [*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, env=environment)
    (wheel,) = tmp_path.glob("mmjax-*-py3-none-linux_*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert f"mmjax/layers/cpu/kernels/{library_path().name}" in archive.namelist()
