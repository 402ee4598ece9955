"""Runs pytest in copies of the checkout, in forks of a process that has loaded all other packages."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import pytest

CHECKOUT = Path(__file__).parents[2]


def become_pytest(folder: Path, words: Sequence[str], plugins: Sequence[object]) -> NoReturn:
    """Run pytest in a copy of the checkout, and end this process, which is a fork."""
    status = 3
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background, or of nohup, ignores them
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with (folder / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(folder)
        # The kernels' tests are a pytest of their own, which is to stop at its first failure too.
        os.environ |= {"PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "-x"}
        # A fork of pytest-xdist's worker is none: what a run has made for all workers is not for the next run.
        os.environ.pop("PYTEST_XDIST_WORKER", None)
        elsewhere = [path for path in sys.path if Path(path).resolve() != CHECKOUT]
        sys.path[:] = [str(folder), *elsewhere]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        if (folder / "sitecustomize.py").exists():
            import_module("sitecustomize")
        options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--show-capture=no", "--tb=line")
        status = int(pytest.main([*options, f"--basetemp={folder}/tmp", *words], plugins=plugins))
        sys.stdout.flush()
    finally:
        os._exit(status)


def start(folder: Path, words: Sequence[str], *plugins: object) -> int:
    """Start a process that runs these tests in this copy. Returns its id."""
    for name in ("tmp", ".hypothesis"):
        shutil.rmtree(folder / name, ignore_errors=True)
    process = os.fork()
    if process == 0:
        become_pytest(folder, words, plugins)
    return process


def load_other_packages(folder: Path, tests: Sequence[str]) -> None:
    """Import here what the tests import, except for the package and the tests themselves."""
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    listed = folder / "modules.json"
    (folder / "list_modules.py").write_text(
        "import json, sys\ndef pytest_collection_finish():\n"
        f"    json.dump([*sys.modules], open({str(listed)!r}, 'w'))\n"
    )
    process = start(folder, ["--collect-only", "-p", "list_modules", *tests])
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit((folder / "output.txt").read_text())
    for name in json.loads(listed.read_text()):
        if name.partition(".")[0] not in ("clipscale", "tests", "list_modules", "wandb", "__main__"):
            with suppress(Exception):
                import_module(name)


def copy_of_checkout(folder: Path) -> Path:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (CHECKOUT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, folder / name)
    return folder
