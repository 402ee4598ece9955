"""Processes that measure: started, watched, and ended."""

import time
from typing import Any

import pytest

from clipscale.bench.harness import Answer, Ended, Job, completed, run


def ended(*words: list[str], **more: Any) -> list[Ended]:
    return run("tests.bench.measuring:work", {"words": words}, ranks=len(words), **more)


def test_answers_come_in_rank_order_and_are_heard_as_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # torchrun's, which is not theirs
    heard: list[Answer] = []
    found = ended(["answer", "answer"], ["answer"], variables={"GIVEN": "yes"}, on_answer=heard.append)
    assert [one.status for one in found] == [0, 0]
    assert [one.answer for one in found] == [
        {"rank": 0, "answers": 2, "variable": "yes"},
        {"rank": 1, "answers": 1, "variable": "yes"},
    ]
    assert heard and heard[0]["answers"] == 1 and all(answer["rank"] == 0 for answer in heard), heard


def test_a_rank_that_fails_ends_the_others_and_says_why() -> None:
    begun = time.monotonic()
    failed, waiting = ended(["answer", "fail"], ["answer", "sleep"])
    assert time.monotonic() - begun < 30
    assert failed.cause == ("failed", "the process ended with status 3: no such thing")
    assert failed.answer and waiting.answer, "what had been left is there"
    assert waiting.status is None, "it did not end by itself"


def test_time_that_is_up_is_no_failure() -> None:
    (late,) = ended(["answer", "sleep"], seconds=3.0, grace=30.0)
    assert late.status is None and late.answer == {"rank": 0, "answers": 1, "variable": None}
    assert "KeyboardInterrupt" in late.output, "it was interrupted before it was killed"


@pytest.mark.parametrize(
    ("status", "output", "cause"),
    [
        (-9, "", ("out of memory", "the system ended the process (SIGKILL)")),
        (-11, "", ("failed", "the process ended by SIGSEGV")),
        (1, "Traceback\nImportError: x\n\n", ("failed", "the process ended with status 1: ImportError: x")),
    ],
)
def test_a_process_that_left_no_answer_has_its_end_as_the_reason(
    status: int, output: str, cause: tuple[str, str]
) -> None:
    ended = Ended(None, status, output)
    assert ended.cause == cause
    job = Job({}, "cpu", probed=[("a", 8)], timed=["a", "b"])
    cases = completed(job, ended)["cases"]
    assert {name: (case["status"], case["reason"]) for name, case in cases.items()} == {"a": cause, "b": cause}


def test_a_process_that_ended_early_costs_only_what_it_had_not_measured() -> None:
    measured = {"status": "ok", "steps": [{"step": 1.0}], "memory": {}, "size": 8}
    ended = Ended({"cases": {"plain@8": dict(measured)}, "complete": False}, -9, "half a line")
    found = completed(Job({}, "cpu", timed=["plain@8", "cache@8"]), ended)["cases"]
    assert found["plain@8"] == measured
    assert found["cache@8"]["status"] == "out of memory", found
