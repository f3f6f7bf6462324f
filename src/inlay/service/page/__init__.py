"""The pages that people see: server-rendered HTML over the same workspace and views that the API uses. No torch.

What always holds: nothing that came from outside reaches a page unescaped, no page needs an inline script or style
(the content security policy forbids them), and every form works without JavaScript.
"""

from __future__ import annotations

from inlay.service.page.mounting import mount

__all__ = ["mount"]
