"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("accel-compile")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0.0.0"
