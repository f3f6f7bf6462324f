"""The exchange room: tasks that come from other libraries and go to them."""

from inlay.exchange.carry import FORMATS, Imported, Wishes, export_folder, import_folder, named_backbone

__all__ = ["FORMATS", "Imported", "Wishes", "export_folder", "import_folder", "named_backbone"]
