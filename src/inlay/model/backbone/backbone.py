"""Backbones: a frozen pretrained encoder with its tokenizer and fingerprint.

A model that transformers has read (`loading.py`), frozen and wrapped at its sites, with its forward passes and the
pooling of their states. Nothing in Inlay ever writes to its weights.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from inlay.caches import use_compiled
from inlay.errors import Unsupported
from inlay.model.backbone.families import find_family
from inlay.model.backbone.fingerprint import digest_weights, fingerprint
from inlay.model.backbone.model_lock import ModelLock, dropout_rates
from inlay.model.backbone.pooling import describe_noise, find_default
from inlay.model.backbone.sites import survey
from inlay.model.backbone.wrappers import join_projections, mount
from inlay.model.batch.buckets import BucketBuffers
from inlay.model.batch.route import Batch, CacheDepth, Pack, Row, collate, pack
from inlay.model.heads.generation import EncoderStates, Tree
from inlay.model.heads.heads import WRITTEN
from inlay.model.kernels import launch
from inlay.model.kernels.attention import crossing, placed
from inlay.model.parts import find_part


class Backbone:
    """A frozen model with wrappers at its sites. Without a route of a bank it computes exactly what it did before.

    Make it with `load_backbone`; `name`, `folder`, `model` and `tokenizer` are what that found.

    >>> backbone
    Backbone(...: bert, ... parameters, on cpu)
    """

    def __repr__(self) -> str:
        return f"Backbone({self.name}: {self.anatomy.family}, {self.num_parameters:,} parameters, on {self.device})"

    def __init__(self, name: str, folder: Path, model: nn.Module, tokenizer: Any) -> None:
        family = find_family(model.config.model_type)  # type: ignore[union-attr, arg-type]
        weights = digest_weights(folder, family)
        self.name, self.folder = name, folder
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint(model.config, weights, tokenizer)
        self.exact_digest, self.precision = weights.exact, weights.precision
        self.has_pooler = "weight" in weights.pooler
        """whether its files have a pooler, trained or not"""
        fresh_std = float(getattr(model.config, "initializer_range", 0.02))
        self.pooler_noise = describe_noise(weights.pooler, fresh_std) if self.has_pooler else ""
        """evidence that the pooler of its files was never trained; "" where it was, or there is none"""
        self.anatomy = survey(model)
        self.num_parameters = weights.num_parameters
        self.model = model.eval().requires_grad_(False)
        self.mount = mount(model, self.anatomy)
        if launch.is_available(self.device):
            join_projections(model, self.anatomy, self.mount)
        self._holder = _Holder(model)
        self.first_position = family.first_position
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        self.packs = family.packing != "none"
        self._blocks = [model.get_submodule(path) for path in self.anatomy.blocks]
        self._lock = ModelLock(model, self._blocks)
        self._compiled: dict[str | Callable[..., Any], list[Callable[..., Any]]] = {}
        self._mounted_names = {
            ".".join(part for part in name.split(".") if part != "inner"): name for name, _ in model.named_parameters()
        }
        name, reason = find_default(folder, family, has_pooler=self.has_pooler, noise=self.pooler_noise)
        self.default_pooling = WRITTEN if self.is_seq2seq else name
        self.pooling_reason = "it writes its answers" if self.is_seq2seq else reason
        """the reason for `default_pooling`, as a clause"""
        self.pad_id = 0 if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
        start_id = getattr(model.config, "decoder_start_token_id", None)
        self.start_id = self.pad_id if start_id is None else int(start_id)
        self.end_id = tokenizer.eos_token_id
        self.takes_token_types = "token_type_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def is_seq2seq(self) -> bool:
        """Whether it is a text-to-text backbone, whose answers are texts."""
        return self.anatomy.has_decoder

    @property
    def hidden_size(self) -> int:
        return self.anatomy.hidden_size

    @property
    def max_length(self) -> int:
        """The largest number of tokens of a row."""
        limit = find_family(self.anatomy.family).max_length
        return limit or int(self.model.config.max_position_embeddings) - self.first_position  # type: ignore[union-attr, arg-type]

    def turn(self) -> AbstractContextManager[None]:
        """Reserve the model for this thread inside the block, in its own mode: other threads' passes wait.

        Every pass takes a turn by itself. Call nothing in it that may wait for another thread.
        """
        return self._lock

    def collate(self, rows: Sequence[Row]) -> Batch:
        """Make a batch of rows on the backbone's device: packed where its family allows it."""
        if self.packs:
            return pack(rows, self.first_position, self.device)
        return collate(rows, self.pad_id, self.device)

    def in_own_type(self, weights: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
        """Convert weights that replace the backbone's in several passes to the backbone's precision."""
        return None if weights is None else {name: tensor.to(self.dtype) for name, tensor in weights.items()}

    def resolve_pooling(self, pooling: str, *, takes_noise: bool = False) -> str:
        """Resolve `auto` to the pooling that suits this backbone; refuse a pooler that is missing or was never trained.

        With `takes_noise` an untrained pooler is accepted: older versions that read it go on reading it.
        """
        if self.is_seq2seq and pooling not in ("auto", WRITTEN):
            raise Unsupported(
                f"pooling `{pooling}` on the backbone `{self.name}`, which writes its answers", "leave out `--pooling`"
            )
        if pooling == "auto":
            return self.default_pooling
        if pooling == "pooler" and not self.has_pooler:
            family = find_family(self.anatomy.family)
            why = "its family has none" if family.pooler is None else "its file has none"
            raise Unsupported(f"pooling `pooler` on the backbone `{self.name}`: {why}", "use `cls` or `mean`")
        if pooling == "pooler" and self.pooler_noise and not takes_noise:
            raise Unsupported(
                f"pooling `pooler` on the backbone `{self.name}`: its pooler was never trained ({self.pooler_noise})",
                "use `--pooling mean`, or train the pooler with the task: `--set train.hidden=pooler`",
            )
        return pooling

    def hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states [B, T, D] ([1, N, D] if packed) of a batch, through the bank that is routed."""
        return self.hidden_layers(batch)[-1]

    def hidden_layers(
        self, batch: Batch, weights: Mapping[str, Tensor] | None = None, *, all_layers: bool = False
    ) -> list[Tensor]:
        """Return the last hidden states, or those of embeddings and every layer; `weights` replace the backbone's.

        A batch with a prefix begins at its layer: call it inside `Bank.routed(batch.route)`, which is a turn.
        """
        assert batch.prefix is None or not all_layers, "the states of lower layers were not kept"
        if batch.prefix is not None and batch.prefix.reach.layer == self.anatomy.num_layers:
            return [batch.prefix.states]
        layers: list[Tensor] = []

        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            layers.append(args[0] if args else kwargs["hidden_states"])

        # The input of every block, not its output: DeBERTa's convolution joins in between two blocks.
        noted = self._blocks if all_layers else []
        with self.turn():
            handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in noted]
            try:
                last = self._model_with(weights, reads=True)(**self._inputs(batch)).last_hidden_state
            finally:
                for handle in handles:
                    handle.remove()
        return [*layers, last]

    @contextmanager
    def changing_inputs(self, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Change the word embeddings of every pass inside the block, before positions are added: [1, N, E] if packed.

        The block is a turn: other threads' passes wait.
        """
        with self.turn():
            words = self.model.get_input_embeddings()  # type: ignore[operator]
            handle = words.register_forward_hook(lambda module, args, output: change(output))
            try:
                yield
            finally:
                handle.remove()

    def read(self, batch: Batch, weights: Mapping[str, Tensor] | None = None) -> EncoderStates:
        """Return the encoder's states of a batch, for the decoder: padded, or packed in passes for any mix of rows."""
        states, pack, tiling = self.hidden_layers(batch, weights)[-1], batch.pack, batch.route.tiling
        if tiling is not None and tiling.rows_N is not None:
            return EncoderStates(states, batch.input_ids_BT.new_ones(1, 1), tiling)
        if pack is not None:
            return EncoderStates(pack.unpack(states[0]), pack.is_real_BT.long())
        assert batch.mask_BT is not None
        return EncoderStates(states, batch.mask_BT)

    def write(
        self,
        read: EncoderStates,
        ids_RT: Tensor,
        weights: Mapping[str, Tensor] | None = None,
        cache: Any = None,
        *,
        keeps: bool = False,
        tree: Tree | None = None,
    ) -> tuple[Tensor, Any]:
        """Compute the logits [R, T, V] after each token of `ids_RT`, given `cache`; with `keeps` the new cache too.

        Each token sees all before it; in a `tree` it sees its ancestors only.
        """
        assert read.tiling is None or not (cache or keeps or tree), "what is read is packed in training alone"
        # Masks of four axes, added to the scores by attention. Given masks of two axes, transformers would ask the
        # device whether they hide anything, and before 5.22 copy a number there: neither can be captured.
        dtype, num_before = read.states_BTD.dtype, cache.get_seq_length() if cache is not None else 0
        lowest, num_tokens = torch.finfo(dtype).min, ids_RT.shape[1]
        mask_B11T = torch.zeros_like(read.mask_BT, dtype=dtype).masked_fill_(read.mask_BT == 0, lowest)
        hidden_TT = ids_RT.new_full((num_tokens, num_before + num_tokens), lowest, dtype=dtype)
        standing: AbstractContextManager[None] = nullcontext()
        # Which tokens of the answer see which: those before them, or their ancestors in the tree.
        if tree is None:
            hidden_TT.triu_(num_before + 1)
        else:
            places_T, sees_TT = tree.layout(ids_RT.device)
            hidden_TT.masked_fill_(sees_TT, 0.0)
            standing = placed(self.model, places_T)
        # Where the encoder's states are packed, cross-attention reads them as they lie.
        attending: AbstractContextManager[None] = nullcontext()
        if read.tiling is not None:
            path = find_family(self.anatomy.family).cross
            decoders = self._blocks[self.anatomy.num_readers :]
            attending = crossing([block.get_submodule(path) for block in decoders], read.tiling)
        inputs = {
            "encoder_outputs": (read.states_BTD,),
            "attention_mask": mask_B11T[:, None, None, :],
            "decoder_input_ids": ids_RT,
            "decoder_attention_mask": hidden_TT[None, None],
            "past_key_values": cache,
            "use_cache": keeps,
        }
        with self.turn(), standing, attending:
            found = self._model_with(weights)(**inputs)
        return found.logits, found.past_key_values if keeps else None

    def prefix(self, batch: Batch, reach: CacheDepth) -> Tensor:
        """Compute the states of a batch up to the depth `reach`, laid out as `CachedStates.states`, and nothing above.

        Call it inside `Bank.routed(batch.route)` of a bank that changes nothing.
        """
        if reach.layer == self.anatomy.num_layers:
            return self.hidden(batch)
        # Note the block's input, and with attention its projection's output; then end the pass by an exception.
        found: list[Tensor] = []

        def note(module: nn.Module, args: tuple[Any, ...]) -> None:
            found.append(args[0])
            if not reach.with_attention:
                raise _Reached

        def stop(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found.append(output)
            raise _Reached

        sites = self.anatomy.linears
        project = next(site.path for site in sites if (site.layer, site.name) == (reach.layer, "project"))
        with self.turn():
            handles = [
                self._blocks[reach.layer].register_forward_pre_hook(note),
                self.model.get_submodule(project).register_forward_hook(stop),
            ]
            try:
                self.model(**self._inputs(batch))
            except _Reached:
                return torch.cat(found, -1) if reach.with_attention else found[0]
            finally:
                for handle in handles:
                    handle.remove()
        raise AssertionError("no block was reached")

    def _inputs(self, batch: Batch) -> dict[str, Tensor | None]:
        inputs = {"input_ids": batch.input_ids_BT, "attention_mask": batch.mask_BT}
        if self.takes_token_types and batch.token_types_BT is not None:
            inputs["token_type_ids"] = batch.token_types_BT
        if batch.positions_BT is not None:
            if not self.is_seq2seq:
                inputs["position_ids"] = batch.positions_BT
            # A mask of four axes is taken as it is: none is made for the whole pack, which packed attention ignores.
            inputs["attention_mask"] = self._no_mask
        return inputs

    def _model_with(self, weights: Mapping[str, Tensor] | None, *, reads: bool = False) -> Callable[..., Any]:
        """Return the whole model, or its encoder with `reads`, to be called; `weights` replace its own by name."""
        part: Any = self.model.encoder if reads and self.anatomy.has_decoder else self.model
        if weights is None:
            return part
        own = {f"inner.{self._mounted_names[name]}": tensor.to(self.dtype) for name, tensor in weights.items()}
        return lambda **inputs: functional_call(self._holder, own, (part,), inputs)

    def pool(
        self, hidden_BTD: Tensor, mask_BT: Tensor, pooling: str, weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return one vector per row: the first token, the pretrained pooler on it, or the mean over real tokens."""
        if pooling == "mean":
            keep_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
            return (hidden_BTD * keep_BT1).sum(1) / keep_BT1.sum(1)
        return hidden_BTD[:, 0] if pooling == "cls" else self._pretrained_pooler(hidden_BTD, weights)

    def pool_packed(
        self, hidden_ND: Tensor, pack: Pack | BucketBuffers, pooling: str, weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Do what `pool` does for the rows of a pack or a rung; a rung's empty rows and padding get a vector too."""
        if pooling == "mean":
            if isinstance(pack, BucketBuffers):
                lengths_B = (pack.parts["stops"] - pack.parts["starts"]).clamp(min=1)
                rows_N = pack.parts["rows"]
            else:
                lengths_B, rows_N = pack.lengths_B, pack.rows_N
            sums_BD = hidden_ND.new_zeros(len(lengths_B), hidden_ND.shape[-1], dtype=torch.float32)
            sums_BD = sums_BD.index_add(0, rows_N, hidden_ND.float())
            return (sums_BD / lengths_B.unsqueeze(1)).to(hidden_ND.dtype)
        starts_B = pack.parts["starts"] if isinstance(pack, BucketBuffers) else pack.starts_B
        first_B1D = hidden_ND.index_select(0, starts_B).unsqueeze(1)
        return first_B1D.squeeze(1) if pooling == "cls" else self._pretrained_pooler(first_B1D, weights)

    @contextmanager
    def compiled(self, backend: str | Callable[..., Any] = "inductor", *, with_blocks: bool = True) -> Iterator[None]:
        """Run blocks compiled inside the block; one compilation serves all of them. Shapes must be those of a rung.

        Without blocks, only the compiler's settings are set, for other code that is compiled inside. The first rung is
        compiled as it is, the second for any number of tokens, rows and lengths: it serves the rest. Compiled code is
        kept between processes, in `$TORCHINDUCTOR_CACHE_DIR` or in our cache.
        """
        use_compiled()
        # The wrapped blocks: their wrappers, which may skip a block, are not compiled.
        blocks: list[Any] = [block.inner for block in self._blocks] if with_blocks else []
        with self.turn():
            if with_blocks and backend not in self._compiled:
                self._compiled[backend] = [
                    torch.compile(block._call_impl, backend=backend, fullgraph=True) for block in blocks
                ]
            try:
                for block, call in zip(blocks, self._compiled.get(backend, ()), strict=with_blocks):
                    block._compiled_call_impl = call
                # Every bank has its own shapes, and all blocks of a process share one limit of compilations. Numbers
                # that a route brings (its longest row) may change as its shapes do.
                with (
                    warnings.catch_warnings(),
                    torch._dynamo.config.patch(recompile_limit=256, allow_unspec_int_on_nn_module=True),
                ):
                    # The compiler looks for gradients where there are none.
                    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
                    # A float32 backbone is asked for where every bit counts.
                    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32")
                    yield
            finally:
                for block in blocks:
                    block._compiled_call_impl = None

    def _pretrained_pooler(self, hidden_BTD: Tensor, weights: Mapping[str, Tensor] | None) -> Tensor:
        prefix = f"{find_family(self.anatomy.family).pooler}."
        own = {
            name.removeprefix(prefix): tensor.to(self.dtype)
            for name, tensor in (weights or {}).items()
            if name.startswith(prefix)
        }
        return functional_call(self.model.get_submodule(prefix[:-1]), own, (hidden_BTD,))

    def own_tensor(self, name: str) -> Tensor:
        """Return the backbone's own value of a slot's tensor `name`, as a float32 copy on the CPU."""
        return find_part(name).own(name, self).detach().to("cpu", torch.float32, copy=True)

    def like_own(self, name: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device and the precision of the backbone's own."""
        return tensor.to(find_part(name).own(name, self), copy=True)

    def own_parameter(self, name: str) -> Tensor:
        """Return a parameter by transformers' own name of it."""
        return self.model.get_parameter(self._mounted_names[name])

    def checkpointed(self, first_layer: int = 0) -> AbstractContextManager[None]:
        """Keep no activations in layers from `first_layer` on inside the block: backward computes them again.

        Call `backward` inside it, and where the route is bound. It is for this thread's passes, as `training` is.
        """

        def recompute() -> None:
            for block in self._blocks[first_layer:]:
                block.forward = _recomputing(block)

        return self._lock.changed(recompute)

    def answering(self) -> AbstractContextManager[None]:
        """Switch dropout off in this thread's passes inside the block; it is for use inside `training`."""
        return self._lock.changed(self.model.eval)

    def training(
        self, dropout: float | None, first_layer: int = 0, *, attention_dropout: float | None = 0.0
    ) -> AbstractContextManager[None]:
        """Switch dropout on in this thread's passes inside the block, at the backbone's rates or at `dropout`.

        The rate of attention is `attention_dropout`; None: the backbone's. The rates from before are restored after it.
        Below `first_layer` nothing is trained, so there is no dropout either: those states can be computed once.
        """
        family = find_family(self.anatomy.family)
        blocks = tuple(f"{path}." for path in self.anatomy.blocks[first_layer:])
        names = [family.attention, *([family.cross] if family.cross else [])]
        attention = tuple(f".{name}{end}" for name in names for end in ("", ".dropout"))

        def train() -> None:
            self.model.train()
            for path, module, name, rate in list(dropout_rates(self.model)):
                is_frozen = first_layer > 0 and not path.startswith(blocks)
                chosen = attention_dropout if path.endswith(attention) else dropout
                if is_frozen:
                    chosen = 0.0
                setattr(module, name, rate if chosen is None else chosen)

        return self._lock.changed(train)


class _Reached(Exception):
    """Raised to end a pass at the depth asked for."""


class _Holder(nn.Module):
    """A module in whose place a function of it is called, so that `functional_call` replaces weights for one call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return compute(*args, **kwargs)


def _recomputing(block: nn.Module) -> Callable[..., Any]:
    """Return a block's `forward` that keeps no activations; backward computes them again, with the weights used now.

    Not with the block's own: a slot's copy (`full`, `top`) stands in the block only during the forward pass.
    """
    holder, forward = _Holder(block), block.forward

    def recompute(*args: Any, **kwargs: Any) -> Any:
        weights: dict[str, Tensor] = {f"inner.{name}": tensor for name, tensor in block.named_parameters()}

        def compute(*args: Any, **kwargs: Any) -> Any:
            return functional_call(holder, weights, (forward, *args), kwargs)

        return checkpoint(compute, *args, use_reentrant=False, **kwargs)

    return recompute
