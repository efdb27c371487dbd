"""What the engine is asked, and what it tells: requests, their events, and how far each has come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workers.chunk import Chunk
from workers.detok import Detokenizer
from workers.errors import WorkerError
from workers.prompt import Prompt
from workers.protocol import Run
from workers.runtime import Keep, Prefilled, Runtime, Spent, Steps
from workers.sampling import Chosen, Sampler, Sampling


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is read and the first token is certain."""

    prompt_tokens: int
    reused: int


@dataclass(frozen=True, slots=True)
class Text:
    """New text of choice `index`, with the tokens that made it where log probabilities were asked for."""

    index: int
    text: str
    tokens: tuple[Chosen, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` has ended: `stop` or `length`."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """All choices have ended."""

    prompt_tokens: int
    completion_tokens: int
    run: Run


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended without (the rest of) its answer."""

    error: WorkerError


Event = Started | Text | Finished | Done | Failed


@dataclass(slots=True)
class Request:
    """One prompt to answer. `emit` is called from the engine's thread and must not block."""

    model: str
    prompt: Prompt
    sampling: Sampling
    emit: Callable[[Event], None]
    keep: Keep | None = None
    deadline: float | None = None
    """On the engine's clock: `time.monotonic`, unless it was given another."""
    runtime: Runtime | None = None
    """What answers in place of what `model` names."""
    tell_tokens: bool = False
    """Have the answer's token ids in its `Run`."""
    account: str = ""
    """Whose share of the device it uses."""
    weight: float = 1.0
    """Of that account: twice the weight is twice the share."""
    steps: Callable[[Prompt, Keep | None], Steps[Prefilled]] | None = None
    """Reads the prompt in place of the runtime's own `prefill`."""
    background: bool = False
    """Begins only when nobody is answered, and gives way (Overloaded) as soon as somebody asks."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through the engine. `cancel` may be called from any thread."""

    request: Request
    runtime: Runtime
    max_tokens: int
    submitted: float
    cancelled: bool = False
    began: float = 0.0
    first: float = 0.0
    device_s: float = 0.0
    """Seconds the device worked for this job, in steps shared with others its share."""
    steps: Steps[Prefilled] | None = None
    asks: int = 0
    """Tokens that its next step computes."""
    chunks: tuple[Chunk, ...] = ()
    """That step, where it reads."""
    given_up: int = 0
    """Times in a row that this step was given up."""
    spent: Spent | None = None
    """On its prompt, once that is read; the KV itself lies in the batch alone."""
    open: int = 0
    """Choices still running."""
    completion_tokens: int = 0
    beside: int = 0
    """Most other answers in a step that this one had part in."""
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By choice, once it has ended."""
    polls: bool = False
    """Its reading waits for another worker, and uses no time of the device."""

    @property
    def account(self) -> str:
        return self.request.account

    def cancel(self) -> None:
        """Free what the job holds within one step; no further event is emitted."""
        self.cancelled = True

    def ran(self, now: float, numerics: str) -> Run:
        """The account of a job that has ended, at `now` on the engine's clock."""
        if self.spent is None:
            raise AssertionError("a job that ends has been read")
        spent, asked, keep = self.spent, self.request.sampling, self.request.keep
        changed = spent.change
        return Run(
            queue_ms=(self.began - self.submitted) * 1e3,
            prefill_ms=(self.first - self.began) * 1e3,
            sharer_ms=spent.sharer_s * 1e3,
            fuse_ms=spent.fuse_s * 1e3,
            decode_ms=(now - self.first) * 1e3,
            device_ms=self.device_s * 1e3,
            reused_tokens=spent.reused,
            fingerprint=self.runtime.fingerprint,
            gates_open=spent.gates_open,
            change=changed.mean if changed else 0.0,
            gates=spent.gates,
            change_k=_short(changed.keys) if changed else (),
            change_v=_short(changed.values) if changed else (),
            kv_read=tuple(keep.read) if keep else (),
            kv_written=tuple(keep.written) if keep else (),
            digests=self.runtime.digests,
            numerics=numerics,
            seed=None if asked.cold else asked.seed,
            beside=self.beside,
            score=spent.score,
            tokens=tuple(self.tokens[i] for i in range(asked.n)) if self.request.tell_tokens else (),
        )


@dataclass(slots=True, eq=False)
class Choice:
    """One running answer of a job: a row of the batch."""

    job: Job
    index: int
    sampler: Sampler
    text: Detokenizer
    tokens: list[int] = field(default_factory=list)
    unsent: list[Chosen] = field(default_factory=list)


def _short(ratios: tuple[float, ...]) -> tuple[float, ...]:
    return tuple([round(ratio, 4) for ratio in ratios])
