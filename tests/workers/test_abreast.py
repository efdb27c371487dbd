"""Forwards side by side: that they run at once, that nobody can tell from the numbers, and how they end."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.workers.test_runtime import Shifted, finish, some_ids
from workers.abreast import Abreast
from workers.buffers import Interrupted, Sequence, interruptible
from workers.chunk import Chunk
from workers.config import ModelConfig
from workers.engine import Engine
from workers.forwards import Forwards
from workers.fusers.base import KVShape
from workers.jobs import Done, Event, Failed, Request
from workers.loader import Loaded, Loader
from workers.prompt import Prompt
from workers.runtime import Paired, Prefilled, Reading, abreast
from workers.sampling import Sampling

CPU = torch.device("cpu")
SHAPE = KVShape(layers=1, heads=1, head_size=2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pair_of(sharer: Loaded, receiver: Loaded, chunk: int = 64) -> Paired:
    fuser = Shifted(receiver.shape, needs_own=True)
    return Paired("fused", sharer, receiver, fuser, mode="fuse", scope="prompt", store=None, chunk=chunk)


def read_by(forwards: Forwards, pair: Paired, ids: tuple[int, ...]) -> Prefilled:
    """A whole prompt; no step reads more than one chunk in all."""
    steps = pair.prefill(Prompt(ids, 0), None)
    with torch.inference_mode():
        while True:
            try:
                coming = next(steps)
            except StopIteration as end:
                found: Prefilled = end.value
                return found
            if isinstance(coming, tuple):
                assert sum(len(chunk.ids) for chunk in coming) <= pair.chunk
                forwards.read(coming)


@contextlib.contextmanager
def before_each_forward(hook: Callable[[], object], *models: Loaded) -> Iterator[None]:
    hooks = [m.model.get_decoder().layers[0].register_forward_pre_hook(lambda _m, _in: hook()) for m in models]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def test_sharer_and_receiver_read_at_the_same_time(tiny: Loaded, other: Loaded) -> None:
    """Each waits in its first layer for the other to be there; the answer is the one that reading in turn gives."""
    pair, ids = pair_of(other, tiny, 512), some_ids(40)
    expected = finish(pair, Prompt(ids, 0))
    meet, met = threading.Barrier(2, timeout=10), list[str]()

    def wait() -> None:
        if len(met) < 2:
            met.append(threading.current_thread().name)
            meet.wait()

    engine = Engine({"fused": pair}, threads=2, pack=False)
    with before_each_forward(wait, other, tiny):
        engine.start()
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        engine.submit(
            Request("fused", Prompt(ids, 0), Sampling(temperature=0.0, max_tokens=1), events.put, tell_tokens=True)
        )
        end = events.get(timeout=30)
        while not isinstance(end, Done | Failed):
            end = events.get(timeout=30)
    engine.close()
    assert isinstance(end, Done)
    assert len(set(met)) == 2
    assert end.run.tokens == ((int(expected.logits.argmax()),),)
    assert 0 < end.run.sharer_ms < end.run.prefill_ms


@pytest.mark.parametrize("size", [5, 64, 200])
def test_numbers_are_those_of_reading_in_turn(tiny: Loaded, other: Loaded, size: int) -> None:
    """KV and logits of a fused prompt, up to rounding; a turn reads no more than one chunk in all."""
    pair, ids = pair_of(other, tiny), some_ids(size, size)
    expected, forwards = finish(pair, Prompt(ids, 0)), Forwards(pack=False)
    found = read_by(forwards, pair, ids)
    forwards.close()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((*found.kv.keys, *found.kv.values), (*expected.kv.keys, *expected.kv.values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_prompts_of_one_model_are_read_in_as_many_forwards_as_there_are_lanes(tiny_folder: Path) -> None:
    """Seven prompts become two rows of about as many tokens; each is read as it is alone, and has its share of the
    time.
    """
    model = Loader("cpu").load(ModelConfig(name="tiny", model=str(tiny_folder)))
    forwards, rows = Forwards(pack=True), list[int]()
    assert forwards.hold(model) is not None
    ids = [some_ids(length, length) for length in (3, 9, 20, 31, 40, 55, 60)]

    def chunks() -> list[Chunk]:
        return [Chunk(model, Sequence(model.shape, len(i), model.dtype, model.device), i, answers=True) for i in ids]

    together, alone = chunks(), chunks()
    with torch.inference_mode():
        for chunk in alone:
            forwards.read([chunk])
        embed = model.model.get_decoder().embed_tokens
        hook = embed.register_forward_hook(lambda _m, given, _o: rows.append(len(given[0])))
        took = forwards.read(together)
        hook.remove()
    forwards.close()
    assert sorted(rows) == [107, 111]
    assert sum(chunk.seconds for chunk in together) == pytest.approx(took)
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.logits is not None
        assert theirs.logits is not None
        torch.testing.assert_close(mine.logits, theirs.logits, rtol=1e-4, atol=1e-4)


@dataclass
class Counted:
    """A forward that asks at each of its layers whether to go on."""

    layers: int = 0
    let: threading.Event | None = None

    def __call__(self) -> None:
        into = Sequence(SHAPE, 1, torch.float32, CPU)
        into.gives_way = True
        for _ in range(1000):
            if self.let is not None:
                self.let.wait(0.01)
            into.go_on()
            self.layers += 1


def test_one_that_is_given_up_gives_up_the_others() -> None:
    """What runs beside it stops at its next layer, not at its end."""
    lanes, slow = Abreast(), Counted(let=threading.Event())
    with interruptible(lambda: slow.layers > 3), pytest.raises(Interrupted):
        lanes.run([Counted(let=threading.Event()), slow], CPU)
    assert 3 < slow.layers < 1000
    assert torch.get_num_threads() == 2
    lanes.close()


def test_what_is_given_up_abreast_is_read_again_and_the_same(tiny: Loaded, other: Loaded) -> None:
    """The forward of one thread may be done and the other's not: only that one is read again."""
    pair, ids = pair_of(other, tiny, 512), some_ids(50)
    expected, forwards = finish(pair, Prompt(ids, 0)), Forwards(pack=False)
    steps = pair.prefill(Prompt(ids, 0), None)
    with torch.inference_mode():
        coming = next(steps)
        assert isinstance(coming, tuple)
        answers = iter([False, True])
        with interruptible(lambda: next(answers)), pytest.raises(Interrupted):
            forwards.read(coming)
        before = [chunk.done for chunk in coming]
        assert not before[0]
        forwards.read(coming)
        assert all(chunk.done for chunk in coming)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: Prefilled = end.value
                break
    forwards.close()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_an_error_beside_is_an_error() -> None:
    """It reaches whoever reads, and the engine ends as after any that nobody foresaw."""
    lanes = Abreast()

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lanes.run([lambda: None, fails], CPU)
    assert torch.get_num_threads() == 2
    lanes.close()


