"""What an examination may be told beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Times in seconds.

    live          send probe requests (one token each, at most `max_probes` a pool); without it nothing is generated
    envoy_admin   base URL of Envoy's admin port, None = Envoy is not looked at
    gateway       base URL where clients connect, None = no request goes through it
    admin         base URL of the running kvcar's admin port, None = from the configuration
    cert, key     client certificate for an admin port that asks for one (admin.tls.client_ca), PEM files
    api_key       what engines and gateway are sent as bearer token, None = nothing
    pool          only this pool
    listen        how long KV event streams are given to connect and to bring something
    timeout       of one HTTP request; a whole check has `check_timeout`
    """

    live: bool = False
    envoy_admin: str | None = None
    gateway: str | None = None
    admin: str | None = None
    cert: str | None = None
    key: str | None = None
    api_key: str | None = field(default=None, repr=False)
    pool: str | None = None
    listen: float = 3.0
    timeout: float = 5.0
    check_timeout: float = 60.0
    max_probes: int = 32
    max_answer: int = 32 << 20
