"""The attention calls and the pointwise work of one forward on the meta device: shapes only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantpolicy.inventory.forward import AttentionCalls, ForwardWork, PointwiseWork, block_of
from quantpolicy.match import block_pattern, normalise_name

# The products of Linears, and what launches no kernel.
NO_POINTWISE = frozenset(
    {"mm", "addmm", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"}
)
RMS_NORMS = (torch.rms_norm, nn.functional.rms_norm)


Call = tuple[str, int, int, int, int, bool]


class WorkRecorder:
    """Adds up what a forward does beside its Linears.

    Args:
        image_tokens: kernels that see a tensor with at least as many rows in one dimension follow
            the image; 0 when not known, and none does then.
    """

    def __init__(self, image_tokens: int) -> None:
        self.image_tokens = image_tokens
        self.attention: Counter[Call] = Counter()
        self.launches: Counter[str] = Counter()
        self.image_bytes: Counter[str] = Counter()
        self.other_bytes: Counter[str] = Counter()
        self._names: list[str] = [""]

    @property
    def work(self) -> ForwardWork:
        """What was recorded, in the order of the forward."""
        attention = tuple(
            AttentionCalls(
                name=name,
                calls=calls,
                heads=heads,
                query_rows=query_rows,
                key_rows=key_rows,
                head_size=size,
                masked=masked,
            )
            for (name, heads, query_rows, key_rows, size, masked), calls in self.attention.items()
        )
        pointwise = tuple(
            PointwiseWork(
                name=name,
                launches=launches,
                image_bytes=self.image_bytes[name],
                other_bytes=self.other_bytes[name],
            )
            for name, launches in self.launches.items()
        )
        return ForwardWork(attention=attention, pointwise=pointwise)

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Record every forward of a module whose tensors are on the meta device."""

        def enter(name: str) -> Callable[..., None]:
            return lambda *_: self._names.append(name)

        handles = []
        for name, part in module.named_modules():
            handles.append(part.register_forward_pre_hook(enter(normalise_name(name))))
            handles.append(part.register_forward_hook(lambda *_: self._leave()))
        try:
            with _Whole(self), _Kernels(self):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self) -> None:
        self._names.pop()

    def add_attention(self, query: Tensor, key: Tensor, *, masked: bool) -> None:
        """Record a call on [batch, heads, rows, head_size] tensors."""
        heads = query.shape[:-2].numel()
        name = block_pattern(self._names[-1])
        call = (name, heads, query.shape[-2], key.shape[-2], query.shape[-1], masked)
        self.attention[call] += 1

    def add_kernel(self, tensors: list[Tensor]) -> None:
        """Record a kernel that reads and writes these tensors."""
        name = block_of(self._names[-1])
        size = sum(_stored_bytes(tensor) for tensor in tensors)
        rows = max((max(tensor.shape[:-1], default=0) for tensor in tensors), default=0)
        follows = 0 < self.image_tokens <= rows
        self.launches[name] += 1
        (self.image_bytes if follows else self.other_bytes)[name] += size


class _Whole(TorchFunctionMode):
    """Takes calls whole that a GPU runs as one kernel and the meta device as many."""

    def __init__(self, recorder: WorkRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer attention and RMS norms with empty results; pass everything else on."""
        del types
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)  # type: ignore[arg-type]
        if func in RMS_NORMS:
            source = args[0]
            assert isinstance(source, Tensor)
            self.recorder.add_kernel([source, source])
            return _blank(source, source.shape)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *_: object,
        **__: object,
    ) -> Tensor:
        self.recorder.add_attention(query, key, masked=attn_mask is not None)
        return _blank(query, (*query.shape[:-1], value.shape[-1]))


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every kernel that is no product of a Linear and no view."""

    def __init__(self, recorder: WorkRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run the op and record it."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and func._schema.name.removeprefix("aten::") not in NO_POINTWISE:
            leaves = tree_leaves((args, kwargs, result))
            self.recorder.add_kernel([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return result


def _blank(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _stored_bytes(tensor: Tensor) -> int:
    """Return the bytes behind a tensor, an expanded dimension counted once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    numel = 1
    for size, stride in sizes:
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()
