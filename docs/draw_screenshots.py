"""Take the pictures of the page that the documents show: `python docs/draw_screenshots.py` (minutes on two cores).

It starts a real service on an empty store, walks the whole way of a task in Chromium with some of the SMS messages, and
writes `docs/screenshots/*.png`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "screenshots"
MESSAGES = ROOT / "examples" / "sms_spam" / "sms_spam.tsv"
CHROMIUM = os.environ.get("INLAY_CHROMIUM") or shutil.which("chromium")
OPTIONS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
NUM_ROWS = 900
NUM_FIRST = 150
"""rows of the first version, few enough for the second one to be better"""
PATIENCE_MS = 20 * 60 * 1000
SAMPLE = "WINNER!! You have been selected for a free prize, call 09061701461 now"
COLOURS = 128


@contextmanager
def service(home: Path) -> Iterator[str]:
    """Run a service on a free port; gives its address."""
    command = [sys.executable, "-m", "inlay", "serve", "--store", str(home), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"answers at (http://\S+)", line):
                    yield found[1]
                    break
            else:
                raise RuntimeError("the service did not start")
        finally:
            process.terminate()
            process.stdout.close()


class Camera:
    """Takes pictures of a page at two widths."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        dark = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
        self.phone = dark.new_page()
        for page in (self.page, self.phone):
            page.set_default_timeout(PATIENCE_MS)
            page.on("dialog", lambda dialog: dialog.accept())

    def take(self, name: str, page: Any = None, height: int | None = None) -> None:
        """Write a picture; `height` cuts it, or shows more than the window does."""
        page = page or self.page
        page.wait_for_timeout(400)
        path = FOLDER / f"{name}.png"
        width = page.viewport_size["width"]
        if height is None:
            page.screenshot(path=path)
        else:
            page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height})
        with Image.open(path) as image:
            image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def upload(page: Any, path: Path, first: int, last: int) -> None:
    """Upload some of the messages."""
    lines = MESSAGES.read_text(encoding="utf8").splitlines(keepends=True)
    path.write_text(lines[0] + "".join(lines[first:last]), encoding="utf8")
    page.get_by_label("Drop a file here").set_input_files(path)
    page.get_by_role("heading", name="What was found").wait_for()


def train(page: Any, rounds: str) -> None:
    """Train what was found."""
    page.get_by_text("More settings").click()
    page.get_by_label("Rounds").fill(rounds)
    page.get_by_label("Learning rate").fill("0.0005")
    page.get_by_role("button", name="Train", exact=True).click()
    page.wait_for_url("**/jobs/job_*")


def walk(camera: Camera, address: str, folder: Path) -> None:
    """Walk the whole way of a task, and take pictures of it."""
    page = camera.page
    page.goto(address)
    camera.take("welcome", height=620)
    page.get_by_role("link", name="Choose a file").click()
    upload(page, folder / "messages.tsv", 1, NUM_FIRST)
    camera.take("new-task", height=1000)
    train(page, "3")
    page.get_by_role("heading", name="Version 1 is live").wait_for()
    page.get_by_role("link", name="Tasks", exact=True).first.click()
    page.get_by_role("link", name="messages").click()
    page.get_by_role("link", name="Train a new version").click()
    upload(page, folder / "more.tsv", 1, NUM_ROWS)
    train(page, "4")
    page.locator("#log li", has_text="Round 3:").wait_for()
    camera.take("job", height=760)
    page.get_by_role("heading", name=re.compile(r"Version 2 is")).wait_for()
    ask(camera, address)
    page.goto(f"{address}/tasks/messages/versions/2")
    cells = page.locator(".confusion td a")
    wrong = page.locator(".confusion td[class*=w] a")
    (wrong if wrong.count() else cells).first.click()
    page.locator("#behind tbody tr").first.wait_for()
    camera.take("version", height=1150)
    page.goto(f"{address}/tasks/messages/label")
    camera.take("label", height=900)
    page.goto(f"{address}/tasks/messages/compare?a=1&b=2")
    camera.take("compare", height=1050)
    page.goto(f"{address}/operator")
    camera.take("operator", height=900)
    page.goto(address)
    camera.take("tasks", height=420)


def ask(camera: Camera, address: str) -> None:
    """Ask both versions about a text, on a desk and on a phone."""
    for page, name, height in ((camera.page, "try", 1000), (camera.phone, "phone", 844)):
        page.goto(f"{address}/tasks/messages/try")
        page.get_by_label("Text").fill(SAMPLE)
        page.get_by_role("button", name="Ask").click()
        page.locator(".answer .says").first.wait_for()
        page.get_by_label("Text").blur()
        camera.take(name, page, height)


def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        service(Path(folder) / "home") as address,
        sync_playwright() as driver,
    ):
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        walk(Camera(browser), address, Path(folder))
        browser.close()


if __name__ == "__main__":
    main()
