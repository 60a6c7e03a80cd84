import json
import shutil

import matplotlib
import pytest
from PIL import Image

from adaecho.figures.__main__ import draw_all, main
from adaecho.figures.arms import caption_of_dots, draw_fig3
from adaecho.figures.curves import draw_curves, mean_and_band, tuning_curves
from adaecho.figures.report import boundary_note
from adaecho.figures.tables import draw_table
from adaecho.records.outcome import best_trials, outcome
from adaecho.records.table import summarize
from adaecho.search.report import draw as draw_sweep

CURVE = {"arm": "baseline", "repeat": 0, "echo_variant": "none", "echo_factor": 1,
         "fresh_examples": [160, 320], "values": [0.5, 0.98]}  # fmt: skip
VARIANTS = ("none", "batch", "example_after_augmentation", "example_before_augmentation")


def rows_of(arm, variant, factor, costs, *, trials=2):
    """One search per cost, the cost of its best trial (None: missed). Other trials cost more."""
    return [
        {
            "experiment": "quickstart", "task": "digits", "arm": arm, "repeat": repeat, "index": index,
            "echo_variant": variant, "echo_factor": factor, "counted": True, "best_value": 0.98,
            "status": "reached" if cost else "budget_spent",
            "target_metric": "accuracy", "target_value": 0.97, "to_target_steps": cost and cost // 32,
            "to_target_fresh_examples": cost and cost * (1 + index),
            "to_target_train_time_s": cost and cost / 1000,
        }
        for repeat, cost in enumerate(costs)
        for index in range(trials)
    ]  # fmt: skip


def seven_arms():
    rows = rows_of("baseline", "none", 1, [8000, 10000])
    for factor in (4, 2):
        for variant in reversed(VARIANTS[1:]):
            rows += rows_of(f"{variant}_e{factor}", variant, factor, [6000, 8000])
    return rows


