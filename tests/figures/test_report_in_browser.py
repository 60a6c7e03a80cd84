"""The report as a browser shows it: no network, no errors, the numbers of the tables, columns that sort."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from adaecho.figures.__main__ import draw_all
from tests.figures.test_figures import rows_of
from tests.needs import needs

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
needs_chromium = needs("chromium", present=bool(CHROMIUM), remedy="apt-get install chromium")
_CLICK = "<script>document.querySelector('table').rows[0].cells[1].click()</script>"


def dom_of(page: Path, profile: Path) -> tuple[str, str]:
    """The page's elements after its scripts ran, and what the browser logged."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--log-level=0", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, done.stderr


@needs_chromium
def test_the_report_renders_without_errors_and_sorts(tmp_path: Path) -> None:
    table = tmp_path / "results" / "fig3" / "digits"
    table.mkdir(parents=True)
    rows = [
        *rows_of("baseline", "none", 1, [8000, 10000]),
        *rows_of("batch_e2", "batch", 2, [600, 700]),
        *rows_of("example_after_e2", "example_after_augmentation", 2, [6000, 7000]),
    ]
    (table / "trials.json").write_text(json.dumps([row | {"experiment": "fig3"} for row in rows]))
    draw_all(tmp_path / "results", tmp_path)
    page = tmp_path / "report.html"
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text().replace("</html>", f"{_CLICK}</html>"))
    plain, log = dom_of(page, tmp_path / "profile")
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
    assert plain.count('<img src="data:image/png;base64,') == plain.count("<img")
    assert re.findall(r"<tr>\s*<td>(\w+)</td>\s*<td[^>]*>([\d,]+)</td>", plain) == [
        ("baseline", "9,000"),
        ("batch_e2", "650"),
        ("example_after_e2", "6,500"),
    ]
    by_cost, _ = dom_of(clicked, tmp_path / "profile")
    costs = re.findall(r"<tr>\s*<td>\w+</td>\s*<td[^>]*>([\d,]+)</td>", by_cost)
    assert costs == ["650", "6,500", "9,000"]  # by value: as text 6,500 would come before 650
