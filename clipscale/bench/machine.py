"""What a benchmark ran on, for its record. `python -m clipscale.bench.machine COMMAND` prints it, as the head of what COMMAND prints."""

import json
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import psutil

from clipscale.report.environment import environment


def machine(verb: str, settings: Any) -> dict[str, Any]:
    """`facts`, with the command as one would type it."""
    defaults = {field.name: field.default for field in fields(settings)}
    given = [f"{key}={value}" for key, value in asked(settings).items() if value != defaults[key]]
    return facts(shlex.join(["clipscale", *verb.split(), *given]))


def facts(command: str) -> dict[str, Any]:
    """The surroundings of this process, less names and paths of the host."""
    found = environment()
    del found["hostname"]
    return found | {
        "command": command,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "memory_bytes": psutil.virtual_memory().total,
        "driver": driver(),
    }


def driver() -> str | None:
    """Version of the GPU's driver; None where there is none to ask."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked_for = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked_for, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()
    return said[0].strip() if said else None


def asked(settings: Any) -> dict[str, Any]:
    """The settings, less the folder that the record lies in."""
    return {key: value for key, value in asdict(settings).items() if key != "out"}


def cpu_name() -> str:
    """As the system calls it."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    print(json.dumps(facts(" ".join(sys.argv[1:]))))
