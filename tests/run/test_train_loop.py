"""The order of a run's loop: steps, evaluations, saves and the end. Its parts are fakes, which note what is asked."""

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from clipscale.checkpoint import CheckpointDescription
from clipscale.common.errors import StoppedError, UserError
from clipscale.config.stages import OptimizerPolicy, Stage
from clipscale.eval.run import Evaluation
from clipscale.run import train_loop
from clipscale.run.train_loop import Intervals, TrainLoop
from clipscale.step.optim import Schedule
from tests.support.checkpoints import ONE_RANK
from tests.support.user_errors import refused

BATCH = 12
# The learning rates of the four steps.
RATES = (0.1, 0.075, 0.05, 0.025)


def results_of(step: int) -> dict[str, dict[str, float]]:
    """What a fake evaluation after a step returns: each has a result of its own."""
    return {"birds": {"top1": step / 10}}


class Step:
    """A step of one chunk. `during(number)` runs in its middle. `saves_after`: then a rank asks to save."""

    def __init__(self, diary: list[str], during: Callable[[int], None], saves_after: tuple[int, ...]) -> None:
        self.diary = diary
        self.during = during
        self.saves_after = saves_after
        self.model = torch.nn.Identity()
        self.logit_scale = torch.ones(())
        self.precision = SimpleNamespace(autocast=nullcontext)
        self.is_updating = False
        self.has_weights_for_evaluation = False

    def run(
        self,
        batch: "Batch",
        stream: object,
        step: int,
        *,
        lr: float,
        wants_save: bool,
        before_chunk: Callable[[], None],
    ) -> object:
        assert lr == pytest.approx(RATES[step - 1])
        self.during(step)
        before_chunk()
        self.diary.append(f"step {step}")
        scalars = SimpleNamespace(loss=float(step), overflows=False)
        return SimpleNamespace(scalars=scalars, wants_save=wants_save or step in self.saves_after, timer=None)

    @contextmanager
    def rollback_on_error(self, stream: object) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.diary.append("rollback")
            raise

    @contextmanager
    def weights_for_evaluation(self, *, uses_ema: bool) -> Iterator[None]:
        assert uses_ema
        self.has_weights_for_evaluation = True
        yield
        self.has_weights_for_evaluation = False

    def num_chunk_passes(self, local_batch: int) -> int:
        return 2

    def size_graph_budget(self, timer: object) -> None:
        pass


class Batch:
    def __len__(self) -> int:
        return BATCH

    def tokens(self, start: int, stop: int) -> None:
        pass


class Part:
    """Any other part of the loop. Notes that it is closed."""

    def __init__(self, diary: list[str], name: str, **attributes: object) -> None:
        self.diary = diary
        self.name = name
        vars(self).update(attributes)

    def close(self) -> None:
        self.diary.append(f"close {self.name}")


class Saver(Part):
    """Notes each save. `best`: the steps that are better than those before."""

    def __init__(self, diary: list[str], best: tuple[int, ...]) -> None:
        super().__init__(diary, "saver", last_begun_step=0)
        self.best = best

    def is_best_so_far(self, step: int) -> bool:
        return step in self.best

    def save(self, state: CheckpointDescription, *, wait: bool) -> None:
        assert state.samples == state.step * BATCH and state.loss == state.step
        self.diary.append(f"save {state.step}" + " and wait" * wait)
        self.last_begun_step = state.step

    def wait_for_save(self) -> None:
        pass

    def wait_for_copy(self, within_s: float) -> None:
        self.diary.append("wait for the copy")


class Records(Part):
    """Notes when a step's record is written, in the order in which the loop asks for it."""

    def __init__(self, diary: list[str]) -> None:
        super().__init__(diary, "records")
        self.unwritten: list[int] = []

    def add(self, record: dict[str, Any], result: object, logit_scale: object) -> None:
        assert record["samples"] == record["step"] * BATCH
        self.unwritten.append(record["step"])

    def flush(self) -> None:
        self.diary += [f"record {step}" for step in self.unwritten]
        self.unwritten.clear()

    log_if_ready = flush

    def log_evaluation(self, step: int, results: object) -> None:
        assert results == results_of(step)
        self.diary.append(f"record evaluation {step}")

    def show_progress(self, task: str, done: int, total: int) -> None:
        pass

    def close(self) -> None:
        self.flush()
        super().close()


