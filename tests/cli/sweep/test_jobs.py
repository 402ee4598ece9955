"""The runs of a sweep: Hydra reads the values of its words, and each run has a folder of its own."""

import re
from pathlib import Path

import pytest

from clipscale.cli.sweep.jobs import choices_of, folder_name
from clipscale.cli.sweep.run_sweep import compose_sweep
from clipscale.cli.words import OverridesParser, overrides_of
from clipscale.common import files

SWEPT = files.read_yaml(Path(__file__).with_name("swept.yaml"))


@pytest.mark.parametrize(("word", "values"), SWEPT.items())
def test_hydra_reads_the_values_of_a_sweeps_word(word: str, values: list) -> None:
    """The settings make a list of a single value, and texts of a chunk's numbers."""

    def text(value: object) -> str:
        return re.sub("['\"]", "", str(value if isinstance(value, list) else [value]))

    ((*words,),) = choices_of(overrides_of("train", [word], sweep=True)[1])
    read = [OverridesParser.create().parse_override(each).value() for each in words]
    assert [text(value) for value in read] == [text(value) for value in values]


@pytest.mark.slow  # each run is composed; the test above reads the same words
@pytest.mark.parametrize(("word", "values"), SWEPT.items())
def test_a_word_of_a_sweep_has_the_values_that_hydra_reads(word: str, values: list) -> None:
    """Each run has a folder of its own."""
    _, jobs = compose_sweep(["data.train=x.tar", word], None)
    section, _, name = word.partition("=")[0].rpartition(".")
    swept = [getattr(getattr(job.config, section) if section else job.config, name) for job in jobs]
    assert [[*value] if isinstance(value, tuple) else value for value in swept] == values
    assert len({job.name for job in jobs}) == len(values)


def test_a_runs_folder_is_named_after_its_values_and_safe() -> None:
    assert folder_name(["model=vit-b32", "batch=64k"]) == "model=vit-b32,batch=64k"
    assert folder_name(["data.train='/a/{0..9}.tar'"]).startswith("data.train=-a-0..9-.tar-")
    assert folder_name([]) == "0"
    long = [f"key{i}=value" for i in range(50)]
    assert len(folder_name(long)) <= 100
    assert folder_name(long) != folder_name([*long, "x=1"])
