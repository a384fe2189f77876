"""Settings and factories that all tests share. Does not import torch: some tests prove its absence.

What libraries say through their loggers is silenced as it is on the command lines. Python warnings
stay errors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from quantpolicy.console import quiet_libraries
from quantpolicy.host import Host
from quantpolicy.plan import (
    CompilePlan,
    ComponentPlan,
    KeptLayer,
    MemoryPlan,
    PlannedLayer,
    QuantPlan,
    SchemeSettings,
)
from quantpolicy.request import Request
from quantpolicy.schemes import (
    Cause,
    ComponentKind,
    Confidence,
    Execution,
    Quality,
    Scheme,
    Tier,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

os.environ.setdefault("OMP_NUM_THREADS", "2")
quiet_libraries()

SETTINGS = {
    Scheme.DENSE: SchemeSettings(),
    Scheme.INT8: SchemeSettings(granularity="per_row", weight_dtype="int8"),
    Scheme.FP8: SchemeSettings(
        granularity="per_row", weight_dtype="float8_e4m3fn", activation_floor=1e-12
    ),
    Scheme.MXFP8: SchemeSettings(granularity="block_32", weight_dtype="float8_e4m3fn"),
    Scheme.NVFP4: SchemeSettings(granularity="block_16", weight_dtype="float4_e2m1fn_x2"),
    Scheme.LAYERWISE_FP8: SchemeSettings(granularity="cast", weight_dtype="float8_e4m3fn"),
}


@pytest.fixture
def settings() -> dict[Scheme, SchemeSettings]:
    """The settings of each scheme, as the shipped table has them."""
    return SETTINGS


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes the tiny pipeline folder of a family, once."""
    from quantpolicy.measure.tiny import build_tiny_pipeline_folder

    root = tmp_path_factory.mktemp("pipelines")

    def folder_of(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else build_tiny_pipeline_folder(folder, family)

    return folder_of


@pytest.fixture
def component_plan() -> Callable[..., ComponentPlan]:
    """Return a function that plans a live module by hand: every aligned bf16 Linear."""

    def plan_component(
        model: nn.Module,
        scheme: Scheme,
        *,
        kind: ComponentKind = ComponentKind.DENOISER,
        pad_rows: int = 0,
        keep: Callable[[str], bool] = lambda _: False,
    ) -> ComponentPlan:
        from quantpolicy.inventory.live import inventory_from_module

        inventory = inventory_from_module(model)
        layers, kept = [], []
        for linear in inventory.linears:
            shape = (linear.out_features, linear.in_features)
            because = None
            if linear.dtype != "bfloat16":
                because, rule = Cause.FP32_KEPT, "derived.fp32_kept"
            elif any(features % 32 for features in shape):
                because, rule = Cause.ALIGNMENT, "derived.alignment"
            elif keep(linear.name):
                because, rule = Cause.ZERO_ROWS, "test.keep"
            if because is None and scheme is not Scheme.DENSE:
                layers.append(
                    PlannedLayer(
                        name=linear.name,
                        scheme=scheme,
                        shape=shape,
                        dtype=linear.dtype,
                        pad_rows=pad_rows,
                    )
                )
            else:
                kept.append(
                    KeptLayer(
                        name=linear.name,
                        because=because or Cause.DENSE_COMPONENT,
                        rule=rule if because else "derived.dense_component",
                        shape=shape,
                        dtype=linear.dtype,
                    )
                )
        return ComponentPlan(
            kind=kind,
            class_name=inventory.class_name,
            scheme=scheme,
            confidence=Confidence.DERIVED,
            dtype="bfloat16",
            settings=SETTINGS[scheme],
            layers=tuple(layers),
            kept=tuple(kept),
        )

    return plan_component


@pytest.fixture
def quant_plan() -> Callable[..., QuantPlan]:
    """Return a function that makes a plan of component plans given by name."""

    def make_plan(
        *, compile_mode: str = "none", host: str = "cpu", **components: ComponentPlan
    ) -> QuantPlan:
        return QuantPlan(
            family="by-hand",
            tier=Tier.AUTO,
            quality=Quality.LOSSLESS,
            execution=Execution.TORCHAO,
            host=Host.load(host),
            request=Request(),
            rules_digest="",
            workload=None,
            components=components,
            decisions=(),
            kernels=(),
            compile=CompilePlan(mode=compile_mode, dynamic=compile_mode == "regional"),
            memory=MemoryPlan(items=(), total_bytes=0, budget_bytes=0, fits=True),
            lifted=(),
            notes=(),
        )

    return make_plan
