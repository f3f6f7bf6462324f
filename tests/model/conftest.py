"""What the tests of Triton's programs need of its interpreter."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def loops_run_in_the_interpreter(request, monkeypatch):
    """Triton 3.6 reads a loop's bounds as `int` of an array of one number, which NumPy 2.4 no longer takes."""
    if request.node.get_closest_marker("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_mend)
