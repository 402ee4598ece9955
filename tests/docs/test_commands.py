"""Every command in the documentation works as it stands: two shells read it, and the command line checks it with data,
weights and runs where the page has them. The slow test runs what a CPU can, on few samples.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

import open_clip
import pyarrow
import pytest
from pyarrow import parquet

from clipscale.cli.compose import compose_settings, is_in_dictionary
from clipscale.cli.main import main
from clipscale.cli.sweep.run_sweep import compose_sweep
from clipscale.cli.verbs import VERBS, split_verb
from clipscale.cli.words import SECTION_ALIASES, is_hydra_setting, overrides_of, parse_flags
from clipscale.common.errors import UserError
from clipscale.config.checks import check_across_sections
from clipscale.config.presets import default_choices
from clipscale.config.setting import settings_of
from clipscale.config.train_config import MAX_SAMPLES
from clipscale.tools.data.demo_folder import user_folder
from tests.conftest import shared
from tests.docs.machine import SHELLS, lay, programs, within
from tests.docs.pages import BLOCKS, FENCE, PAGES, ROOT, TABLE, Block
from tests.support.bert import save_bert

TARGETS = re.findall(r"[\w-]+", "".join(re.findall(r"^(?:GPU|MORE|\.PHONY).*", (ROOT / "Makefile").read_text(), re.M)))
# Commands between the words, which may leave something out: shells read them, and nothing checks them.
INLINE = re.compile(r"`(clipscale [^`]*)`")
IN_TEXT = "in the text"
# Programs that a shell only notes; `block` says where one begins.
PROGRAMS = "apt-get aws clip_benchmark img2dataset kubectl make npm pip pytest python sbatch tar torchrun clipscale"
# Blocks that the slow test runs.
READY = (("sh", ""), ("python", "needs the export"), ("python", "needs transformers"))
RUN = [block for block in BLOCKS if (block.language, block.needs) in READY]


def beside(folder: Path) -> None:
    """What commands find in the folder where they are typed: the checkout, and files of the user."""
    for name in ("benchmarks", "docs", "launch", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    (folder / "mine").symlink_to("/data/pairs")
    (folder / "shards.txt").write_text("/data/mine/00000.tar\n")
    (folder / "captions.csv").write_text("image,caption\npicture.png,a picture\n")
    (folder / "shop.csv").write_text("photo,title\n0.png,a picture\n")
    shutil.copy(ROOT / "docs/images/report.png", folder / "picture.png")


@pytest.fixture(scope="session")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared(tmp_path_factory, "laid", lay)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache, where the first command that needs the demo set renders it."""
    return shared(tmp_path_factory, "cache", Path.mkdir)


Commands = list[tuple[Block, list[str]]]


def read(shell: str, folder: Path) -> Commands:
    """Type all commands in a shell. Returns the words that it gives to the programs, which only note them."""
    beside(folder)
    note = f"""printf '%s\\037' "${{0##*/}}" "$@" >>{folder}/noted; echo >>{folder}/noted"""
    path = programs(folder / "bin", f"{PROGRAMS} block", note)
    shutil.copy(folder / "bin/python", folder / ".venv/bin/python")
    found = [block for block in BLOCKS if block.language == "sh"]
    for page, text in PAGES.items():
        text = "" if page == TABLE else text
        found += [Block(page, "sh", IN_TEXT, f"{' '.join(line.split())}\n") for line in INLINE.findall(text)]
    typed = "".join(f"block {number}\n{block.code}" for number, block in enumerate(found))
    environment = {"PATH": path, "HOME": "/home/user", "PS1": "", "PS2": ""}
    done = subprocess.run(SHELLS[shell], input=typed, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [line.split("\37")[:-1] for line in (folder / "noted").read_text().splitlines()]
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"{shell}: {done.stderr} after {lines[-2:]}"
    numbers = accumulate((int(words[1]) if words[0] == "block" else 0 for words in lines), max)
    return [(found[number], words) for number, words in zip(numbers, lines, strict=True) if words[0] != "block"]


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "commands.json").write_text(json.dumps(read("bash", folder)))

    found = json.loads((shared(tmp_path_factory, "commands", make) / "commands.json").read_text())
    return [(Block(*block), words) for block, words in found]


