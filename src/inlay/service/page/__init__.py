"""The pages for people: server-rendered HTML, made from the same workspace and views as the API. No torch.

What always holds: everything that comes from outside is escaped, no page has an inline script or style
(the content security policy forbids them), and every form works without JavaScript.
"""

from __future__ import annotations

from inlay.service.page.mounting import mount

__all__ = ["mount"]