class Loop:
    """A loop of four steps, which one can run, and the diary of its parts."""

    def __init__(
        self,
        folder: Path,
        *,
        intervals: Intervals = Intervals(),  # noqa: B008
        sets: int = 1,
        step: int = 0,
        during: Callable[["Loop", int], None] = lambda loop, step: None,
        saves_after: tuple[int, ...] = (),
        best: tuple[int, ...] = (),
    ) -> None:
        self.diary: list[str] = []
        stream = Part(self.diary, "stream", next_batch=Batch, set_poll=lambda poll: None, position=lambda: None)
        self.step = Step(self.diary, lambda number: during(self, number), saves_after)
        parts: dict[str, Any] = {
            "train_step": self.step,
            "stream": stream,
            "records": Records(self.diary),
            "saver": Saver(self.diary, best),
            "evaluation": Evaluation(sets=["birds"] * sets, uses_ema=True),
        }
        self.loop = TrainLoop(
            world=ONE_RANK,
            lock=None,
            run_dir=folder,
            stage=Stage(
                global_batch=BATCH,
                steps_before=0,
                samples_before=0,
                is_last=True,
                optimizer_policy=OptimizerPolicy.TAKE_FITTING,
            ),
            step=step,
            loss=math.nan,
            schedule=Schedule(peak=0.1, total=4, warmup=0, cooldown=4, final=0.0, is_cosine=False, steps_before=0),
            intervals=intervals,
            checkpoint_template=CheckpointDescription(),
            is_compiled=False,
            print_summary=lambda result: self.diary.append(f"summary of step {result['step']}"),
            **parts,
        )

    def events(self, *words: str) -> list[str]:
        """What the diary says of these alone."""
        return [event for event in self.diary if event.startswith(words)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Loop]:
    """Makes loops whose evaluation, and whose gathering of a checkpoint's content, are fakes too."""

    def made(**options: Any) -> Loop:
        loop = Loop(tmp_path, **options)

        def evaluate(*given: object, file: Any, **named: object) -> dict[str, dict[str, float]]:
            assert loop.step.has_weights_for_evaluation
            loop.diary.append(f"evaluate {loop.loop.step}")
            return results_of(loop.loop.step)

        monkeypatch.setattr(train_loop, "evaluate", evaluate)
        monkeypatch.setattr(train_loop, "gather_checkpoint_state", lambda description, *_: description)
        return loop

    return made


def test_a_run_evaluates_and_saves_between_its_steps_and_ends_with_both(make: Callable[..., Loop]) -> None:
    """A step's record is written before what is done next. The last save comes before the last evaluation."""
    run = make(intervals=Intervals(evaluates_at_start=True, eval_steps=2, save_steps=3))
    result = run.loop.run()
    assert run.diary == [
        "evaluate 0", "record evaluation 0",
        "step 1",
        "record 1", "step 2",
        "record 2", "evaluate 2", "record evaluation 2",
        "step 3",
        "record 3", "save 3",
        "step 4",
        "record 4", "save 4 and wait",
        "evaluate 4", "record evaluation 4",
        "close stream", "close saver", "close records",
        "summary of step 4",
    ]  # fmt: skip
    assert result == {"run": str(run.loop.run_dir), "step": 4, "loss": 4.0, "eval": results_of(4)}


@pytest.mark.parametrize(
    ("options", "saves"),
    [
        ({}, ["save 4 and wait"]),
        ({"saves_after": (1,)}, ["save 1", "save 4 and wait"]),
        ({"intervals": Intervals(eval_steps=1), "best": (2,)}, ["save 2", "save 4 and wait"]),
        ({"intervals": Intervals(), "best": (2,)}, ["save 4 and wait"]),  # it is not evaluated there
        ({"intervals": Intervals(save_steps=2), "saves_after": (2, 4)}, ["save 2", "save 4 and wait"]),
        ({"intervals": Intervals(save_seconds=1e-9)}, ["save 1", "save 2", "save 3", "save 4 and wait"]),
    ],
)
def test_a_step_is_saved_once_whatever_the_reasons(
    make: Callable[..., Loop], options: dict[str, Any], saves: list[str]
) -> None:
    run = make(**options)
    run.loop.run()
    assert run.events("save") == saves


def test_a_complete_run_is_evaluated_again_and_not_saved(make: Callable[..., Loop]) -> None:
    run = make(step=4, intervals=Intervals(evaluates_at_start=True, eval_steps=1, save_steps=1))
    result = run.loop.run()
    assert (result["step"], result["eval"]) == (4, results_of(4))
    assert run.events("step", "save", "evaluate") == ["evaluate 4"]


def test_a_run_without_sets_has_no_results(make: Callable[..., Loop]) -> None:
    run = make(sets=0)
    assert run.loop.run()["eval"] == {} and not run.events("evaluate")


def signalled(loop: Loop, step: int) -> None:
    if step == 3:
        loop.loop.signal_poller.signum = signal.SIGTERM


@pytest.mark.parametrize(
    ("saves_after", "events"),
    [((), ["step 2", "rollback", "save 2 and wait"]), ((2,), ["step 2", "save 2", "rollback"])],
)
def test_a_signal_discards_the_step_and_saves_the_one_before_it(
    make: Callable[..., Loop], saves_after: tuple[int, ...], events: list[str]
) -> None:
    """A step that is saved already is not saved again. The run waits for its copy all the same."""
    run = make(during=signalled, saves_after=saves_after)
    with pytest.raises(StoppedError, match="step 2"):
        run.loop.run()
    actual = run.events("step", "rollback", "save", "wait", "close", "evaluate", "summary")
    assert actual == [
        "step 1", *events, "wait for the copy", "close stream", "close saver", "close records"
    ]  # fmt: skip


def diverged(loop: Loop, step: int) -> None:
    if step == 3:
        raise UserError("step 3: the loss is nan")


def test_a_mistake_in_a_step_saves_the_steps_before_it_and_remains_the_end(make: Callable[..., Loop]) -> None:
    run = make(during=diverged)
    with refused("the loss is nan"):
        run.loop.run()
    assert run.events("step", "rollback", "save") == ["step 1", "step 2", "rollback", "save 2 and wait"]
    assert not run.events("summary")
