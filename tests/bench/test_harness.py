"""Processes that measure: started, watched, and ended."""

import time
from typing import Any

import pytest

from clipscale.bench.harness import Answer, Job, cause, completed, measure


def measured(*words: list[str], **more: Any) -> list[Answer]:
    job = Job({"words": words}, "cpu", timed=["a", "b"], ranks=len(words), variables={"GIVEN": "yes"})
    return measure("tests.bench.measuring:Words", job, **more)


def test_answers_are_heard_as_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")  # torchrun's, which is not theirs
    heard: list[Any] = []
    (found,) = measured(["answer", "answer"], on_answer=lambda now: heard.append(now[0]["cases"]["a"]["steps"][0]))
    assert found["complete"] and found["cases"]["a"]["steps"] == [{"rank": 0, "answers": 2, "variable": "yes"}]
    assert heard and heard[0]["answers"] == 1, heard


def test_a_rank_that_fails_ends_the_others_and_says_why() -> None:
    begun = time.monotonic()
    (failed,) = measured(["answer", "fail"], ["answer", "sleep"])
    assert time.monotonic() - begun < 30
    a, b = failed["cases"]["a"], failed["cases"]["b"]
    assert a["steps"] and a["status"] == "ok", "what had been left is there"
    assert (b["status"], b["reason"]) == ("failed", "the process ended with status 3: no such thing")


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (-9, "", ("out of memory", "the system ended the process (SIGKILL)")),
        (-11, "", ("failed", "the process ended by SIGSEGV")),
        (1, "Traceback\nImportError: x\n\n", ("failed", "the process ended with status 1: ImportError: x")),
    ],
)
def test_a_process_that_left_no_answer_has_its_end_as_the_reason(
    status: int, output: str, expected: tuple[str, str]
) -> None:
    assert cause(status, output) == expected
    job = Job({}, "cpu", probed=[("a", 8)], timed=["a", "b"])
    cases = completed(job, None, status, output)["cases"]
    assert {name: (case["status"], case["reason"]) for name, case in cases.items()} == {"a": expected, "b": expected}


def test_a_process_that_ended_early_costs_only_what_it_had_not_measured() -> None:
    measured = {"status": "ok", "steps": [{"step": 1.0}], "memory": {}, "size": 8}
    answer = {"cases": {"plain@8": dict(measured)}, "complete": False}
    found = completed(Job({}, "cpu", timed=["plain@8", "cache@8"]), answer, -9, "half a line")["cases"]
    assert found["plain@8"] == measured
    assert found["cache@8"]["status"] == "out of memory", found
