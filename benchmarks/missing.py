"""Prints the packages that clipscale[bench] needs and another machine lacks: `python benchmarks/missing.py HAVE`.

HAVE: a file with the names of the packages that the machine has, one a line; lines that start with # are comments.
What a package needs is read from the packages of this environment.
"""

import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def missing(have: Path) -> list[str]:
    """The names, sorted."""
    lines = have.read_text(encoding="utf-8").splitlines()
    known = {canonicalize_name(line) for line in lines if not line.startswith("#")}
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*project["dependencies"], *project["optional-dependencies"]["bench"]]
    names = []
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in known:
            known.add(name)
            names.append(name)
            waiting += requires(name) or []
    return sorted(names)


if __name__ == "__main__":
    print(*missing(Path(sys.argv[1])))
