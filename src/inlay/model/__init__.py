"""The model room: a frozen backbone and the bank of slots set into it."""

from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.loading import load_backbone
from inlay.model.bank.bank import Bank
from inlay.model.bank.slots import SlotSpec
from inlay.model.heads.inference import infer, infer_canonically

__all__ = ["Backbone", "Bank", "SlotSpec", "infer", "infer_canonically", "load_backbone"]
