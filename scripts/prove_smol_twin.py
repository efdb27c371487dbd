"""Writes the bundled identity pair `smol-twin` and its report: `python -m scripts.prove_smol_twin`.

Sharer and receiver are the same weights, so there is no fuser to train. What is proven is that KV handed from one to
the other answers token for token as reading does.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
from pathlib import Path
from typing import Any

import torch

from scripts.facts import passage
from scripts.train_smol_reader import SHARER
from workers.fusers.identity import IdentityFuser
from workers.loader import Loader
from workers.pairs import FORMAT, FuserInfo, Interval, Report, canonical, fingerprint, write
from workers.prompt import split_context
from workers.train import publish
from workers.verify import Evidence, identical_share, judge, numerics

_MOST = 12


def prompts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """Short chat prompts: a question, every other one with the passage it is about before it."""
    found = []
    for seed in range(count):
        document = passage(seed, "test", subjects=1)
        messages = [{"role": "system", "content": document.text}] if seed % 2 else []
        context, rest = split_context(tokenizer, [*messages, {"role": "user", "content": document.items[0].question}])
        found.append((*context, *rest))
    return found


def main() -> None:
    """Measure, then write `pair.json` and `report.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pairs/smol-twin"))
    parser.add_argument("--prompts", type=int, default=140)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = Loader("cpu").load(SHARER)
    fuser = IdentityFuser(model.identity, model.identity, model.shape)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    asked = prompts(model.tokenizer, args.prompts)
    same = identical_share(model, asked, _MOST)
    info = FuserInfo(kind=fuser.kind, digest=fuser.digest)
    publish(args.out, "smol-twin", model, model, info, mode="handover", scope="prompt", made=date, licence="Apache-2.0")
    gain = Interval(0.0, 0.0, 0.0, same.n)
    verdict, reason = judge(Evidence(fuser.kind, "handover", same.n, {}, gain, same))
    report = Report(
        format=FORMAT,
        fingerprint=fingerprint(
            model.identity, model.identity, kind=fuser.kind, digest=fuser.digest, mode="handover", scope="prompt"
        ),
        mode="handover",
        verdict=verdict,
        reason=reason,
        date=date,
        numerics=numerics(model),
        data=hashlib.sha256(canonical(asked)).hexdigest(),
        n=same.n,
        gain=gain,
        retention=same,
        notes=(
            f"Retention is the share of prompts whose greedy answer (at most {_MOST} tokens) over handed-over KV is, "
            "token for token, the answer of the same model reading the prompt itself.",
            "Gain is zero by construction: both sides are the same weights. The pair is pure reuse.",
        ),
    )
    write(args.out, "report.json", report)
    print(f"{report.verdict}: {report.reason}")


if __name__ == "__main__":
    main()
