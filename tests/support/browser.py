"""A real browser, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, async_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def find_chromium(default: str) -> str:
    """A browser of this machine: Playwright's own if it is installed; skips if there is none."""
    found = [default] if os.access(default, os.X_OK) else []
    found += filter(None, map(shutil.which, CHROMIUM))
    if not found:
        pytest.skip("needs Chromium (playwright install chromium, or apt-get install chromium)")
    return found[0]


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser without windows, closed at the end."""
    async with async_playwright() as playwright:
        path = find_chromium(playwright.chromium.executable_path)
        browser = await playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            await browser.close()
