"""What the documents show is what happens: notebooks, README's code, its commands, and the demo."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from planner.__main__ import main

from .problems import shorten

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "planner", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture
def this_interpreter(tmp_path, monkeypatch):
    """A kernel named python3 that runs the interpreter of the tests."""
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def test_there_is_something_to_run():
    assert [n.stem[:2] for n in NOTEBOOKS] == ["01", "02", "03", "04"]
    assert BLOCKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path, this_interpreter):
    notebook = nbformat.read(path, as_version=4)
    which = nbformat.v4.new_code_cell("import sys; print(sys.executable)")
    notebook.cells.insert(0, which)
    client = NotebookClient(notebook, kernel_name="python3", timeout=600, resources={"metadata": {"path": path.parent}})
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
for mode in ("compiled", "eager"):
    p = plan(Model(8, 8), torch.zeros(4, 8), budget_gb=1, loss_fn=torch.Tensor.mean, mode=mode)
    print({d.source for d in p.decisions})
"""


def test_lines_of_cells_are_named_by_the_cell(tmp_path):
    code = f"from IPython.core.interactiveshell import InteractiveShell as S\nS.instance().run_cell({CELL!r}, True)"
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout.splitlines() == 2 * ["{'In[1]:5: return super().forward(x).tanh()'}"], run.stderr


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_the_code_in_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_commands_in_readme_exist():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(r"make ([a-z]+)", README.read_text())
    assert {"demo", "test"} <= set(named) <= set(targets)


def test_the_files_that_readme_links_to_exist():
    for link in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", README.read_text()):
        name = next(filter(None, link))
        assert name.startswith("https://") or (ROOT / name).exists(), name


def test_the_demo_holds():
    result = command_line("demo", "--quiet", "--steps", "2")
    assert result.returncode == 0, result.stderr
    for line in (
        r"predicted peak +[\d.]+ MB",
        r"measured peak +[\d.]+ MB",
        "gradients agree  yes",
        r"overhead +[+-][\d.]+%",
    ):
        assert re.search(f"^{line}", result.stdout, flags=re.MULTILINE), line


def test_the_demo_says_when_nothing_fits(monkeypatch, capsys):
    shorten(monkeypatch)
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
