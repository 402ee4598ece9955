"""Python files in the working directory are never imported, whatever module they are named after."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from clipscale.config.presets import PACKAGE
from tests.conftest import TINY

BY_PYTHON = "import runpy, sys; print(*sys.modules)"
"""Lists what `python -m` itself imports from the working directory, before any code of ours. Only `python -P -m` prevents that."""
NAMES = sorted({*sys.stdlib_module_names, *packages_distributions()} - {"clipscale", "__main__"})
CODE = "open('ran-' + __name__, 'w').close(); raise SystemExit('the working directory was imported')\n"


def verbs(shards: str) -> dict[str, list[str]]:
    train = ["train", *TINY, f"data.train={shards}", "run=r", "data.workers=1"]
    return {
        "check": ["data", "check", shards, "workers=2"],
        "train": train,
        "procs": [*train, "launch.procs=2"],
        "doctor": ["doctor"],
        "bench": ["bench", "loss", "n=64", "d=16", "methods=infcl", "device=cpu", "repeats=1"],
    }


@pytest.mark.parametrize(
    "verb",
    ["check", *(pytest.param(name, marks=pytest.mark.slow) for name in ("train", "procs", "doctor", "bench"))],
)
@pytest.mark.parametrize("start", ["script", pytest.param("module", marks=pytest.mark.slow)])
def test_modules_in_the_working_directory_are_not_imported(
    verb: str, start: str, shards: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    by_python: set[str] = set()
    if start == "module":
        listed = subprocess.run([sys.executable, "-c", BY_PYTHON], capture_output=True, text=True, check=True).stdout
        by_python = set(listed.split())
    for name in NAMES:
        if name.isidentifier() and name not in by_python:
            (tmp_path / f"{name}.py").write_text(CODE)
    script = tmp_path / "bin/clipscale"  # as pip installs it
    script.parent.mkdir()
    script.write_text(
        "import sys\nfrom clipscale.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    command = [sys.executable, *(["-m", "clipscale"] if start == "module" else [str(script)])]
    variables = environment | {"PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": ""}
    variables.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [*command, *verbs(shards)[verb]], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500
    )
    assert not [name for name in os.listdir(tmp_path) if name.startswith("ran-")], done.stderr  # noqa: PTH208
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("start", ["module", "script"])
def test_a_checkout_works_as_the_working_directory(start: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """Both as `python -m` without installation, and as the installed script of an editable checkout, whose folder a
    file of site-packages adds to the path. Processes that it starts find the package too.
    """
    root = tmp_path / "checkout"
    (root / "clipscale").mkdir(parents=True)
    for name in ("__init__.py", "safe_path.py", "units.py", "errors.py"):
        (root / "clipscale" / name).write_bytes((PACKAGE / name).read_bytes())
    (root / "clipscale/try_it.py").write_text(
        "import subprocess, sys; from clipscale.safe_path import protect; protect(); import clipscale.common.units\n"
        "multiprocessing = 'import sys; sys.path = %r; import clipscale.common.units; print(clipscale.__file__)' % sys.path\n"
        "subprocess.run([sys.executable, '-Sc', multiprocessing], check=True)\n"
        "subprocess.run([sys.executable, '-Sc', 'import clipscale.common.units; print(clipscale.__file__)'], check=True)\n"
    )
    script = tmp_path / "bin/clipscale"
    script.parent.mkdir()
    script.write_text(f"import sys\nsys.path.append({str(root)!r})\nimport clipscale.try_it\n")
    command = [
        sys.executable,
        "-S",
        *([str(script)] if start == "script" else ["-m", "clipscale.try_it"]),
    ]  # -S: no installed clipscale
    variables = {name: value for name, value in environment.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(root / "clipscale")) == 2
