"""onnxruntime, its telemetry off: the one place that imports it.

From 1.29 on its packages send events (models' names and hashes among them) and keep an identifier of the device
in the user's cache, unless this variable is set before it is imported; the call serves where it was imported
before accel, and on Windows.
"""

from __future__ import annotations

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime as ort

ort.disable_telemetry_events()

__all__ = ["ort"]
