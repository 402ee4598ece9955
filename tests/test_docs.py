"""Every block of code in the documentation works: each command is composed and checked by the real command line. The
slow test runs them on the tiny model with small stand-ins. A block that cannot be run says in its title what it needs.
"""

import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import clipscale
from clipscale.cli import compose
from clipscale.cli.main import main
from clipscale.cli.verbs import VERBS, split_verb
from clipscale.config.parse import MEANT
from clipscale.config.presets import PACKAGE, group_options
from clipscale.config.setting import setting, settings_of
from clipscale.config.train import TrainConfig, check
from tests.conftest import TINY
from tests.support.browser import CHROMIUM, browser

ROOT = PACKAGE.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
PAGES["--help"] = "".join(f"```sh\n{verb.examples}\n```\n" for verb in VERBS.values())
FENCE = re.compile(r"^```(\w*)(?: title=\"(.*)\")?\n(.*?)^```$", re.M | re.S)
TARGETS = re.findall(r"[\w-]+", "".join(re.findall(r"^(?:GPU|MORE|\.PHONY).*", (ROOT / "Makefile").read_text(), re.M)))


class Block(NamedTuple):
    language: str
    needs: str
    code: str

    def commands(self) -> Iterator[list[str]]:
        """The words of every command, without the environment before it; a variable of a loop is 1."""
        for line in self.code.replace("\\\n", " ").splitlines() if self.language == "sh" else ():
            words = shlex.split(re.sub(r"\$\w+", "1", line), comments=True)
            words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
            if words:
                yield words


