from __future__ import annotations

import gc
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.batch import Batch
from workers.buffers import Interrupted, interruptible
from workers.config import ModelConfig
from workers.engine import Engine
from workers.errors import BadPrompt, DeadlineExceeded, Overloaded, PairNotLoaded, PromptTooLong
from workers.jobs import Choice, Done, Event, Failed, Finished, Job, Request, Started, Text
from workers.loader import Loaded, Loader
from workers.prompt import Prompt
from workers.runtime import Alone, Prefilled, Steps
from workers.sampling import Sampling


@pytest.fixture
def engine(tiny: Loaded, other: Loaded) -> Iterator[Engine]:
    runtimes = {"tiny": Alone("tiny", tiny, None, 32), "other": Alone("other", other, None, 32)}
    running = Engine(runtimes, max_running=4, max_queued=40, threads=1)  # type: ignore[arg-type]
    running.start()
    yield running
    running.close()


class Asked:
    """A request with its events."""

    def __init__(
        self,
        engine: Engine,
        ids: list[int],
        model: str = "tiny",
        deadline: float | None = None,
        account: str = "",
        **asked: Any,
    ):
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        asked = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **asked}
        prompt = Prompt(tuple(ids), 0)
        request = Request(model, prompt, Sampling(**asked), self.events.put, deadline=deadline, account=account)
        self.job: Job = engine.submit(request)

    def all(self) -> list[Event]:
        """Until the end."""
        seen = []
        while not seen or not isinstance(seen[-1], Done | Failed):
            seen.append(self.events.get(timeout=30))
        return seen

    def text(self, index: int = 0) -> str:
        return "".join(e.text for e in self.all() if isinstance(e, Text) and e.index == index)


def some_ids(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(2, 390) for _ in range(length)]


def generate(model: Loaded, ids: list[int], tokens: int) -> list[int]:
    """What transformers' own greedy loop answers."""
    out = model.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return [int(t) for t in out[0, len(ids) :]]


def test_alone_the_answer_is_generates(engine: Engine, tiny: Loaded) -> None:
    """One greedy request gives, token for token, what `generate` gives."""
    ids = some_ids(70)
    expected = tiny.tokenizer.decode(generate(tiny, ids, 20), skip_special_tokens=True)
    assert Asked(engine, ids, max_tokens=20).text() == expected


def test_neighbours_do_not_change_an_answer(engine: Engine, tiny: Loaded, other: Loaded) -> None:
    """Twenty-four requests on two models, of mixed lengths, sampled and greedy, joining and leaving as they come:
    every greedy answer is what it is alone."""
    cases = [(some_ids(3 + 11 * i % 150, i), "tiny" if i % 3 else "other", 4 + i % 9) for i in range(24)]
    asked = []
    for i, (ids, model, tokens) in enumerate(cases):
        asked.append(Asked(engine, ids, model, max_tokens=tokens))
        if i % 4 == 0:
            Asked(engine, some_ids(20, 100 + i), model, temperature=1.0, seed=i, max_tokens=6)
        time.sleep(0.003)
    for one, (ids, model, tokens) in zip(asked, cases, strict=True):
        loaded = tiny if model == "tiny" else other
        assert one.text() == loaded.tokenizer.decode(generate(loaded, ids, tokens), skip_special_tokens=True)


MIXED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.7, "n": 2},
    {"temperature": 1.2, "seed": 5, "top_k": 20, "min_p": 0.02},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "logprobs": 3},
    {"logit_bias": {17: 5.0, 30: -100.0}, "stop": ("e", "the")},
    {},
]


def test_every_way_of_choosing_works_beside_every_other(engine: Engine) -> None:
    """Seven requests, each with other sampling parameters, all at once and in two orders: texts, log probabilities and
    ends are those of each alone."""
    ids = [some_ids(9 + 5 * i, i) for i in range(len(MIXED))]
    alone = [comparable(Asked(engine, ids[i], max_tokens=12, **asked).all()) for i, asked in enumerate(MIXED)]
    for order in (range(len(MIXED)), reversed(range(len(MIXED)))):
        running = {i: Asked(engine, ids[i], max_tokens=12, **MIXED[i]) for i in order}
        assert [comparable(running[i].all()) for i in range(len(MIXED))] == alone


