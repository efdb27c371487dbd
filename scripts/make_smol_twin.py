"""Writes the bundled identity pair `smol-twin`: `python -m scripts.make_smol_twin`.

Sharer and receiver are the same weights, so there is no fuser to train; `scripts.prove_bundled` proves that KV handed
from one to the other answers as reading does.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

from scripts.train_smol_reader import SHARER
from workers.fusers.identity import IdentityFuser
from workers.loader import Loader
from workers.pair_file import publish
from workers.pairs import FuserInfo


def main() -> None:
    """Write `pair.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pairs/smol-twin"))
    args = parser.parse_args()
    model = Loader("cpu").load(SHARER)
    fuser = IdentityFuser(model.identity, model.identity, model.shape)
    info = FuserInfo(kind=fuser.kind, digest=fuser.digest)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    publish(args.out, "smol-twin", model, model, info, mode="handover", scope="prompt", made=date, licence="Apache-2.0")


if __name__ == "__main__":
    main()
