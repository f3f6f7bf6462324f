"""The serving room: published versions answering requests, and the proof that they still stand."""

from inlay.serving.engine import Answer, Engine, Request
from inlay.serving.verify import Check, verify

__all__ = ["Answer", "Check", "Engine", "Request", "verify"]
