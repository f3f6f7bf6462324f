"""A real browser for tests of the page: Chromium of the machine, driven by playwright.

Tests marked `browser` are skipped only where no Chromium is installed: `chromium`, `chromium-browser`, `google-chrome`
on the path, or the program that $INLAY_CHROMIUM names.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("INLAY_CHROMIUM") or next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_OPTIONS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_AXE = gzip.decompress((Path(__file__).parent / "vendor" / "axe.min.js.gz").read_bytes()).decode()
_WATCH_POLICY = """
window.refusals = [];
document.addEventListener("securitypolicyviolation", (event) => window.refusals.push(event.violatedDirective));
"""
SIZES = {"desk": (1280, 900), "phone": (390, 844)}


@contextmanager
def browsing(size: str = "desk", scheme: str = "light") -> Iterator[Watched]:
    """Open a browser; what it complains about at the end fails the test."""
    from playwright.sync_api import sync_playwright

    width, height = SIZES[size]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_OPTIONS))
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.set_default_timeout(60_000)  # a busy machine trains slowly
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        context.add_init_script(_WATCH_POLICY)
        watched = Watched(context.new_page())
        try:
            yield watched
            watched.check()
        finally:
            browser.close()


class Watched:
    """A page of a browser, with all that it complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        page.on("dialog", lambda dialog: dialog.accept())

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def check(self, allowed: tuple[str, ...] = ()) -> None:
        """Fail if there was a complaint, or something the security policy refused."""
        refusals = self.page.evaluate("window.refusals")
        assert not refusals, refusals
        left = [words for words in self.complaints if not any(word in words for word in allowed)]
        assert not left, left
        self.complaints.clear()

    def find_barriers(self) -> list[str]:
        """Return what axe finds that keeps people out: WCAG 2.2 A and AA, and best practices."""
        self.page.evaluate(_AXE)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{rule['id']}: {rule['help']}: {[node['html'][:200] for node in rule['nodes'][:3]]}"
            for rule in found["violations"]
        ]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
