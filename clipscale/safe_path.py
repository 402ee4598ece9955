"""Keeps files in the working directory from being imported in place of installed modules.

Imports only what Python has loaded already.
"""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 (pathlib is not loaded yet)
"""The folder that holds this package."""


def own_module() -> bool:
    """Whether Python was started as `python -m clipscale`, or with a module of it."""
    words = sys.orig_argv
    return "-m" in words[:-1] and words[words.index("-m") + 1].partition(".")[0] == "clipscale"


def protect() -> None:
    """Take the working directory out of the module path, of this process and of those that it starts.

    A folder that PYTHONPATH names stays. A checkout that is the working directory stays too, behind all others.
    """
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    here = os.getcwd()  # noqa: PTH109 (pathlib is not loaded yet)
    named = {os.path.abspath(folder) for folder in given}  # noqa: PTH100
    if here not in named:
        sys.path[:] = [folder for folder in sys.path if folder not in ("", here)]
    if here == ROOT and here not in named:
        sys.path.append(here)
        given.append(here)
    if given:
        os.environ["PYTHONPATH"] = os.pathsep.join(given)
    else:
        os.environ.pop("PYTHONPATH", None)
    os.environ["PYTHONSAFEPATH"] = "1"
