"""Check the documentation's links: every local target exists, and every anchor names a heading.

`python docs/check_links.py`; addresses on the web are not visited.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors that a page's headings get, as code hosts make them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.strip().replace(" ", "-") for heading in plain}


def broken(page: Path) -> Iterator[str]:
    """Yield the links of `page` that lead nowhere."""
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{target}: no such heading"


def main() -> int:
    """Print every broken link; return 1 if there is one."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("checkpoints/*/*.md")]
    found = [f"{page.relative_to(ROOT)}: {problem}" for page in pages for problem in broken(page)]
    print("\n".join(found) or f"{len(pages)} pages, every link leads somewhere")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