def comparable(events: list[Event]) -> list[Any]:
    """By choice: text, reason, tokens with their log probabilities to four places; then the usage."""
    told: dict[int, list[Any]] = {}
    for event in events:
        if isinstance(event, Text):
            told.setdefault(event.index, []).append(
                (event.text, [(c.token, round(c.logprob or 0, 4), [t for t, _ in c.top]) for c in event.tokens])
            )
        if isinstance(event, Finished):
            told.setdefault(event.index, []).append(event.reason)
    done = events[-1]
    assert isinstance(done, Done)
    return [sorted(told.items()), done.prompt_tokens, done.completion_tokens]


def test_events_come_in_order_and_usage_is_exact(engine: Engine) -> None:
    """Started, text, finished, done; as many completion tokens as were allowed."""
    events = Asked(engine, some_ids(10), max_tokens=5).all()
    assert events[0] == Started(10, 0)
    assert isinstance(events[-2], Finished)
    assert events[-2].reason == "length"
    assert isinstance(events[-1], Done)
    assert (events[-1].prompt_tokens, events[-1].completion_tokens) == (10, 5)


def test_the_end_token_ends_with_stop(engine: Engine, tiny: Loaded) -> None:
    """When the model's end token is made likeliest, the answer is empty and has stopped."""
    eos = min(tiny.eos)
    events = Asked(engine, some_ids(10), ignore_eos=False, logit_bias={eos: 100.0}).all()
    assert [type(e) for e in events] == [Started, Finished, Done]
    assert isinstance(events[1], Finished)
    assert events[1].reason == "stop"