def test_every_block_is_marked_and_names_what_there_is(commands: Commands) -> None:
    for page, text in PAGES.items():
        rest = FENCE.sub("", text)
        assert "```" not in rest and not re.search(r"^\w[^\n]*\n\n {4}\S.*", rest, re.M), f"{page}: no fence"
        lost = re.search(r"<[a-zA-Z_][^>\n]*", re.sub(r"`[^`\n]*`", "", rest))
        assert page == "--help" or lost is None, f"{page}: the HTML parser takes it for a tag: {lost and lost[0]}"
    for block in BLOCKS:
        assert block.language in ("sh", "python", "text", "yaml", "json"), block
        assert re.match(r"needs |$", block.needs), block
    for _, words in commands:
        paths = [word.split("::")[0] for word in words if re.match(r"(tests|benchmarks|launch|docs)/", word)]
        assert all((ROOT / path).exists() for path in paths), paths
        assert words[0] != "make" or words[1] in TARGETS, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh is installed")
def test_both_shells_read_what_is_typed_alike(commands: Commands, tmp_path: Path) -> None:
    assert read("zsh", tmp_path) == commands


def ours(words: Sequence[str]) -> list[str]:
    """The words of clipscale in a command: its own, or those that a launcher passes on; none in another one."""
    if "launch/slurm.sh" in words:
        return ["train", *words[words.index("launch/slurm.sh") + 1 :]]
    return [*words[words.index("clipscale") + 1 :]] if "clipscale" in words else []


TAKEN = re.compile(r"(run|resume|model\.weights)=\[?(?:runs/)?(\w[\w./-]*)\]?")


def runs_of(words: Sequence[str]) -> set[str]:
    """The runs that a command takes as they are."""
    if words[0] == "report":
        return {word for word in words[1:] if "=" not in word}
    found = filter(None, map(TAKEN.fullmatch, words))
    return {m[2] for m in found if m[1] != "run" or words[0] != "train"}.difference(
        tag for _, tag in open_clip.list_pretrained()
    )


def checked(commands: Commands) -> dict[tuple[str, ...], Block]:
    return {tuple(ours(words)): block for block, words in commands if ours(words) and block.needs != IN_TEXT}


# The runs and weights that are laid are of smaller models than the page's, from which a captioner cannot begin.
SMALLER = re.compile(r"whose embed_dim is (32|128), not (128|512); give a captioner of its sizes")


def lay_runs(typed: Iterable[Sequence[str]], finished: Path, folder: Path) -> None:
    for run in set().union(*map(runs_of, typed)):
        shutil.copytree(finished, folder / "runs" / run, dirs_exist_ok=True)


