"""A Linear over quantised weights held as plain tensors, for eager, torch.compile and CUDA graphs.

It takes the tensors of a torchao weight without copying them and gives the same weight back, so
checkpoints keep torchao's layout. Which modules are exchanged is decided by a plan, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import PerRow

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.fp8_linear import fp8_gemm, fp8_linear
from quantpolicy.kernels.int8_linear import int8_linear
from quantpolicy.kernels.quantised_rows import QuantisedRows
from quantpolicy.kernels.stored_scheme import scheme_of
from quantpolicy.kernels.traced import traced_fp8_gemm, traced_fp8_linear, traced_int8_linear
from quantpolicy.object_class import exchange_class, follows_class
from quantpolicy.schemes import Scheme

_EXTRA = "extra_"
_OWN = (
    "name",
    "scheme",
    "floor",
    "_former",
    "_weight_class",
    "_weight_attributes",
    "_extra_names",
)


class FusedLinear(nn.Linear):
    """A quantised Linear that calls one op: rows quantised at run time, scales in the epilogue.

    ``adopt`` turns an existing Linear into one in place, ``release`` turns it back; the object, its
    hooks and its bias stay. Buffers ``qdata`` [N, K] and ``scale`` [N, 1] fp32 share memory with
    the torchao weight, which ``weight`` wraps again. Inference only.
    """

    name: str
    scheme: Scheme
    floor: float
    qdata: Tensor
    scale: Tensor
    _former: type[nn.Linear]

    @classmethod
    def adopt(cls, linear: nn.Linear, *, name: str = "") -> FusedLinear:
        """Turn a Linear whose weight torchao has quantised into a fused one, in place.

        Args:
            linear: its weight is a ``Float8Tensor`` or ``Int8Tensor`` with one scale a row and
                dynamic, symmetric, row-wise activation quantisation.
            name: the module's name in the model, for messages.

        Raises:
            KernelMountError: if the weight is quantised in another way; nothing is changed.
        """
        weight: Any = linear.weight
        scheme = _checked_scheme(weight, name)
        former = type(linear)
        del linear.weight
        exchange_class(linear, cls)
        assert isinstance(linear, cls)
        linear.name, linear.scheme, linear._former = name, scheme, former
        linear.floor = _floor_of(weight) if scheme is Scheme.FP8 else 0.0
        linear._hold(weight)
        return linear

    def release(self) -> nn.Linear:
        """Turn this module back into what it was before, in place."""
        weight = self.weight
        for item in ("qdata", "scale", *(_EXTRA + extra for extra in self._extra_names)):
            delattr(self, item)
        linear: nn.Linear = self
        exchange_class(linear, self._former)
        for item in _OWN:
            delattr(linear, item)
        bias = linear._parameters.pop("bias")
        linear.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        linear.register_parameter("bias", bias)
        return linear

    def _hold(self, weight: Any) -> None:
        """Register the tensors of a torchao weight as buffers and keep what wraps them again."""
        self._weight_class = type(weight)
        names, self._weight_attributes = weight.__tensor_flatten__()
        self._extra_names = tuple(item for item in names if item not in ("qdata", "scale"))
        self.register_buffer("qdata", weight.qdata.contiguous(), persistent=False)
        self.register_buffer("scale", weight.scale.contiguous(), persistent=False)
        for item in self._extra_names:
            self.register_buffer(_EXTRA + item, getattr(weight, item), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The torchao weight over this module's tensors."""
        tensors = {"qdata": self.qdata, "scale": self.scale}
        tensors.update({item: getattr(self, _EXTRA + item) for item in self._extra_names})
        wrapped: Tensor = self._weight_class.__tensor_unflatten__(
            tensors, self._weight_attributes, self.qdata.shape, self.qdata.stride()
        )
        return wrapped

    @follows_class
    def forward(self, x: Tensor | QuantisedRows) -> Tensor:
        """Return ``x @ weight.T + bias`` over the quantised weight, in the dtype of ``x``."""
        if not isinstance(self, FusedLinear):
            return type(self).forward(self, x)
        return self.multiply(x)

    def multiply(self, x: Tensor | QuantisedRows) -> Tensor:
        """Return what ``forward`` does."""
        _refuse_gradient(self, x.codes if isinstance(x, QuantisedRows) else x)
        if isinstance(x, QuantisedRows):
            return self._of_codes(x)
        if torch.compiler.is_compiling():
            if self.scheme is Scheme.FP8:
                return traced_fp8_linear(x, self.qdata, self.scale, self.bias, self.floor)
            return traced_int8_linear(x, self.qdata, self.scale, self.bias)
        qdata, scale, bias = self._operands()
        if self.scheme is Scheme.FP8:
            return fp8_linear(x, qdata, scale, bias, self.floor)
        return int8_linear(x, qdata, scale, bias)

    def _of_codes(self, x: QuantisedRows) -> Tensor:
        if torch.compiler.is_compiling():
            return traced_fp8_gemm(x.codes, x.scale, self.qdata, self.scale, self.bias, x.dtype)
        return fp8_gemm(x.codes, x.scale, *self._operands(), x.dtype)

    def operands_for(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, float]:
        """Return data, scales, bias and floor for an op that does what this does, with more.

        Args:
            inputs: of the op; a gradient through them is refused as ``forward`` refuses it.
        """
        _refuse_gradient(self, *inputs)
        return self.qdata, self.scale, self.bias, self.floor

    def _operands(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return data, scales and bias; an attribute of a module costs more than these look-ups."""
        buffers: Any = self._buffers
        return buffers["qdata"], buffers["scale"], self._parameters["bias"]

    def extra_repr(self) -> str:
        """Return the sizes and the scheme."""
        return f"{self.in_features}, {self.out_features}, scheme={self.scheme.value}"

    def refuse_cast(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse what ``_apply`` is given if it changes a dtype; changes nothing.

        Raises:
            KernelMountError: it does.
        """
        for dtype in (self.qdata.dtype, torch.float32, torch.bfloat16):
            changed = fn(torch.empty(0, dtype=dtype, device=self.qdata.device)).dtype
            if changed is not dtype:
                raise KernelMountError(
                    self.name or "FusedLinear",
                    f"a cast to {str(changed).removeprefix('torch.')} of quantised tensors",
                    allowed="a quantised module can change its device only",
                    remedy="cast the model before it is quantised",
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedLinear:
        self.refuse_cast(fn)
        super()._apply(fn, recurse)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state_dict = dict(state_dict)
        weight = state_dict.pop(prefix + "weight", None)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        if weight is None:
            missing_keys.append(prefix + "weight")
        elif type(weight) is not self._weight_class or weight.shape != self.qdata.shape:
            error_msgs.append(
                f"{prefix}weight: found {type(weight).__name__} {tuple(weight.shape)}; allowed is"
                f" {self._weight_class.__name__} {tuple(self.qdata.shape)}; load a checkpoint baked"
                " from the same plan."
            )
        else:
            for item in ("qdata", "scale", *self._extra_names):
                own = getattr(self, item if item in ("qdata", "scale") else _EXTRA + item)
                own.copy_(getattr(weight, item))


def _refuse_gradient(linear: FusedLinear, *inputs: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise KernelMountError(
            linear.name or "FusedLinear",
            "a gradient is wanted through a quantised Linear",
            allowed="fused execution serves inference only",
            remedy="run under torch.no_grad(), or plan with execution='torchao'",
        )


def _checked_scheme(weight: Tensor, name: str) -> Scheme:
    """Return the scheme of a torchao weight that this module can take."""
    scheme = scheme_of(weight)
    if scheme in _WHY_NOT:
        found = _WHY_NOT[scheme](weight)
    else:
        found = f"the weight is a {type(weight).__name__}"
    if scheme is None or found:
        raise KernelMountError(
            name or "FusedLinear",
            found,
            allowed="Float8Tensor and Int8Tensor with row-wise dynamic activations are",
            remedy="use execution='torchao' for this module",
        )
    return scheme


def _is_per_row(weight: Any) -> bool:
    """Return whether a weight has one scale a row of its [N, K] data."""
    return weight.dim() == 2 and list(weight.block_size) == [1, weight.shape[1]]


def _why_not_fp8(weight: Any) -> str:
    activation = weight.act_quant_kwargs
    if weight.qdata.dtype is not torch.float8_e4m3fn:
        return f"the data is {weight.qdata.dtype}"
    if not _is_per_row(weight) or not isinstance(activation.granularity, PerRow):
        return "scales are not per row"
    if activation.float8_dtype is not torch.float8_e4m3fn or activation.hp_value_ub is not None:
        return "activations have another dtype or an upper bound"
    if weight.mm_config is None or not weight.mm_config.use_fast_accum:
        return "fast accumulation is off"
    return ""


def _why_not_int8(weight: Any) -> str:
    activation = weight.act_quant_kwargs
    if activation is None:
        return "activations are not quantised"
    if not _is_per_row(weight) or not isinstance(activation.granularity, PerRow):
        return "scales are not per row"
    if activation.mapping_type.name != "SYMMETRIC" or activation.reduce_range:
        return "activations are not quantised symmetrically to the full range"
    if weight.act_pre_scale is not None or weight.act_quant_scale is not None:
        return "activations have a static scale"
    return ""


_WHY_NOT: dict[Scheme | None, Callable[[Any], str]] = {
    Scheme.FP8: _why_not_fp8,
    Scheme.INT8: _why_not_int8,
    Scheme.LAYERWISE_FP8: lambda _: "activations are not quantised",
}


def _floor_of(weight: Any) -> float:
    """Return the activation floor that the weight carries, 0 for none."""
    return float(weight.act_quant_kwargs.hp_value_lb or 0.0)
