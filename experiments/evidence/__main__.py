"""``python -m experiments.evidence``: draw the figures of all experiments, and judge the paper's claims.

The command reads the committed results under ``results/``. It writes a report with all figures and tables,
and docs/claims.md with a verdict on each claim.
"""

from pathlib import Path

from adaecho.figures.__main__ import draw_tables, main, write_report
from adaecho.figures.tables import read_tables
from adaecho.records.files import read_json, write_text
from experiments.evidence.decisions import decide_all
from experiments.evidence.page import claims_page, of_experiments, overview
from experiments.evidence.predicted_time import draw_time_ratios, section_of_cells
from experiments.evidence.worths import draw_distance, draw_equal_steps

ROOT = Path(__file__).resolve().parents[2]


def draw(results: Path, into: Path) -> list[Path]:
    """Draw all figures, write the report, and return the paths of all written files.

    The page docs/claims.md is written only if ``results`` is the folder ``results/`` of this repository.
    """
    tables = read_tables(results)
    decisions, rows = decide_all(tables), {name: of_name for name, (of_name, _) in tables.items()}
    written, sections = draw_tables(tables, results, into)
    cells = results / "predicted_time" / "paced" / "cells.json"
    if cells.exists():
        record, title = read_json(cells), "predicted_time: is the time what the records predict?"
        written.append(into / "predicted_time_paced.png")
        draw_time_ratios(record, written[-1], title)
        sections.append(section_of_cells(title, record, written[-1].name))
    for name, draw_worths in (("distance", draw_distance), ("equal_steps", draw_equal_steps)):
        if (results / name).exists():
            written.append(into / f"{name}.png")
            draw_worths(results / name, written[-1])
    if results.resolve() == ROOT / "results":
        written.append(ROOT / "docs" / "claims.md")
        write_text(written[-1], claims_page(decisions, rows, results))
    claims = of_experiments(decisions, rows, results)
    before = ["## Which of the paper's claims hold", overview(decisions), *claims] if claims else []
    return [*written, write_report(sections, into, before)]


if __name__ == "__main__":
    main(draw=draw, prog="python -m experiments.evidence")
