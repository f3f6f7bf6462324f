"""The spec of a slot: a resolved method and a head, which together decide its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from inlay.errors import StoreDamaged, Unsupported
from inlay.model.backbone.sites import Anatomy
from inlay.model.bank.methods import find_method, layout, resolve_method
from inlay.model.bank.resolved_method import ResolvedMethod
from inlay.model.heads.heads import HeadSpec
from inlay.model.parts.part import TensorSpec
from inlay.settings import MethodConfig


@dataclass(frozen=True)
class SlotSpec:
    """The content of a slot: a method with all its settings, and a head."""

    method: ResolvedMethod
    head: HeadSpec

    @classmethod
    def of(cls, config: MethodConfig, head: HeadSpec) -> SlotSpec:
        """The spec of a method as it is asked for."""
        return cls(resolve_method(config), head)

    def layout(self, anatomy: Anatomy) -> list[TensorSpec]:
        """The slot's tensors, in a fixed order."""
        return layout(anatomy, self.method, self.head)

    def count_parameters(self, anatomy: Anatomy) -> int:
        """Count the trained parameters, head included."""
        return sum(item.num_parameters for item in self.layout(anatomy))

    @property
    def is_joint(self) -> bool:
        """Whether it is one of several tasks of a run that share parameters."""
        return find_method(self.method.name).is_joint

    @property
    def is_finetuned(self) -> bool:
        """Whether it has its own copy of backbone weights."""
        return find_method(self.method.name).is_finetuned

    @classmethod
    def from_stored(cls, method: Mapping[str, Any], head: Mapping[str, Any]) -> SlotSpec:
        """The spec a version's manifest describes."""
        try:
            config, spec = MethodConfig(**method), HeadSpec(**head)
        except TypeError as error:
            raise Unsupported(
                f"the version has a setting this Inlay does not know: {error}", "it was made by a newer Inlay: upgrade"
            ) from None
        return cls.of(config, spec)


def check_tensors(expected: Mapping[str, TensorSpec], tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those a slot is to have, by name and shape: missing, extra or misshapen ones."""
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        what = f"lacks `{missing[0]}`" if missing else f"has `{extra[0]}`, which its method does not train"
        raise StoreDamaged(f"a version's set of tensors {what}", "run `inlay verify`, or publish the task again")
    for name, item in expected.items():
        if tuple(tensors[name].shape) != item.shape:
            raise StoreDamaged(
                f"tensor `{name}` has the shape {tuple(tensors[name].shape)}, not {item.shape}",
                "run `inlay verify`, or publish the task again",
            )
