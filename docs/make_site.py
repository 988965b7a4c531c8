"""Gather what mkdocs makes the site of, in build/site_source: `make docs` does both.

Pages keep their places. Links to what is no page of the site (code, tests, measurements) become
links to the repository; the notebook becomes a page, with the outputs that are stored in it; the
public names of the package get a page.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mmjax

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "docs" / "mkdocs.yml"
SOURCE, SITE = ROOT / "build" / "site_source", ROOT / "build" / "site"
REPOSITORY = "https://github.com/mmjax/mmjax/blob/main"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
NOTEBOOK, NOTEBOOK_PAGE = "examples/quickstart.ipynb", "examples/quickstart.md"
PYTHON_PAGE = "docs/python.md"
OUTPUTS = "mmjax.frontend.output.outputs"
WITH_ALL_FIELDS = ("LoRARequest", "SamplingParams", "StructuredOutputsParams")
"""Public names of which every field is shown, also one whose name says all."""
ALL_FIELDS = "    options: {show_if_no_docstring: true, filters: ['!^_', '!^of$', '!^mm_items$']}"
MADE = {NOTEBOOK_PAGE, PYTHON_PAGE}
COPIED = {".css", ".png", ".svg"}


def list_pages() -> list[str]:
    """Return the pages of the site's navigation, without those that are made."""
    text = CONFIG.read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return [page for page in re.findall(r": (\S+\.md)$", text, re.MULTILINE) if page not in MADE]


def rewrite(page: str, text: str, pages: set[str]) -> str:
    """Return a page's text with links that lead somewhere on the site, or to the repository."""

    def replace(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        name, _, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not name:
            return found[0]
        path = str((ROOT / page).parent.joinpath(name).resolve().relative_to(ROOT))
        if (ROOT / path).is_dir() and f"{path}/README.md" in pages:
            target = f"{name.rstrip('/')}/README.md"
        elif path == NOTEBOOK:
            target = f"{name.removesuffix('.ipynb')}.md"
        elif path not in pages and Path(path).suffix not in COPIED:
            target = f"{REPOSITORY}/{path}" + (f"#{anchor}" if anchor else "")
        return f"{before}{target}{after}"

    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def make_python_page() -> str:
    """Return the page of the package's public names, from their docstrings."""
    lines = ["# Python", "", "The names of the package `mmjax`, which load nothing until used.", ""]
    for name in mmjax.__all__:
        if name in mmjax._HOMES:
            options = [ALL_FIELDS] if name in WITH_ALL_FIELDS else []
            lines += [f"::: {mmjax._HOMES[name]}.{name}", *options, ""]
    lines += ["What `generate` and `chat` return, one for each prompt:", ""]
    for name in ("RequestOutput", "CompletionOutput"):
        lines += [f"::: {OUTPUTS}.{name}", ALL_FIELDS, ""]
    return "\n".join(lines)


def make_notebook_page() -> Iterator[tuple[str, bytes]]:
    """Yield the files that the notebook becomes, below its folder."""
    # Imported here: of [docs] alone.
    from nbconvert import MarkdownExporter

    exporter: Any = MarkdownExporter()
    text, resources = exporter.from_filename(
        str(ROOT / NOTEBOOK), {"output_files_dir": "quickstart_files"}
    )
    yield Path(NOTEBOOK_PAGE).name, text.encode()
    yield from resources["outputs"].items()


def main() -> None:
    """Write build/site_source anew."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    pages = list_pages()
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        target = SOURCE / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewrite(page, text, {*pages, *MADE}), encoding="utf-8")
    for file in (ROOT / "docs").rglob("*"):
        if file.suffix in COPIED:
            copied = SOURCE / file.relative_to(ROOT)
            copied.parent.mkdir(exist_ok=True)
            shutil.copy(file, copied)
    (SOURCE / PYTHON_PAGE).write_text(make_python_page(), encoding="utf-8")
    for name, data in make_notebook_page():
        file = SOURCE / "examples" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


if __name__ == "__main__":
    main()
