"""MLflow's user interface on a finished search, in a real browser: select trials, compare them, read the report.

Screenshots are kept in the directory that RAYDP_SCREENSHOTS names, if it is set.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raydp.search.results import Result
from tests.search.helpers import small_search

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (on Debian: apt-get install chromium)"),
]
PATIENCE = 90_000  # milliseconds; the interface loads megabytes of script on a busy machine
#: MLflow 3.17 asks for an optional service of its own whose absence the browser reports.
EXPECTED = "Failed to load resource: the server responded with a status of 404 (Not Found)"


@dataclass(frozen=True, kw_only=True)
class Site:
    """A served run directory."""

    url: str
    directory: Path
    result: Result


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A search of the two splits, served by ``raydp ui``."""
    path = tmp_path_factory.mktemp("ui") / "run"
    result = small_search(name="splits", method="tp_topk", trials=3, seeds=1, space=splits, fixed=FIXED).run(
        storage=path, quiet=True
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "raydp", "ui", str(path), "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(180):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        yield Site(url=url, directory=path, result=result)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)


FIXED = {"epochs": 2, "batch_size": 128, "learning_rate": 1.0}


def splits(trial: Any) -> None:
    trial.suggest_float("warmup_fraction", 0.3, 0.6)
    trial.suggest_float("warmup_share", 0.3, 0.6)


@pytest.fixture
def page(site: Site) -> Iterator[Any]:
    """A tab whose console must stay free of errors."""
    with sync_api.sync_playwright() as playwright:
        # The sandbox of Chromium needs rights that containers lack; the pages are our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900})
        tab.set_default_timeout(PATIENCE)
        errors: list[str] = []
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        yield tab
        browser.close()
    assert [error for error in errors if error != EXPECTED] == []


def keep(page: Any, name: str) -> None:
    if "RAYDP_SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["RAYDP_SCREENSHOTS"]) / f"{name}.png")


def test_selected_trials_are_compared_on_the_axes_of_the_split(site: Site, page: Any) -> None:
    page.goto(f"{site.url}/#/experiments/1/runs", wait_until="domcontentloaded")
    page.get_by_text("splits", exact=True).first.wait_for()
    page.locator(".ag-row svg").first.click()  # opens the search: its trials are below it
    best = site.result.best
    assert best is not None
    page.get_by_text(f"{best.key} ", exact=False).first.wait_for()
    keep(page, "runs")
    rows = page.locator(".ag-row .ag-checkbox-input-wrapper")
    rows.nth(3).wait_for()
    for row in range(1, 4):
        rows.nth(row).click()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_text("Comparing 3 Runs from 1 Experiment").wait_for()
    axes = page.locator("svg text")
    axes.filter(has_text="warmup_share").first.wait_for()
    texts = axes.all_text_contents()
    assert {"warmup_fraction", "warmup_share"} <= set(texts)
    assert "accuracy" in texts, texts  # the objective, and not whichever metric was measured first
    assert "method" not in texts and not any(text.startswith("seed-") for text in texts), texts
    assert page.get_by_text(f"{best.key} ", exact=False).count() > 0
    keep(page, "compare")


def test_the_report_opens_without_a_network(site: Site, page: Any) -> None:
    from raydp.search import report

    out = site.directory / "report.html"
    report.write([site.result], out, pictures=False)
    page.context.set_offline(True)
    page.goto(out.as_uri())
    assert page.get_by_text("warmup_share").count() > 0
    assert page.locator("svg").count() >= 3
    keep(page, "report")
