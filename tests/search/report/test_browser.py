"""The page in a browser: on a telephone, on a desk, on paper, in the dark, by keyboard alone, and to a screen reader.

The checks of accessibility are the rules of WCAG 2.2 (AA) that a page of text, tables and figures can break; nothing is
fetched for them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydp.search import report
from raydp.search.results import Result
from tests.search.synthetic import clamping_run, distances_run, large_run, methods_run, splits_run

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)"),
]
PATIENCE = 90_000  # milliseconds
TELEPHONE, DESK, PAPER = 375, 1280, 688  # CSS pixels; the last is A4 between margins of 14 mm
PAGES = ("one", "several", pytest.param("large", marks=pytest.mark.slow))  # a thousand trials

#: Elements outside of boxes that scroll which reach over the right edge.
OVER = """() => [...document.querySelectorAll("body *")]
    .filter(e => !e.closest(".scroll") && !e.closest(".skip") && e.getBoundingClientRect().right > innerWidth + 1)
    .map(e => e.outerHTML.slice(0, 120))"""

#: Rules that are broken, in words.
BROKEN = """() => {
    const found = [], all = (selector) => [...document.querySelectorAll(selector)];
    if (document.documentElement.lang !== "en") found.push("no language");
    if (!document.title.trim()) found.push("no title");
    if (!document.querySelector("meta[name=viewport]").content.includes("width=device-width")) found.push("viewport");
    for (const landmark of ["header", "main", "nav", "footer", "h1"])
        if (all(landmark).length !== 1) found.push(`${all(landmark).length} of ${landmark}`);
    let level = 0;
    for (const heading of all("h1, h2, h3, h4, h5, h6")) {
        if (+heading.tagName[1] > level + 1) found.push(`heading skips a level: ${heading.textContent}`);
        level = +heading.tagName[1];
    }
    const ids = all("[id]").map((e) => e.id);
    ids.filter((id, i) => ids.indexOf(id) !== i).forEach((id) => found.push(`id twice: ${id}`));
    for (const figure of all("figure")) {
        const picture = figure.querySelector("svg[role=img], img");
        const said = picture && (picture.getAttribute("aria-label") ?? picture.alt);
        if (!said || said.length < 20) found.push(`figure without words: ${figure.id}`);
        if (!figure.querySelector("figcaption").textContent) found.push(`figure without caption: ${figure.id}`);
    }
    for (const image of all("img")) if (!image.alt) found.push("image without alt");
    for (const control of all("a, button, summary, [tabindex]"))
        if (!(control.getAttribute("aria-label") || control.textContent).trim())
            found.push(`no name: ${control.outerHTML}`);
    for (const box of all(".scroll")) {
        const room = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
        if (room && box.tabIndex !== 0) found.push(`only a mouse can scroll: ${box.className}`);
        if (box.tabIndex === 0 && !box.getAttribute("role")) found.push(`box without a role: ${box.className}`);
    }
    for (const table of all("table"))
        for (const heading of table.querySelectorAll("thead th"))
            if (heading.textContent && heading.scope !== "col")
                found.push(`heading without scope: ${heading.textContent}`);
    for (const link of all("a[href^='#']")) if (!ids.includes(link.hash.slice(1))) found.push(`dead link ${link.hash}`);
    return found;
}"""

#: Text whose contrast with what lies behind it is below 4.5 : 1 (3 : 1 where it is large).
FAINT = """() => {
    const parts = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
    const linear = (v) => (v /= 255, v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const ground = (e) => {
        for (; e; e = e.parentElement) {
            const colour = parts(getComputedStyle(e).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour;
        }
        return [255, 255, 255];
    };
    const faint = new Set();
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const e = walker.currentNode.parentElement, words = walker.currentNode.textContent.trim();
        // Words in the cells of a heat map lie on colours of their own: tests/search/report/test_charts.py.
        const cells = e.closest("figure[id*=pair_] svg");
        if (!words || cells || e.closest("script, style, svg style") || !e.checkVisibility()) continue;
        const style = getComputedStyle(e), size = parseFloat(style.fontSize);
        const colour = parts(e.closest("svg") ? style.fill : style.color);
        const [a, b] = [light(colour), light(ground(e))].sort((x, y) => y - x);
        const large = size >= 24 || (size >= 18.66 && +style.fontWeight >= 700);
        if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5)) faint.add(`${words.slice(0, 40)}: ${colour} on ${ground(e)}`);
    }
    return [...faint];
}"""


def best_in_the_middle(fraction: float, share: float, seed: int) -> float:
    return 0.9 - 2 * (fraction - 0.3) ** 2 - 2 * (share - 0.3) ** 2 + 0.001 * seed


class Files:
    """Reports, made when first asked for: of one search, of several that fill every figure, of a thousand trials."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getitem__(self, name: str) -> Path:
        page = self._root / f"{name}.html"
        if not page.exists():
            root = self._root / name
            root.mkdir()
            paths = {"one": self._one, "several": self._several, "large": lambda root: [large_run(root / "run")]}[name](
                root
            )
            report.write([Result.load(path) for path in paths], page, pictures=False)
        return page

    def _one(self, root: Path) -> list[Path]:
        return [splits_run(root / "splits", best_in_the_middle)]

    def _several(self, root: Path) -> list[Path]:
        return [
            methods_run(root / "methods", name="methods"),
            *self._one(root),
            clamping_run(root / "clamping"),
            distances_run(root / "distances", 1.0),
            distances_run(root / "further", 3.0),
        ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # The sandbox of Chromium needs rights that containers lack; the pages are our own.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab without a network whose console must stay empty."""
    context = browser.new_context(viewport={"width": DESK, "height": 900})
    context.set_offline(True)
    opened = context.new_page()
    opened.set_default_timeout(PATIENCE)
    said: list[str] = []
    opened.on("console", lambda message: said.append(message.text))
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("requestfailed", lambda request: said.append(f"asked for {request.url}"))
    yield opened
    context.close()
    assert said == []


@pytest.mark.parametrize("width", [TELEPHONE, DESK])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window_but_what_scrolls_by_itself(
    tab: Any, files: Files, name: str, width: int
) -> None:
    tab.set_viewport_size({"width": width, "height": 900})
    tab.goto(files[name].as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert tab.evaluate(OVER) == []
    if width == TELEPHONE:
        wide = tab.evaluate(
            "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        )
        assert wide > 0  # the leaderboard, at least, which scrolls in its own box
        caption = tab.locator("caption span").first.bounding_box()
        assert caption["x"] + caption["width"] <= width  # and is explained without scrolling
        assert tab.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 15


@pytest.mark.parametrize("name", PAGES)
def test_no_rule_of_accessibility_is_broken(tab: Any, files: Files, name: str) -> None:
    tab.goto(files[name].as_uri())
    assert tab.evaluate(BROKEN) == []


@pytest.mark.parametrize("media", [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"media": "print"}], ids=str)
@pytest.mark.parametrize("name", ["one", "several"])
def test_text_contrasts_with_what_lies_behind_it(tab: Any, files: Files, name: str, media: dict[str, Any]) -> None:
    tab.emulate_media(**media)
    tab.goto(files[name].as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    assert tab.evaluate(FAINT) == []


def test_rules_that_are_broken_are_noticed(tab: Any, files: Files) -> None:
    tab.goto(files["one"].as_uri())
    tab.evaluate("""() => {
        document.documentElement.lang = "";
        document.querySelector("svg").removeAttribute("aria-label");
        document.querySelector("h2").outerHTML = "<h4 style='color: #999'>Leaderboard</h4>";
        document.querySelector("main").insertAdjacentHTML("beforeend", "<div style='width: 2000px'>wide</div>");
    }""")
    broken = tab.evaluate(BROKEN)
    assert "no language" in broken and "heading skips a level: Leaderboard" in broken
    assert any(rule.startswith("figure without words") for rule in broken)
    assert [text.split(":")[0] for text in tab.evaluate(FAINT)] == ["Leaderboard"]
    assert any("wide" in element for element in tab.evaluate(OVER))


def test_a_table_is_sorted_by_the_keyboard_alone(tab: Any, files: Files) -> None:
    tab.goto(files["one"].as_uri())
    heading = tab.locator("th", has_text="warmup_fraction").first
    column = tab.locator("table").first.locator("tbody tr td:nth-child(5)")
    for _ in range(40):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.textContent") == "warmup_fraction":
            break
    else:
        raise AssertionError("the heading cannot be reached")
    outline = tab.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"  # one sees where one is
    assert heading.get_attribute("aria-sort") is None
    for key, order, reverse in (("Enter", "ascending", False), ("Space", "descending", True)):
        tab.keyboard.press(key)
        assert heading.get_attribute("aria-sort") == order
        values = [float(text) for text in column.all_text_contents()]
        assert len(values) == 9 and values == sorted(values, reverse=reverse)
    tab.locator("th", has_text="trial").first.locator("button").press("Enter")
    assert heading.get_attribute("aria-sort") is None  # one column at a time


def test_the_first_tab_leads_past_the_navigation(tab: Any, files: Files) -> None:
    tab.goto(files["one"].as_uri())
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the results"
    assert tab.locator(".skip").bounding_box()["x"] >= 0
    tab.keyboard.press("Enter")
    assert tab.evaluate("location.hash") == "#main"


@pytest.mark.parametrize("name", PAGES)
def test_paper_has_everything_and_nothing_to_press(tab: Any, files: Files, name: str, tmp_path: Path) -> None:
    tab.set_viewport_size({"width": PAPER, "height": 1000})
    tab.emulate_media(media="print", color_scheme="dark")
    tab.goto(files[name].as_uri())
    for control in ("nav", ".skip", "details", "summary"):
        assert not any(found.is_visible() for found in tab.locator(control).all()), control
    assert tab.evaluate("getComputedStyle(document.querySelector('th button'), '::after').display") == "none"
    assert tab.evaluate("document.documentElement.scrollWidth") == PAPER  # nothing is cut off at the right
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    boxes = "[...document.querySelectorAll('.scroll')].filter((e) => e.checkVisibility())"
    hidden = f"{boxes}.filter((e) => e.scrollHeight > e.clientHeight + 1).map((e) => e.ariaLabel)"
    assert tab.evaluate(hidden) == []  # nothing waits to be scrolled to
    for kind in ("figure", "tr", ".card"):
        assert tab.evaluate(f"getComputedStyle(document.querySelector('{kind}')).breakInside") == "avoid"
    assert tab.evaluate("getComputedStyle(document.querySelector('h2')).breakAfter") == "avoid"
    tab.pdf(path=tmp_path / "page.pdf", format="A4", prefer_css_page_size=True)
    content = (tmp_path / "page.pdf").read_bytes()
    pages = content.count(b"/Type /Page\n") or content.count(b"/Type /Page ")
    low, high = {"one": (2, 10), "several": (6, 30), "large": (15, 60)}[name]
    assert content.startswith(b"%PDF") and low <= pages <= high
