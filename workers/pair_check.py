"""Can two models be a pair, how, and at what cost? From configs and tokenizers alone; `twolane pair check`.

What training costs is an estimate (`workers.train_cost`), at a speed that is measured here unless it is told.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch

from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.fusers.base import KVShape
from workers.fusers.projector import ProjectorShape, last_aligned
from workers.loader import DTYPES
from workers.memory import kv_bytes, projector_parameters
from workers.outline import Outline, outline
from workers.train_cost import Kind, Sizes, Tokens, cost, speed_here
from workers.vocabulary import Overlap, compare

OFFICIAL_TOKENS = 200_000_000
"""The official recipe's 500 000 conversations, taken as 400 tokens each."""
TFLOPS = 10.0
"""That training reaches on one A100 or so."""
LITE_RANK = 48
"""As in the bundled pair."""
LINEAR_TOP = 3
"""As `workers.fit_linear` takes by default."""


@dataclass(frozen=True, slots=True)
class Party:
    """One of the two models, and what it takes."""

    model: str
    kind: str
    layers: int
    heads: int
    head_size: int
    rope: str
    context: int
    template: bool
    parameters: int
    weight_bytes: int
    kv_bytes_per_1k_tokens: int
    refusal: str


@dataclass(frozen=True, slots=True)
class Option:
    """One kind of fuser between the two."""

    kind: str
    mode: str
    scopes: tuple[str, ...]
    possible: bool
    reason: str
    """Why not; or what to know."""
    parameters: int = 0
    bytes: int = 0
    """In the dtype it is run in."""
    train_flops_per_token: int = 0
    """Mean over a step of 250 tokens of context and 50 of question and answer, read for the first time."""
    train_hours_per_1m_tokens: float = 0.0
    train_hours_again: float = 0.0
    """The same once the KV of the frozen models is kept: further rounds, another seed."""
    train_hours_official: float | None = None
    """Of the official recipe."""


