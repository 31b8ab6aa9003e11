"""Plans in a real browser: nothing overlaps, is cut off, or scrolls sideways, on light and on dark pages."""

import json
import os
import re
import shutil
import subprocess
from html import unescape

import pytest

from .pictures import HOSTILE, pictures, without_graphviz
from .variants import more

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is found to draw in: apt-get install chromium"),
    pytest.mark.usefixtures("short_searches"),
]

NARROWEST = 500  # pixels; Chromium opens no window that is narrower, so that the page has to be
COLOURS = {"light": ("#ffffff", "#24292f"), "dark": ("#0d1117", "#e6edf3")}
# as JupyterLab styles what a cell shows
JUPYTER = (
    "body{margin:0;padding:8px 24px 8px 72px;font:14px/1.6 system-ui,sans-serif}"
    "th,td{text-align:right;vertical-align:middle;padding:.5em;border:none;white-space:normal}"
    "tr:nth-child(odd){background:rgba(128,128,128,.08)}code{font-size:13px}"
)
GITHUB = "body{margin:0;padding:8px 32px;font:16px/1.5 sans-serif}th,td{padding:6px 13px;border:1px solid #8888}"

MEASURE = """
const found = [];
const box = e => e.getBoundingClientRect();
const within = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const cross = (a, b) =>
  a.left + 1 < b.right && b.left + 1 < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom;
const say = (what, ...things) => found.push(what + things.map(e => ' | ' + e.textContent.slice(0, 80)).join(''));
const apart = (all, what) => all.forEach((a, i) => all.slice(i + 1).forEach(b => {
  if (cross(box(a), box(b))) say(what, a, b);
}));
for (const svg of document.querySelectorAll('svg')) {
  const own = [...svg.querySelectorAll('text')];
  for (const t of own) {
    if (!within(box(t), box(svg))) say('outside its drawing', t);
    const frame = t.parentNode.querySelector(':scope > rect');
    if (frame && t.parentNode.tagName == 'g' && !within(box(t), box(frame))) say('outside its box', t);
  }
  apart(own, 'texts over one another');
  if (svg.getAttribute('role') == 'img')
    for (const shape of svg.querySelectorAll('path,rect,circle,line'))
      if (!within(box(shape), box(svg))) found.push('a shape outside its drawing: ' + shape.outerHTML.slice(0, 200));
}
for (const cell of document.querySelectorAll('td,th')) {
  const range = document.createRange();
  range.selectNodeContents(cell);
  if ([...range.getClientRects()].some(r => !within(r, box(cell)))) say('outside its cell', cell);
}
apart([...document.querySelectorAll('h4,table,p,ul,svg[role=img]')], 'blocks over one another');
for (const e of document.querySelectorAll('h4,p,ul,div,svg[role=img]'))
  if (!e.parentNode.closest('[style*=overflow-x]') && box(e).right > box(document.body).right + 1) say('too wide', e);
const texts = [...document.querySelectorAll('text')];
const result = {
  found, texts: texts.length, small: Math.min(...texts.map(t => box(t).height)),
  cells: document.querySelectorAll('td').length, scripts: document.scripts.length,
  inner: innerWidth, scroll: document.documentElement.scrollWidth, colour: getComputedStyle(document.body).color,
};
const answer = document.createElement('pre');
answer.id = 'result';
answer.textContent = JSON.stringify(result);
document.body.append(answer);
"""


def rendered(html, folder, width, theme):
    """What the script found in a page. With PLAN_SCREENSHOTS=folder, the page is also drawn there, to be looked at."""
    page = folder / "page.html"
    page.write_text(html.replace("</body>", f"<script>{MEASURE}</script></body>"), encoding="utf-8")
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}",
        f"--user-data-dir={folder / 'profile'}",
    ]
    if shots := os.environ.get("PLAN_SCREENSHOTS"):
        shot = f"--screenshot={shots}/{folder.name}_{theme}_{width}.png"
        subprocess.run([CHROMIUM, *options, f"--window-size={width},9000", shot, page.as_uri()], capture_output=True)
    run = subprocess.run(
        [CHROMIUM, *options, f"--window-size={width},900", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    result = re.search(r'<pre id="result">(.*?)</pre>', run.stdout, flags=re.DOTALL)
    assert result, run.stderr
    return json.loads(unescape(result[1]))


def everything():
    """All drawings of all plans; of the graphs, with Graphviz (where it is installed) and without."""
    parts = [f"<h3>{name}</h3>{p._repr_html_()}{p.graph()}" for name, (p, _) in pictures().items()]
    with without_graphviz():
        parts += [p.graph() for p, _ in pictures().values()]
        parts += graphs_of_modules()
    return "".join([*parts, *graphs_of_modules()])


def graphs_of_modules():
    name = "a_language_model_with_a_rather_long_name_of_its_own"
    return [pictures()["gpt2"][0].graph(f"{name}.transformer.h.1"), pictures()["hostile"][0].graph(HOSTILE)]


def check(seen, width):
    assert seen["found"] == []
    assert seen["inner"] == max(width, NARROWEST)
    assert seen["scroll"] <= seen["inner"]
    assert seen["texts"] > 150
    assert seen["cells"] > 200
    assert seen["small"] > (9 if width > NARROWEST else 5)  # pixels; of graphs on a narrow page
    assert seen["scripts"] == 1  # the test's own


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [*more(400, 800), 1400])
def test_in_a_notebook(width, theme, tmp_path):
    background, colour = COLOURS[theme]
    style = f"{JUPYTER}html{{color-scheme:{theme}}}body{{background:{background};color:{colour}}}"
    if width < NARROWEST:
        style += f"body{{box-sizing:border-box;width:{width}px;padding:8px}}"
    page = f"<!DOCTYPE html><meta charset='utf-8'><style>{style}</style><body>{everything()}</body>"
    check(rendered(page, tmp_path, width, theme), width)


def test_where_styles_are_stripped(tmp_path):
    """A page that leaves out style sheets, scripts, classes and inline styles."""
    html = re.sub(r" style='[^']*'", "", everything())
    assert "style" not in re.sub(r"<title>.*?</title>", "", html)
    page = f"<!DOCTYPE html><meta charset='utf-8'><style>{GITHUB}</style><body>{html}</body>"
    check(rendered(page, tmp_path, 1012, "light"), 1012)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_of_its_own(theme, tmp_path):
    file = tmp_path / "plan.html"
    p, _ = pictures()["gpt2"]
    assert p.to_html(str(file)) == file.read_text(encoding="utf-8")
    seen = rendered(file.read_text(encoding="utf-8"), tmp_path, 800, theme)
    assert seen["found"] == []
    assert seen["scroll"] <= 800
    assert seen["colour"] == ("rgb(255, 255, 255)" if theme == "dark" else "rgb(0, 0, 0)")  # the page's own, both ways
