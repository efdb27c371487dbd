"""Log lines on a stream that fails."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from workers.logs import LossyStream

_SCRIPT = """
import resource
from router.telemetry import configure_logging
import structlog
configure_logging("info", format="json")
log = structlog.get_logger("t")
log.info("before")
size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
for _ in range(3):
    log.warning("dropped")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("after")
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on the size of files")
def test_a_full_disk_stops_no_one_who_logs(tmp_path: Path) -> None:
    """While the log's file takes nothing the program goes on; afterwards the log says that lines were lost."""
    with (tmp_path / "log").open("wb") as file:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT], stderr=file, env=dict(os.environ), timeout=60, check=False
        )
    text = (tmp_path / "log").read_text()
    assert done.returncode == 0, text
    assert "before" in text
    assert '"after"' in text
    assert '"event": "log lines lost"' in text


def test_a_closed_stream_takes_nothing_and_raises_nothing() -> None:
    """Writes to a closed stream are counted as lost; an open one gets the count before the next line."""
    stream = io.StringIO()
    lossy = LossyStream(stream)
    lossy.write("one\n")
    assert stream.getvalue() == "one\n"
    stream.close()
    assert [lossy.write("two\n"), lossy.write("three\n"), lossy.lost] == [0, 0, 2]