@dataclass(frozen=True, slots=True)
class Check:
    """What was found. `ok` when at least one kind of fuser is possible."""

    ok: bool
    reasons: tuple[str, ...]
    """Why not."""
    sharer: Party
    receiver: Party
    tokenizers: str
    """same | ids pass | alignment needed"""
    overlap: Overlap
    context: int
    """Tokens that both can read."""
    mapping: tuple[int, ...]
    """`last_aligned`: the sharer layer of each receiver layer."""
    options: tuple[Option, ...]
    dtype: str
    tflops: float

    @property
    def data(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def check(sharer: Outline, receiver: Outline, *, dtype: str = "float32", tflops: float = TFLOPS) -> Check:
    """Judge two models. `tflops`: 10¹² operations a second that training reaches."""
    parties = _party(sharer, dtype), _party(receiver, dtype)
    overlap = compare(receiver.vocabulary.tokens, sharer.vocabulary.tokens, sharer.rows)
    tokenizers = _tokenizers(sharer, receiver, overlap)
    reasons = [p.refusal for p in parties if p.refusal]
    options: tuple[Option, ...] = ()
    mapping: tuple[int, ...] = ()
    if sharer.shape is not None and receiver.shape is not None:
        mapping = last_aligned(receiver.shape.layers, sharer.shape.layers)
        options = (
            _c2c(sharer, receiver, sharer.shape, receiver.shape, tokenizers, dtype, tflops),
            _lite(sharer, receiver, sharer.shape, receiver.shape, tokenizers, tflops),
            _linear(sharer, receiver, sharer.shape, receiver.shape, tokenizers, tflops),
            _identity(sharer, receiver, tokenizers),
        )
        if not any(o.possible for o in options):
            reasons = [f"{o.kind}: {o.reason}" for o in options]
    return Check(
        ok=not reasons,
        reasons=tuple(reasons),
        sharer=parties[0],
        receiver=parties[1],
        tokenizers=tokenizers,
        overlap=overlap,
        context=min(sharer.context, receiver.context),
        mapping=mapping,
        options=options,
        dtype=dtype,
        tflops=tflops,
    )


def _party(model: Outline, dtype: str) -> Party:
    shape, size = model.shape, DTYPES[dtype].itemsize
    return Party(
        model=model.source,
        kind=model.kind,
        layers=shape.layers if shape else 0,
        heads=shape.heads if shape else 0,
        head_size=shape.head_size if shape else 0,
        rope=model.rope,
        context=model.context,
        template=model.vocabulary.template,
        parameters=model.parameters,
        weight_bytes=model.parameters * size,
        kv_bytes_per_1k_tokens=1000 * kv_bytes(shape, dtype) if shape else 0,
        refusal=model.refusal,
    )


def _tokenizers(sharer: Outline, receiver: Outline, overlap: Overlap) -> str:
    if sharer.vocabulary.digest == receiver.vocabulary.digest and not overlap.outside:
        return "same"
    return "ids pass" if overlap.ids_pass else "alignment needed"


def _c2c(
    sharer: Outline,
    receiver: Outline,
    source: KVShape,
    target: KVShape,
    tokenizers: str,
    dtype: str,
    tflops: float,
) -> Option:
    aligned = tokenizers == "alignment needed"
    scopes = ("prompt",) if aligned else ("prompt", "context")
    reason = "only message text is fused, and nothing is reused" if aligned else ""
    if aligned:
        for role, vocabulary in (("sharer", sharer.vocabulary), ("receiver", receiver.vocabulary)):
            if not vocabulary.template:
                return Option("c2c", "fuse", (), False, f"chats must be aligned, and the {role} has no chat template")
            if not vocabulary.pads:
                return Option(
                    "c2c", "fuse", (), False, f"chats must be aligned, and the {role} has no pad or eos token"
                )
    parameters = c2c_parameters(source, target)
    training = _training("c2c", sharer, receiver, parameters, tflops, own=True)
    return Option(
        "c2c",
        "fuse",
        scopes,
        True,
        reason,
        parameters,
        parameters * DTYPES[dtype].itemsize,
        *training,
        train_hours_official=training[0] * OFFICIAL_TOKENS / (tflops * 1e12) / 3600,
    )


def c2c_parameters(sharer: KVShape, receiver: KVShape) -> int:
    """Of the official network in its published size, one projector per receiver layer."""
    shape = ProjectorShape(
        source_dim=sharer.head_size,
        target_dim=receiver.head_size,
        source_num_heads=sharer.heads,
        target_num_heads=receiver.heads,
    )
    return receiver.layers * projector_parameters(shape)


def _lite(
    sharer: Outline, receiver: Outline, source: KVShape, target: KVShape, tokenizers: str, tflops: float
) -> Option:
    from workers.fusers.lite import LiteNet, LiteShape, copied_layers, fits
    from workers.fusers.mix_net import MixNet, MixShape

    matched = tokenizers == "alignment needed"
    if matched:
        for role, vocabulary in (("sharer", sharer.vocabulary), ("receiver", receiver.vocabulary)):
            if not vocabulary.template:
                return Option("lite", "fuse", (), False, f"chats must be matched, and the {role} has no chat template")
    turns = source.rope_theta is not None and target.rope_theta is not None
    reason = "each model reads its own tokens, and fused slots are not stored" if matched else ""
    with torch.device("meta"):
        net: LiteNet | MixNet
        if turns and not matched and fits(source, target):
            own = False
            net = LiteNet(LiteShape(source, target, copied_layers(source, target, None), LITE_RANK))
            reason = reason or "the size is that of handover"
        else:
            own = True
            reads = (tuple(range(source.layers)),) * target.layers
            net = MixNet(MixShape(source, target, own=True, reads=reads, rank=LITE_RANK))
    parameters = sum(p.numel() for p in net.parameters())
    training = _training("lite", sharer, receiver, parameters, tflops, own=own)
    mode = "handover or fuse" if turns else "fuse"
    # It computes in float32, whatever the models do.
    return Option("lite", mode, ("prompt", "context"), True, reason, parameters, parameters * 4, *training)


def _linear(
    sharer: Outline, receiver: Outline, source: KVShape, target: KVShape, tokenizers: str, tflops: float
) -> Option:
    from workers.fusers.linear import LinearShape

    mode = "fuse or handover"
    if tokenizers == "alignment needed":
        return Option("linear", mode, (), False, "the sharer would misread the receiver's token ids")
    read = tuple(range(min(LINEAR_TOP, source.layers)))
    try:
        shape = LinearShape(source, target, (read,) * target.layers, (1.0,) * target.layers, 0.0, 1.0)
    except LoadFailed as error:
        return Option("linear", mode, (), False, str(error).removeprefix("linear fuser: "))
    parameters = sum(math.prod(size) for size in shape.sizes.values())
    # Nothing is learnt by gradients: both models read, and products of inputs and outputs are summed up.
    flops = 2 * (sharer.body + receiver.body)
    flops += 4 * target.layers * shape.inputs * (shape.inputs + shape.outputs)
    hours = flops * 1e6 / (tflops * 1e12) / 3600
    return Option("linear", mode, ("prompt", "context"), True, "", parameters, parameters * 4, flops, hours, hours)


def _identity(sharer: Outline, receiver: Outline, tokenizers: str) -> Option:
    if sharer.config != receiver.config or tokenizers != "same":
        return Option("identity", "handover", (), False, "their configs or tokenizers differ, so their weights do too")
    reason = "same config; whether the weights are the same is checked when they are loaded"
    return Option("identity", "handover", ("prompt",), True, reason)


def _training(
    kind: Kind, sharer: Outline, receiver: Outline, fuser: int, tflops: float, *, own: bool
) -> tuple[int, float, float]:
    """(operations per token, hours per million tokens, the same with kept KV)."""
    tokens = Tokens()
    found = cost(kind, _sizes(sharer), _sizes(receiver), fuser, tokens, own=own)
    total = tokens.context + tokens.asked
    first, again = (found.seconds(tflops * 1e12, kept=kept) / total * 1e6 / 3600 for kept in (False, True))
    return (found.reading + found.learning) // total, first, again


def _sizes(model: Outline) -> Sizes:
    return Sizes(model.body, model.head, model.shape.layers if model.shape else 0)


def told(found: Check) -> str:
    """For people."""
    lines = [_told_party("sharer", found.sharer), _told_party("receiver", found.receiver)]
    lines.append(f"tokenizers  {found.tokenizers}: {found.overlap}; {found.overlap.shared_strings} token texts in both")
    if found.options:
        lines.append(f"context     {found.context} tokens")
        lines.append(f"layers      last_aligned: {_told_mapping(found.mapping)}")
        lines += [_told_option(o, found) for o in found.options]
    lines += [f"no pair     {reason}" for reason in found.reasons]
    return "\n".join(lines)


def _told_party(role: str, party: Party) -> str:
    head = f"{role:<11} {party.model}: {party.kind}"
    if party.refusal:
        return f"{head}; refused"
    return (
        f"{head}, {party.layers} layers, {party.heads} KV heads of {party.head_size}, {party.rope}, context "
        f"{party.context}, {'a' if party.template else 'no'} chat template\n{'':<11} "
        f"{party.parameters / 1e6:.1f} M parameters, {_size(party.weight_bytes)}; "
        f"KV {_size(party.kv_bytes_per_1k_tokens)} per 1000 tokens"
    )


def _told_mapping(mapping: tuple[int, ...]) -> str:
    """The receiver layers that share the sharer's first, and those that step with its others."""
    shared = mapping.count(0) if mapping.count(0) > 1 else 0
    runs = [range(shared), range(shared, len(mapping))]
    return ", ".join(f"{_span(r[0], r[-1])} from {_span(mapping[r[0]], mapping[r[-1]])}" for r in runs if r)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _told_option(option: Option, found: Check) -> str:
    head = f"{option.kind:<11} "
    if not option.possible:
        return f"{head}not possible: {option.reason}"
    text = f"{head}mode {option.mode}, scope {' or '.join(option.scopes)}" + (
        f"; {option.reason}" * bool(option.reason)
    )
    if not option.parameters:
        return text
    hours = f"{option.train_hours_per_1m_tokens:.2f} h per million tokens"
    if option.train_hours_again < option.train_hours_per_1m_tokens:
        hours += f" ({option.train_hours_again:.2f} h once their KV is kept)"
    if option.train_hours_official is not None:
        hours += f", {option.train_hours_official:.1f} h for the official recipe"
    return (
        f"{text}\n{'':<11} {option.parameters / 1e6:.2f} M parameters, {_size(option.bytes)}; training "
        f"{option.train_flops_per_token / 1e9:.2f} GFLOP per token: {hours}, at {found.tflops:.3g} TFLOP/s"
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@click.command("check")
@click.argument("sharer")
@click.argument("receiver")
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="float32", show_default=True)
@click.option(
    "--tflops", type=click.FloatRange(0, min_open=True), help="That training reaches. Default: measured here."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def check_command(sharer: str, receiver: str, dtype: str, tflops: float | None, as_json: bool) -> None:
    """Say whether SHARER and RECEIVER can be a pair, how, and at what cost. No weights are read.

    Each is a hub id, a folder (weights need not be in it), a GGUF file or package:NAME. Exit status 1 when they cannot
    be a pair.
    """
    try:
        outlines = [outline(ModelConfig(model=model)) for model in (sharer, receiver)]
    except LoadFailed as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)
    speed = tflops or speed_here(DTYPES[dtype]) / 1e12
    found = check(outlines[0], outlines[1], dtype=dtype, tflops=speed)
    click.echo(json.dumps(found.data) if as_json else told(found))
    sys.exit(0 if found.ok else 1)
