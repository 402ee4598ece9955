"""make mutants: breaks the core in a hundred places, one at a time, and says which breaks no test notices.

1. breaks_of_code.py draws the breaks by a seed; mutmut makes them.
2. chosen_tests.py chooses the tests of each: by its file's path, and of these the ones that ran its line when there was
   no break, which line_notes.py has noted. The quick ones come first.
3. pytest_forks.py runs them in a copy of the checkout, in a fork of one process that has loaded all other packages.
"""

import argparse
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.breaks_of_code import CHECKOUT, Mutant, drawn, target_files
from tests.mutants.chosen_tests import Choice, Noting, Record, tests_of
from tests.mutants.pytest_forks import copy_of_checkout, load_other_packages, start

# What every interpreter of the tests runs first, to note the lines.
NOTES = """
import json
from pathlib import Path
from tests.mutants.line_notes import note_lines
folder = Path(__file__).parent
note_lines(json.loads((folder / "wanted.json").read_text()), folder / "notes.jsonl")
"""
# A copy's broken file, as it was.
WHOLE = "whole.py"


def recorded(mutants: Sequence[Mutant], folders: Sequence[Path], files: Sequence[str]) -> Record:
    """Run the test files once without a break, some in each copy. Tests that fail are left out."""
    seconds: dict[str, float] = {}
    running: dict[tuple[str, int], set[str]] = defaultdict(set)
    processes = []
    for place, folder in enumerate(folders):
        wanted: dict[str, list[int]] = defaultdict(list)
        for each in mutants:
            wanted[str(folder / each.file)] += each.lines
        (folder / "wanted.json").write_text(json.dumps(wanted))
        (folder / "sitecustomize.py").write_text(NOTES)
        processes.append(start(folder, files[place :: len(folders)], Noting()))
    for folder, process in zip(folders, processes, strict=True):
        os.waitpid(process, 0)
        output = (folder / "output.txt").read_text()
        if not (folder / "noted.json").exists():
            raise SystemExit(output)
        noted = json.loads((folder / "noted.json").read_text())
        if noted["failed"]:
            print(f"{output[-3000:]}\nleft out, as they fail without a break: {' '.join(noted['failed'])}", flush=True)
        seconds |= {test: spent for test, spent in noted["seconds"].items() if test not in noted["failed"]}
        for note in (folder / "notes.jsonl").read_text().splitlines():
            test, path, line = json.loads(note)
            running[str(Path(path).relative_to(folder)), line].update(noted["sharing"].get(test, [test]))
        (folder / "sitecustomize.py").unlink()
    return Record(seconds, running)


@dataclass
class Running:
    """A mutant whose tests run now, in a copy of the checkout."""

    mutant: Mutant
    folder: Path
    process: int
    began: float
    tests: int
    limit_s: float

    def status(self) -> int | None:
        """pytest's exit status; -1 if it took too long; None if it is not known yet."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        late = time.monotonic() - self.began > self.limit_s
        if not process and not late:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)  # and what the tests have left
        if not process:
            os.waitpid(self.process, 0)
            return -1
        return os.waitstatus_to_exitcode(status)

    def result(self, status: int) -> dict[str, Any]:
        """The result. `by`: the test that failed, or `time` if the tests took too long; None: the mutant lives."""
        text = (self.folder / "output.txt").read_text(errors="replace")
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
        by = named[1] if named else text[-300:]
        if status == -1 or "Timeout" in text:
            by = "time"
        shutil.copy2(self.folder / WHOLE, self.folder / self.mutant.file)
        fields = asdict(self.mutant)
        del fields["source"]
        seconds = round(time.monotonic() - self.began, 1)
        return {**fields, "by": by if status else None, "tests": self.tests, "seconds": seconds}


def tested(mutants: Sequence[Mutant], folders: Sequence[Path], record: Record) -> Iterator[dict[str, Any]]:
    """Yield the mutants' results as they come, one mutant at a time in each copy.

    If a mutant's tests take far longer than without it, it has been noticed.
    """
    waiting, free, running = list(enumerate(mutants)), list(folders), list[Running]()
    while waiting or running:
        while waiting and free:
            number, mutant = waiting.pop(0)
            folder = free.pop()
            broken = folder / mutant.file
            shutil.copy2(broken, folder / WHOLE)
            broken.write_text(mutant.source)
            os.utime(broken, (10**9 + number,) * 2)  # no compiled module is taken for another's
            tests = record.tests(mutant)
            seconds = [record.seconds[test] for test in tests]
            files = list(dict.fromkeys(test.partition("::")[0] for test in tests)) or tests_of(mutant.file)
            process = start(folder, ["-x", f"--timeout={60 + 4 * max(seconds, default=60)}", *files], Choice(tests))
            running.append(Running(mutant, folder, process, time.monotonic(), len(tests), 120 + 4 * sum(seconds)))
        time.sleep(0.1)
        for each in list(running):
            status = each.status()
            if status is not None:
                running.remove(each)
                free.append(each.folder)
                yield each.result(status)


def ending(result: dict[str, Any]) -> str:
    return {None: "lives", "time": "late"}.get(result["by"], "dead")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--only", default="", help="a pattern of paths and changes: these of the drawn ones")
    parser.add_argument("--list", action="store_true", help="show what is drawn, and run nothing")
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build/mutants.jsonl", help="one result a line")
    parser.add_argument("--resume", action="store_true", help="keep the results that --out has, and go on")
    words = parser.parse_args()
    began = time.monotonic()
    mutants = drawn(words.number, words.seed, target_files())
    mutants = [each for each in mutants if re.search(words.only, f"{each.file}:{each.line} {each.change}")]
    if words.list:
        for each in mutants:
            print(f"{each.file}:{each.line}  {each.change}")
        return 0
    earlier = [json.loads(line) for line in words.out.read_text().splitlines()] if words.resume else []
    known = {(result["file"], result["line"], result["change"]) for result in earlier}
    mutants = [each for each in mutants if (each.file, each.line, each.change) not in known]
    tests = list(dict.fromkeys(test for each in mutants for test in tests_of(each.file)))
    counts = Counter(ending(result) for result in earlier)
    words.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as home,
        words.out.open("a" if words.resume else "w") as out,
    ):
        folders = [copy_of_checkout(Path(home) / str(number)) for number in range(words.jobs)]
        load_other_packages(folders[0], tests)
        record = recorded(mutants, folders, tests)
        minutes = (time.monotonic() - began) / 60
        print(
            f"{len(record.seconds)} tests pass, after {minutes:.0f} minutes; {len(mutants)} mutants follow", flush=True
        )
        for result in tested(mutants, folders, record):
            out.write(json.dumps(result) + "\n")
            out.flush()
            end = ending(result)
            counts[end] += 1
            place = f"{result['file']}:{result['line']}"
            print(f"{end} {result['seconds']:.0f}s {place}  {result['change']}  {result['by'] or ''}", flush=True)
    noticed, minutes = counts["dead"] + counts["late"], (time.monotonic() - began) / 60
    print(f"{noticed} of {counts.total()} are noticed, {counts['late']} of them by the time they take")
    print(f"{minutes:.0f} minutes, {words.jobs} at a time, load {os.getloadavg()[2]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
