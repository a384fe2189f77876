"""How compiled code launches the kernel of an op itself, without calling the op.

To a compiler an op is a call into Python, which costs more than a small kernel takes. An op whose
launcher can be traced has a twin of the same result. ``torch.compile`` writes the twin into its
graph, and AOTAutograd asks the twin's rule what it consists of: allocations and Triton launches,
which inductor's code then makes directly. A rule runs on fake tensors, while compiling; where the
predicate refuses them, the graph gets the op instead, which decides when it is called.

Compilers keep on disk what a graph became. So a twin's name holds a digest of this package.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from quantpolicy.kernels.registry import (
    define_op,
    define_unlisted_op,
    wants_gradient,
    why_no_triton,
)

# False: compiled code calls every op as a whole.
TRACE_LAUNCHES = True

_TRACED: Counter[str] = Counter()
_KNOWN_TYPES = (Tensor, torch.nn.Parameter, FunctionalTensor)
_SHARED = "quantpolicy_results"

Implementation = Callable[..., object]


def traced_launches() -> dict[str, int]:
    """Return in how many places of compiled graphs each op's kernel is launched directly.

    Counted while tracing. What compiled code launches is in no count of calls.
    """
    return dict(_TRACED)


@torch.compiler.assume_constant_result
def is_traced(name: str) -> bool:
    """Return whether compiled code may launch the kernel of an op itself; a constant of a trace.

    An export keeps its ops. Dynamo itself answers that question with yes to whatever it traces.
    """
    return TRACE_LAUNCHES and not why_no_triton(name) and not torch.compiler.is_exporting()


@functools.cache
def sources_digest() -> str:
    """Return a digest of what decides the launches that a twin is traced to."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def define_traced_op(
    schema: str,
    *,
    cpu: Implementation,
    cuda: Implementation,
    fake: Implementation,
    launcher: Implementation,
    why_not: Callable[..., str],
    shared: bool = False,
) -> Implementation:
    """Define an op and its twin; return a function that calls the one or the other.

    Args:
        schema, cpu, cuda, fake: as ``define_op`` takes them.
        launcher: allocations, views, torch's own ops and launches by ``keyed_launch``; of the same
            result as ``cuda``, on tensors real or fake.
        why_not: why the launcher cannot take these arguments, "" when it can; reads shapes,
            strides, dtypes and the device, no data and no address.
        shared: equal calls in one graph are made once, because callers repeat them.
    """
    name, _, rest = schema.partition("(")
    op = define_op(schema, cpu=cpu, cuda=cuda, fake=fake)
    twin_name = f"{name}_{sources_digest()}"
    twin = define_unlisted_op(f"{twin_name}({rest}", cpu=cpu, cuda=cuda, fake=fake)

    def rule(
        mode: FunctionalTensorMode,
        func: object,
        types: tuple[type, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del func
        if any(t not in _KNOWN_TYPES and not issubclass(t, FakeTensor) for t in types):
            return NotImplemented
        with mode:
            gradient = torch.is_grad_enabled() and wants_gradient(args)
            if kwargs or gradient or not is_traced(name) or why_not(*args):
                return op(*args, **(kwargs or {}))
            # An open float is closed here: kernels get numbers.
            args = tuple(float(a) if isinstance(a, torch.SymFloat) else a for a in args)
            if shared:
                return _made_once(mode, name, launcher, args)
            return _traced(name, launcher, args)

    torch.library.register_torch_dispatch(f"quantpolicy::{twin_name}", FunctionalTensorMode, rule)

    def call(*args: object) -> object:
        first = args[0]
        if isinstance(first, Tensor) and is_tracing(first) and is_traced(name):
            return twin(*args)
        return op(*args)

    return call


def _made_once(
    mode: FunctionalTensorMode, name: str, launcher: Implementation, args: tuple[Any, ...]
) -> object:
    """Trace a launcher, or return what it gave for the same values in the same trace."""
    proxies = get_proxy_mode()
    values = [_value(argument) for argument in args]
    key = (name, id(proxies), *(id(v) if isinstance(v, Tensor) else v for v in values))
    results = vars(mode).setdefault(_SHARED, {})
    if key not in results:
        # What the ids in the key belong to is kept, so that they stay its own.
        results[key] = (_traced(name, launcher, args), values, proxies)
    return results[key][0]


def is_tracing(tensor: Tensor) -> bool:
    """Return whether ``torch.compile`` traces the caller for a GPU."""
    return torch.compiler.is_dynamo_compiling() and tensor.is_cuda


def _traced(name: str, launcher: Implementation, args: tuple[Any, ...]) -> object:
    if get_proxy_mode() is not None:
        _TRACED[name] += 1
    return launcher(*args)


def _value(argument: object) -> object:
    """Return what stands for an argument's value: another tensor once it is written to."""
    if isinstance(argument, FunctionalTensor):
        torch._sync(argument)  # type: ignore[attr-defined]
        return torch._from_functional_tensor(argument.elem)
    return argument


def is_fake(tensor: Tensor) -> bool:
    """Return whether a launcher is being traced, by one of its tensors."""
    return isinstance(tensor, FunctionalTensor)


def trace_launch(
    kernel: Any, grid: tuple[int, int], args: tuple[object, ...], options: dict[str, Any]
) -> None:
    """Write the launch of a Triton kernel into the graph that is being traced.

    Inductor compiles a kernel with fused multiply-adds allowed and takes floats as fp64: kernels
    that are traced round products explicitly where it matters, and cast their float arguments.
    """
    options = dict(options)
    if not options.pop("enable_fp_fusion"):
        raise NotImplementedError(f"{kernel} forbids fused multiply-adds, which no trace can")
    torch.library.wrap_triton(kernel)[grid](*args, **options)
