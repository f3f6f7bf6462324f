"""The model room: a frozen backbone and the bank of slots set into it."""

from inlay.model.backbone import Backbone
from inlay.model.bank import Bank
from inlay.model.inference import infer, infer_canonically
from inlay.model.loading import load_backbone
from inlay.model.slots import SlotSpec

__all__ = ["Backbone", "Bank", "SlotSpec", "infer", "infer_canonically", "load_backbone"]
