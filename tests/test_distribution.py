"""The wheel and the sdist: built, installed into a fresh environment beside the torch of this one, and used."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("planner", "solvers", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "MANIFEST.in")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with both; the wheel is made of the sdist, which so is known to be whole."""
    tree, into = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for part in map(ROOT.joinpath, PARTS):
        if part.is_dir():
            shutil.copytree(part, tree / part.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(part, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(into), str(tree)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return into


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Runs a program of a fresh environment that has the wheel and, by their paths, the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (own / "of_the_tests.pth").write_text("\n".join(here))
    (wheel,) = built.glob("*.whl")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], env=environment, check=True)

    def run(program, *arguments, cwd):
        command = [str(folder / "bin" / program), *map(str, arguments)]
        return subprocess.run(
            command, cwd=cwd, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )

    return run


def test_what_is_in_them(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(p.relative_to(ROOT)) for top in ("planner", "solvers") for p in (ROOT / top).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {"planner/py.typed", "solvers/py.typed"} < set(names)
    with tarfile.open(sdist) as packed:
        assert any(name.endswith("/CHANGELOG.md") for name in packed.getnames())
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    (latest, *_) = re.findall(
        r"^## \[(.*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    for line in (
        f"Version: {latest}",
        "Name: checkpoint-planner",
        "License-Expression: Apache-2.0",
        "Requires-Dist: torch>=",
    ):
        assert f"\n{line}" in text


@pytest.mark.compat
def test_readmes_loop_and_the_launcher_run_where_the_wheel_is_installed(installed, tmp_path):
    loop = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    (line,) = (line for line in loop.splitlines() if line.startswith("plan("))
    planned, plain = tmp_path / "planned.py", tmp_path / "plain.py"
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    where = (
        "import planner, torch\nfrom planner.planfile.files import own_version\n"
        "torch.manual_seed(0)\nprint(own_version(), planner.__file__)\n"
    )
    after = "print([p.sum().item() for p in model.parameters()])\n"
    planned.write_text(where + loop + after)
    plain.write_text(where + loop.replace(line, "") + after)
    one = installed("python", planned, cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert re.match(rf"{re.escape(version)} .*/environment\d*/.*site-packages", one.stdout)
    assert str(ROOT) not in one.stdout
    other = installed("checkpoint-planner", "run", "--budget-gb", "2.4 MB", plain, cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    assert other.stdout == one.stdout
    assert re.search(r"^planner: planned .*peak .* of a budget of 2\.40 MB", other.stderr, flags=re.MULTILINE)
