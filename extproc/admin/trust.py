"""How commands that read the same configuration ask an admin port that speaks TLS."""

from __future__ import annotations

import ssl


def trust(server: str, cert: str | None = None, key: str | None = None) -> ssl.SSLContext:
    """Trusts the very certificate that the configuration names, whoever signed it and for whatever name.

    server     the server's certificate (PEM); cert, key: the client's own, where one is asked for. Raises OSError.
    """
    context = ssl.create_default_context(cafile=server)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context
