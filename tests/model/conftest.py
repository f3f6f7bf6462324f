"""What the tests of Triton kernels need of the interpreter."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("triton") is not None:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope):
        """A loaded scalar is an array of one element there, which numpy from 2.4 on makes no loop bound of."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
