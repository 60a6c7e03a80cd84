"""The documentation as a site: ``python scripts/site.py`` builds it into build/site.

The pages are those of the repository, at the same places, so that their links hold both here and there.
Files that they link to go with them, folders get a page that lists them, each public name its docstring.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
PAGES = (
    "*.md",
    "docs/**/*.md",
    "experiments/**/*.md",
    "adaecho/*/README.md",
    "results/README.md",
    "results/weights/*/README.md",
    "skills/*/*.md",
)
_LINK = re.compile(r"(\]\()(?!https?://|#)([^)#\s]+)")
sys.path.insert(0, str(ROOT))

from scripts.api_page import PUBLIC  # noqa: E402


def main() -> None:
    """Gather the pages and build the site; a link that leads nowhere is an error."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    folders: set[Path] = set()
    for page in sorted({page for pattern in PAGES for page in ROOT.glob(pattern)}):
        write(page, with_links(page, folders))
    for folder in sorted(folders):
        write(folder / "README.md", listing(folder))
    write(ROOT / "docs" / "reference.md", reference())
    write(ROOT / "docs" / "site.css", (ROOT / "docs" / "site.css").read_text())
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"], cwd=ROOT, check=True)
    # Docstrings begin a block of code as reStructuredText does.
    built = SITE / "docs" / "reference.html"
    built.write_text(built.read_text().replace("::</p>", ":</p>"))


def write(page: Path, text: str) -> None:
    """Put a page of the repository where the site's are gathered."""
    place = SOURCE / page.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def with_links(page: Path, folders: set[Path]) -> str:
    """The page's text, its links as the site has them."""
    return _LINK.sub(lambda found: found[1] + gathered(page, found[2], folders), page.read_text())


def gathered(page: Path, link: str, folders: set[Path]) -> str:
    """The link as the site has it; a file that it leads to is copied, a folder noted in ``folders``."""
    target = (page.parent / link).resolve()
    if target.is_dir():
        if not (target / "README.md").exists():
            folders.add(target)
        return f"{link.rstrip('/')}/README.md"
    if target.suffix != ".md":
        place = SOURCE / target.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, place)
    return link


def listing(folder: Path) -> str:
    """A page with the files and folders of a folder: those with a page link to it, small ones are copied."""
    lines = [f"# {folder.relative_to(ROOT)}", ""]
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "_")):
            continue
        if (path / "README.md").exists():
            title = (path / "README.md").read_text().splitlines()[0].removeprefix("# ")
            lines.append(f"* [{path.name}]({path.name}/README.md): {title}")
        elif path.suffix in {".py", ".json", ".md"}:
            lines.append(f"* [{path.name}]({gathered(folder / 'README.md', path.name, set())})")
        else:
            lines.append(f"* {path.name}{'/' * path.is_dir()}")
    return "\n".join([*lines, ""])


def reference() -> str:
    """Directives that mkdocstrings replaces by each public name's docstring."""
    names = [f"{module}.{name}" for module, names in PUBLIC.items() for name in names]
    return "\n".join(["# Reference", "", *(f"::: {name}\n" for name in names)])


if __name__ == "__main__":
    main()
