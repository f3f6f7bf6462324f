"""The stream room: the data files of a folder become tasks, and after each, all earlier ones are proved to stand."""

from __future__ import annotations

from inlay.stream.watch import StreamEvent, StreamResult, StreamSettings, watch_folder

__all__ = ["StreamEvent", "StreamResult", "StreamSettings", "watch_folder"]
