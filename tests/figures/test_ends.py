"""Figure and report of an experiment without a target."""

import itertools
import json

import pytest

from adaecho.figures.__main__ import draw_all
from adaecho.figures.arms import draw_ends
from adaecho.figures.tables import draw_table
from adaecho.records.outcome import COSTS, ends
from adaecho.records.table import summarize


def rows(arm, finals, *, steps, status="budget_spent"):
    return [
        {
            "experiment": "x", "task": "digits_mlp", "arm": arm, "repeat": repeat, "index": 0,
            "counted": True, "echo_variant": "none", "echo_factor": 1,
            **dict.fromkeys(f"to_target_{cost}" for cost in COSTS),
            "status": status, "target_metric": "cross_entropy", "target_value": None, "steps": steps,
            "fresh_examples": 32 * steps, "trained_examples": 32 * steps,
            "final_cross_entropy": final, "best_value": final,
        }
        for repeat, final in enumerate(finals)
    ]  # fmt: skip


@pytest.fixture
def table():
    return [
        *rows("s1", [0.05, 0.07], steps=1000),
        *rows("s2_linear", [0.1, 0.2], steps=500),
        *rows("s2_untouched", [9.0, 9.0], steps=10, status="diverged"),
    ]


@pytest.mark.filterwarnings("error")
def test_every_arm_with_ends_has_a_dot_and_a_bar(table, tmp_path, drawn):
    draw_ends(ends(table), tmp_path / "x.png", "title", "cross_entropy")
    panels = drawn[0].axes
    quantities = ("cross entropy\nat the end", "steps", "examples\ntrained on", "fresh examples")
    assert [axes.get_xlabel().removesuffix(" (log)") for axes in panels] == [*quantities]
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["s1", "s2 linear", "s2 untouched (2 diverged)"]
    dots = [line.get_xydata().tolist() for line in panels[0].lines if line.get_marker() == "o"]
    assert dots == [[[pytest.approx(0.06), 0]], [[pytest.approx(0.15), 1]]]
    assert [pytest.approx(0.1), pytest.approx(0.2)] in [list(line.get_xdata()) for line in panels[0].lines]


def test_a_table_of_diverged_runs_has_an_empty_figure(table, tmp_path, drawn):
    draw_ends(ends(table[4:]), tmp_path / "x.png", "title", "cross_entropy")
    assert [len(axes.lines) for axes in drawn[0].axes] == [0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("names", "lines"), [(("e2_lr0.1", "e2_lr0.2", "e4_lr0.1"), 2), (("lr0.1", "lr0.2"), 1)]
)
def test_a_swept_learning_rate_is_an_axis(names, lines, tmp_path, drawn):
    table = [row for name in names for row in rows(name, [0.05, 0.07], steps=10)]
    draw_table(table, summarize(table), [], tmp_path, "x", "png")
    (axes,) = drawn[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("learning rate", "cross entropy at the end")
    assert len(axes.containers) == lines
    assert (axes.get_legend() is None) == (lines == 1)


@pytest.mark.parametrize("ratio", [1.05, 2.14, 4.9, 20.0, 3000.0])
def test_labels_of_counts_do_not_overlap(ratio, tmp_path, drawn):
    table = rows("e0", [0.1], steps=44) + rows("e1", [0.1], steps=int(44 * ratio))
    draw_ends(ends(table), tmp_path / "x.png", "x", "cross_entropy")
    drawn[0].canvas.draw()
    for axes in drawn[0].axes[1:]:
        low, high = axes.get_xlim()
        seen = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        boxes = sorted(label.get_window_extent().extents.tolist() for label in seen if label.get_text())
        assert len(boxes) >= 2
        assert all(left[2] < right[0] for left, right in itertools.pairwise(boxes))


def test_long_names_leave_room_for_the_panels(tmp_path, drawn):
    names = [
        f"task-small_text_echo-example_before_augmentation_factor-{e}_batch_size-32_adascale-on" for e in "12"
    ]
    table = [
        row for name, steps in zip(names, (44, 90), strict=True) for row in rows(name, [0.1], steps=steps)
    ]
    draw_ends(ends(table), tmp_path / "x.png", "x", "cross_entropy")
    drawn[0].draw_without_rendering()
    titles = sorted(axes.xaxis.label.get_window_extent().extents.tolist() for axes in drawn[0].axes)
    assert all(left[2] < right[0] for left, right in itertools.pairwise(titles))
    assert titles[-1][2] <= drawn[0].bbox.x1


def test_the_report_has_the_ends(table, tmp_path):
    folder = tmp_path / "results" / "x" / "digits_mlp"
    folder.mkdir(parents=True)
    (folder / "trials.json").write_text(json.dumps(table))
    written = draw_all(tmp_path / "results", tmp_path / "figures")
    assert {path.name for path in written} >= {"x_digits_mlp.png", "x_digits_mlp.svg"}
    text = (tmp_path / "figures" / "report.md").read_text()
    assert "| s2_linear | 0.1500 | 0.1000 to 0.2000 | 0.1500 | 16,000 | 500 | 16,000 | 2 | 0 | 0 |" in text
    assert "| s2_untouched | - | - | - | - | - | - | 0 | 2 | 0 |" in text
