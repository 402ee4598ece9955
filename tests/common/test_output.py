"""Records of a run that a full disk refuses wait in memory."""

import resource
from contextlib import closing
from pathlib import Path

from clipscale.common.output import RetryingLines
from tests.conftest import Capture


def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(RetryingLines(path.open("ab", buffering=0))) as lines:
        lines.append("1\n")
        assert path.read_text() == "1\n", "a kill loses no line"
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))  # no file grows, as on a full disk
        try:
            lines.append("2\n")
            lines.append("3\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        out = capsys.readouterr().out
        assert out.count("metrics.jsonl cannot be written (File too large)") == 1, out
    assert path.read_text() == "1\n2\n3\n"
