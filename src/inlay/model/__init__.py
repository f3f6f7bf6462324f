"""The model room: a frozen backbone and the bank of slots set into it."""

from __future__ import annotations

from inlay.model.backbone.backbone import Backbone
from inlay.model.backbone.families import CLASSIFIERS, find_family
from inlay.model.backbone.int8 import check_int8, check_slot, check_spec, quantize, with_precision
from inlay.model.backbone.loading import BUILT_IN, BuiltIn, find_folder, first_line, load_backbone
from inlay.model.backbone.pooling import POOLED
from inlay.model.backbone.sites import Anatomy, LinearSite
from inlay.model.backbone.tiny import make_tiny_folder
from inlay.model.bank.bank import Bank
from inlay.model.bank.flat import FlatBank
from inlay.model.bank.methods import (
    JOINT_METHODS,
    METHODS,
    SlotSpec,
    find_method,
    first_layer,
    has_frozen_attention,
    layout,
    make_expander,
    materialized_method,
    resolve_method,
)
from inlay.model.bank.pass_hooks import PassHooks, build_views, site_shapes
from inlay.model.batch.buckets import BucketBuffers, Capacity, DecoderTargets, PackedRows, bound_length, round_up_tokens
from inlay.model.batch.route import Batch, CacheDepth, CachedStates, Route, Row, collate, make_rows
from inlay.model.batch.tiles import Tiles, send
from inlay.model.heads.captured_inference import MOST_TOKENS, GraphedForward, find_obstacle
from inlay.model.heads.generation import forced_logits
from inlay.model.heads.head_losses import RowBatch, TokenBatch, text_losses
from inlay.model.heads.heads import (
    HEADS,
    JOINED,
    TOWERS,
    WRITTEN,
    HeadSpec,
    Outcome,
    Output,
    collect_outputs,
    find_head,
    find_output_passages,
)
from inlay.model.heads.inference import (
    TOKEN_BUDGET,
    batch_rows,
    batches_by_length,
    canonical_backbone,
    canonical_environment,
    infer,
    infer_canonically,
    infer_vectors,
)
from inlay.model.heads.readout import apply_heads, pair_features
from inlay.model.heads.stored_heads import check_labels, read_head
from inlay.model.kernels import fold_residual, launch
from inlay.model.kernels.launch import GraphRecorder, is_out_of_memory
from inlay.model.kernels.select import Gather, pick_numbered
from inlay.model.parts import head
from inlay.model.parts.bottleneck import BLOCK, BOTTLENECK, adapter_groups
from inlay.model.parts.linears import DORA, FACTORS, LORA, LoraPart, scales_input
from inlay.model.parts.norms import NORMS, trained_norms
from inlay.model.parts.own_weights import OWN_WEIGHTS
from inlay.model.parts.part import ResolvedMethod, TensorSpec, adapted_layers, adapted_linears, draw_tensor

__all__ = [
    "BLOCK",
    "BOTTLENECK",
    "BUILT_IN",
    "CLASSIFIERS",
    "DORA",
    "FACTORS",
    "HEADS",
    "JOINED",
    "JOINT_METHODS",
    "LORA",
    "METHODS",
    "MOST_TOKENS",
    "NORMS",
    "OWN_WEIGHTS",
    "POOLED",
    "TOKEN_BUDGET",
    "TOWERS",
    "WRITTEN",
    "Anatomy",
    "Backbone",
    "Bank",
    "Batch",
    "BucketBuffers",
    "BuiltIn",
    "CacheDepth",
    "CachedStates",
    "Capacity",
    "DecoderTargets",
    "FlatBank",
    "Gather",
    "GraphRecorder",
    "GraphedForward",
    "HeadSpec",
    "LinearSite",
    "LoraPart",
    "Outcome",
    "Output",
    "PackedRows",
    "PassHooks",
    "ResolvedMethod",
    "Route",
    "Row",
    "RowBatch",
    "SlotSpec",
    "TensorSpec",
    "Tiles",
    "TokenBatch",
    "adapted_layers",
    "adapted_linears",
    "adapter_groups",
    "apply_heads",
    "batch_rows",
    "batches_by_length",
    "bound_length",
    "build_views",
    "canonical_backbone",
    "canonical_environment",
    "check_int8",
    "check_labels",
    "check_slot",
    "check_spec",
    "collate",
    "collect_outputs",
    "draw_tensor",
    "find_family",
    "find_folder",
    "find_head",
    "find_method",
    "find_obstacle",
    "find_output_passages",
    "first_layer",
    "first_line",
    "fold_residual",
    "forced_logits",
    "has_frozen_attention",
    "head",
    "infer",
    "infer_canonically",
    "infer_vectors",
    "is_out_of_memory",
    "launch",
    "layout",
    "load_backbone",
    "make_expander",
    "make_rows",
    "make_tiny_folder",
    "materialized_method",
    "pair_features",
    "pick_numbered",
    "quantize",
    "read_head",
    "resolve_method",
    "round_up_tokens",
    "scales_input",
    "send",
    "site_shapes",
    "text_losses",
    "trained_norms",
    "with_precision",
]
