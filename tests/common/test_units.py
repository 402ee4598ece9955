"""Counts, folders, bytes and suggestions for mistyped words."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipscale.common import files
from clipscale.common.files import file_name, unused_path
from clipscale.common.text import did_you_mean
from clipscale.common.units import format_bytes, format_count, parse_bytes, parse_count
from clipscale.run_folder.paths import run_folder

TABLES = files.read_yaml(Path(__file__).with_name("units.yaml"))


@pytest.mark.parametrize(("text", "count"), TABLES["counts"].items())
def test_counts_are_binary_and_with_decimals_or_in_b_what_papers_mean(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5", "0.3123k", "-1", "1MB", "ten", "1 000"])
def test_other_texts_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (count|whole number)"):
        parse_count(text)


@pytest.mark.parametrize(("text", "size"), TABLES["sizes"].items())
def test_sizes_of_memory_are_binary_in_every_form_that_people_type(text: object, size: int) -> None:
    assert parse_bytes(str(text)) == size


@pytest.mark.parametrize("text", ["", "T", "-1G", "2 P", "2B2", "1.5.0G", "two G", "bi"])
def test_no_size_of_memory_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_a_formatted_count_reads_back_as_itself(count: int) -> None:
    assert parse_count(format_count(count)) == count


def test_the_nearest_names_go_by_the_whole_by_the_last_part_and_by_the_beginning() -> None:
    names = ["optim.lr", "optim.betas", "batch", "model", "cache.chunk"]
    assert did_you_mean("optim.lrr", names) == "; did you mean 'optim.lr'?"
    assert did_you_mean("lr", names) == "; did you mean 'optim.lr'?"
    assert did_you_mean("bacth", names) == "; did you mean 'batch'?"
    assert did_you_mean("chunk", names) == "; did you mean 'cache.chunk'?"
    assert did_you_mean("zzz", names) == did_you_mean("", names) == ""


def test_a_plain_name_lies_under_runs_and_a_path_is_itself() -> None:
    assert run_folder("b32") == Path("runs/b32")
    assert run_folder("/scratch/b32") == Path("/scratch/b32")
    assert run_folder("./b32") == Path("b32")


def test_a_taken_folder_gets_a_number(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert unused_path(folder) == folder
    folder.mkdir()
    (tmp_path / "run-2").mkdir()
    assert unused_path(folder) == tmp_path / "run-3"


@pytest.mark.parametrize("other", ["a/c", "a-b", "a:b", "a/b/", "a//b", "a" * 200, "a" * 201, ".", "-"])
def test_a_files_name_is_safe_and_of_one_text_alone(other: str) -> None:
    name = file_name(other)
    assert len(name) <= 100 and Path(name).name == name and name != file_name("a/b")
    assert file_name("seed=1,optim.lr=1e-4") == "seed=1,optim.lr=1e-4"


@pytest.mark.parametrize(("count", "text"), TABLES["bytes"].items())
def test_bytes_are_shown_in_the_largest_fitting_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text