def cover(typed: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Few commands that have all verbs and all sections of all of them. Each adds the most that are still missing."""
    sections_of: dict[tuple[str, ...], set[tuple[str, str]]] = {}
    for words in typed:
        verb, rest = split_verb(words)
        sections_of[words] = {
            (verb, ""),
            *(("", word.partition("=")[0].split(".")[0]) for word in rest if "=" in word),
        }
    missing = set[tuple[str, str]]().union(*sections_of.values())
    chosen = []
    while missing:
        best = max(sections_of, key=lambda words: len(sections_of[words] & missing))
        chosen.append(best)
        missing -= sections_of[best]
    return chosen


def test_every_setting_of_a_command_is_one_of_its_verb(commands: Commands) -> None:
    for words in checked(commands):
        name, rest = split_verb(words)
        verb = VERBS[name]
        known = {*settings_of(verb.settings), *default_choices(verb.conf)}
        for key in (word.lstrip("+").partition("=")[0] for word in rest if "=" in word):
            key = SECTION_ALIASES.get(key, "data.train" if key == "data" else key)
            is_known = key in known or is_in_dictionary(key, verb.settings) or is_hydra_setting(key + ".")
            assert is_known, f"{key}, in clipscale {' '.join(words)}"


@pytest.mark.long
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_command_composes(
    commands: Commands, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: bool
) -> None:
    """The values of its settings fit each other and the runs. /models is not there. In the ordinary suite: so many
    commands that they have all verbs and all sections; each preset has a test in config/test_presets.py."""
    monkeypatch.chdir(tmp_path)
    typed = checked(commands) if every else cover(checked(commands))
    lay_runs(typed, finished, tmp_path)
    for words in typed:
        name, rest = split_verb(words)
        line = parse_flags(name, rest)
        try:
            if line.multirun:
                compose_sweep(line.words, line.config_dir)
            elif name != "completion":
                settings = compose_settings(name, overrides_of(name, line.words)[1], line.config_dir)
                if name == "train":
                    check_across_sections(settings)
        except UserError as error:
            assert SMALLER.search(str(error)) or "there is no /models/" in str(error), words


@pytest.mark.slow  # the ordinary test above composes most
@pytest.mark.timeout(1200)
def test_every_command_finds_what_it_names(
    commands: Commands, laid: Path, finished: Path, demo: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Weights of every architecture, sets, shards and runs are there, as far as this machine can tell."""
    typed = {words: block for words, block in checked(commands).items() if block.page != TABLE}  # it makes its own
    lay_runs(typed, finished, tmp_path)
    beside(tmp_path)
    weights = pyarrow.table({"key": [f"{i:09d}" for i in range(300)], "weight": [1.5] * 300})
    parquet.write_table(weights, tmp_path / "weights.parquet")
    features = ["embed", f"run={finished}", f"data={laid}/data/mine", f"out={laid}/data/laion-b32", "device=cpu"]
    assert main(features) == 0
    for name in ("features", "demo-features"):
        (tmp_path / name).symlink_to("/data/laion-b32")
    save_bert(tmp_path / "tower")
    (tmp_path / "cache/clipscale").mkdir(parents=True)
    (tmp_path / "cache/clipscale" / user_folder().name).symlink_to(demo)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-m", "tests.docs.machine"]
    done = within(laid, program, cwd=tmp_path, input=json.dumps([*typed]), env=environment | cache)
    assert done.returncode == 0, done.stderr
    wrong = []
    for (words, block), line in zip(typed.items(), done.stdout.splitlines(), strict=True):
        status, out = json.loads(line)
        remote = re.search("network|S3", block.needs) and re.search(
            "cannot be (fetched|listed|loaded|read)|unreachable_shard|has no credentials", out
        )
        if status != 0 and not remote and not SMALLER.search(out):
            wrong.append(f"{block.page}, {block.needs}: clipscale {' '.join(words)}: {out}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", {block.page: None for block in RUN})
def test_every_command_runs_as_it_stands(
    page: str, commands: Commands, laid: Path, cache: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """In one shell, since both read it alike. What the page makes is not there yet; its other runs are of the demo."""
    beside(tmp_path)
    script = ""
    made = set[str]()
    for words in (ours(words) for block, words in commands if block in RUN and block.page == page and ours(words)):
        values = {key: value for key, _, value in (word.partition("=") for word in words)}
        script += "".join(f"clipscale train experiment=demo run={run}\n" for run in sorted(runs_of(words) - made))
        made |= {*runs_of(words), values.get("run", ""), values.get("out", "").removeprefix("runs/")}
        script += f"rm -rf {values['out']}\n" if words[0] == "data" and "out" in values else ""
    for block in (block for block in RUN if block.page == page):
        script += block.code if block.language == "sh" else f"{sys.executable} - <<'END'\n{block.code}END\n"
    modules = 'clipscale) set -- -m clipscale "$@";; torchrun) set -- -m torch.distributed.run "$@";;'
    line = f'case "${{0##*/}}" in {modules} esac; exec {sys.executable} "$@"'
    path = programs(tmp_path / "bin", "clipscale python torchrun", line)
    few = {MAX_SAMPLES: "512", "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "2", "PATH": path}
    done = within(laid, SHELLS["bash"], cwd=tmp_path, input=script, env=environment | few)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
