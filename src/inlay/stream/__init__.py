"""The stream room: a folder whose data files become tasks, and the proof after each that all earlier ones stand."""

from inlay.stream.watch import Event, StreamResult, StreamSettings, watch_folder

__all__ = ["Event", "StreamResult", "StreamSettings", "watch_folder"]
