"""The two models of a mini world, trained from nothing into ordinary model folders. Knows the world; knows no fuser.

Both answer questions, the sharer writes hints when it is asked in the relay's wording, and the receiver reads them.
That wording is one token of either vocabulary: it costs the relay nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.mini_world.world import KINDS, Kind, Question, Role, Words, World
from workers.hint import ASK, END, TELL
from workers.muon import Muon

_WEIGHTS: dict[tuple[Role, bool], dict[Kind, float]] = {
    ("sharer", False): {"A": 4, "B": 1, "AB": 3, "S": 2},
    ("sharer", True): {"A": 4, "B": 1, "AB": 3, "S": 2},
    ("receiver", False): {"A": 1, "B": 4, "AB": 5, "S": 3},
    ("receiver", True): {"A": 6, "B": 2, "AB": 5, "S": 2},
}
"""How often each kind is learnt from, without a hint and with one: what must be known or copied more often than what
must be guessed.
"""
_WORDING: dict[Role, tuple[str, ...]] = {
    "sharer": (f"\n\n{ASK}",),
    "receiver": (f"\n\n{TELL}\n", f"\n{END}"),
}
_GO = {"sharer": "", "receiver": "<go>"}
"""What makes a model answer. The sharer needs nothing: at the question's last token it knows what it will say, and that
token is message text, which is what is fused.
"""


@dataclass(frozen=True, slots=True)
class Lessons:
    """How deep a model is, and how long and how fast it learns."""

    layers: int
    steps: int
    vocabulary: int
    hints: tuple[float, float]
    """Share of batches with hints: in the first 40 % of the steps, and after."""
    batch: int = 64
    matrices: float = 0.006
    """Rate of Muon."""
    others: float = 0.01
    """Rate of AdamW, on embeddings and norms."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Of both."""

    sharer: Lessons = Lessons(6, 1000, 700, (0.35, 0.35), matrices=0.007)
    receiver: Lessons = Lessons(3, 1200, 900, (0.5, 0.4))

    def of(self, role: Role) -> Lessons:
        return self.sharer if role == "sharer" else self.receiver


Tell = Callable[[str], None]


def make(folder: Path, role: Role, world: World, lessons: Lessons, seed: int, tell: Tell) -> float:
    """Train a model and write its folder. Returns CPU seconds."""
    began = time.process_time()
    tokens = tokenizer(role, world.texts, lessons.vocabulary)
    torch.manual_seed(seed)
    model = (_sharer if role == "sharer" else _receiver)(lessons, tokens)
    _learn(model, _Encoder(tokens, role), role, world, lessons, seed, tell)
    model.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return time.process_time() - began


def tokenizer(role: Role, texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of its own, with the role's chat template."""
    raw = Tokenizer(BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<q>", "<end>", "<pad>", *([_GO[role]] if _GO[role] else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.add_tokens([AddedToken(text, normalized=False) for text in _WORDING[role]])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<q>", eos_token="<end>", pad_token="<pad>")
    fast.chat_template = (
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}<q>{{ m['content'] }}"
        f"{{% elif m['role'] == 'assistant' %}}{_GO[role]}{{{{ m['content'] }}}}<end>"
        "{% else %}{{ raise_exception('this model knows questions and answers only') }}{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{_GO[role]}{{% endif %}}"
    )
    return fast


def _sharer(lessons: Lessons, tokens: PreTrainedTokenizerFast) -> Any:
    config = Qwen3Config(
        hidden_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        intermediate_size=224,
        **_common(lessons, tokens),
    )
    return Qwen3ForCausalLM(config)


def _receiver(lessons: Lessons, tokens: PreTrainedTokenizerFast) -> Any:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        **_common(lessons, tokens),
    )
    return LlamaForCausalLM(config)


def _common(lessons: Lessons, tokens: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "num_hidden_layers": lessons.layers,
        "vocab_size": len(tokens),
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": tokens.bos_token_id,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
    }


@dataclass(frozen=True, slots=True)
class _Line:
    """What a model reads, and what it learns to write."""

    ids: list[int]
    """Prompt and answer, but for the end."""
    wanted: list[tuple[int, ...]]
    """At each of the last positions: what may come next, each as likely."""


class _Encoder:
    """Questions and answers -> ids, as chats through the product are read."""

    def __init__(self, tokens: PreTrainedTokenizerFast, role: Role) -> None:
        self._tokens = tokens
        self._end = int(tokens.eos_token_id or 0)
        self._encode = cache(self._encoded)
        self._each = cache(self._of_each)
        self.role = role

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokens(text, add_special_tokens=False)["input_ids"])

    def _of_each(self, words: tuple[str, ...], behind: bool) -> tuple[int, ...]:
        """Of words that are one token each."""
        ids = [self._encode(f" {word}" if behind else word) for word in words]
        if any(len(found) != 1 for found in ids):
            raise ValueError(f"not one token each: {', '.join(words)}")
        return tuple(found[0] for found in ids)

    def line(self, question: Question, hint: str | None, answer: str, words: Words) -> _Line:
        """`answer` is read; of its first words all that may stand there is learnt, of the rest what it says."""
        asked, said = self._encode(text_of(self.role, question, hint)), [*self._encode(answer), self._end]
        wanted = [self._each(word, number > 0) for number, word in enumerate(words)]
        wanted += [(token,) for token in said[len(words) :]]
        return _Line([*asked, *said[:-1]], wanted)


