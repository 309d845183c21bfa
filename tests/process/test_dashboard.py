"""The dashboard in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, expect

from blobstore.http.loop_lag import LoopLag
from blobstore.latencies import Latencies
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import KIB, MIB
from tests.support.browser import chromium
from tests.support.dashboard import TOKEN, Serving
from tests.support.store_client import StoreClient, chain, content, opaque

NBYTES = 64 * KIB
PATIENCE_MS = 20_000
CONTRAST_MIN = 4.5
SHIFT_MAX = 0.02
"""Far below what people notice (0.1 is held to be good)."""

LAPTOP, PHONE = (1280, 800), (400, 800)

TOO_FAINT = """(least) => {
  const rgba = (text) => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 1) return color;
    }
    return [255, 255, 255, 1];
  };
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim());
    const seen = node.checkVisibility({ visibilityProperty: true });
    if (!own || !seen || ["SCRIPT", "STYLE"].includes(node.tagName)) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < least) faint.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return faint;
}"""
CUT_OFF = """([nbytes, time]) => {
  const widest = { "#hits tr:first-child td:nth-child(4)": nbytes, "#namespaces td": nbytes,
    "#moves td:nth-child(4)": nbytes, "#attached td:nth-child(4)": nbytes,
    "#operations td:nth-child(3)": time, "#operations td:nth-child(4)": time };
  for (const [cells, text] of Object.entries(widest))
    for (const cell of document.querySelectorAll(cells)) cell.textContent = text;
  return [...document.querySelectorAll("td, thead th, #hits th, #operations th")]
    .filter((cell) => cell.checkVisibility() && cell.scrollWidth > cell.clientWidth)
    .map((cell) => cell.textContent);
}"""
WATCH_SHIFTS = """() => {
  window.shifted = 0;
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
  }).observe({ type: "layout-shift", buffered: true });
}"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    settings = StoreSettings(tmp_path, dram_bytes=4 * MIB, staging_bytes=MIB, ssd_bytes=64 * MIB)
    made = await Store.open(settings)
    yield made
    await made.close()


@pytest.fixture
async def serving(store: Store) -> AsyncIterator[Serving]:
    lag = LoopLag()
    lag.start()
    made = Serving(store, Latencies(), lag)
    await made.start()
    yield made
    await made.stop()
    await lag.close()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


