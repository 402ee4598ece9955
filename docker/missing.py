"""Prints what clipscale[bench] needs and the GPU image lacks, by gpu-image.txt and the packages of this environment."""

import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

here = Path(__file__).parent
lines = (here / "gpu-image.txt").read_text().splitlines()
image = {canonicalize_name(line) for line in lines if not line.startswith("#")}
project = tomllib.loads((here.parent / "pyproject.toml").read_text())["project"]
waiting = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["bench"])]
missing: set[str] = set()
while waiting:
    requirement = waiting.pop()
    name = canonicalize_name(requirement.name)
    if name in image | missing or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
        continue
    missing.add(name)
    waiting += map(Requirement, requires(name) or ())
print(*sorted(missing))
