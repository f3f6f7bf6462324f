"""The store of trained tasks: immutable versions, content-addressed, safe against crashes and other writers.

Importing this room, and listing what is in a store, imports neither torch nor numpy.
"""

from inlay.store.files import write_atomically, write_once
from inlay.store.format import Manifest, Probe, Version
from inlay.store.store import Store

__all__ = ["Manifest", "Probe", "Store", "Version", "write_atomically", "write_once"]
