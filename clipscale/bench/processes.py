"""Fresh processes for measuring: started, watched and asked for their answers."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clipscale.bench.worker import Job

# Memory that is freed goes back to the system at once, so that the resident set is what is in use (mallopt(3)).
PLAIN_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Answer = dict[str, Any]


def run(job: Job) -> list[Answer]:
    """The answers of all ranks that gave one, in rank order; for a process that ended without one, why every method failed there."""
    environment = {key: value for key, value in os.environ.items() if key not in TORCHRUN}
    environment |= PLAIN_MALLOC if job.probed and job.case.device == "cpu" else {}
    with tempfile.TemporaryDirectory(prefix="clipscale-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(job.case.ranks):
                command = [sys.executable, "-m", "clipscale.bench.worker", str(folder), str(rank)]
                with (folder / f"said-{rank}").open("wb") as said:
                    processes.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
            while any(process.poll() is None for process in processes) and not any(p.poll() for p in processes):
                time.sleep(0.02)
            if any(p.poll() for p in processes):
                time.sleep(0.2)  # ranks that fail together leave together
        finally:
            ended = [process.poll() for process in processes]
            for process in processes:
                process.kill()
                process.wait()
        answers = []
        for rank, status in enumerate(ended):
            path = folder / f"answer-{rank}.json"
            if path.exists():
                answers.append(json.loads(path.read_text()))
            elif status is not None:
                answers.append(silent(job, status, (folder / f"said-{rank}").read_text(errors="replace")))
        return answers


def silent(job: Job, status: int, said: str) -> Answer:
    """The answer of a process that left none."""
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    if status == -signal.SIGKILL:
        found = {"status": "out of memory", "reason": "the system ended the process (SIGKILL)"}
    elif status < 0:
        found = {"status": "failed", "reason": f"the process ended by {signal.Signals(-status).name}"}
    else:
        found = {"status": "failed", "reason": f"the process ended with status {status}: {last[:300]}"}
    return {"methods": {name: found | {"traceback": said[-5000:]} for name in dict.fromkeys(job.probed + job.timed)}}
