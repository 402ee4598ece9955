"""Which of a run's checkpoints its evaluations call the best."""

from pathlib import Path

import pytest

from clipscale.common import files
from clipscale.common.goal import Goal
from clipscale.run_folder.chosen_checkpoint import BestFinder
from tests.support.checkpoints import write_result


def test_the_best_checkpoint_is_compared_on_what_all_were_evaluated_on(tmp_path: Path) -> None:
    """A later evaluation of one step, on the whole set, takes no other one's place."""
    (tmp_path / "eval").mkdir()
    for step, value in ((1, 0.3), (2, 0.7), (3, 0.5)):
        results = {"birds (limit 9)": {"top1": value}} | ({"birds": {"top1": 0.4}} if step == 1 else {})
        files.write_json(tmp_path / f"eval/step_{step:08d}.json", {"results": results})
    assert BestFinder(tmp_path, Goal("birds", "top1")).best_step([1, 2, 3]) == 2


@pytest.mark.parametrize(("goal", "line"), [("birds/top11", "metrics: top1"), ("dogs/top1", "metrics: none")])
def test_a_goal_without_a_result_names_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], goal: str, line: str
) -> None:
    write_result(tmp_path, 1, 0.3)
    assert not BestFinder(tmp_path, Goal.parse("checkpoint.best", goal)).report_improvement(1, None)
    assert line in caplog.text + "".join(capsys.readouterr())


def test_a_goal_may_leave_out_the_folder_above_its_set() -> None:
    goal = Goal("holdout", "loss")
    assert goal.shortest_match(["objects", "shop/holdout (limit 9)", "shop/holdout"]) == "shop/holdout"
    assert goal.shortest_match(["holdouts", "shop/uphold"]) is None
