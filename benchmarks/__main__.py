"""Runs every benchmark that needs nothing but this machine, one after the other: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    here = Path(__file__).parent
    # By hand: `spine` asks a running router, `mini_world` trains for a quarter of an hour and keeps its own report.
    files = {p.stem for p in here.glob("*.py")} | {p.parent.name for p in here.glob("*/__main__.py")}
    names = sorted(files - {"__init__", "__main__", "spine", "mini_world"})
    failed = []
    for name in names:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=here.parent, check=False).returncode:
            failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
