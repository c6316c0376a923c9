"""Every figure shows what the run directory holds, says it in words, and refuses what it cannot show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from raydp.search.report import epsilon_charts, search_charts, trial_charts
from raydp.search.report.charts import BEST, COLOURS, NotShown, readable_on, short, shorts, svg_of, window
from raydp.search.results import Result
from raydp.tasks import TASKS
from tests.search.synthetic import Run, clamping_run, distances_run, methods_run, plan_of, splits_run


def peak(fraction: float, share: float, seed: int) -> float:
    """Best in the middle of the grid, by more than the seeds differ."""
    return 0.9 - 2 * (fraction - 0.3) ** 2 - 2 * (share - 0.3) ** 2 + 0.001 * seed


def tied(fraction: float, share: float, seed: int) -> float:
    """Best on the border, where a neighbour is as good but for the seeds."""
    return 0.9 - abs(share - 0.3) + (0.01 * (-1) ** seed if fraction < 0.35 else -0.2) - 0.0001 * fraction


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Result.load(splits_run(tmp_path_factory.mktemp("grid") / "run", peak))


@pytest.fixture(scope="module")
def methods(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Result.load(methods_run(tmp_path_factory.mktemp("methods") / "run"))


def test_a_heat_map_frames_its_optimum_and_says_how_sure_it_is(grid: Result, tmp_path: Path) -> None:
    chart = search_charts.pair(grid, "warmup_fraction", "warmup_share")
    assert "warmup_fraction = 0.3, warmup_share = 0.3" in chart.caption
    assert "No other cell is within one standard error" in chart.caption and "border" not in chart.caption
    assert chart.table is not None and len(chart.table.rows) == 9
    (best,) = [row for row in chart.table.rows if row[4] == "best"]
    assert best[:2] == (0.3, 0.3) and best[2][0] == pytest.approx(0.9005) and best[3] == 2
    (image,) = chart.figure.axes[0].images
    assert image.get_array().argmax() == 4
    doubtful = Result.load(splits_run(tmp_path / "tied", tied))
    chart = search_charts.pair(doubtful, "warmup_fraction", "warmup_share")
    assert "1 further cell is within one standard error" in chart.caption
    assert "border of warmup_fraction" in chart.caption


def test_scattered_proposals_are_drawn_one_by_one(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for number in range(12):
        run.trial({"learning_rate": 0.1 * 1.5**number, "momentum": number / 13}, {"accuracy": [0.5 + number / 100]})
    chart = search_charts.pair(Result.load(run.done()), "learning_rate", "momentum")
    axes = chart.figure.axes[0]
    assert len(axes.collections[0].get_offsets()) == 12 and axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    assert "momentum = 0.846" in chart.caption


def test_methods_stand_side_by_side_with_every_seed(methods: Result) -> None:
    chart = search_charts.methods(methods)
    assert "tp_topk is clearly ahead of dp_sgd." in chart.caption
    assert chart.table is not None and [row[0] for row in chart.table.rows] == ["tp_topk", "dp_sgd"]
    assert [len(line.get_xdata()) for line in chart.figure.axes[0].lines] == [3, 2, 3, 2]
    assert len(chart.table.columns) == len(chart.table.rows[0]) == 6


def test_slices_show_one_line_a_method_over_candidates(methods: Result) -> None:
    chart = search_charts.slices(methods)
    axes = chart.figure.axes[0]
    assert axes.get_xscale() == "log"
    assert list(axes.get_xticks()) == [0.5, 1.0, 4.0]
    assert chart.table is not None and len(chart.table.rows) == 6


def test_importance_is_optunas(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    for number in range(40):
        run.trial(
            {"learning_rate": number % 8 / 8, "momentum": (number * 7) % 5 / 5},
            {"accuracy": [0.5 + (number % 8) / 100]},
        )
    chart = search_charts.importance(Result.load(run.done()))
    assert chart.table is not None and chart.table.rows[0][0] == "learning_rate"
    assert sum(row[1][0] for row in chart.table.rows) == pytest.approx(1)
    assert search_charts.leading_pair(Result.load(tmp_path / "run")) == ("learning_rate", "momentum")


def test_parallel_coordinates_cut_long_categories_and_keep_them_apart(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    long = "cosine_annealing_with_warm_restarts"
    for number, name in enumerate((f"{long}_0.1", f"{long}_0.2", "none")):
        run.trial({"schedule": name, "learning_rate": 0.1 + number}, {"accuracy": [0.5 + number / 10]})
    chart = search_charts.parallel(Result.load(run.done()))
    labels = [text.get_text() for text in chart.figure.axes[0].texts]
    assert any("…" in label for label in labels) and len(set(labels)) == len(labels)
    assert "schedule none" in chart.caption


def test_short_names_differ_where_the_names_do() -> None:
    assert short("constant") == "constant" and len(short("a" * 30)) == 10
    names = ["cosine_annealing_0.1", "cosine_annealing_0.2", "cosine_restarts_00.1"]
    assert len(set(shorts(names))) == 3
    assert shorts([True, 0.5, None]) == ["true", "0.5", "None"]


def test_a_collapsed_trial_does_not_take_the_scale() -> None:
    values = [0.9 + 0.001 * index for index in range(20)]
    low, high, outside = window([*values, 0.1], "max")
    assert 0.89 < low < 0.9 and high > values[-1] and outside == 1
    assert window([*values, 5.0], "max")[2] == 0  # far better is worth seeing
    assert window([*values, 5.0], "min")[2] == 1
    assert window([0.1, 0.9], "max")[2] == 0


def test_progress_is_the_best_so_far(methods: Result) -> None:
    chart = search_charts.progress(methods)
    (line,) = [line for line in chart.figure.axes[0].lines if line.get_label() == "best so far"]
    assert list(line.get_ydata()) == sorted(line.get_ydata())
    assert "number 4" in chart.caption


def test_the_budget_is_stacked_and_what_addition_wastes_is_its_excess(grid: Result) -> None:
    chart = trial_charts.budget(grid)
    assert chart.table is not None and len(chart.table.rows) == 9
    for row in chart.table.rows:
        key, warmup, sparse, total, composed, waste = row
        share = grid.trials[int(key[1:])].plan.phases[0].spec.share
        assert warmup == pytest.approx(3 * share, rel=1e-3)  # the first phase is calibrated to its nominal share
        assert total == pytest.approx(warmup + sparse) and waste == pytest.approx(total - 3)
        assert composed <= 3 and waste > 0
        # Addition would leave the last phase what the share leaves; composition leaves it more.
        assert sparse == pytest.approx(3 * (1 - share) + waste, rel=1e-3)


def test_curves_show_the_mean_over_the_seeds(grid: Result) -> None:
    chart = trial_charts.curves(grid)
    assert len(chart.figure.axes[0].lines) == 9
    assert chart.table is not None and chart.table.rows[1][:2] == ("t0004", 20)
    assert chart.table.rows[1][2] == pytest.approx(0.9005)


def test_a_clamping_schedule_shows_its_four_diagnostics(tmp_path: Path) -> None:
    result = Result.load(clamping_run(tmp_path / "run"))
    chart = trial_charts.schedule(result)
    panels = [axes for axes in chart.figure.axes if axes.get_visible()]
    assert [axes.get_ylabel() for axes in panels] == list(trial_charts.SCHEDULE.values())
    assert panels[0].get_yscale() == "log" and len(panels[0].lines) == 2
    assert panels[1].lines[0].get_ydata()[-1] == pytest.approx(0.55)
    assert result.plot_schedule("t0001").axes
    with pytest.raises(NotShown, match="clamping schedule"):
        trial_charts.schedule(Result.load(methods_run(tmp_path / "other")))


def test_supports_stand_against_their_null(grid: Result) -> None:
    chart = trial_charts.support(grid)
    assert "9 of 9 supports hold more score energy" in chart.caption
    assert chart.table is not None and chart.table.rows[0][2][0] == 0.7 and chart.table.rows[0][3] == 0.55


def test_cost_is_added_up_by_method(methods: Result) -> None:
    chart = trial_charts.cost([("made", methods)])
    assert chart.table is not None
    assert [(row[0], row[2], pytest.approx(row[3])) for row in chart.table.rows] == [
        ("tp_topk", 9, 0.06),
        ("dp_sgd", 9, 0.03),
    ]


def test_several_budgets_give_the_price_of_privacy(tmp_path: Path) -> None:
    results = [("made", Result.load(methods_run(tmp_path / "run")))]
    with pytest.raises(NotShown, match="one epsilon only"):
        epsilon_charts.against_epsilon(results, "accuracy")
    budget = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add_remove"}
    results.append(("made at 1", Result.load(methods_run(tmp_path / "other", budget=budget))))
    results.append(("again", results[0][1]))  # of equal budgets the best trial counts
    chart = epsilon_charts.against_epsilon(results, "accuracy")
    assert chart.table is not None
    assert [row[:2] for row in chart.table.rows] == [
        ("tp_topk", 1.0),
        ("tp_topk", 3.0),
        ("dp_sgd", 1.0),
        ("dp_sgd", 3.0),
    ]


def test_distances_of_generated_images_stand_against_epsilon_with_every_seed(tmp_path: Path) -> None:
    results = [Result.load(distances_run(tmp_path / f"at{epsilon}", epsilon)) for epsilon in (1.0, 4.0)]
    chart = epsilon_charts.distances([("made", result) for result in results])
    assert set(epsilon_charts.DISTANCES) <= set(TASKS["denoising"].metrics)
    assert chart.title == "Fréchet and KID against ε"
    assert chart.table is not None and len(chart.table.columns) == 5
    assert [(row[0], row[1], row[2], round(row[3][0], 6)) for row in chart.table.rows] == [
        ("dp_deepsets", 1.0, "t0002", 17.2),
        ("dp_deepsets", 4.0, "t0002", 14.2),
        ("dp_sgd", 1.0, "t0000", 19.2),
        ("dp_sgd", 4.0, "t0000", 16.2),
    ]
    panels = chart.figure.axes
    assert len(panels) == 2
    for panel, scale in zip(panels, (1.0, 100.0), strict=True):
        dots = [line for line in panel.lines if line.get_marker() == "o"]
        assert sorted(len(line.get_xdata()) for line in dots) == [3, 3, 3, 3]  # a dot a run
        means = {line.get_label(): list(line.get_ydata()) for line in panel.lines if line.get_marker() == "_"}
        assert means["dp_sgd"] == [pytest.approx(19.2 / scale), pytest.approx(16.2 / scale)]
    assert results[0].plot_distances(results[1]).axes and results[0].plot_distances().axes
    with pytest.raises(NotShown, match="no trial generates images"):
        epsilon_charts.distances([("made", Result.load(methods_run(tmp_path / "other")))])


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    """Of two colours, WCAG's: (red, green, blue) in [0, 1]."""

    def luminance(colour: Sequence[float]) -> float:
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("name", ["viridis", "viridis_r"])
def test_words_on_a_heat_map_can_be_read_on_every_colour(name: str) -> None:
    for colour in (matplotlib.colormaps[name](place)[:3] for place in range(256)):
        assert contrast(colour, to_rgb(readable_on(colour))) >= 4.5


