"""What the documents show is what happens: notebooks, the code and the commands on each page, the site, the demo."""

import ast
import builtins
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from jupyter_client import KernelManager
from nbclient import NotebookClient

from planner.__main__ import main
from planner.cli.arguments import parser
from planner.cli.commands import COMMANDS

from .forked import begun, python
from .problems import shorten
from .real_models import gpt2
from .variants import keeping

ROOT = Path(__file__).parent.parent
README, CHANGELOG = ROOT / "README.md", ROOT / "CHANGELOG.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
LONG = "how-much-memory"  # the page whose code runs longest
PYTHON = re.compile(r"^(?:<!-- (.*) -->\n)?```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def test_there_is_something_to_run():
    assert [n.stem[:2] for n in NOTEBOOKS] == ["01", "02", "03", "04"]
    assert [p.stem for p in PAGES if PYTHON.search(p.read_text())][:3] == ["README", "budget", "first-plan"]


# what a notebook runs holds for every schedule: its searches do a small part of their work, as those of the pages
FIRST = f"""\
import sys
print(sys.executable)
sys.path.insert(0, {str(ROOT)!r})
import pytest
from tests.problems import hardly_search
hardly_search(pytest.MonkeyPatch())
%reset -f
"""


class Kernel:
    """A forked process, as Jupyter knows processes."""

    stdin = stdout = stderr = None

    def __init__(self, command, env, cwd=None, **_):
        nowhere = [os.devnull, os.devnull]
        self.process = begun(command[1:], Path(cwd or ROOT), env, nowhere)
        self.pid, self.wait = self.process.pid, self.process.join

    def poll(self):
        return self.process.exitcode


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A kernel of the interpreter of the tests, for all notebooks: each begins without the names of those before."""
    home = tmp_path_factory.mktemp("jupyter")
    folder = home / "kernels" / "python3"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(home))
        patch.setenv("JUPYTER_DATA_DIR", str(home))
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        patch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", Kernel)
        manager = KernelManager(kernel_name="python3")
        yield manager
        if manager.has_kernel:
            manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("path", keeping(NOTEBOOKS[1], of=NOTEBOOKS), ids=lambda p: p.stem)
def test_notebooks_run(path, kernel):
    notebook = nbformat.read(path, as_version=4)
    which = nbformat.v4.new_code_cell(FIRST)
    notebook.cells.insert(0, which)
    client = NotebookClient(notebook, km=kernel, timeout=600, resources={"metadata": {"path": path.parent}})
    client.execute()  # raises CellExecutionError where a cell does
    assert which.outputs[0]["text"].strip() == sys.executable
    assert not said_aside(notebook)
    assert "ipykernel_" not in json.dumps(outputs(notebook))  # the temporary files that stand for cells


def outputs(notebook):
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def said_aside(notebook):
    return [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_committed_with_small_outputs(path):
    assert path.stat().st_size < 100_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not said_aside(notebook)
    assert any("<svg" in o.get("data", {}).get("text/html", "") for o in outputs(notebook))
    assert not re.search(r"/(tmp|home|root)/|ipykernel_", json.dumps(outputs(notebook)))


CELL = """\
import torch
from planner import plan
class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()
for mode in ("aten", "eager"):
    p = plan(Model(8, 8), torch.zeros(4, 8), budget_gb=1, loss_fn=torch.Tensor.mean, mode=mode)
    print({d.source for d in p.decisions})
"""


def test_lines_of_cells_are_named_by_the_cell(tmp_path):
    code = f"from IPython.core.interactiveshell import InteractiveShell as S\nS.instance().run_cell({CELL!r}, True)"
    run = python("-c", code, folder=ROOT, IPYTHONDIR=str(tmp_path))
    assert run.stdout.splitlines() == 2 * ["{'In[1]:5: return super().forward(x).tanh()'}"], run.stderr


@pytest.mark.parametrize("path", keeping(*(p for p in PAGES if p.stem != LONG), of=PAGES), ids=lambda p: p.stem)
def test_the_code_on_each_page_runs(path, short_searches, tmp_path, monkeypatch):
    """From top to bottom, as a reader runs it; what needs several processes or the reader's own is checked by name."""
    monkeypatch.chdir(tmp_path)
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # torch.compile may import where a function is from
    names = vars(page)
    for note, block in PYTHON.findall(path.read_text()):
        code = compile(block, str(path), "exec")
        if "not run" not in note:
            exec(code, names)
        else:
            check_names(ast.parse(block), {*names, *re.findall(r"`(\w+)`", note)})


def check_names(code, known):
    """Imports are there, names are defined, and keyword arguments are those of the planner's functions."""
    imported = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            imported |= {a.asname or a.name.partition(".")[0]: importlib.import_module(a.name) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            imported |= {a.asname or a.name: getattr(module, a.name) for a in node.names}
    names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
    known = {*known, *imported, *dir(builtins), *(n.id for n in names if isinstance(n.ctx, ast.Store))}
    assert not {n.id for n in names} - known
    for call in ast.walk(code):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in imported:
            inspect.signature(imported[call.func.id]).bind_partial(**{k.arg: None for k in call.keywords})


@pytest.mark.parametrize("path", [*PAGES, CHANGELOG], ids=lambda p: p.stem)
def test_the_commands_on_each_page_exist(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["planner"])
    page = path.read_text()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", page, flags=re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python -m (benchmarks\.\w+|solvers)", page):
        assert importlib.util.find_spec(module), module
    for line in re.findall(r"-m planner ([^`\n#]+)", page):
        words = shlex.split(line)
        assert words[0] in {*COMMANDS, "run", "--version"}, words
        if words[1:]:
            parser().parse_args(words)


def test_the_files_and_places_that_pages_link_to_exist():
    for path in [*PAGES, CHANGELOG]:
        for link in re.findall(r"\]\(([^)]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)):
            file, _, place = link.partition("#")
            if not link.startswith("https://"):
                target = path.parent / file if file else path
                assert target.exists(), (path.name, link)
                assert not place or place in places(target), (path.name, link)


def places(path):
    """The anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_readme_fits_a_screen_and_pages_have_headings_where_they_are_long():
    assert len(README.read_text().splitlines()) <= 70
    for path in PAGES:
        lines = path.read_text().splitlines()
        assert len(lines) < 80 or sum(line.startswith("## ") for line in lines) > 2, path.name


def test_the_site_builds_without_a_warning_and_has_no_dead_link(tmp_path):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html") if page.name != "404.html"}
    assert len(pages) == len(list((ROOT / "docs").glob("*.md"))) + len(NOTEBOOKS)
    ids = {page.resolve(): set(re.findall(r"\bid=\"?'?([^\"'\s>]+)", text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r"<(?:a|img|link|script)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"", text):
            address = urlsplit(unescape(link))
            if not address.scheme and not address.netloc:
                target = (page.parent / unquote(address.path)).resolve() if address.path else page.resolve()
                assert target.exists(), (page.name, link)
                place = unquote(address.fragment)
                assert not place or target not in ids or place in ids[target], (page.name, link)


def test_the_demo_holds():
    result = python("-m", "planner", "demo", "--quiet", "--steps", "2", folder=ROOT)
    assert result.returncode == 0, result.stderr
    for line in (
        r"predicted peak +[\d.]+ MB",
        r"measured peak +[\d.]+ MB",
        "gradients agree  yes",
        r"overhead +[+-][\d.]+%",
    ):
        assert re.search(f"^{line}", result.stdout, flags=re.MULTILINE), line
    assert "PlanWarning" not in result.stderr


def test_the_demo_says_when_nothing_fits(monkeypatch, capsys):
    shorten(monkeypatch)
    small = gpt2(layers=1)
    monkeypatch.setattr("planner.cli.demo.small_gpt2", lambda: (small.model, small.batch))
    assert main(["demo", "--budget", "0.01", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"^InfeasibleBudgetError: budget_gb=.*minimum_gb=", said, flags=re.MULTILINE)
    assert "Traceback" not in said


def test_the_page_on_architecture_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = {f"planner.{p.parent.name}" for p in (ROOT / "planner").glob("*/__init__.py")} | {"planner.errors"}
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `planner"))
    assert set(re.findall(r"`(planner\.\w+)`", table)) == packages
    files = re.findall(r"`((?:\w+/)+\w+\.py)(?:: ([\w.]+))?", page)
    assert len(files) > 20
    for file, name in files:
        found = [root / file for root in (ROOT, ROOT / "planner") if (root / file).is_file()]
        assert found, file
        if name:
            assert re.search(
                rf"^ *(class|def) {name.split('.')[-1]}\b|^{name}\b", found[0].read_text(), re.MULTILINE
            ), name
