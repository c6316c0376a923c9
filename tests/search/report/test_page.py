"""The page opens anywhere, can be read by everybody, and is clear about what is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from raydp.errors import CorruptFile, InvalidValue, UnknownName
from raydp.search import report
from raydp.search.results import Result
from tests.search.synthetic import Run, clamping_run, distances_run, large_run, methods_run, splits_run

VOID = {"meta", "wbr", "img", "br", "path", "use", "rect", "image", "stop", "circle"}


class Parsed(HTMLParser):
    """Elements of a page: (tag, attributes), headings' levels, and whether tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(*paths: Path, out: Path | None = None) -> str:
    out = out or paths[0] / report.REPORT
    (written,) = report.write([Result.load(path) for path in paths], out, pictures=False)
    return written.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("page")
    paths = (
        methods_run(root / "methods", name="methods"),
        splits_run(root / "splits", lambda a, b, seed: 0.9 - a * b + 0.001 * seed),
        clamping_run(root / "clamping"),
    )
    return page_of(*paths, out=root / "all.html")


def test_nothing_is_asked_of_the_network(text: str) -> None:
    assert not re.search(r"(src|href|action)=[\"']?(https?:)?//", text)
    assert not re.search(r"url\((?!#)", text) and "@import" not in text and "fetch(" not in text
    assert set(re.findall(r"https?://[^\"' <]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_page_is_well_formed_and_has_landmarks(text: str) -> None:
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.all("html")[0]["lang"] == "en" and parsed.all("title")
    for landmark in ("header", "main", "nav", "footer", "h1"):
        assert len(parsed.all(landmark)) == 1
    ids = [value["id"] for _, value in parsed.elements if value.get("id")]
    assert len(ids) == len(set(ids))
    inside = [link["href"] for link in parsed.all("a") if (link["href"] or "").startswith("#")]
    assert inside and all(link is not None and link[1:] in ids for link in inside)
    for section in parsed.all("section"):
        assert section["aria-labelledby"] in ids
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and all(after - before <= 1 for before, after in pairwise(levels))


def test_every_figure_has_a_text_alternative_and_every_heading_of_a_table_sorts(text: str) -> None:
    parsed = Parsed(text)
    pictures = parsed.all("svg")
    assert len(pictures) == len(parsed.all("figure")) >= 12
    assert all(picture["role"] == "img" and len(picture["aria-label"] or "") > 40 for picture in pictures)
    headings = [heading for heading in parsed.all("th") if heading]
    assert headings and all(heading["scope"] == "col" for heading in headings)
    assert len(parsed.all("button")) == len(headings)
    boxes = [box for box in parsed.all("div") if box.get("tabindex") == "0"]
    assert boxes and all(box["aria-label"] for box in boxes)  # what scrolls can be reached by the keyboard


def test_several_searches_fill_every_figure(text: str, tmp_path: Path) -> None:
    shown = {re.sub(r"^(s\d+|all)-", "", str(figure["id"])) for figure in Parsed(text).all("figure")}
    assert shown >= {"methods", "pair_warmup_fraction_warmup_share", "slices", "parallel", "importance", "progress"}
    assert shown >= {"curves", "budget", "schedule", "support", "cost"}
    assert "Differences between methods" in text and "distances" not in shown
    near, far = (distances_run(tmp_path / f"at{epsilon}", epsilon) for epsilon in (1.0, 3.0))
    figures = {str(figure["id"]) for figure in Parsed(page_of(near, far, out=tmp_path / "page.html")).all("figure")}
    assert {"all-distances", "s0-distances", "s1-distances"} <= figures and "all-epsilon_frechet" not in figures


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_contrasts_with_its_ground_in_the_light_and_in_the_dark() -> None:
    css = resources.files("raydp.search.report").joinpath("page.css").read_text()
    themes = [
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    ]
    assert len(themes) == 3  # light, dark, print
    for theme in themes:
        pairs = [(ink, ground) for ink in ("ink", "muted", "accent", "good", "bad") for ground in ("ground", "panel")]
        for ink, ground in [*pairs, ("warn", "warn-ground")]:
            light, dark = sorted((luminance(theme[ink]), luminance(theme[ground])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground, theme)


def test_one_search_says_what_it_found_and_what_it_spent(tmp_path: Path) -> None:
    path = methods_run(tmp_path / "run")
    (path / "statement.txt").write_text("This search satisfies (3, 1e-5)-DP & nothing else.")
    text = page_of(path)
    result = Result.load(path)
    for line in result.summary().splitlines()[-2:]:
        assert line in text
    for expected in ("0.921 ± 0.001", "tp_topk − dp_sgd", "ahead", str(path), "raydp verify", "trials/*/plan.json"):
        assert expected in text
    assert "This search satisfies (3, 1e-5)-DP &amp; nothing else." in text


def test_figures_lie_beside_the_page_as_svg_and_png(tmp_path: Path) -> None:
    path = splits_run(tmp_path / "run", lambda a, b, seed: 0.9 - a * b)
    written = report.write([Result.load(path)], tmp_path / "out" / "my.html")
    names = {file.name for file in (tmp_path / "out" / "my_figures").iterdir()}
    assert {"pair_warmup_fraction_warmup_share.svg", "pair_warmup_fraction_warmup_share.png", "budget.svg"} <= names
    assert {file.name for file in written} == names | {"my.html"}
    assert (tmp_path / "out" / "my_figures" / "budget.png").read_bytes().startswith(b"\x89PNG")


def test_generated_images_of_the_best_trial_are_shown(tmp_path: Path) -> None:
    path = methods_run(tmp_path / "run")
    assert "data:image/png" not in page_of(path)
    for key in ("t0000", "t0004"):
        (path / "trials" / key / "seed-1" / "samples.png").write_bytes(b"\x89PNG" + key.encode())
    text = page_of(path)
    assert 'alt="Images generated by t0004, seed 1"' in text and text.count("data:image/png") == 1


def test_further_pairs_are_shown_on_request(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for number in range(8):
        run.trial({"a": number, "b": number % 3, "c": number % 4}, {"accuracy": [0.5 + number % 3 / 10]})
    result = Result.load(run.done())
    assert any(chart.name == "pair_b_c" for chart in report.figures(result, [("b", "c")]).charts)
    with pytest.raises(UnknownName, match="Known: a, b, c"):
        report.write([result], tmp_path / "x.html", pairs=[("a", "rate")])


def test_words_of_others_are_escaped(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.trial({"name": "<b>&"}, {"accuracy": [0.5]})
    run.trial({"name": "x"}, state="failed", reason="<script>alert(1)</script>")
    text = page_of(run.done())
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text and "&lt;b&gt;&amp;" in text


def test_one_trial_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.trial({"learning_rate": 0.5}, {"accuracy": [0.5]}, share=0.3)
    text = page_of(run.done())
    assert "Best accuracy" in text and "Where the budget went" in text
    assert "Figures that are not shown" in text and "it takes five complete trials" in text


@pytest.mark.parametrize("state", ["failed", "infeasible", "diverged"])
def test_a_search_without_a_complete_trial_says_what_happened(tmp_path: Path, state: str) -> None:
    run = Run(tmp_path / "run")
    for number in range(3):
        run.trial({"learning_rate": 0.1 * (number + 1)}, state=state, reason="the process died")
    text = page_of(run.done())
    assert "No trial is complete" in text and text.count("the process died") == 3
    assert "none, for no trial is complete" in text


def test_a_search_without_any_trial_says_so(tmp_path: Path) -> None:
    text = page_of(Run(tmp_path / "run").done())
    assert "No trial has been proposed yet." in text


def test_an_unfinished_search_has_a_page(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.trial({"learning_rate": 0.1}, {"accuracy": [0.5]})
    run.trial({"learning_rate": 0.2}, state="running")
    run.trial({"learning_rate": 0.3}, state="proposed")
    text = page_of(run.done())
    assert "running" in text and "proposed" in text


def test_metrics_that_are_not_finite_are_shown_as_such_and_never_win(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", seeds=2)
    run.trial({"learning_rate": 0.1}, {"accuracy": [0.5, 0.6]})
    run.trial({"learning_rate": 9.0}, {"accuracy": [0.9, None]})
    run.trial({"learning_rate": 0.2}, {"accuracy": [0.4, 0.3]})
    text = page_of(run.done())
    assert "not finite" in text and re.search(r"<tr class=best><td class=n>1</td><td>t0000</td>", text)
    assert ">nan" not in text.lower() and "=nan" not in text.lower()


def test_names_longer_than_ten_characters_fit(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for number, name in enumerate(("cosine_annealing_with_warm_restarts", "constant", "linear_decay_to_zero")):
        run.trial({"schedule": name, "learning_rate": 0.1 + number}, {"accuracy": [0.5 + number / 10]})
    text = page_of(run.done())
    assert "cosine_annealing_with_warm_restarts" in text  # in full in the table
    assert "…" in text  # cut in the figure


def test_insecure_noise_is_said_first(tmp_path: Path) -> None:
    text = page_of(methods_run(tmp_path / "run", insecure_seed=1))
    assert text.index("INSECURE") < text.index("Leaderboard")


def test_mixed_searches_stand_side_by_side_and_say_what_is_not_comparable(tmp_path: Path) -> None:
    run = Run(tmp_path / "b", name="other", data="mnist5k", metric=["loss"], mode=["min"])
    run.trial({}, {"loss": [0.1]})
    text = page_of(methods_run(tmp_path / "a"), run.done(), out=tmp_path / "page.html")
    assert "Not comparable" in text and "other data: digits and mnist5k" in text
    assert "add up" in text  # several searches on the same data


def test_missing_and_damaged_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="must be a directory that raydp made"):
        page_of(tmp_path)
    path = methods_run(tmp_path / "run")
    result = Result.load(path)
    with pytest.raises(InvalidValue, match="given twice"):
        report.write([result, result], tmp_path / "page.html")
    with pytest.raises(InvalidValue, match="one or more"):
        report.write([], tmp_path / "page.html")
    (path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(CorruptFile):
        page_of(path)


def test_a_damaged_file_of_steps_does_not_hide_the_rest(tmp_path: Path) -> None:
    path = splits_run(tmp_path / "run", lambda a, b, seed: 0.9 - a * b)
    (path / "trials" / "t0000" / "seed-0" / "metrics.jsonl").write_text("{broken\n")
    text = page_of(path)
    assert "learning curves: an error" in text and "is damaged" in text and "Where the budget went" in text


def test_a_thousand_trials_stay_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = large_run(tmp_path / "run")
    begun = time.perf_counter()
    text = page_of(path)
    took = time.perf_counter() - begun
    with capsys.disabled():
        print(f"\n1,000 trials: {len(text.encode()) / 1e6:.2f} MB, {text.count('<'):,} tags, built in {took:.1f} s")
    assert len(text.encode()) < 3e6
    assert text.count("<") < 60_000  # what a browser has to build before anything shows
    assert "t0999" in text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_opens_a_thousand_trials_and_sorts_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page_of(large_run(tmp_path / "run"))
    probe = """<script>addEventListener("load", () => setTimeout(() => {
        const [page] = performance.getEntriesByType("navigation");
        const heading = Array.from(document.querySelectorAll("th")).find((h) => h.textContent === "learning_rate");
        const rates = () => Array.from(heading.closest("table").tBodies[0].rows, (r) => Number(
            r.cells[heading.cellIndex].dataset.v ?? r.cells[heading.cellIndex].textContent));
        heading.firstChild.click();
        const up = rates(), first = heading.ariaSort;
        heading.firstChild.click();
        const down = rates();
        const sorted = (list) => list.every((v, i) => i === 0 || list[i - 1] <= v);
        document.title = JSON.stringify({opened: page.loadEventEnd, first, second: heading.ariaSort, rows: up.length,
            up: sorted(up), down: sorted(down.reverse()), wide: document.documentElement.scrollWidth});
    }, 0));</script></body>"""
    file = tmp_path / "probe.html"
    file.write_text(text.replace("</body>", probe), encoding="utf-8")
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=500,900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-500:]
    seen = json.loads(title[1].replace("&quot;", '"'))
    with capsys.disabled():
        print(f"\n1,000 trials opened in {seen['opened']:.0f} ms")
    assert seen["rows"] == 1000 and seen["up"] and seen["down"]
    assert (seen["first"], seen["second"]) == ("ascending", "descending")
    assert seen["opened"] < 3000
    assert seen["wide"] <= 500  # nothing is wider than the window


def test_the_rule_of_selection_is_said(tmp_path: Path) -> None:
    composed = page_of(methods_run(tmp_path / "composed"))
    assert "ε of the whole search" in composed and "Adaptive composition of all runs" in composed
    public = page_of(methods_run(tmp_path / "public", selection={"rule": "public"}))
    assert "ε of the released result" in public and "at most 0" in public and "No private data in the search" in public
