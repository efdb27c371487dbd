"""LiteLLM's kinds of error, for `retry_policy` and `allowed_fails_policy`."""

from __future__ import annotations

from typing import Annotated, Literal

from router.errors import TimedOut, TransportError
from router.transports.upstream_errors import CONTENT_CODES, CONTEXT_EXCEEDED
from shapes import Field

Count = Annotated[int, Field(ge=0)]
RetryPolicy = dict[
    Literal[
        "BadRequestErrorRetries",
        "AuthenticationErrorRetries",
        "TimeoutErrorRetries",
        "RateLimitErrorRetries",
        "ContentPolicyViolationErrorRetries",
        "InternalServerErrorRetries",
        "ServiceUnavailableErrorRetries",
        "NotFoundErrorRetries",
        "DefaultRetries",
    ],
    Count | None,
]
"""Tries after the first on one deployment, by kind of error."""
AllowedFails = dict[
    Literal[
        "BadRequestErrorAllowedFails",
        "AuthenticationErrorAllowedFails",
        "TimeoutErrorAllowedFails",
        "RateLimitErrorAllowedFails",
        "ContentPolicyViolationErrorAllowedFails",
        "InternalServerErrorAllowedFails",
        "ServiceUnavailableErrorAllowedFails",
        "BadGatewayErrorAllowedFails",
        "NotFoundErrorAllowedFails",
    ],
    Count | None,
]
"""Failures of one kind in a row before a deployment rests."""

_BY_CODE = {
    "upstream_auth": "AuthenticationError",
    "upstream_billing": "AuthenticationError",
    "upstream_not_found": "NotFoundError",
    # Of a stream that broke off no more is known than its code.
    "upstream_timeout": "TimeoutError",
    "rate_limit_exceeded": "RateLimitError",
    CONTEXT_EXCEEDED: "BadRequestError",
    **dict.fromkeys(CONTENT_CODES, "ContentPolicyViolationError"),
}
_BY_STATUS = {
    400: "BadRequestError",
    429: "RateLimitError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
}


def kind_of(error: TransportError) -> str:
    """LiteLLM's name for it; what has none of its own is an InternalServerError."""
    if isinstance(error, TimedOut):
        return "TimeoutError"
    return _BY_CODE.get(error.code or "") or _BY_STATUS.get(error.status, "InternalServerError")