def text_of(role: Role, question: Question, hint: str | None) -> str:
    """A prompt as the chat template writes it. For the sharer any hint means that it is asked for one."""
    if hint is None:
        wording = ""
    elif role == "sharer":
        wording = _WORDING["sharer"][0]
    else:
        wording = _WORDING["receiver"][0] + hint + _WORDING["receiver"][1]
    return f"<q>{question.text}{wording}{_GO[role]}"


def prompt(tokens: Any, role: Role, question: Question, hint: str | None = None) -> list[int]:
    """Ids of `text_of`."""
    return list(tokens(text_of(role, question, hint), add_special_tokens=False)["input_ids"])


def _batches(encoder: _Encoder, world: World, lessons: Lessons, seed: int) -> Iterator[list[_Line]]:
    """One for every step; with hints or without, never mixed, so that little is padded."""
    chance = random.Random(f"{encoder.role} {seed}")
    by_kind = {kind: list(world.questions(world.names, (kind,))) for kind in KINDS}
    weights = {hinted: list(_WEIGHTS[encoder.role, hinted].values()) for hinted in (False, True)}
    for step in range(lessons.steps):
        share = lessons.hints[step >= 0.4 * lessons.steps]
        hinted = chance.random() < share
        kinds = chance.choices(KINDS, weights[hinted], k=lessons.batch)
        yield [_line(encoder, world, chance.choice(by_kind[kind]), hinted, chance) for kind in kinds]


def _line(encoder: _Encoder, world: World, question: Question, hinted: bool, chance: random.Random) -> _Line:
    words, hint = world.says(encoder.role, question), None
    if hinted and encoder.role == "sharer":
        answer = world.hint(question, chance.choice(words[0]))
        return encoder.line(question, "", answer, words[:1])
    if hinted:
        hint, words = world.hinted(question, chance)
    return encoder.line(question, hint, " ".join(chance.choice(word) for word in words), words)


def _learn(model: Any, encoder: _Encoder, role: Role, world: World, lessons: Lessons, seed: int, tell: Tell) -> None:
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, lessons.matrices)
    adam = torch.optim.AdamW(others, lr=lessons.others, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step, lines in enumerate(_batches(encoder, world, lessons, seed)):
        scale = _scale(step, lessons.steps)
        muon.param_groups[0]["lr"] = lessons.matrices * scale
        adam.param_groups[0]["lr"] = lessons.others * scale
        model.zero_grad(set_to_none=True)
        loss = _loss(model, lines)
        loss.backward()
        muon.step()
        adam.step()
        if (step + 1) % 100 == 0 or step + 1 == lessons.steps:
            tell(f"{role} step {step + 1}/{lessons.steps}  loss {float(loss.detach()):.3f}")
    model.eval()


def _scale(step: int, steps: int) -> float:
    """Up over 20 steps, level, and down over the last half."""
    return min((step + 1) / 20, 1.0, 0.02 + 0.98 * 2 * (steps - step) / steps)


def _loss(model: Any, lines: Sequence[_Line]) -> torch.Tensor:
    """Mean over all that is learnt. Short and long lines go apart: padding would cost a quarter more."""
    ordered = sorted(lines, key=lambda line: len(line.ids))
    halves = (ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :])
    logits = torch.cat([_logits(model, half) for half in halves])
    wanted = [options for line in ordered for options in line.wanted]
    rows = [row for row, options in enumerate(wanted) for _ in options]
    likely = torch.tensor([1 / len(options) for options in wanted for _ in options])
    said = F.log_softmax(logits, dim=-1)[rows, [token for options in wanted for token in options]]
    return -(likely * said).sum() / len(wanted)


def _logits(model: Any, lines: Sequence[_Line]) -> torch.Tensor:
    """Where something is learnt, line after line."""
    width = max(len(line.ids) for line in lines)
    # Padding stands behind everything, and a causal model does not look there.
    ids = torch.tensor([[*line.ids, *[0] * (width - len(line.ids))] for line in lines])
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    answers = [row[len(line.ids) - len(line.wanted) : len(line.ids)] for row, line in zip(hidden, lines, strict=True)]
    found: torch.Tensor = model.get_output_embeddings()(torch.cat(answers))
    return found
