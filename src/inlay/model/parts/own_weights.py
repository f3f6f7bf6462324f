"""A slot's own copy of the backbone's weights: fine-tuning of all layers, or of the top ones.

Such a slot shares no forward pass with another: its weights take the place of the backbone's for the whole pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from inlay.errors import BadConfig
from inlay.model.backbone.sites import Anatomy
from inlay.model.parts.part import Part, ResolvedMethod, TensorSpec, adapted_layers

if TYPE_CHECKING:
    from inlay.model.backbone.backbone import Backbone


class OwnWeightsPart(Part):
    """A copy of the backbone's own weights, of the top layers at least."""

    prefix = "weight."
    is_stacked = False

    def tensors(self, anatomy: Anatomy, method: ResolvedMethod) -> Iterator[TensorSpec]:
        layers = adapted_layers(anatomy, method)
        if layers != tuple(range(layers[0], anatomy.num_layers)):
            raise BadConfig(
                f"method `{method.name}` trains the top layers, but `method.layers` is `{method.layers}`",
                "write `--set method.layers=-3:` for the top three",
            )
        for parameter in anatomy.parameters:
            is_outside = not 0 <= parameter.layer < anatomy.num_layers
            # Fine-tuning every layer trains the embeddings too; the weights above the top layer are trained with it.
            reaches = len(layers) == anatomy.num_layers or parameter.layer > max(layers)
            is_trained = reaches if is_outside else parameter.layer in layers
            if is_trained:
                yield TensorSpec(self.name(parameter.name), parameter.shape, "backbone", part="weights")

    def own(self, name: str, backbone: Backbone) -> Tensor:
        return backbone.own_parameter(self.theirs(name))

    def without_pooler(self, anatomy: Anatomy, specs: Iterable[TensorSpec]) -> list[TensorSpec]:
        """Return the tensors without those of the pooler, for heads that read none."""
        poolers = {self.name(parameter.name) for parameter in anatomy.parameters if parameter.is_pooler}
        return [spec for spec in specs if spec.name not in poolers]

    def theirs(self, name: str) -> str:
        """Return the backbone's own name of a weight."""
        return name.removeprefix(self.prefix)


OWN_WEIGHTS = OwnWeightsPart()
