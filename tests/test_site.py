"""The documentation's site: every page is in it, and it builds without a warning."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from docs.make_site import CONFIG, MADE, REPOSITORY, ROOT, SITE, list_pages, rewrite

LEFT_OUT = {"docs/notes/log.md"}
"""For those who work on mmjax."""


def test_every_page_is_in_the_navigation_once() -> None:
    pages = list_pages()
    assert len(set(pages)) == len(pages)
    written = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert written - LEFT_OUT <= set(pages)
    assert not LEFT_OUT & set(pages)


def test_a_link_leads_to_a_page_or_to_the_repository() -> None:
    pages = {*list_pages(), *MADE}
    for page in list_pages():
        text = rewrite(page, (ROOT / page).read_text(encoding="utf-8"), pages)
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s#]+)", text):
            if target.startswith(REPOSITORY):
                assert (ROOT / target.removeprefix(f"{REPOSITORY}/")).exists(), target
            elif not re.match(r"\w+:", target):
                path = (ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT)
                assert str(path) in pages or path.suffix in {".png", ".svg"}, f"{page}: {target}"


@pytest.mark.slow  # mkdocs is an extra of its own, which `make test` does not install
def test_the_site_builds_without_a_warning() -> None:
    if find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed; `make test-slow` and `make docs` install it")
    for command in ([str(ROOT / "docs" / "make_site.py")], ["-m", "mkdocs", "build", "--strict"]):
        is_build = command[0] == "-m"
        done = subprocess.run(
            [sys.executable, *command, *(["-f", str(CONFIG)] if is_build else [])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    home = (SITE / "index.html").read_text(encoding="utf-8")
    assert "Serve multimodal models with JAX" in home
    python = Path(SITE / "docs" / "python" / "index.html").read_text(encoding="utf-8")
    names = "generate stream_chat SamplingParams draw_boxes temperature finish_reason"
    for name in names.split():
        assert f"{name}</code>" in python or f"{name}</span>" in python
