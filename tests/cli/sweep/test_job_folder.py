"""The jobs of a sweep tell each other by files which of them run, have failed, or must not begin."""

from pathlib import Path
from threading import Event, Thread

from clipscale.cli.sweep.job_folder import JobFolder


def test_a_job_with_equal_values_waits_for_the_first_ones_end(tmp_path: Path) -> None:
    jobs = JobFolder(tmp_path)
    jobs.begin()
    entered = Event()

    def second() -> None:
        with jobs.lock("seed=1"):
            entered.set()

    with jobs.lock("seed=1"), jobs.lock("seed=2"):
        jobs.note_failure("seed=2", "went wrong")
        thread = Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
    thread.join(10)
    assert entered.is_set()
    assert jobs.failed() == ["seed=2"]
    jobs.begin()
    assert jobs.failed() == []


def test_a_signal_lets_no_job_begin_and_waits_for_those_that_have(tmp_path: Path) -> None:
    jobs = JobFolder(tmp_path)
    jobs.begin()
    ended = Event()

    def wait() -> None:
        jobs.wait_for_jobs()
        ended.set()

    with jobs.lock("seed=1"):
        jobs.stop()
        assert jobs.is_stopping
        thread = Thread(target=wait)
        thread.start()
        assert not ended.wait(0.2)
    thread.join(10)
    assert ended.is_set()
    jobs.begin()
    assert not jobs.is_stopping