def test_a_stop_string_ends_with_stop(engine: Engine) -> None:
    """Text before the stop string is sent, and the reason is `stop`."""
    ids = some_ids(30, 5)
    whole = Asked(engine, ids, max_tokens=12).text()
    stop = whole[len(whole) // 2 :][:3]
    asked = Asked(engine, ids, max_tokens=12, stop=(stop,)).all()
    assert "".join(e.text for e in asked if isinstance(e, Text)) == whole[: whole.index(stop)]
    assert any(isinstance(e, Finished) and e.reason == "stop" for e in asked)


def test_several_choices_share_one_reading(engine: Engine) -> None:
    """n choices each finish once; greedy ones are equal, seeded ones differ."""
    ids = some_ids(12)
    events = Asked(engine, ids, n=3).all()
    texts = ["".join(e.text for e in events if isinstance(e, Text) and e.index == i) for i in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert sorted(e.index for e in events if isinstance(e, Finished)) == [0, 1, 2]
    sampled = Asked(engine, ids, n=3, temperature=2.0, seed=1, max_tokens=12).all()
    assert len({"".join(e.text for e in sampled if isinstance(e, Text) and e.index == i) for i in range(3)}) > 1


def test_cancel_frees_the_place_and_falls_silent(engine: Engine) -> None:
    """A cancelled request emits no more, and four places serve others though five hundred tokens were asked for."""
    long = [Asked(engine, some_ids(10, i), max_tokens=1500) for i in range(4)]
    for one in long:
        one.events.get(timeout=10)
    for one in long:
        one.job.cancel()
    assert Asked(engine, some_ids(10)).text()
    time.sleep(0.05)
    for one in long:
        while not one.events.empty():
            assert not isinstance(one.events.get(), Done | Failed)
    assert engine.load() == (0, 0)


def test_cancel_takes_one_turn(tiny: Loaded) -> None:
    """Whether it waits, is read or is answered: a cancelled request holds nothing after the next turn."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32)}, max_running=2, threads=1)
    answered, read, waiting = (Asked(engine, some_ids(n, n), max_tokens=900) for n in (8, 200, 9))
    with torch.inference_mode():
        for _ in range(3):
            engine.turn()
        assert engine.load() == (2, 1)
        assert answered.events.qsize() > 1
        assert read.events.empty()
        for one in (answered, read, waiting):
            one.job.cancel()
            engine.turn()
            assert one.job not in engine._open
        assert engine.load() == (0, 0)
    assert not any(batch.choices for batch in engine._batches.values())


class Broken(Alone):
    """Fails in a way that nobody foresaw, at its second chunk."""

    def prefill(self, prompt: Prompt, keep: Any) -> Steps[Prefilled]:
        yield 1
        raise ZeroDivisionError


def test_an_unforeseen_error_fails_all_at_once_and_ends_the_engine(tiny: Loaded) -> None:
    """Whoever waits or is answered hears of it, and nothing new is taken: a supervisor can start a worker anew."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32), "broken": Broken("broken", tiny, None, 32)}, threads=1)
    threading.excepthook, hook = lambda args: None, threading.excepthook
    engine.start()
    running = Asked(engine, some_ids(8), max_tokens=1900)
    running.events.get(timeout=10)
    broken = Asked(engine, some_ids(8), "broken")
    for one in (running, broken):
        end = one.all()[-1]
        assert isinstance(end, Failed)
        assert "went down" in str(end.error)
    engine._thread.join(10)
    threading.excepthook = hook
    assert not engine.alive
    assert isinstance(engine.failed, ZeroDivisionError)
    with pytest.raises(Overloaded):
        Asked(engine, some_ids(5))


def test_a_request_cancelled_before_the_engine_took_it_never_begins(tiny: Loaded) -> None:
    """Forgotten while it still lay in the inbox, it takes no place and emits nothing; the next one is served."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32)}, max_running=1, max_queued=1, threads=1)
    gone = Asked(engine, some_ids(5), max_tokens=1900)
    gone.job.cancel()
    engine._drop_ended()
    engine.start()
    assert Asked(engine, some_ids(5)).text()
    assert gone.events.empty()
    assert engine.load() == (0, 0)
    engine.close()


def test_a_full_queue_refuses(tiny: Loaded) -> None:
    """What goes beyond places and queue is refused at once."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32)}, max_running=1, max_queued=2, threads=1)
    jobs = [Asked(engine, some_ids(5)) for _ in range(3)]
    with pytest.raises(Overloaded):
        Asked(engine, some_ids(5))
    engine.start()
    assert all(job.text() for job in jobs)
    engine.close()


@pytest.mark.parametrize(
    ("ids", "asked", "error"),
    [
        ([5], {"model": "nobody"}, PairNotLoaded),
        ([5] * 2048, {}, PromptTooLong),
        ([5] * 2000, {"max_tokens": 100}, PromptTooLong),
        ([5], {"n": 9}, BadPrompt),
        ([5], {"logit_bias": {4000: 1.0}}, BadPrompt),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_door(
    engine: Engine, ids: list[int], asked: dict[str, Any], error: type[Exception]
) -> None:
    """Refusals come from submit, before any work."""
    with pytest.raises(error):
        Asked(engine, ids, **asked)


def test_the_deadline_is_kept(engine: Engine) -> None:
    """An answer that is not complete in time fails, and its place is free."""
    events = Asked(engine, some_ids(5), max_tokens=1900, deadline=time.monotonic() + 0.1).all()
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, DeadlineExceeded)
    assert Asked(engine, some_ids(5)).text()


def test_closing_fails_what_runs(tiny: Loaded) -> None:
    """Nobody is left waiting."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32)}, threads=1)
    engine.start()
    asked = Asked(engine, some_ids(5), max_tokens=1900)
    asked.events.get(timeout=10)
    engine.close()
    assert isinstance(asked.all()[-1], Failed)
    with pytest.raises(Overloaded):
        Asked(engine, some_ids(5))


def test_a_long_prompt_does_not_stop_running_answers(engine: Engine) -> None:
    """While a prompt of many chunks is read, a running answer gets a token after each chunk."""
    running = Asked(engine, some_ids(5), max_tokens=200)
    running.events.get(timeout=10)
    long = Asked(engine, some_ids(1500, 1), max_tokens=1)
    long.events.get(timeout=20)
    got = 0
    while not running.events.empty():
        got += isinstance(running.events.get(), Text)
    assert got >= 1500 // 32 // 2
    running.job.cancel()


def test_device_time_is_shared_out(engine: Engine) -> None:
    """Answers decoded together share the device's time: it adds up to no more than passed, and none is free."""
    began = time.monotonic()
    asked = [Asked(engine, some_ids(40 + i, i), max_tokens=12, n=1 + i % 2) for i in range(6)]
    ends = [a.all()[-1] for a in asked]
    passed = (time.monotonic() - began) * 1e3
    runs = [end.run for end in ends if isinstance(end, Done)]
    assert len(runs) == 6
    assert all(0 < run.device_ms <= run.prefill_ms + run.decode_ms for run in runs)
    assert sum(run.device_ms for run in runs) <= passed


def test_short_prompts_are_read_together_and_long_ones_in_turns(tiny: Loaded) -> None:
    """Four prompts that fit into one chunk begin their answers in one turn; behind a long one only what fits begins."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32)}, max_running=6, threads=1)
    short = [Asked(engine, some_ids(8, i)) for i in range(4)]
    long = Asked(engine, some_ids(40), max_tokens=1)
    last = Asked(engine, some_ids(31))
    started = []
    with torch.inference_mode():
        for _ in range(3):
            engine.turn()
            started.append([not one.events.empty() for one in (*short, long, last)])
    assert started == [[True] * 4 + [False] * 2, [True] * 4 + [False] * 2, [True] * 5 + [False]]


def test_a_tenant_that_holds_all_places_does_not_hold_up_another(engine: Engine) -> None:
    """While one account's long answers hold every place and more of them wait, another's request is answered whole."""
    long = [Asked(engine, some_ids(10, i), max_tokens=1500, account="busy") for i in range(12)]
    for one in long[:4]:
        one.events.get(timeout=10)
    assert Asked(engine, some_ids(10), max_tokens=4, account="quiet").text()
    for one in long:
        seen = []
        while not one.events.empty():
            seen.append(one.events.get())
        assert not any(isinstance(e, Done | Failed) for e in seen)
        one.job.cancel()


def test_a_full_queue_still_takes_a_quiet_tenant(tiny: Loaded) -> None:
    """Where one account fills the queue, another's request takes the place of the last of it, which is refused as
    overloaded; the busy account itself is refused at the door."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 32)}, max_running=1, max_queued=2, threads=1)
    engine.start()
    try:
        busy = [Asked(engine, some_ids(10, i), max_tokens=1500, account="busy") for i in range(3)]
        with pytest.raises(Overloaded):
            Asked(engine, some_ids(10), account="busy")
        busy[0].events.get(timeout=10)
        assert Asked(engine, some_ids(10), account="quiet").text()
        refused = busy[-1].events.get(timeout=10)
        assert isinstance(refused, Failed)
        assert isinstance(refused.error, Overloaded)
    finally:
        engine.close()


def test_what_is_interrupted_gives_the_same_answer(engine: Engine, tiny: Loaded) -> None:
    """A busy account's prompts of many chunks, overtaken again and again by a quiet one's, are answered token for
    token as if nobody had come."""
    cases = [(some_ids(300 + 13 * i, 50 + i), 12) for i in range(6)]
    busy = [Asked(engine, ids, max_tokens=tokens, account="busy") for ids, tokens in cases]
    for i in range(25):
        Asked(engine, some_ids(20, 900 + i), max_tokens=2, account="quiet").all()
    for one, (ids, tokens) in zip(busy, cases, strict=True):
        assert one.text() == tiny.tokenizer.decode(generate(tiny, ids, tokens), skip_special_tokens=True)


def test_an_interrupted_forward_has_changed_nothing(tiny: Loaded) -> None:
    """A chunk and a step that are given up in the middle, and run again, leave KV and logits as an undisturbed run."""
    ids = tuple(some_ids(60))
    asked = iter([False, False, True, *[False] * 500])
    runtime = Alone("tiny", tiny, None, 32)

    def read(give_up: Callable[[], bool]) -> Prefilled:
        steps = runtime.prefill(Prompt(ids, 0), None)
        with torch.inference_mode(), interruptible(give_up):
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    found: Prefilled = end.value
                    return found

    disturbed, plain = read(lambda: next(asked)), read(lambda: False)
    assert torch.equal(disturbed.logits, plain.logits)
    for mine, other in zip((*disturbed.kv.keys, *disturbed.kv.values), (*plain.kv.keys, *plain.kv.values), strict=True):
        assert torch.equal(mine, other)
    batch = Batch(tiny)
    batch.rows.join(plain.kv, len(ids))
    batch.choices.append(Choice(None, 0, None, None, [5]))  # type: ignore[arg-type]
    with torch.inference_mode():
        stop = iter([False, True])
        with interruptible(lambda: next(stop)), pytest.raises(Interrupted):
            batch.step()
        again = batch.step()
        fresh = Batch(tiny)
        fresh.rows.join(plain.kv, len(ids))
        fresh.choices.append(Choice(None, 0, None, None, [5]))  # type: ignore[arg-type]
        assert torch.equal(again, fresh.step())


def test_an_answer_takes_no_more_memory_than_it_may_grow_into(tiny: Loaded) -> None:
    """While it runs the prompt's KV lies in the batch alone, and the room there ends with its last token: what a memory
    budget counts on."""
    engine = Engine({"tiny": Alone("tiny", tiny, None, 512)}, max_running=1, threads=1)
    engine.start()
    asked = Asked(engine, some_ids(1100), max_tokens=200)
    while not isinstance(asked.events.get(timeout=30), Text):
        pass
    read = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dim() == 4 and t.shape[:3] == (1, 2, 1100)]
    (batch,) = engine._batches.values()
    assert not read
    assert asked.all()
    assert batch.rows.slots == 1408  # 1300 in steps of 128; twice 1152 would be beyond the context
    engine.close()


def test_short_prompts_of_one_account_are_read_in_one_forward(tiny_folder: Path) -> None:
    """Five prompts become one row of tokens, another account's stays apart, and what begins alike is answered alike:
    texts are those of `generate`, device time is shared by tokens."""
    tiny = Loader("cpu").load(ModelConfig(name="tiny", model=str(tiny_folder)))
    cases = [(some_ids(7 + 3 * i, i), 6 + i) for i in range(5)]
    expected = [tiny.tokenizer.decode(generate(tiny, ids, n), skip_special_tokens=True) for ids, n in cases]
    engine = Engine({"tiny": Alone("tiny", tiny, None, 512)}, max_running=8, threads=1)
    forwards: list[int] = []
    with torch.inference_mode():
        first = Asked(engine, some_ids(5), max_tokens=1)
        engine.turn()
        assert isinstance(first.all()[-1], Done)
        tiny.model.get_decoder().embed_tokens.register_forward_hook(
            lambda _m, given, _out: forwards.append(len(given[0]))
        )
        asked = [Asked(engine, ids, max_tokens=n) for ids, n in cases]
        apart = Asked(engine, some_ids(20), max_tokens=3, account="another")
        engine.turn()
        assert sorted(forwards) == [20, sum(len(ids) for ids, _ in cases)]
        while engine.load() != (0, 0):
            engine.turn()
    assert apart.text()
    ends = [one.all() for one in asked]
    assert ["".join(e.text for e in end if isinstance(e, Text)) for end in ends] == expected
    runs = [end[-1].run for end in ends if isinstance(end[-1], Done)]
    assert all(0 < run.device_ms <= run.prefill_ms + run.decode_ms for run in runs)
