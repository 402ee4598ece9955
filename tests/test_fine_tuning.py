"""A run from weights shows where it started."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from clipscale.cli.sweep.run_sweep import compose_sweep
from clipscale.config.model import ModelConfig
from clipscale.config.sections import EvalConfig, LossConfig
from clipscale.tools.export.settings import ExportSettings
from clipscale.tools.export.verb import main as export
from clipscale.tools.report.charts import charts_of, points
from clipscale.tools.report.page import write_report
from clipscale.tools.report.runs import read_runs
from clipscale.train import train
from tests.cli.conftest import Cli, tiny
from tests.cli.conftest import cli as cli
from tests.conftest import Capture
from tests.eval.sets import pair_set
from tests.support.checkpoints import ONE_RANK
from tests.support.runs import ARCHITECTURE, curve, four_step_config, train_loop
from tests.support.user_errors import refused


def test_a_run_from_weights_is_evaluated_before_its_first_step(shards: str, tmp_path: Path, capsys: Capture) -> None:
    """Its curve begins where it started, and its scores are shown beside those. It changes no bit of the training."""
    start, plain, tuned = tmp_path / "start", tmp_path / "plain", tmp_path / "tuned"
    sets = EvalConfig(sets=[str(pair_set(tmp_path / "pairs"))])
    at_start = train(four_step_config(shards, start, eval=sets))["eval"]
    model = ModelConfig(name="test", architecture=ARCHITECTURE, weights=f"run:{start}")
    train(four_step_config(shards, plain, model=model))
    band = {"pairs.text_to_image_r10": [0, 100], "source": "a paper"}
    config = four_step_config(shards, tuned, model=model, eval=sets, expected=band)
    capsys.readouterr()
    train(config)
    said = capsys.readouterr().out
    card = (export(ExportSettings(run=str(tuned))) / "README.md").read_text()
    page = re.sub(r"<[^>]+>", "|", write_report([tuned]).read_text())
    for place, text in {"console": said, "card": card, "report": page}.items():
        assert re.search(r"pairs, start.*pairs, end.*pairs, difference[| ]+-?[0-9]", text, re.DOTALL), (place, text)
    for text in (said, page):
        assert re.search(r"published: pairs text_to_image_r10 [0-9.]+ %, within 0 to 100 \(a paper\)", text)
    assert curve(tuned) == curve(plain)
    first = json.loads((tuned / "eval/step_00000000.json").read_text())["results"]
    assert first["pairs"]["loss"] == pytest.approx(at_start["pairs"]["loss"], rel=1e-2)
    assert not (start / "eval/step_00000000.json").exists(), "random weights have nothing to show"
    (run,) = read_runs([tuned])
    chart = next(chart for chart in charts_of([run]) if chart["key"] == "eval/pairs/loss")
    assert points(run, chart)[:, 0].tolist() == [0, 4]
    train(replace(config, samples=72, resume="auto"))
    assert not json.loads((tuned / "eval/step_00000006.json").read_text())["results"]["pairs"]["broken"]


def test_weights_without_a_bias_do_not_train_with_the_sigmoid_loss_alone(shards: str, tmp_path: Path) -> None:
    """Without a bias its first steps push all pairs apart."""
    start = tmp_path / "start"
    train(four_step_config(shards, start, samples=12))
    model = ModelConfig(name="test", architecture=ARCHITECTURE, weights=f"run:{start}")
    config = four_step_config(shards, tmp_path / "run", model=model, loss=LossConfig(objective="sigmoid"))
    with refused("loss.objective=sigmoid: .* no logit bias; give model.init_bias=-10"):
        train(config)
    run = train_loop(replace(config, model=replace(model, init_bias=-10.0)), ONE_RANK)
    run.stream.close()
    assert run.train_step.model.logit_bias == -10.0


def test_a_run_goes_on_where_its_start_is_gone(cli: Cli, shards: str, tmp_path: Path) -> None:
    """Its checkpoint holds all weights. It goes on as one whose start is still there, in a sweep, too."""
    assert cli(*tiny(f"data.train={shards}", "run=start"))[0] == 0
    words = [word for word in tiny(f"data.train={shards}") if not word.startswith("model")] + ["optim.lr=1e-5"]
    for run in ("kept", "moved"):
        assert cli(*words, f"run={run}", "model.weights=start")[::2] == (0, "")
    longer = [word for word in words if not word.startswith("samples=")] + ["samples=64"]
    assert cli(*longer, "run=kept", "model.weights=start")[0] == 0
    (tmp_path / "runs/start").rename(tmp_path / "elsewhere")
    status, _, err = cli(*longer, "run=moved", "model.weights=runs/start", "--check")
    assert status == 0 and err.endswith("loading torch ...\n") and err.count("\n") == 1, err
    status, _, err = cli(*longer, "run=moved", "model.weights=start")
    assert status == 0, err
    assert curve(tmp_path / "runs/moved") == curve(tmp_path / "runs/kept")
    for run in ("s/seed=1", "s/seed=2"):
        (tmp_path / "runs" / run).parent.mkdir(exist_ok=True)
        (tmp_path / "runs" / run).symlink_to(tmp_path / "runs/moved")
    _, jobs = compose_sweep([*longer[1:], "run=s", "model.weights=start", "seed=1,2"], None)
    assert [job.config.model.name for job in jobs] == ["tiny", "tiny"]
    status, _, err = cli(*longer, "run=new", "model.weights=start")
    assert status == 2 and "model.weights='start' is not a file, a folder, a run or a tag" in err