def dots(axes):
    return [round(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o"]


def dashed(axes):
    return [line.get_xdata()[0] for line in axes.lines if line.is_dashed()]


def rows_named(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def words(axes):
    return [text.get_text() for text in axes.texts]


def draw(rows, curves, into, stem="t"):
    return [path.name for path in draw_table(rows, summarize(rows), curves, into, stem, "png")]


def echoed(factor, of=""):
    """Curve of an arm with or without batch echoing."""
    variant = "batch" if factor > 1 else "none"
    return {**CURVE, "arm": f"e{factor}{of}", "echo_variant": variant, "echo_factor": factor}


@pytest.fixture
def fig3(tmp_path, drawn):
    """``fig3(rows)``: draw and return the axes."""

    def axes_of(rows):
        draw_fig3(outcome(rows), tmp_path / "f.png", "digits")
        return drawn[-1].axes[0]

    return axes_of


def test_fig3_has_paper_order_means_extremes_and_ideal_lines(fig3):
    axes = fig3(seven_arms())
    variants = ["batch", "example, after augmentation", "example, before augmentation"]
    arms = [f"{variant}, e = {factor}" for factor in (2, 4) for variant in variants]
    assert rows_named(axes) == ["baseline", *arms]
    assert dots(axes) == [9000] + [7000] * 6
    extremes = [list(line.get_xdata()) for line in axes.lines if line.get_alpha() == 0.6]
    assert extremes == [[8000, 10000]] + [[6000, 8000]] * 6
    assert dashed(axes) == [9000 / 2] * 3 + [9000 / 4] * 3
    assert words(axes).count("0.77") == 6  # geometric: the root of 48 / 80


def test_fig3_names_arms_that_missed_the_target(fig3):
    rows = rows_of("baseline", "none", 1, [8000, 10000, 9000])
    rows += rows_of("batch_e2", "batch", 2, [None, None, None])
    rows += rows_of("after_e2", "example_after_augmentation", 2, [6000, None, 7000])
    for trial in rows[-4:-2]:
        trial["fresh_examples"] = 16000  # reads of the search that missed
    axes = fig3(rows)
    assert dots(axes) == [9000, 6500]
    assert "target not reached" in words(axes)
    assert ">0.98, 2 of 3 reached" in words(axes)
    bounds = "ratio to the baseline (> and <: bounds, as searches missed)."
    assert caption_of_dots(outcome(rows)).endswith(bounds)
    assert caption_of_dots(outcome(rows)).startswith("Mean over those that reached it of 3 searches per")
    alone = fig3(rows_of("baseline", "none", 1, [None]))
    assert (dots(alone), words(alone)) == ([], ["target not reached"])


def test_the_report_names_best_points_at_the_end_of_an_axis():
    arms = [
        {"arm": "a", "reached": 5, "at_edge": {"optimizer.momentum": 2, "optimizer.learning_rate": 0}},
        {"arm": "b", "runs": 3, "at_edge": {"optimizer.momentum": 0}},
    ]
    assert boundary_note(arms) == (
        "Best points in the outermost 5% of an axis: a: optimizer.momentum in 2 of 5 searches."
    )
    assert boundary_note(arms[1:]) == "Best points in the outermost 5% of an axis: none."
    assert boundary_note([{"arm": "no search"}]) == ""


def test_each_panel_has_each_search_once_and_shows_accuracy_as_error(tmp_path, drawn):
    before = {**echoed(2, "before"), "echo_variant": "example_before_augmentation"}
    curves = [echoed(1), echoed(2), echoed(16), before]
    draw_curves(curves, tmp_path / "c.png", "digits", "accuracy", 0.97)
    two, sixteen = drawn[0].axes
    assert (two.get_title("center"), sixteen.get_title("center")) == ("e = 2", "e = 16")
    lines = [[line for line in axes.lines if len(line.get_xdata()) == 2] for axes in (two, sixteen)]
    assert [len(each) for each in lines] == [4, 3]  # the target, the baseline, and the echoed arms
    assert lines[0][1].get_ydata() == pytest.approx([0.5, 0.02])
    assert lines[0][0].get_ydata() == pytest.approx([0.03, 0.03])
    draw_curves(curves[:1], tmp_path / "c.png", "text", "cross_entropy", None)
    (axes,) = drawn[1].axes
    assert list(axes.lines[0].get_ydata()) == [0.5, 0.98]
    assert axes.get_ylabel() == "validation cross entropy, nats"


def test_a_curve_is_the_mean_over_searches_and_constant_after_their_ends():
    longer = {"fresh_examples": [100, 200, 300], "values": [6.0, 4.0, 2.0]}
    shorter = {"fresh_examples": [150, 250], "values": [5.0, 3.0]}
    x, mean, low, high = mean_and_band([longer, shorter], "cross_entropy")
    assert list(x) == [150, 200, 250, 300]
    assert mean == pytest.approx([5.0, 4.0, 3.0, 2.5])
    assert (low[-1], high[-1]) == pytest.approx((2.0, 3.0))
    points = [{"fresh_examples": [1], "values": [value]} for value in (0.99, 0.96)]
    _, mean, low, high = mean_and_band(points, "accuracy")
    assert (low[0], mean[0], high[0]) == pytest.approx((0.01, 0.02, 0.04))  # in logarithms of the error


def test_a_tuning_curve_is_the_best_of_the_first_trials(tmp_path, drawn):
    rows = rows_of("baseline", "none", 1, [1, 1], trials=5)
    for row, cost in zip(rows, [None, 900, 1200, None, 700] * 2, strict=True):
        row["to_target_fresh_examples"] = cost
    curve, again = tuning_curves(rows)
    assert (curve["fresh_examples"], curve["values"]) == ([2, 3, 4, 5], [900, 900, 900, 700])
    assert again["values"] == curve["values"]
    assert tuning_curves(rows_of("baseline", "none", 1, [800, 900], trials=1)) == []
    assert tuning_curves(rows_of("baseline", "none", 1, [None])) == []
    assert draw(rows, [], tmp_path, "x") == ["x.png", "x_tuning.png"]
    assert drawn[1].axes[0].get_ylabel() == "fresh examples to the target"
    assert drawn[1].axes[0].get_xlabel() == "trials of the search"


@pytest.mark.parametrize(
    ("task", "name"), [("small_text", "example"), ("digits", "example, before augmentation")]
)
def test_a_task_without_augmentation_has_one_example_variant(tmp_path, drawn, task, name):
    rows = [*rows_of("baseline", "none", 1, [800]), *rows_of("example_e2", VARIANTS[3], 2, [400])]
    draw([row | {"task": task} for row in rows], [], tmp_path)
    assert rows_named(drawn[0].axes[0]) == ["baseline", f"{name}, e = 2"]


def written(results):
    """A folder of one table with curves and command."""
    folder = results / "quickstart" / "digits"
    folder.mkdir(parents=True)
    (folder / "trials.json").write_text(json.dumps(seven_arms()))
    (folder / "curves.json").write_text(json.dumps([CURVE]))
    (folder / "origin.json").write_text(json.dumps({"commands": ["python -m adaecho.run -m x=<1>"]}))
    return results


@pytest.fixture
def results(tmp_path):
    return written(tmp_path / "results")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Drawn results with a picture in the table's folder."""
    results = written(tmp_path_factory.mktemp("drawn") / "results")
    Image.new("RGB", (8, 8), "red").save(results / "quickstart/digits/boxes.jpg")
    main(["--results", str(results)])
    return results


def test_figures_and_report_repeat_byte_for_byte_and_keep_the_users_settings(report, tmp_path):
    first = {path.name: path.read_bytes() for path in (report / "figures").iterdir()}
    before = dict(matplotlib.rcParams)
    copy = shutil.copytree(report, tmp_path / "results", ignore=lambda *_: ["figures"])
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": "other"}):
        second = draw_all(copy, copy / "figures")
    assert dict(matplotlib.rcParams) == before
    assert {path.name: path.read_bytes() for path in second} == first
    figures = ("quickstart_digits", "quickstart_digits_curves", "quickstart_digits_tuning")
    names = {f"{name}.{ending}" for name in figures for ending in ("png", "svg")}
    assert first.keys() == names | {"report.md"}


def test_the_report_has_table_figures_pictures_and_command(report):
    text = (report / "figures" / "report.md").read_text()
    assert "| baseline | 9,000 | 8,000 to 10,000 | 1.00 | - | 281 | 9.0 | 2 of 2 | 4 | 0 | 0 | 0 |" in text
    assert "![quickstart, digits: fresh examples to 97% validation accuracy](quickstart_digits.png)" in text
    assert "python -m adaecho.run -m x=<1>" in text
    assert "](../quickstart/digits/boxes.jpg)" in text


def test_an_unwritable_folder_or_missing_tables_give_one_message(results, tmp_path, refused):
    (tmp_path / "file").write_text("")
    assert "file" in refused(main, "--results", results, "--into", tmp_path / "file" / "figures")
    assert "contains no <experiment>/<task>/trials.json" in refused(main, "--results", tmp_path / "none")


def test_a_sweep_has_its_figures_in_its_folder(tmp_path):
    rows = [{**row, "fresh_examples": 160} for row in seven_arms()]
    for row in best_trials(rows).values():
        folder = tmp_path / row["arm"] / str(row["repeat"]) / str(row["index"])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"fresh_examples": 160, "accuracy": 0.98}\n')
    names = ("fig3.png", "fig3_curves.png", "fig3_tuning.png")
    assert draw_sweep(tmp_path, rows) == [f"figure: {tmp_path / name}" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert draw_sweep(tmp_path, []) == []


def test_a_sweep_over_tasks_has_a_figure_of_each_metric(tmp_path, drawn):
    """A cross entropy drawn as accuracy shows an error of 0.1% or less."""
    ended = {"fresh_examples": 160, "target_value": None, "final_accuracy": 0.9}
    rows = [{**row, **ended} for row in rows_of("digits", "none", 1, [None], trials=1)]
    of_text = {"task": "small_text", "target_metric": "cross_entropy", "final_cross_entropy": 5.9}
    rows += [{**row, **of_text, "arm": "text", "best_value": 5.9} for row in rows]
    for row in rows:
        folder = tmp_path / row["arm"] / "0" / "0"
        folder.mkdir(parents=True)
        value = json.dumps({"fresh_examples": 160, row["target_metric"]: row["best_value"]})
        (folder / "metrics.jsonl").write_text(f"{value}\n")
    stems = ("fig3_digits_accuracy_ends", "fig3_small_text_cross_entropy_ends")
    names = [f"figure: {tmp_path / stem}{end}.png" for stem in stems for end in ("", "_curves")]
    assert draw_sweep(tmp_path, rows) == names
    assert drawn[1].axes[0].get_ylabel() == "validation error (log)"
    assert drawn[3].axes[0].get_ylabel() == "validation cross entropy, nats"
    assert drawn[3].axes[0].lines[0].get_ydata().tolist() == [5.9]
