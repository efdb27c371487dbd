"""The running answers of one model, a row of KV each."""

from __future__ import annotations

import torch

from workers.buffers import Rows
from workers.jobs import Choice
from workers.loader import Loaded
from workers.plain import PlainDecoder
from workers.response import Response
from workers.runtime import Prefilled


class Batch:
    """The running answers of one model: choice i lies in row i. With a `response` their KV is fused as they grow."""

    def __init__(self, model: Loaded, response: Response | None = None, plain: PlainDecoder | None = None) -> None:
        """`plain`: what makes its steps where that can; none where the answer is fused."""
        self.model = model
        self.plain = plain if response is None else None
        self.rows = Rows(model.shape, 1, model.dtype, model.device)
        # What is fused as it grows has changed its own KV before the step, and would change it twice.
        self.rows.gives_way = response is None
        self.beside = None if response is None else response.rows()
        self.choices: list[Choice] = []
        self.given_up = 0
        """Times in a row that the step to come was given up."""

    def join(self, choice: Choice, prefilled: Prefilled, position: int) -> None:
        """The next token stands at `position`."""
        most = position + choice.job.max_tokens
        self.rows.join(prefilled.kv, position, most)
        if self.beside is not None and prefilled.beside is not None:
            self.beside.join(prefilled.beside, position, most)
        self.choices.append(choice)

    def step(self) -> torch.Tensor:
        """Feed each choice's last token. Returns logits (choices, vocabulary)."""
        if self.plain is not None:
            logits = self.plain.step(self.rows, [c.tokens[-1] for c in self.choices])
            self.rows.advance()
            return logits
        positions, mask = self.rows.prepare()
        tokens = torch.tensor([[c.tokens[-1]] for c in self.choices], device=self.model.device)
        self.rows.given = None if self.beside is None else self.beside.step(tokens)
        out = self.model.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            cache=self.rows,
            use_cache=True,
        )
        self.rows.advance()
        own: torch.Tensor = out.logits[:, -1]
        return own

    def remove(self, row: int) -> None:
        """Free a row; the last choice moves into it."""
        self.rows.leave(row)
        if self.beside is not None:
            self.beside.leave(row)
        last = self.choices.pop()
        if row < len(self.choices):
            self.choices[row] = last
