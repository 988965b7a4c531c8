"""Photograph the page for the README: the default model's answer about a fresh scene, and its cost.

`.venv/bin/python docs/make_page_picture.py [SEED]` serves the model, drives Chromium, and writes
docs/page.png.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from make_picture import find_scene
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

HERE = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1240, 1000
MAX_COLORS = 256

expect.set_options(timeout=120_000)


@contextmanager
def serving() -> Iterator[str]:
    """Serve the default model; yield its address once all its programs are compiled."""
    command = [sys.executable, "-m", "mmjax.serve", "--port", "0", "--precompile", "all"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            found = re.search(r"mmjax serving \S+ at (\S+)", line)
            if found:
                yield found[1]
                return
        raise SystemExit("the server has ended")
    finally:
        process.terminate()
        process.communicate()


def ask(page: Page, scene: Image.Image) -> None:
    """Ask about the scene, and open what the last answer cost."""
    file = BytesIO()
    scene.save(file, "PNG")
    page.locator("#files").set_input_files(
        [{"name": "scene.png", "mimeType": "image/png", "buffer": file.getvalue()}]
    )
    expect(page.locator("#drafts img")).to_have_count(1)
    page.get_by_role("textbox", name="Message").fill("Describe the picture.")
    page.keyboard.press("Enter")
    expect(page.locator("details.cost")).to_have_count(1)
    # Again, so that the caches have it.
    with page.expect_response("**/v1/chat/completions"):
        page.get_by_role("button", name="Answer again").click()
    expect(page.locator("details.cost")).to_have_count(1)
    page.locator("details.cost summary").last.click()
    expect(page.locator(".strip")).to_be_visible()
    page.locator("details.cost").last.scroll_into_view_if_needed()


def main(argv: list[str]) -> None:
    """Write the picture."""
    scene = find_scene(int(argv[0]) if argv else 15)
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with serving() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"{address}/")
        expect(page.locator("#status[data-state=ready]")).to_be_visible()
        ask(page, scene)
        shot = Image.open(BytesIO(page.screenshot()))
        browser.close()
    shot.convert("P", palette=Image.Palette.ADAPTIVE, colors=MAX_COLORS).save(
        HERE / "page.png", optimize=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
