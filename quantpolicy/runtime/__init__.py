"""Plans on live models: apply, count, undo. Imports torch and torchao."""

from quantpolicy.kernels.contract import OpCounts, op_counts
from quantpolicy.runtime.apply import apply_plan, switch_execution
from quantpolicy.runtime.execution import unmount
from quantpolicy.runtime.mount import UnmountReport
from quantpolicy.runtime.report import ApplyReport, ComponentReport, SchemeCount, SkippedLayers
from quantpolicy.runtime.weights import quantise_weight, tensor_parts, torchao_config

__all__ = [
    "ApplyReport",
    "ComponentReport",
    "OpCounts",
    "SchemeCount",
    "SkippedLayers",
    "UnmountReport",
    "apply_plan",
    "op_counts",
    "quantise_weight",
    "switch_execution",
    "tensor_parts",
    "torchao_config",
    "unmount",
]
