"""The engine: one thread that owns the device, and a running batch that requests join and leave.

Each turn of the loop gives every running answer its next token, then reads one chunk of a long prompt, or as many short
ones as fit into a chunk, those of one tenant in one forward. So prompts delay running answers by one chunk at most, and
an answer that ends frees its place at once. Between tenants the device's time is shared by weight (`shares`): who has
used less begins first and reads first, and meanwhile the answers of those who have used more pause; what runs for them
is given up at the next layer. While an answer of theirs runs, prompts of those who have used more take half of the time
at most.
The engine knows runtimes and token ids; it knows no HTTP and no message format.

An unexpected error ends the thread and with it the process: whoever supervises the worker starts it anew, which is
safer than going on with a state that nobody foresaw.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import structlog
import torch

from workers.batch import Batch
from workers.buffers import Interrupted, interruptible
from workers.config import spare_places
from workers.detok import Detokenizer
from workers.errors import BadPrompt, DeadlineExceeded, NoNumbers, Overloaded, PairNotLoaded, WorkerError
from workers.forwards import Forwards
from workers.jobs import Choice, Done, Failed, Finished, Job, Request, Started, Text
from workers.loader import Loaded
from workers.meter import Meter
from workers.response import Response
from workers.runtime import Prefilled, Runtime, require_room
from workers.sampling import Chosen, Sampler, likeliest
from workers.shares import Line, Shares

log = structlog.get_logger("worker.engine")

_PATIENCE = 2
"""Times in a row that one forward is given up for others: then it runs to its end, or many accounts that each ask for
little would leave none of a busy one's work done."""

_NO_NUMBERS = "the model computed what is no number, so there is no answer"


