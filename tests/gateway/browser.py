"""A real Chromium before a gateway's page: what a user does there, and what must never happen meanwhile."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
"""A folder that pictures of the page are written to; none are where it is not named."""

_CAMERA = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
_PATIENCE = 180_000
"""Milliseconds that only end a test that has failed."""
_DROP = """([name, type, content]) => {
  const files = new DataTransfer();
  files.items.add(new File([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], name, { type }));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer: files }));
  }
}"""


@contextmanager
def browser() -> Iterator[Browser]:
    """The one that is installed; skips the test where there is none."""
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no browser: install Debian's chromium, or name another one's program in CHROMIUM")
    expect.set_options(timeout=_PATIENCE)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=_CAMERA)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def opened(browser: Browser, address: str, **screen: Any) -> Iterator[Page]:
    """The page of the gateway at this address. Asserts at its end that nothing went wrong in it, that its policy was
    kept, and that it asked nobody else for anything."""
    context = browser.new_context(**{"viewport": {"width": 1080, "height": 1000}, **screen})
    wrong: list[str] = []
    try:
        page = context.new_page()
        page.set_default_timeout(_PATIENCE)

        def heard(message: ConsoleMessage) -> None:
            answered = message.text.startswith("Failed to load resource")  # an answer that is an error, which is shown
            if message.type in ("error", "warning") and not answered:
                wrong.append(message.text)

        def asked(request: Request) -> None:
            if not request.url.startswith((f"http://{address}/", "blob:")):
                wrong.append(f"asked for {request.url}")

        page.on("console", heard)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", asked)
        page.goto(f"http://{address}/")
        yield page
    finally:
        context.close()
    assert wrong == []


def drop(page: Page, content: bytes, name: str, kind: str) -> None:
    """Drops a file on the page."""
    page.evaluate(_DROP, [name, kind, base64.b64encode(content).decode()])
    page.get_by_role("button", name=f"Remove {name}").wait_for()


def question(page: Page) -> Locator:
    """Where one asks."""
    return page.get_by_role("textbox", name="Question")


def ask(page: Page, words: str) -> Locator:
    """Asks, and returns where the answer is going to be."""
    number = page.get_by_role("article", name="Answer").count()
    question(page).fill(words)
    page.get_by_role("button", name="Ask", exact=True).click()
    return page.get_by_role("article", name="Answer").nth(number)


def complete(answer: Locator) -> Locator:
    """The answer, once it is whole and its times are there."""
    answer.get_by_role("table").wait_for()
    answer.get_by_role("button", name="Retry").wait_for()
    return answer


def shoot(page: Page, name: str, **options: Any) -> None:
    """A picture of the page, where one is wanted."""
    if SCREENSHOTS:
        Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", animations="disabled", **options)