def test_marks_stand_out_from_the_light_and_from_the_dark_ground() -> None:
    css = resources.files("raydp.search.report").joinpath("page.css").read_text()
    light, dark = re.findall(r"--ground: (#[0-9a-f]{6})", css)[:2]
    for colour in {*COLOURS, BEST}:
        for ground in (light, dark):
            assert contrast(to_rgb(colour), to_rgb(ground)) >= 3, (colour, ground)


def test_two_objectives_have_a_front(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", metric=["accuracy", "loss"], mode=["max", "min"])
    for accuracy, loss in ((0.9, 0.5), (0.8, 0.3), (0.7, 0.6)):
        run.trial({"learning_rate": accuracy}, {"accuracy": [accuracy], "loss": [loss]})
    chart = search_charts.tradeoff(Result.load(run.done()))
    assert chart.table is not None and [row[0] for row in chart.table.rows] == ["t0001", "t0000"]


def test_pictures_can_stand_in_one_page(grid: Result) -> None:
    chart = search_charts.pair(grid, "warmup_fraction", "warmup_share")
    svg = svg_of(chart.figure, name="a")
    assert svg.startswith("<svg") and svg.endswith("</svg>") and "<metadata" not in svg
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    assert used and used <= set(re.findall(r'id="([^"]+)"', svg)) and all(name.startswith("a-") for name in used)


@pytest.mark.parametrize("inline", [False, True], ids=["as it starts", "%matplotlib inline"])
def test_a_notebook_shows_a_figure_by_itself_and_once(grid: Result, inline: bool) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    formatter = formatters.DisplayFormatter()
    if inline:
        pylabtools = pytest.importorskip("IPython.core.pylabtools")
        formatter.formatters["image/png"].for_type(Figure, lambda figure: pylabtools.print_figure(figure, "png"))
    before = plt.get_fignums()
    for figure in (grid.plot_budget(), grid.plot_splits(), grid.plot_steps("t0004")):
        shown, _ = formatter.format(figure)
        assert {"image/svg+xml", "image/png"} <= set(shown)
        assert shown["image/svg+xml"].startswith("<svg") and "#ffffff" in shown["image/svg+xml"].lower()
    assert plt.get_fignums() == before  # pyplot, which would show them once more, knows nothing of them


def test_results_plot_themselves(grid: Result, methods: Result) -> None:
    for figure in (
        grid.plot_splits(),
        grid.plot_learning_curves(),
        grid.plot_budget(),
        grid.plot_support(),
        grid.plot_parallel(),
        grid.plot_importance(),
        methods.plot_methods(),
        methods.plot_hyperparameters(),
        methods.plot_progress(),
    ):
        assert figure.axes
    with pytest.raises(NotShown, match="reports = 1"):
        methods.plot_learning_curves()
    with pytest.raises(NotShown, match="one method"):
        grid.plot_methods()


def test_plans_show_themselves_in_a_notebook() -> None:
    text = plan_of(0.3)._repr_html_()
    assert "warmup" in text and "the rest" in text and "certified ε" in text