class Engine:
    """Runs requests on the runtimes it is given. `submit` and `Job.cancel` are safe from any thread."""

    def __init__(
        self,
        runtimes: dict[str, Runtime],
        *,
        max_running: int = 8,
        max_queued: int = 64,
        threads: int | None = None,
        pack: bool = True,
        numerics: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`numerics` says what decides low bits here, for the record. `clock` counts seconds: another one than the
        machine's is for whoever drives the engine by `turn`.
        """
        self.runtimes = runtimes
        self.numerics = numerics
        self.max_running, self.max_queued = max_running, max_queued
        self._places = max_running + spare_places(max_running)
        self.rates = Meter()
        self._clock = clock
        self.beat = clock()
        """When the loop last turned: an engine at work whose beat is old hangs."""
        self.failed: BaseException | None = None
        self._threads = threads
        self._forwards = Forwards(pack=pack)
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._shares = Shares()
        self._waiting: Line[Job] = Line(self._shares)
        self._reading: Line[Job] = Line(self._shares)
        self._gave_way = False
        self._read_s = self._wrote_s = 0.0
        """Seconds that the last step of reading took, and that answers have had since."""
        self._batches: dict[int, Batch] = {}
        self._open: set[Job] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Fail what runs, and end the thread."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def load(self) -> tuple[int, int]:
        """(requests being read or answered, requests waiting)."""
        with self._lock:
            total = len(self._open)
        running = len({c.job for b in list(self._batches.values()) for c in list(b.choices)}) + len(self._reading)
        return min(running, total), max(0, total - running)

    def stalled(self) -> float:
        """Seconds since the loop last turned, 0 when there is nothing to do."""
        with self._lock:
            return self._clock() - self.beat if self._open else 0.0

    def submit(self, request: Request) -> Job:
        """Raises PairNotLoaded, Overloaded, BadPrompt, PromptTooLong; later failures arrive as `Failed`."""
        runtime = request.runtime or self.runtimes.get(request.model)
        if runtime is None:
            raise PairNotLoaded(f"this worker holds no model or pair named {request.model!r}")
        if request.sampling.n > self.max_running:
            raise BadPrompt(f"n must be at most {self.max_running} here, and was {request.sampling.n}")
        strange = sorted(t for t in request.sampling.logit_bias if not 0 <= t < runtime.decoder.vocab)
        if strange:
            raise BadPrompt(f"logit_bias names token {strange[0]}; the model has 0..{runtime.decoder.vocab - 1}")
        job = Job(
            request,
            runtime,
            max_tokens=require_room(request.prompt, runtime.context, request.sampling.max_tokens),
            submitted=self._clock(),
        )
        with self._lock:
            if self._closing or self.failed is not None:
                raise Overloaded("the worker is going down")
            if request.background and self._open:
                raise Overloaded("others are being answered; what can wait must ask again later")
            if len(self._open) >= self.max_running + self.max_queued and not self._may_displace(job):
                raise Overloaded(f"the queue of {self.max_queued} is full")
            self._open.add(job)
        self._inbox.put(job)
        return job

    def _may_displace(self, job: Job) -> bool:
        """A full queue still takes the request of an account that has fewer open than another, whose last one is then
        refused in its place. The lock is held.
        """
        open_by = Counter(other.account for other in self._open)
        return len(self._open) < 2 * (self.max_running + self.max_queued) and (
            open_by[job.account] + 1 < max(open_by.values())
        )

    # -- the thread ---------------------------------------------------------------------------------------------

    def _main(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while not self._closing:
                    self.turn()
        except BaseException as error:
            self.failed = error
            # The plain traceback: a formatter that shows local variables would show prompts.
            log.critical("engine failed", trace=traceback.format_exc())
            raise
        finally:
            self._forwards.close()
            with self._lock:
                left, self._open = list(self._open), set()
            for job in left:
                if not job.cancelled:
                    job.request.emit(Failed(WorkerError("the worker went down while it answered")))

    def turn(self) -> None:
        """One turn of the loop: for whoever drives the engine in place of its thread, under inference mode. Waits for a
        job when there is none.
        """
        self._receive()
        self.beat = self._clock()
        self._gave_way = False
        self._drop_ended()
        self._begin()
        self._shed()
        if not self._answers_pause():
            for batch in self._batches.values():
                if batch.choices and not self._gave_way:
                    self._decode(batch)
            self._begin()
        self._read()

    def _receive(self, *, wait: bool = True) -> None:
        """Take new jobs; wait for one when there is nothing else to do."""
        idle = wait and not (self._waiting or self._reading or any(b.choices for b in self._batches.values()))
        for block in itertools.chain([idle], itertools.repeat(False)):
            try:
                job = self._inbox.get(block=block)
            except queue.Empty:
                return
            if job is None:
                continue
            if job.cancelled:
                # Its caller left while it lay in the inbox; it may be forgotten already, and must not begin.
                self._forget(job)
            else:
                self._waiting.add(job)

    def _drop_ended(self) -> None:
        """Free what belongs to jobs that were cancelled or whose time ran out."""
        now = self._clock()
        with self._lock:
            known = list(self._open)
        waited_for = any(not job.request.background for job in known)
        for job in known:
            if job.request.background and waited_for and not job.cancelled:
                self._fail(job, Overloaded("gave way to a caller"))
            if job.request.deadline is not None and now > job.request.deadline and not job.cancelled:
                self._fail(job, DeadlineExceeded("the answer was not complete in the time the caller allowed"))
            if job.cancelled:
                self._forget(job)

    def _forget(self, job: Job) -> None:
        job.cancelled = True
        with self._lock:
            self._open.discard(job)
        self._waiting.remove(job)
        self._reading.remove(job)
        if job.steps is not None:
            job.steps.close()
        for batch in self._batches.values():
            for row in range(len(batch.choices) - 1, -1, -1):
                if batch.choices[row].job is job:
                    batch.remove(row)

    def _fail(self, job: Job, error: WorkerError) -> None:
        job.request.emit(Failed(error))
        self._forget(job)

    def _shed(self) -> None:
        """Refuse what was displaced from a full queue."""
        while self._waiting and len(self._open) > self.max_running + self.max_queued:
            self._fail(self._waiting.longest(), Overloaded(f"the queue of {self.max_queued} is full"))

    def _begin(self) -> None:
        """Let waiting jobs begin to read while there are places for all their choices."""
        while (job := self._next_to_begin()) is not None:
            self._waiting.remove(job)
            job.began = self._clock()
            prefill = job.request.steps or job.runtime.prefill
            job.steps = prefill(job.request.prompt, job.request.keep)
            self._reading.add(job)

    def _next_to_begin(self) -> Job | None:
        """Whose turn it is, if there is room; else one whose account has fewer places than others leave it, if a spare
        one is free.
        """
        if not self._waiting:
            return None
        taken = Counter[str]()
        for job in self._reading:
            taken[job.account] += job.request.sampling.n
        for batch in self._batches.values():
            taken.update([choice.job.account for choice in batch.choices])
        free = self.max_running - taken.total()
        spare = self._places - taken.total()
        # At least two: one account alone must not take the places that are spared for others.
        accounts = max(2, len({*taken, *(job.account for job in self._waiting)}))
        fair = max(1, self._places // accounts)
        for place, job in enumerate(self._waiting.heads()):
            if place == 0 and job.request.sampling.n <= free:
                return job
            # Nobody else passes one whose turn it is, or a request for many choices would wait for ever.
            if taken[job.account] + job.request.sampling.n <= fair and job.request.sampling.n <= spare:
                return job
        return None

    def _answers_pause(self) -> bool:
        """A prompt is being read whose account goes before all others that have answers running."""
        if not self._reading:
            return False
        first = next(self._reading.heads())
        running = {choice.job.account for batch in self._batches.values() for choice in batch.choices}
        others = running - {first.account}
        return not first.polls and bool(others) and self._shares.before(first.account, others)

    def _overtaken(self, running: set[str]) -> bool:
        """Asked at each layer of a forward: whether one has come that goes before those it runs for, and may begin."""
        if self._inbox.empty():
            return False
        self._receive(wait=False)
        job = self._next_to_begin()
        others = running if job is None else running - {job.account}
        self._gave_way = job is not None and bool(others) and self._shares.before(job.account, others)
        return self._gave_way

    def _reading_pauses(self, job: Job) -> bool:
        """An answer runs whose account goes before the job's, and has not yet had as much time as the last reading
        took: whoever goes later reads for half of the time at most. It is never both, this and `_answers_pause`.
        """
        if job.polls or self._wrote_s >= self._read_s:
            return False
        running = {choice.job.account for batch in self._batches.values() for choice in batch.choices}
        return any(self._shares.before(account, [job.account]) for account in running)

    def _read(self) -> None:
        """Prompts, in turn, as long as they fit into one chunk: so long do running answers wait."""
        left: int | None = None
        self._gave_way = False
        while self._reading and not self._gave_way:
            job = next(self._reading.heads())
            if (left is not None and job.asks > left) or self._reading_pauses(job):
                return
            left = job.runtime.chunk if left is None else left
            jobs = self._read_beside(job, left)
            left -= sum(each.asks for each in jobs)
            if job.chunks:
                self._read_together(jobs)
            elif not self._read_on(job):
                return

    def _read_beside(self, job: Job, left: int) -> list[Job]:
        """The job, and those behind it on its account that can be read in one forward with it, of `left` tokens in all.
        Others' would delay its first token.
        """
        jobs, decoder = [job], self._forwards.joint(job.chunks)
        left -= job.asks
        for other in self._reading.of(job.account) if decoder is not None else ():
            if other is job:
                continue
            # What may come from the store first; a long prompt takes no memory before its turn.
            if not other.asks and not other.polls and len(other.request.prompt) <= left:
                self._read_on(other)
            if not 0 < other.asks <= left or self._forwards.joint(other.chunks) is not decoder:
                break
            jobs.append(other)
            left -= other.asks
        return jobs

    def _read_together(self, jobs: list[Job]) -> None:
        """The next step of them all, then each goes on by itself."""
        began, patient = self._clock(), max(job.given_up for job in jobs) < _PATIENCE
        try:
            with interruptible(lambda: patient and self._overtaken({jobs[0].account})):
                self._forwards.read([chunk for job in jobs for chunk in job.chunks])
        except Interrupted:
            for job in jobs:
                job.given_up += 1
                self._charge(job, (self._clock() - began) / len(jobs))
            return
        took = self._clock() - began
        for job in jobs:
            self._read_on(job, sum(chunk.seconds for chunk in job.chunks))
        self._read_s = took

    def _read_on(self, job: Job, before: float = 0.0) -> bool:
        """One step of one prompt, for which the device has worked `before` seconds. False when others must have their
        turn before the next.
        """
        if job.steps is None:
            raise AssertionError("a job that is read has steps")
        began = self._clock() - before
        job.chunks = ()
        try:
            with interruptible(lambda: job.given_up < _PATIENCE and self._overtaken({job.account})):
                coming = next(job.steps)
        except StopIteration as end:
            self._has_read(job, self._clock() - began)
            self._reading.remove(job)
            self._answer(job, end.value)
            return True
        except WorkerError as error:
            self._fail(job, error)
            return True
        self._has_read(job, self._clock() - began)
        job.given_up = job.given_up + 1 if self._gave_way else 0
        if isinstance(coming, tuple):
            job.chunks, job.asks = coming, sum(len(chunk.ids) for chunk in coming)
        else:
            job.asks = coming or 0
        job.polls = coming is None
        return coming is not None

    def _has_read(self, job: Job, seconds: float) -> None:
        self._charge(job, seconds)
        if not job.polls:
            self._read_s, self._wrote_s = seconds, 0.0

    def _charge(self, job: Job, seconds: float) -> None:
        job.device_s += seconds
        self._shares.charge(job.account, seconds, job.request.weight)

    def _answer(self, job: Job, prefilled: Prefilled) -> None:
        """The prompt is read: choose first tokens, and let the choices join the batch."""
        job.first = self._clock()
        job.spent = prefilled.spent
        self.rates.read(job.runtime.name, prefilled.spent.computed_tokens, prefilled.spent.compute_s)
        if not likeliest(prefilled.logits[None])[0][1]:
            self._fail(job, NoNumbers(_NO_NUMBERS))
            return
        asked, prompt = job.request.sampling, job.request.prompt
        # What is asked beside the models served here must not double their memory.
        response = prefilled.beside.response if prefilled.beside is not None else None
        batch = self._batch(job.runtime.decoder, response, pack=job.request.runtime is None)
        job.open = asked.n
        job.request.emit(Started(len(prompt), prefilled.spent.reused))
        for index in range(asked.n):
            detokenizer = Detokenizer(job.runtime.decoder.tokenizer, asked.stop)
            choice = Choice(job, index, Sampler(asked, prompt.ids, index), detokenizer)
            batch.join(choice, prefilled, prompt.positions)
            if self._deliver(choice, choice.sampler.choose(prefilled.logits)):
                self._end(batch, len(batch.choices) - 1)

    def _batch(self, model: Loaded, response: Response | None, *, pack: bool) -> Batch:
        key = id(model.model) if response is None else id(response)
        if key not in self._batches:
            plain = self._forwards.hold(model) if pack else None
            self._batches[key] = Batch(model, response, plain)
        return self._batches[key]

    def _decode(self, batch: Batch) -> None:
        began = self._clock()
        running = {c.job.account for c in batch.choices}
        try:
            with interruptible(lambda: batch.given_up < _PATIENCE and self._overtaken(running)):
                logits = batch.step()
        except Interrupted:
            batch.given_up += 1
            return
        batch.given_up = 0
        best = likeliest(logits)
        took = self._clock() - began
        self._wrote_s += took
        for name in {c.job.runtime.name for c in batch.choices}:
            self.rates.wrote(name, took)
        beside, share = len(batch.choices) - 1, took / len(batch.choices)
        for choice in batch.choices:
            self._charge(choice.job, share)
        broken = [choice.job for choice, (_, sound) in zip(batch.choices, best, strict=True) if not sound]
        for row, choice in reversed(list(enumerate(batch.choices))):
            if choice.job in broken:
                continue
            sampler = choice.sampler
            choice.job.beside = max(choice.job.beside, beside)
            # Rows go from the last to the first: what moves into a freed row has had its turn.
            chosen = sampler.record(best[row][0]) if sampler.sampling.greedy else sampler.choose(logits[row])
            if self._deliver(choice, chosen):
                self._end(batch, row)
        for job in broken:
            if not job.cancelled:
                self._fail(job, NoNumbers(_NO_NUMBERS))

    def _deliver(self, choice: Choice, chosen: Chosen) -> bool:
        """Send what has become certain. True when the choice has ended."""
        job, asked = choice.job, choice.job.request.sampling
        job.completion_tokens += 1
        choice.tokens.append(chosen.token)
        if asked.logprobs is not None:
            choice.unsent.append(chosen)
        ended = chosen.token in job.runtime.decoder.eos and not asked.ignore_eos
        text = "" if ended else choice.text.push(chosen.token)
        reason = "stop" if ended or choice.text.stopped else None
        if reason is None and len(choice.tokens) >= job.max_tokens:
            reason = "length"
        if reason is not None:
            text += choice.text.flush()
            reason = "stop" if choice.text.stopped else reason
        if text or (reason and choice.unsent):
            job.request.emit(Text(choice.index, text, tuple(choice.unsent)))
            choice.unsent.clear()
        if reason is not None:
            job.request.emit(Finished(choice.index, reason))
        return reason is not None

    def _end(self, batch: Batch, row: int) -> None:
        choice = batch.choices[row]
        job = choice.job
        job.open -= 1
        job.tokens[choice.index] = tuple(choice.tokens)
        if job.request.keep is not None and job.request.sampling.n == 1:
            # The last token was chosen but not read: its KV does not exist.
            ids = (*job.request.prompt.ids, *choice.tokens[:-1])
            job.runtime.keep_answer(ids, batch.rows.kv(row, 0, len(ids)), job.request.keep)
        batch.remove(row)
        if not job.open:
            # Its place is free before its caller hears so and asks again.
            with self._lock:
                self._open.discard(job)
            job.request.emit(
                Done(len(job.request.prompt), job.completion_tokens, job.ran(self._clock(), self.numerics))
            )
