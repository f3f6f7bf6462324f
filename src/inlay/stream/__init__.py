"""The stream room: a folder whose data files become tasks, and the proof after each that all earlier ones stand."""

from __future__ import annotations

from inlay.stream.watch import StreamEvent, StreamResult, StreamSettings, watch_folder

__all__ = ["StreamEvent", "StreamResult", "StreamSettings", "watch_folder"]
