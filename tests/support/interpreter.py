"""Code in an interpreter of its own, which has loaded nothing yet."""

import os
import subprocess
import sys


def interpreted(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the code with these variables in its environment. Returns what it returns and prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=600)
