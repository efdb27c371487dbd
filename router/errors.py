"""The router's error tree and its one table to HTTP.

RouterError
├── BadRequest           400  the caller's mistake
├── Unauthenticated      401  no key, or an unknown one: always the same sentence
├── Forbidden            403  known, but not allowed (policy refused every deployment)
├── UnknownModel         404
├── TooManyRequests      429  a limit of the tenant; Retry-After in whole seconds
├── Unrecorded           503  a regulated answer could not be recorded, so there is none
├── Final                     a deployment failed, and no other may be asked: the request cannot be sent twice
└── TransportError            the deployment failed before the first frame
    ├── Refused               the upstream answered an error that is the caller's own: passed on, never retried
    ├── Unaffordable     429  not asked: the tenant's budget has no room for what it is expected to cost
    ├── Unavailable      503  connection refused, reset, 5xx, overloaded
    └── TimedOut         504
"""

from __future__ import annotations

import msgspec


class RouterError(Exception):
    """Base; never raised itself. Carries what OpenAI's error body holds."""

    status = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        type: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}
        self.status = status or self.status
        self.code = code or self.code
        self.type = type or self.type

    def body(self) -> bytes:
        """OpenAI's error shape as JSON."""
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


class BadRequest(RouterError):
    """The request itself is wrong."""

    status, type, code = 400, "invalid_request_error", "bad_request"


class Unauthenticated(RouterError):
    """No key or an unknown key; the sentence teaches nothing about keys."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(RouterError):
    """Policy refused every deployment; `code` is the decision's reason."""

    status, type, code = 403, "permission_error", "forbidden"


class UnknownModel(RouterError):
    """No model group of that name for this tenant."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class TooManyRequests(RouterError):
    """A limit of the tenant is reached; `headers` hold retry-after."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"


class Unrecorded(RouterError):
    """The audit record a regulated tenant needs could not be made durable."""

    status, type, code = 503, "server_error", "audit_unavailable"


class Final(RouterError):
    """What a TransportError says of a request that must not be sent again, here or elsewhere."""

    @classmethod
    def of(cls, error: TransportError) -> Final:
        """The same to the caller."""
        return cls(
            error.message,
            status=error.status,
            code=error.code,
            param=error.param,
            type=error.type,
            headers=error.headers,
        )


class TransportError(RouterError):
    """A deployment failed before the first frame."""

    status, type = 502, "upstream_error"
    code: str | None = "upstream_error"


class Refused(TransportError):
    """An upstream 4xx that is the caller's own mistake: passed on as it is, not retried, held against nobody."""

    status, type = 400, "invalid_request_error"
    code: str | None = None


class Unaffordable(TransportError):
    """The deployment was not asked, because the tenant's budget has no room for it. Held against nobody."""

    status, type, code = 429, "rate_limit_error", "budget_exceeded"


class Unavailable(TransportError):
    """Connection refused or lost, 5xx, overloaded, or no worker."""

    status, type, code = 503, "upstream_error", "upstream_unavailable"


class TimedOut(TransportError):
    """No answer, or no next event, in the configured time."""

    status, type, code = 504, "timeout_error", "upstream_timeout"
