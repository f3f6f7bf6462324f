"""The slot that a version's manifest describes, held against its labels, its reading and its backbone.

A manifest may be damaged, or crafted by a stranger. What always holds: where `read_slot` returns, the version's rows
can be read and answers found in its outputs, so that nothing but its own answers depends on what its manifest says.
"""

from __future__ import annotations

from inlay.data import KINDS, find_layout
from inlay.errors import StoreDamaged
from inlay.model import Backbone, SlotSpec, check_labels
from inlay.store import Manifest

_SHORTEST = 4
"""tokens of a row at least, as `train.max_length` has it"""


def read_slot(manifest: Manifest, backbone: Backbone) -> SlotSpec:
    """Return the slot of a version; refuse one that this backbone cannot have, or that contradicts its manifest."""
    spec = SlotSpec.from_stored(manifest.method, manifest.head)
    head, has_pairs = spec.head, bool(manifest.extra.get("pairs"))
    if head.kind != manifest.kind:
        raise StoreDamaged(f"the version is of the kind `{manifest.kind}`, but its head of `{head.kind}`")
    check_labels(head, manifest.labels)
    backbone.resolve_pooling(head.pooling if head.reads_rows else "auto", takes_noise=True)
    can_write = backbone.is_seq2seq and KINDS[head.kind].spell_answers is not None
    if head.is_written and not can_write:
        raise StoreDamaged(f"the version's answers are written, which no `{head.kind}` on `{backbone.name}` can be")
    if not _SHORTEST <= manifest.max_length <= backbone.max_length:
        raise StoreDamaged(
            f"the version's rows have {manifest.max_length} tokens; `{backbone.name}` reads {_SHORTEST} to "
            f"{backbone.max_length}"
        )
    if manifest.extra.get("stride", 0) < 0:
        raise StoreDamaged(f"the version's windows share {manifest.extra['stride']} tokens, which is below 0")
    layout = find_layout(head.kind)
    needs_pairs, takes_pairs = layout.overlaps or head.has_towers, layout.words is None
    if (needs_pairs and not has_pairs) or (has_pairs and not takes_pairs):
        raise StoreDamaged(f"the version reads {'pairs' if has_pairs else 'single texts'}, which its head cannot")
    return spec
