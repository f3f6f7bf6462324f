"""The exchange room: imports tasks from other libraries, and exports tasks to them and to ONNX."""

from __future__ import annotations

from inlay.exchange.import_export import (
    FORMATS,
    ImportOptions,
    export_folder,
    import_file,
    import_folder,
    named_backbone,
)
from inlay.exchange.onnx import export_onnx

__all__ = ["FORMATS", "ImportOptions", "export_folder", "export_onnx", "import_file", "import_folder", "named_backbone"]
