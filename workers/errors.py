"""What a worker may answer instead of tokens. Torch-free: the router reads these too.

WorkerError
├── BadPrompt         the request itself cannot be served (400)
│   ├── PromptTooLong
│   └── SameText
├── PairNotLoaded     this worker does not hold the model or pair (404)
├── KVMismatch        stored KV does not fit the model that asked for it (500)
├── NoNumbers         the model computed what is no number (500)
└── Overloaded        the queue is full (503, Retry-After)
"""


class WorkerError(Exception):
    """Base; never raised itself. `code` is stable and crosses the wire."""

    status = 500
    code = "worker_error"


class BadPrompt(WorkerError):
    """The request cannot be served by this model or pair, here or anywhere."""

    status = 400
    code = "bad_prompt"


class SameText(BadPrompt):
    """The sharer was to read another text, and it is the one that it would have read anyway."""

    code = "same_text"


class PromptTooLong(BadPrompt):
    """Prompt and answer together exceed the context of the model or pair."""

    code = "context_length_exceeded"


class PairNotLoaded(WorkerError):
    """No model or pair of that name is ready on this worker."""

    status = 404
    code = "model_not_found"


class KVMismatch(WorkerError):
    """KV tensors whose layers, heads or head size are not those of the model."""

    code = "kv_mismatch"


class NoNumbers(WorkerError):
    """The model's logits are NaN or infinite: weights are broken, or its dtype is too narrow for them."""

    code = "no_numbers"


class Overloaded(WorkerError):
    """The bounded queue is full; another worker or the text lane may answer."""

    status = 503
    code = "overloaded"


class LoadFailed(WorkerError):
    """A checkpoint is missing, malformed, unsupported or too large for the device."""

    status = 503
    code = "load_failed"


class DeadlineExceeded(WorkerError):
    """The time the caller allowed ran out before the answer was complete."""

    status = 504
    code = "deadline_exceeded"
