"""The wheel holds all that `clipscale train` needs, and the architecture page names every module."""

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from clipscale.config.presets import PACKAGE
from tests.conftest import TINY

CHECKOUT = PACKAGE.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(CHECKOUT)]
    built = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("clipscale-*.whl"))


def test_the_wheel_holds_the_package_and_its_configuration(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"clipscale/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    sources |= {f"clipscale/explore/page.{kind}" for kind in ("html", "css", "js")}
    settings = {f"clipscale/conf/{path.relative_to(CHECKOUT / 'conf')}" for path in CHECKOUT.glob("conf/**/*.yaml")}
    assert settings
    assert not (sources | settings) - names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_in_an_empty_environment_trains_from_another_folder(
    wheel: Path, shards: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The environment sees the dependencies of this one, but not this checkout."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin/python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, timeout=120, env=environment)
    # Python does not follow the .pth files in a folder added this way, such as the editable install of this checkout.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = [str(home / "bin/clipscale"), "train", *TINY, f"data.train={shards}", "run=wheel"]
    done = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "done: runs/wheel (step 2" in done.stdout
    where = [str(python), "-c", "import clipscale; print(clipscale.__file__)"]
    assert str(home) in subprocess.run(where, cwd=elsewhere, capture_output=True, text=True, check=True).stdout


def test_the_architecture_page_names_every_module_and_no_other() -> None:
    """Of the page's tables only: `triton/panels.py`, `softmax.py` means two files of one folder."""
    named: set[str] = set()
    section = ""
    for line in (CHECKOUT / "docs/architecture.md").read_text().splitlines():
        if line.startswith("### "):
            section = "" if "," in line else line.removeprefix("### ") + "/"
        folder = section
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", line.split("|")[1]) if line.startswith("| `") else []:
            if "/" in name:
                folder = section + name.rpartition("/")[0] + "/"
            named.add(folder if name.endswith("/") else folder + name.rpartition("/")[2])
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")}
    whole = tuple(name for name in named if name.endswith("/"))
    missing = sorted(module for module in modules - named if not module.startswith(whole))
    assert not missing, f"docs/architecture.md lacks {missing}"
    gone = sorted(name for name in named - modules if not name.endswith("/"))
    assert not gone, f"docs/architecture.md names {gone}, which do not exist"


def test_files_and_folders_stay_small_and_layers_apart() -> None:
    """At most 400 lines a file and 20 files a folder; one module draws tables; nothing imports the mock library, plan or bench."""
    texts = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    folders = Counter(path.parent for path in texts)
    assert {path: text.count("\n") for path, text in texts.items() if text.count("\n") > 400} == {}
    assert {folder: count for folder, count in folders.items() if count > 20} == {}

    def importers(pattern: str) -> set[str]:
        return {str(path) for path, text in texts.items() if re.search(rf"^\s*(from|import) {pattern}\b", text, re.M)}

    assert importers(r"unittest") == set()
    assert importers(r"rich\.table") == {"report/table.py", "cli/help.py"}, "help has columns, and no table"
    above = {name for name in importers(r"clipscale\.(plan|bench)") if not name.startswith(("plan/", "bench/"))}
    assert above == set(), "their verbs are called by name"
