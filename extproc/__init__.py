"""An Envoy request in, a chosen instance out. See README.md in this folder."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvcar")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0.0.0"
