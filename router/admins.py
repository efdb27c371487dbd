"""Administrators: who may do what to the router. Holds digests of keys only.

Every route below `/admin` stands in `RIGHTS`, and `guard` refuses to serve one that does not: a new route cannot be
left open by forgetting. The master key may do everything; without a master key and without `admins` the router is open
to this machine alone, as `local`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.admin_config import AdminConfig, Role
from router.errors import Forbidden, RouterError, Unauthenticated
from router.http import Header, bearer, first_of_each, header
from router.settings import is_loopback
from router.tenant_config import digest_key

Right = Literal["read", "operate", "reload", "publish"]

ROLES: dict[Role, frozenset[Right]] = {
    "operator": frozenset({"read", "operate", "reload"}),
    "auditor": frozenset({"read"}),
    "publisher": frozenset({"read", "publish", "reload"}),
}
EVERYTHING: frozenset[Right] = frozenset({"read", "operate", "reload", "publish"})

RIGHTS: dict[tuple[str, str], Right] = {
    ("GET", "/admin/workers"): "read",
    ("GET", "/admin/pairs"): "read",
    ("GET", "/admin/kv"): "read",
    ("GET", "/admin/stops"): "read",
    ("POST", "/admin/stops"): "operate",
    ("DELETE", "/admin/stops"): "operate",
    ("POST", "/admin/pairs/{pair}/reinstate"): "publish",
    ("DELETE", "/admin/tenants/{tenant}/kv"): "operate",
    ("POST", "/admin/reload"): "reload",
}
"""The right that each administrative route asks for, by method and path."""


@dataclass(frozen=True, slots=True)
class Admin:
    """Who asks, by the name that records carry."""

    name: str
    role: str
    rights: frozenset[Right]


class Admins:
    """Key -> Admin. `configure` puts others in force."""

    def __init__(self, admins: tuple[AdminConfig, ...], master_key: str | None, *, loopback: bool) -> None:
        """`loopback`: only this machine reaches the router."""
        self._loopback = loopback
        self._by_digest: dict[str, Admin] = {}
        self.configure(admins, master_key)

    def configure(self, admins: tuple[AdminConfig, ...], master_key: str | None) -> None:
        """Replace all."""
        found = {a.key: Admin(a.name, a.role, ROLES[a.role]) for a in admins}
        if master_key is not None:
            found[str(digest_key(master_key))] = Admin("master", "master", EVERYTHING)
        self._by_digest = found

    def find(self, key: str | None) -> Admin | None:
        """Whose key it is; None for nobody's."""
        if not self._by_digest:
            return Admin("local", "local", EVERYTHING) if self._loopback else None
        digest = hashlib.sha256((key or "").encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for known, admin in self._by_digest.items():  # all of them: how long it takes tells nothing
            if hmac.compare_digest(known, digest):
                found = admin
        return found

    def guard(self, route: Route, known_elsewhere: Callable[[str | None], bool]) -> Route:
        """The route for those who have its right. `known_elsewhere`: a key is good for something else (403, not 401).

        Raises LookupError for a route that `RIGHTS` does not list.
        """
        handler = route.endpoint

        async def guarded(request: Request) -> Response:
            method = "GET" if request.method == "HEAD" else request.method
            if not self._by_digest and _of_another_site(request.scope["headers"]):
                # Without keys a browser on this machine would let any page press our buttons.
                raise Forbidden("Pages of other sites may not ask this.", code="foreign_origin")
            admin = self._authorized(
                bearer(first_of_each(request.scope["headers"])), RIGHTS[method, route.path], known_elsewhere
            )
            request.state.admin = admin
            answer: Response = await handler(request)
            return answer

        methods = sorted((route.methods or set()) - {"HEAD"})
        missing = [method for method in methods if (method, route.path) not in RIGHTS]
        if missing:
            raise LookupError(f"{missing} {route.path}: not in router.admins.RIGHTS")
        return Route(route.path, guarded, methods=methods, name=route.name)

    def _authorized(self, key: str | None, right: Right, known_elsewhere: Callable[[str | None], bool]) -> Admin:
        admin = self.find(key)
        if admin is None:
            if not known_elsewhere(key):
                raise Unauthenticated("A valid API key is needed: send it as 'Authorization: Bearer KEY'.")
            raise Forbidden("This needs the master key or an administrator's.", code="admin_only")
        if right not in admin.rights:
            roles = ", ".join(role for role, rights in ROLES.items() if right in rights)
            message = f"{admin.name} is {admin.role}; this needs: {roles} or the master key."
            raise Forbidden(message, code="role_not_allowed")
        return admin


def _of_another_site(headers: list[Header]) -> bool:
    """A browser asks for a page that is not this router's: it says where the page is from.

    Of this router is what was loaded from this machine by the address that is asked now; a name that somebody else
    had resolved to this machine is not.
    """
    told = first_of_each(headers)
    if b"origin" not in told:
        return False
    try:
        origin = urlsplit(header(told, b"origin") or "")
        here = origin.hostname is not None and is_loopback(origin.hostname)
    except ValueError:
        return True
    return not here or origin.netloc != header(told, b"host")


def who(request: Request) -> str:
    """The name of the administrator whose request passed the guard."""
    admin = getattr(request.state, "admin", None)
    if not isinstance(admin, Admin):
        raise RouterError("This route has no guard.", code="internal_error")
    return admin.name