def test_readings_go_on_together_and_are_closed_together() -> None:
    """Each step has what all of them read next; one that waits holds up no other; one that fails ends all."""
    closed = []

    def reading(name: str, steps: int, *, waits: bool = False, fails: bool = False) -> Reading[str]:
        try:
            for step in range(steps):
                yield None if waits else (name, step)  # type: ignore[misc]
            if fails:
                raise ValueError(name)
            return name
        finally:
            closed.append(name)

    def all_of(*readings: Reading[str]) -> Generator[object, None, None]:
        results.extend((yield from abreast(*readings)))

    results: list[str] = []
    assert list(all_of(reading("a", 3), reading("b", 1), reading("c", 2, waits=True))) == [
        ("a", 0, "b", 0),
        ("a", 1),
        ("a", 2),
    ]
    assert results == ["a", "b", "c"]
    closed.clear()
    with pytest.raises(ValueError, match="d"):
        list(abreast(reading("a", 3), reading("d", 1, fails=True)))
    assert sorted(closed) == ["a", "d"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_streams_of_a_device_give_the_same_numbers(tiny_folder: Path, other_folder: Path) -> None:
    """On CUDA each forward has a stream; the next reader waits for all of them."""
    tiny, other = (Loader("cuda").load(ModelConfig(model=str(folder))) for folder in (tiny_folder, other_folder))
    pair, ids = pair_of(other, tiny, 512), some_ids(200)
    expected, forwards = finish(pair, Prompt(ids, 0)), Forwards(pack=True)
    found = read_by(forwards, pair, ids)
    torch.testing.assert_close(found.logits, expected.logits)