class Viewer:
    """A page in a context of its own, and all that it asked for and complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", self._requested)
        page.on("console", self._complained)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def _requested(self, request: Request) -> None:
        self.requests.append(request.url)

    def _complained(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    async def is_shown(self, selector: str, text: str) -> None:
        await expect(self.page.locator(selector)).to_have_text(text, timeout=PATIENCE_MS)

    async def connect(self, address: str, token: str = TOKEN) -> None:
        await self.page.goto(address)
        await self.page.get_by_label("Token").fill(token)
        await self.page.get_by_role("button", name="Connect").click()


async def view(browser: Browser, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> Viewer:
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    return Viewer(await context.new_page())


async def work(store: Store, latencies: Latencies, name: str = "") -> None:
    """Three blobs are put; of four that are asked for, one is absent."""
    ns = opaque(NBYTES, "a model <b>&amp;</b>")
    await store.declare(ns.encode())
    client = StoreClient(store)
    started_s = latencies.clock()
    keys = chain(4, name)
    await client.put(ns, keys[:3], [content(n, NBYTES) for n in range(3)], timeout_s=5.0)
    latencies.note("local", "put", started_s)
    (await client.get(ns, keys)).release()
    latencies.note("local", "get", started_s, "busy")


async def test_whoever_has_a_token_sees_the_store_live(
    browser: Browser, serving: Serving, store: Store
) -> None:
    await work(store, serving.latencies)
    viewer = await view(browser)
    page = viewer.page
    await page.goto(serving.address)
    await viewer.is_shown("#pill", "Not connected")
    await expect(page.get_by_role("heading", name="Tiers")).to_be_hidden()
    await viewer.connect(serving.address)
    await viewer.is_shown("#pill", "Live")
    await viewer.is_shown("#ratio-all", "75.0 %")
    await viewer.is_shown("#clients", "1")
    rows = page.locator("#hits tr")
    await expect(rows.nth(0)).to_have_text("from DRAM03192 KiB48")
    await expect(rows.nth(3)).to_have_text("missed: absent01")
    operations = page.get_by_role("table", name="Operations", exact=True)
    await expect(operations.get_by_role("row", name="local put")).to_be_visible()
    await expect(page.locator("#slowest tr")).to_have_count(2)
    model = page.get_by_role("table", name="Namespaces").get_by_role("rowheader")
    await expect(model).to_have_text("a model <b>&amp;</b>")

    await work(store, serving.latencies, "more")
    await expect(rows.nth(0)).to_have_text("from DRAM36384 KiB96")
    await expect(rows.nth(3)).to_have_text("missed: absent12")
    await viewer.is_shown("#ratio", "75.0 %")
    await expect(page.locator("#pipe-put.flowing")).to_be_visible()
    assert (
        float(
            await page.get_by_role("meter", name="DRAM in use").get_attribute("aria-valuenow") or 0
        )
        > 0
    )
    assert viewer.complaints == []
    assert {url.split("/")[2] for url in viewer.requests} == {serving.address.split("/")[2]}


async def test_a_token_stays_in_its_tab_and_leaves_in_the_header_alone(
    browser: Browser, serving: Serving
) -> None:
    viewer = await view(browser)
    page = viewer.page
    await viewer.connect(serving.address, "wrong")
    await expect(page.get_by_role("status")).to_contain_text("not accepted")
    await page.get_by_label("Token").fill("no token")
    await page.get_by_label("Token").press("Enter")
    await expect(page.get_by_role("status")).to_contain_text("no spaces")
    await page.get_by_label("Token").fill(TOKEN)
    await page.get_by_label("Token").press("Enter")
    await viewer.is_shown("#pill", "Live")
    await page.reload()
    await viewer.is_shown("#pill", "Live")  # the tab remembers
    other = await page.context.new_page()
    await other.goto(serving.address)
    await expect(other.get_by_label("Token")).to_be_focused()  # another does not
    await page.get_by_role("button", name="Forget token").click()
    await expect(page.get_by_label("Token")).to_be_focused()
    assert await page.evaluate("sessionStorage.length") == 0
    assert await page.evaluate("localStorage.length + document.cookie.length") == 0
    assert set(serving.asked) == {"/", "/v1/events"}


async def test_it_says_plainly_that_it_is_not_connected_and_comes_back(
    browser: Browser, serving: Serving, store: Store
) -> None:
    viewer = await view(browser)
    await viewer.connect(serving.address)
    await viewer.is_shown("#pill", "Live")
    await serving.stop()
    await viewer.is_shown("#pill", "Not connected")
    await expect(viewer.page.get_by_role("status")).to_contain_text("What is shown is of")
    await expect(viewer.page.locator("main.stale")).to_be_visible()
    await serving.start()
    await viewer.is_shown("#pill", "Live")
    await expect(viewer.page.locator("main.stale")).to_have_count(0)
    serving.tokens.clear()
    await expect(viewer.page.get_by_role("status")).to_contain_text("not accepted")
    await expect(viewer.page.get_by_role("heading", name="Tiers")).to_be_hidden()


async def test_a_server_that_has_gone_silent_is_noticed(browser: Browser, serving: Serving) -> None:
    await serving.stop()
    serving.interval_s = 3600.0
    await serving.start()
    viewer = await view(browser)
    await viewer.page.clock.install()
    await viewer.connect(serving.address)
    await viewer.is_shown("#pill", "Live")
    await viewer.page.clock.run_for(7_000)
    await viewer.is_shown("#pill", "Silent")
    asked = len(serving.asked)
    await viewer.page.clock.run_for(20_000)
    await viewer.is_shown("#pill", "Live")  # asked anew
    assert len(serving.asked) > asked


async def test_a_server_that_never_answers_is_asked_again(
    browser: Browser, serving: Serving
) -> None:
    serving.mute = True
    viewer = await view(browser)
    await viewer.page.clock.install()
    await viewer.connect(serving.address)
    await viewer.is_shown("#pill", "Connecting")
    serving.mute = False
    await viewer.page.clock.run_for(17_000)
    await viewer.is_shown("#pill", "Live")
    assert serving.asked.count("/v1/events") == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
async def test_it_is_readable(
    browser: Browser, serving: Serving, store: Store, size: tuple[int, int], scheme: str
) -> None:
    viewer = await view(browser, size, scheme)
    page = viewer.page
    await page.goto(serving.address)
    assert await page.evaluate(TOO_FAINT, CONTRAST_MIN) == []
    await viewer.connect(serving.address)
    for name in ("one", "two"):
        await work(store, serving.latencies, name)
    await viewer.is_shown("#hits tr:first-child td:nth-child(3)", "6")
    assert await page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert await page.evaluate(TOO_FAINT, CONTRAST_MIN) == []
    assert await page.evaluate(CUT_OFF, ["88.8 MiB", "88.8 ms"]) == []
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = sum(map(int, background.removeprefix("rgb(").rstrip(")").split(",")))
    assert (bright < 3 * 64) == (scheme == "dark")
    assert viewer.complaints == []


async def test_nothing_jumps_when_numbers_come_and_change(
    browser: Browser, serving: Serving, store: Store
) -> None:
    await work(store, serving.latencies)
    viewer = await view(browser)
    await viewer.connect(serving.address)
    await viewer.is_shown("#pill", "Live")
    await viewer.page.evaluate(WATCH_SHIFTS)
    for number in range(20):
        await work(store, serving.latencies, f"chain {number}")
    await viewer.is_shown("#hits tr:first-child td:nth-child(3)", "63")
    await serving.stop()
    await viewer.is_shown("#pill", "Not connected")
    await serving.start()
    await viewer.is_shown("#pill", "Live")
    assert await viewer.page.evaluate("window.shifted") < SHIFT_MAX


async def test_everything_that_means_something_has_a_name(
    browser: Browser, serving: Serving, store: Store
) -> None:
    await work(store, serving.latencies)
    viewer = await view(browser)
    page = viewer.page
    await viewer.connect(serving.address)
    await viewer.is_shown("#pill", "Live")
    for role, name in (
        ("meter", "DRAM in use"),
        ("meter", "SSD in use"),
        ("img", "Throughput, now: puts"),
        ("img", "look-ups"),
        ("table", "Look-ups"),
        ("table", "Slowest operations"),
        ("table", "Namespaces"),
        ("table", "Moves"),
        ("table", "Clients"),
        ("region", "Policy"),
        ("region", "Tiers"),
        ("button", "Forget token"),
    ):
        await expect(page.get_by_role(role, name=name)).to_have_count(1)  # type: ignore[arg-type]
    headings = await page.get_by_role("heading", level=2).all_text_contents()
    assert headings[:2] == ["Tiers", "Throughput"]


async def test_it_shows_what_moved_and_why_and_who_is_attached(
    browser: Browser, serving: Serving, store: Store
) -> None:
    await work(store, serving.latencies)
    record = next(store.index.records())
    for _ in range(3):
        store.counters.moved("dram>none", "kept_on_ssd", record)
    store.counters.refused("ssd", "unlikely", record)
    for _ in range(9):  # the store's own get makes one more
        store.counters.ages.reused(200.0)
    viewer = await view(browser)
    await viewer.connect(serving.address)
    moves = viewer.page.locator("#moves tr")
    # The store's own moves come between, as soon as it writes what was put.
    for text in ("left DRAM: kept on ssd03192 KiB", "not onto SSD: unlikely0164.0 KiB"):
        await expect(moves.filter(has_text=text)).to_have_count(1)
    store.counters.moved("dram>none", "kept_on_ssd", record)
    await expect(moves.filter(has_text="left DRAM: kept on ssd14256 KiB")).to_have_count(1)
    clients = viewer.page.get_by_role("table", name="Clients").get_by_role("rowheader")
    await expect(clients).to_have_text(re.compile(r"client \d+"))
    await expect(viewer.page.locator("#gap")).to_have_text(re.compile(r"\d+ min \d+ s"))
    assert viewer.complaints == []


async def test_of_many_operations_the_busiest_are_shown(browser: Browser, serving: Serving) -> None:
    for number in range(15):
        for _ in range(number):
            serving.latencies.note("local", f"verb{number}", serving.latencies.clock(), "busy")
    serving.latencies.note("http", "never", serving.latencies.clock())
    viewer = await view(browser)
    await viewer.connect(serving.address)
    rows = viewer.page.locator("#operations tr")
    await expect(rows).to_have_count(12)
    await viewer.is_shown("#no-operations", "and 3 others, asked for less")
    names = await rows.locator("th").all_text_contents()
    assert names == sorted(f"local verb{number}" for number in range(3, 15))
    # What failed before the last minute is no news.
    await expect(rows.first.locator("td").last).to_have_text("0")
    serving.latencies.note("local", "verb10", serving.latencies.clock(), "busy")
    await expect(rows.first.locator("td").last).to_have_text("1")


async def test_namespaces_of_one_model_are_told_apart(
    browser: Browser, serving: Serving, store: Store
) -> None:
    for salt in ("one", "two"):
        await store.declare(Namespace("llama", KVLayout.opaque(NBYTES), salt=salt).encode())
    viewer = await view(browser)
    await viewer.connect(serving.address)
    names = viewer.page.locator("#namespaces tr th")
    await expect(names).to_have_count(2)
    found = await names.all_text_contents()
    assert all(re.fullmatch(r"llama · [0-9a-f]{8}", name) for name in found)
    assert len(set(found)) == 2


async def test_a_store_without_ssd_says_so(browser: Browser, tmp_path: Path) -> None:
    store = await Store.open(StoreSettings(tmp_path, dram_bytes=4 * MIB, staging_bytes=MIB))
    serving = Serving(store, Latencies())
    await serving.start()
    try:
        viewer = await view(browser)
        await viewer.connect(serving.address)
        await viewer.is_shown("#ssd .share", "off")
        await viewer.is_shown("#ssd .size", "This store has no SSD tier.")
        assert viewer.complaints == []
    finally:
        await serving.stop()
        await store.close()
