"""What each fused op promises and needs: the one place that says so, read by all others.

The rule table lists ops by these names, the resolver plans by what they need, and the kernels take
their contract from here. Nothing is computed here, and torch is not imported.
"""

from __future__ import annotations

from typing import NamedTuple

from quantpolicy.schemes import Contract, Execution, Scheme

# Triton compiles the kernels for these CUDA devices and later; e4m3 conversions need the second,
# the tensor memory accelerator the third.
TRITON_SM = 80
FP8_SM = 89
TMA_SM = 90
# Compiled code calls an op from Python. At few rows the host is what a step waits for: at 1,120
# tokens one of Wan 5B took 27.5 ms with its kernels, 20.8 dense
# (bench/results/execution_few_tokens.json). The limit lies between those rows and the 27,280 at
# which the kernels gain.
COMPILED_ROWS = 4096


class OpFacts(NamedTuple):
    """What one op promises of its result, and where it makes sense.

    Args:
        min_sm: least CUDA compute capability (80 for 8.0) of its kernel; 0 for plain torch, which
            runs on every GPU.
        scheme: scheme of the component that it is for, None for any.
        execution: execution of the component that it is for, None for any.
        part_of: ops that it stands for where all of them are mounted; such an op is not listed in
            the rule table.
        replaces: ops whose sites it takes where it is planned, and whose work it does there.
        drops_mask: whether attention goes without its mask where the op is mounted.
    """

    contract: Contract
    min_sm: int = 0
    scheme: Scheme | None = None
    execution: Execution | None = None
    part_of: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    drops_mask: bool = False


OPS = {
    "attention_trim": OpFacts(Contract.EQUIVALENT, drops_mask=True),
    "rope_qkv_pack": OpFacts(Contract.LOSSLESS, TRITON_SM),
    "gated_residual": OpFacts(Contract.LOSSLESS, TRITON_SM),
    "qk_rms_norm": OpFacts(Contract.HIGH, TRITON_SM),
    "qk_norm_rope_pack": OpFacts(
        Contract.HIGH, TRITON_SM, part_of=("rope_qkv_pack", "qk_rms_norm")
    ),
    "layer_norm_modulate": OpFacts(Contract.HIGH, TRITON_SM),
    "linear_gelu": OpFacts(Contract.HIGH, scheme=Scheme.DENSE),
    "split_linear": OpFacts(Contract.HIGH, scheme=Scheme.DENSE),
    "gelu_fp8_linear": OpFacts(Contract.HIGH, FP8_SM, Scheme.FP8, Execution.FUSED),
    "swiglu_fp8_linear": OpFacts(Contract.HIGH, FP8_SM, Scheme.FP8, Execution.FUSED),
    "rms_norm": OpFacts(Contract.HIGH, TRITON_SM),
    "scale_add_rms_norm": OpFacts(Contract.HIGH, TRITON_SM),
    "qk_rms_norm_rope": OpFacts(Contract.HIGH, TRITON_SM),
    "swiglu": OpFacts(Contract.HIGH, TRITON_SM),
    "swiglu_linear": OpFacts(Contract.HIGH, TMA_SM, Scheme.DENSE, replaces=("swiglu",)),
    "qkv_linear": OpFacts(Contract.HIGH, scheme=Scheme.DENSE),
    "batched_tiles": OpFacts(Contract.HIGH),
    "layer_norm_fp32": OpFacts(Contract.HIGH, TRITON_SM),
    "layer_norm_fp8": OpFacts(Contract.HIGH, FP8_SM, Scheme.FP8, Execution.FUSED),
    "add_layer_norm_fp8": OpFacts(Contract.HIGH, FP8_SM, Scheme.FP8, Execution.FUSED),
    "rms_norm_fp8": OpFacts(Contract.HIGH, FP8_SM, Scheme.FP8, Execution.FUSED),
    "qk_norm_rope_across_heads": OpFacts(Contract.HIGH, TRITON_SM),
}

# Those that a rule table lists, a plan names and a model carries.
MOUNTABLE = tuple(name for name, facts in OPS.items() if not facts.part_of)
