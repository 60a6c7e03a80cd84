"""The site as a browser shows it: no error, no dead link, every picture, and text that fits a telephone."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from queue import Queue

from tests.needs import needs
from tests.servers import Quiet, serving

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
needs_chromium = needs("chromium", present=bool(CHROMIUM), remedy="apt-get install chromium")
needs_mkdocs = needs(
    "mkdocs",
    present=None not in map(find_spec, ("mkdocs", "material", "mkdocstrings")),
    remedy="make dev installs it",
)

# Opens every page that can be reached in a frame, at two widths, and posts what is wrong with it.
_WALK = """<!doctype html><title>walk</title><script>
const wrong = [], seen = new Map(), here = location.origin + "/";
async function open_(url, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 800px; border: 0`;
  frame.src = url;
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; });
  const page = frame.contentDocument, root = page.documentElement;
  if (root.scrollWidth > width) wrong.push(`${url} is ${root.scrollWidth} pixels wide at ${width}`);
  for (const image of page.images) {
    image.loading = "eager";
    await image.decode().catch(() => {});
    if (!image.naturalWidth) wrong.push(`${url}: no picture ${image.src}`);
  }
  const links = [...page.querySelectorAll("a[href]")].map(a => a.href);
  frame.remove();
  return links;
}
// What the search lists for a word that is typed into it.
async function typed(word) {
  const frame = document.createElement("iframe");
  frame.style.cssText = "width: 1280px; height: 800px; border: 0";
  frame.src = here + "index.html";
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; });
  const page = frame.contentDocument;
  const box = page.querySelector("[data-md-component=search-query]");
  for (let tries = 0; tries < 600; tries++) {
    box.focus();
    box.value = word;
    box.dispatchEvent(new frame.contentWindow.KeyboardEvent("keyup", {bubbles: true}));
    await new Promise(done => setTimeout(done, 100));
    const hits = [...page.querySelectorAll(".md-search-result__link")].map(a => a.href.split(/[?#]/)[0]);
    if (hits.length) { frame.remove(); return hits.map(url => url.slice(here.length)); }
  }
  return [];
}
async function walk() {
  const pages = [here + "index.html"];
  for (const url of pages) {
    await open_(url, 1280);
    for (const link of await open_(url, 400)) {
      const target = link.split("#")[0];
      if (!target.startsWith(here) || seen.has(target)) continue;
      const answer = await fetch(target);
      seen.set(target, answer.status);
      if (!answer.ok) wrong.push(`${url}: ${target} is ${answer.status}`);
      if (target.endsWith(".html") && !pages.includes(target)) pages.push(target);
    }
  }
  const index = await (await fetch(here + "search/search_index.json")).json();
  const hits = await typed("slow_store");
  return {pages: pages.map(url => url.slice(here.length)), wrong, indexed: index.docs.length, hits};
}
window.onload = () => walk().then(found => found, error => ({wrong: [String(error)]}))
  .then(found => fetch("/found", {method: "POST", body: JSON.stringify(found)}));
</script><body></body>"""


class _Site(Quiet):
    found: Queue[dict[str, list[str]]]

    def do_POST(self) -> None:  # noqa: N802
        self.found.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()


def test_every_page_of_the_docs_can_be_chosen() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f"- {page}\n" not in listed] == []


@needs_chromium
@needs_mkdocs
def test_every_page_opens_without_errors_with_its_pictures_and_fits_400_pixels(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "site.py"], check=True)
    site = tmp_path / "site"
    shutil.copytree(ROOT / "build" / "site", site)
    (site / "walk.html").write_text(_WALK)
    _Site.found = Queue()
    with serving(site, _Site) as place:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr", "--log-level=0",
            "--remote-debugging-port=0", f"http://{place}/walk.html",
        ]  # fmt: skip
        with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log) as browser:
            try:
                found = _Site.found.get(timeout=240)
            finally:
                browser.terminate()
    assert found["wrong"] == []
    assert [line for line in (tmp_path / "log").read_text().splitlines() if "CONSOLE" in line] == []
    written = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {*found["pages"]} == written - {"404.html", "walk.html"}
    assert found["indexed"] > len(written)
    assert found["hits"]
    assert all("slow_store" in (site / page).read_text() for page in found["hits"])