def blocks(page: str) -> list[Block]:
    return [Block(*actual) for actual in FENCE.findall(PAGES[page])]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_marked_and_its_commands_are_right(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rest = FENCE.sub("", PAGES[page])
    assert "```" not in rest and not re.search(r"^\w[^\n]*\n\n {4}\S.*", rest, re.M), "code without a fence"
    lost = re.search(r"<[a-zA-Z_][^>\n]*", re.sub(r"`[^`\n]*`", "", rest))
    assert page == "--help" or lost is None, f"the HTML parser takes it for a tag: {lost and lost[0]}"
    for block in blocks(page):
        assert block.language in ("sh", "python", "text", "yaml", "json"), block
        assert re.match(r"needs |$", block.needs), block
        for words in block.commands():
            paths = [word.split("::")[0] for word in words if re.match(r"(tests|benchmarks|launch)/", word)]
            assert all((ROOT / path).exists() for path in paths), paths
            if scripts := [words.index(path) for path in paths if path.endswith(".sh")]:
                composed(["train", *words[scripts[0] + 1 :]])
            elif "clipscale" in words[:5]:
                composed(words[words.index("clipscale") + 1 :])
            elif words[0] == "make":
                assert words[1] in TARGETS, words
            else:
                assert block.needs or words[0] in ("python", "pytest"), f"{words[0]}: say what it needs"


def composed(words: list[str]) -> None:
    """Compose and check a command's settings, as if the runs that it names were there."""
    name, words = split_verb(words)
    line = compose.parse(name, words)
    for _, _, run in (word.partition("=") for word in words if word.startswith(("run=", "resume="))):
        (Path(run) if "/" in run else Path("runs") / run).mkdir(parents=True, exist_ok=True)
    if line.multirun:
        every = [settings for _, settings in compose.combinations(line.words, line.config_dir)]
    else:
        every = [compose.settings(name, compose.overrides(name, line.words)[1], line.config_dir)]
    for settings in every:
        if name == "train":
            check(settings)
        elif name == "plan":  # the others look for sets, shards and weights
            VERBS[name].check(settings)


def test_python_blocks_work() -> None:
    import torch

    for code in (b.code for page in PAGES for b in blocks(page) if b.language == "python" and not b.needs):
        images, texts = torch.nn.functional.normalize(torch.randn(2, 8, 4), dim=-1)
        queries, passages, encoder = torch.randn(8, 4), torch.randn(16, 4), torch.nn.Linear(4, 4)
        names = {
            "clipscale": clipscale, "setting": setting, "logit_scale": torch.tensor(10.0),
            "image_features": images.requires_grad_(), "text_features": texts, "queries": queries, "passages": passages,
            "query_tokens": {"input": queries}, "passage_tokens": {"input": passages}, "query_encoder": encoder,
            "passage_encoder": encoder, "optimizer": torch.optim.SGD(encoder.parameters(), lr=0.0),
            "loss_of_representations": lambda q, p: clipscale.contrastive_loss(q, p, 1.0),
        }  # fmt: skip
        exec(code, names)


def test_every_flag_of_open_clip_has_a_setting() -> None:
    """The page about moving names its flags, and settings that there are; the command line answers with these, too."""
    flags = (Path(pytest.importorskip("open_clip_train").__file__).parent / "params.py").read_text()
    known = {*settings_of(TrainConfig), *group_options()}
    for reference, ours in re.findall(r"^\| (`--.*?) \| (.*?) \|", PAGES["docs/howto/open-clip.md"], re.M):
        assert all(f'"{flag}"' in flags for flag in re.findall(r"--[\w-]+", reference)), reference
        assert set(re.findall(r"`([\w.]+)(?:=[^`]*)?`", ours)) <= known, ours
    assert {value.partition("=")[0] for key, value in MEANT.items() if "=" not in key} <= known


SMALL = {
    r"^(model=vit|experiment=(?!demo)).*": "model=tiny", r"^(model\.\w+\.weights)=.*": r"\1=b32",
    r"^batch=\w+$": "batch=16", r"^batch=.*,.*": "batch=8,16", r"^samples=.*": "samples=32", r"\{0+\.\.\d+\}": "*",
    r"^(cache\.\w*chunk)=.*": r"\1=8", r"^checkpoint=\d+": "checkpoint=2", r"^(gpus|nodes)=.*": r"\1=2",
    r"^launch.procs=.*": "launch.procs=1",
}  # fmt: skip
"""What is large -> its stand-in."""
RUN = [page for page in PAGES if page != "--help" and any(not b.needs and [*b.commands()] for b in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_every_command_runs_on_the_tiny_model(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.data.files import picture, write_tar
    from tests.eval.sets import classification_set, retrieval_set

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in (tmp_path / "data" / name for name in ("", "laion", "mine", "cc12m")):
        members = [(f"{i:03}.png", picture(i, (70, 70))) for i in range(32)]
        about = b'{"similarity": 0.5, "title": "a caption"}'
        members += [(f"{i:03}.{kind}", about) for i in range(32) for kind in ("txt", "json")]
        folder.mkdir()
        write_tar(folder / "00000.tar", sorted(members))
    (tmp_path / "data/pictures").mkdir()
    for i in range(40):
        (tmp_path / f"data/pictures/{i}.png").write_bytes(picture(i, (70, 70)))
        (tmp_path / f"data/pictures/{i}.txt").write_text(f"picture {i}")
    classification_set(tmp_path / "data/imagenet1k")
    retrieval_set(tmp_path / "data/mscoco_captions")
    every = [words[1:] for b in blocks(page) if not b.needs for words in b.commands() if words[0] == "clipscale"]
    used = {word[4:] for words in every if words[0] != "train" for word in words if word.startswith("run=")}
    used |= {word for words in every if words[0] == "report" for word in words[1:] if "=" not in word}
    made = {word[4:] for words in every if words[0] == "train" for word in words if word.startswith("run=")}
    new = sorted({"b32", *used} - made - {""})
    runs = [["train", "model=tiny", "data=/data/mine", f"run={run}", "plan=true"] for run in new]
    for words in [*runs, *every]:
        assert main(small(words, tmp_path)) in ((0, 1) if words[0] == "plan" else (0,)), words


def small(words: list[str], folder: Path) -> list[str]:
    """The command with stand-ins, and with what TINY has for settings that it leaves out."""
    words = [re.sub("/(data|models)/", rf"{folder}/\1/", word) for word in words]
    for large, stand_in in SMALL.items():
        words = [re.sub(large, stand_in, word) for word in words]
    given = {word.partition("=")[0] for word in words}
    tiny = [word for word in TINY if word.partition("=")[0] not in given and "model" not in word]
    more = {"train": tiny, "eval": ["device=cpu"], "embed": ["device=cpu"], "data demo": ["samples=64"]}
    return [*words, *more.get(words[0], more.get(" ".join(words), []))]


def test_formulas_are_typeset_and_text_that_the_parser_eats_fails() -> None:
    """As `make docs` does it: by its hook, on what Markdown has made of a page."""
    pytest.importorskip("latex2mathml")
    from markdown import markdown
    from mkdocs.exceptions import PluginError

    hook = runpy.run_path(str(ROOT / "docs/formulas.py"))["on_page_content"]
    page = SimpleNamespace(file=SimpleNamespace(src_path="loss.md"))

    def built(text: str) -> str:
        return hook(
            markdown(
                text, extensions=["pymdownx.arithmatex"], extension_configs={"pymdownx.arithmatex": {"generic": True}}
            ),
            page=page,
        )

    html = built("The scores $x_{ij} < 1$:\n\n$$\nL = \\sum_i r_i\n$$\n\n`<u_i, v_j>` and *a* < b")
    assert html.count("<math") == 2 and "<msub><mi>x</mi>" in html and "arithmatex" not in html
    assert 'display="block"' in html and "&lt;u_i, v_j&gt;" in html
    with pytest.raises(PluginError, match=r"loss\.md: the HTML parser takes <u_i, for a tag"):
        built("the scores <u_i, v_j> are")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_site_is_searched_and_turns_dark_from_the_disk(tmp_path: Path) -> None:
    """Nothing is fetched: a page from the disk may start no worker, whose place a frame takes."""
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path], cwd=ROOT, check=True
    )
    typed = "((field) => { field.focus(); field.value = 'parquet'; field.dispatchEvent(new KeyboardEvent('keyup')) })"
    links = "[...document.querySelectorAll('.md-search-result__link')].map((link) => link.href).join()"
    with browser() as page:
        page.call("Page.navigate", url=(tmp_path / "howto/lit.html").as_uri())
        end = time.monotonic() + 60
        while "own-data.html" not in (page.value(links) or ""):
            page.value(f"{typed}(document.querySelector('.md-search__input'))")
            assert time.monotonic() < end, page.errors
            time.sleep(0.2)
        page.value("document.querySelector('label[for=__palette_1]').click()")
        assert page.value("document.body.dataset.mdColorScheme") == "slate"
        assert page.errors == []
