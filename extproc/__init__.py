"""An Envoy request in, a chosen instance out. See README.md in this folder."""

import os
from importlib.metadata import PackageNotFoundError, version

# gRPC reads it when it is first imported. Its older listener reads and writes sockets in the thread that waits for
# completions, where the newer one hands each to a pool of threads: an eighth to a fifth less CPU an exchange
# (docs/performance.md).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")

try:
    __version__ = version("kvcar")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"
