from __future__ import annotations

import pytest
from by_hand import BLOCKS, component, linear, plan_of, target
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.cost import activation_bytes, component_bytes, plan_memory, predict_ms
from quantpolicy.host import Rates
from quantpolicy.layers import LinearGroup, Verdict, group_linears
from quantpolicy.schemes import Cause, ComponentKind, Execution, Scheme
from quantpolicy.workload import RowScale

GIB = 1 << 30
TORCHAO, FUSED = Execution.TORCHAO, Execution.FUSED
TAKEN, KEPT = Verdict(), Verdict(Cause.SMALL_M, "derived.small_m")


def host_with(launch_us: float = 0, **tflops: float) -> Host:
    rates = Rates(gemm_tflops=tflops, copy_gb_per_s=1000, launch_us=launch_us, source="made up")
    return Host.load("h200").model_copy(update={"rates": rates})


def group(rows: int | None, n: int = 1000, k: int = 1000, count: int = 1) -> LinearGroup:
    return LinearGroup(linear("a", n, k), count, rows, rows)


def test_arithmetic_bound_dense_linear() -> None:
    # 2 * 10^6 * 10^3 * 10^3 operations at 1 TFLOP/s
    host = host_with(dense=1)
    assert predict_ms([group(10**6)], [TAKEN], Scheme.DENSE, host, TORCHAO) == 2000


def test_traffic_bound_dense_linear_counts_input_weight_and_output() -> None:
    # (2 + 2 + 2) * 10^6 bytes at 1 TB/s
    host = host_with(dense=10**6)
    assert predict_ms([group(1000)], [TAKEN], Scheme.DENSE, host, TORCHAO) == 0.006


def test_fp8_adds_the_quantisation_of_the_input() -> None:
    # 2 * 10^12 operations at 2 TFLOP/s, and 5 * 10^9 bytes at 1 TB/s
    host = host_with(dense=1, fp8=2)
    assert predict_ms([group(10**6)], [TAKEN], Scheme.FP8, host, TORCHAO) == 1005


def test_linears_that_the_scheme_leaves_cost_what_dense_ones_cost() -> None:
    host = host_with(dense=1, fp8=2)
    groups = [group(10**6), group(10**6, count=3)]
    assert predict_ms(groups, [TAKEN, KEPT], Scheme.FP8, host, TORCHAO) == 1005 + 3 * 2000


def test_padded_rows_are_paid_for() -> None:
    host = host_with(dense=1, int8=1)
    padded = predict_ms([group(1)], [Verdict(pad_rows=17)], Scheme.INT8, host, TORCHAO)
    whole = predict_ms([group(17)], [TAKEN], Scheme.INT8, host, TORCHAO)
    assert padded == whole == 0.034


def test_launches_bound_small_work_and_fused_execution_needs_fewer() -> None:
    host = host_with(launch_us=10, dense=1000, fp8=1000)
    groups = [group(1, count=100)]
    assert predict_ms(groups, [TAKEN], Scheme.DENSE, host, TORCHAO) == 1.0
    assert predict_ms(groups, [TAKEN], Scheme.FP8, host, TORCHAO) == 15.0
    assert predict_ms(groups, [TAKEN], Scheme.FP8, host, FUSED) == 2.0


def test_fused_ops_read_their_input_once_and_need_no_padding() -> None:
    # 2 * 10^12 operations at 2 TFLOP/s, and 3 * 10^9 bytes at 1 TB/s
    host = host_with(dense=1, fp8=2, int8=1)
    assert predict_ms([group(10**6)], [TAKEN], Scheme.FP8, host, FUSED) == 1003
    padded = predict_ms([group(1)], [Verdict(pad_rows=17)], Scheme.INT8, host, FUSED)
    assert padded == predict_ms([group(1)], [TAKEN], Scheme.INT8, host, FUSED) == 0.002


def test_fused_execution_has_its_own_gemm_rates_where_they_are_known() -> None:
    rates = Rates(
        gemm_tflops={"dense": 1, "int8": 1, "fp8": 2},
        fused_gemm_tflops={"int8": 4},
        copy_gb_per_s=1e9,
        launch_us=0,
        source="made up",
    )
    host = Host.load("h200").model_copy(update={"rates": rates})

    def predict(scheme: Scheme, execution: Execution) -> float | None:
        return predict_ms([group(10**6)], [TAKEN], scheme, host, execution)

    assert predict(Scheme.INT8, TORCHAO) == 2000
    assert predict(Scheme.INT8, FUSED) == 500
    assert predict(Scheme.FP8, FUSED) == 1000
    assert predict(Scheme.DENSE, FUSED) == 2000


def test_few_tokens_are_worth_quantising_under_fused_execution_alone() -> None:
    def chosen(execution: str, resolution: str, frames: int) -> str:
        request = Request(execution=execution, resolution=resolution, frames=frames)
        plan = resolve("wan2.2-ti2v-5b", host=Host.load("h200"), request=request)
        assert plan.workload is not None
        assert plan.workload.image_tokens == (1120 if frames == 25 else 27280)
        return plan.components["transformer"].scheme

    assert chosen("torchao", "512x320", 25) == "dense"
    assert chosen("fused", "512x320", 25) == "fp8"
    assert chosen("torchao", "1280x704", 121) == chosen("fused", "1280x704", 121) == "fp8"


def test_there_is_no_prediction_without_rates_rows_or_layers() -> None:
    host = host_with(dense=1)
    bare = host.model_copy(update={"rates": None})
    assert predict_ms([group(1)], [TAKEN], Scheme.DENSE, bare, TORCHAO) is None
    assert predict_ms([group(None)], [TAKEN], Scheme.DENSE, host, TORCHAO) is None
    assert predict_ms([], [], Scheme.DENSE, host, TORCHAO) is None
    assert predict_ms([group(1)], [TAKEN], Scheme.FP8, host, TORCHAO) is None


def test_h200_rates_reproduce_the_measured_gemms() -> None:
    host, large = Host.load("h200"), group(27070, 9216, 3072)
    dense = predict_ms([large], [TAKEN], Scheme.DENSE, host, TORCHAO)
    fp8 = predict_ms([large], [TAKEN], Scheme.FP8, host, TORCHAO)
    int8 = predict_ms([large], [TAKEN], Scheme.INT8, host, TORCHAO)
    assert dense == pytest.approx(1.96, rel=0.02)
    assert fp8 == pytest.approx(1.06 + 0.10, rel=0.02)
    assert int8 == pytest.approx(2.54 + 0.10, rel=0.02)


def test_component_bytes_are_itemised_by_scheme() -> None:
    part = component(linear("a", 64, 32), linear("b", 64, 32), linear("c", 16, 16))
    grouped = group_linears(part, (), RowScale(), {})
    verdicts = [TAKEN, TAKEN, KEPT]
    assert component_bytes(part, grouped, verdicts, Scheme.INT8).items == (
        ("int8 Linears", 2 * (64 * 32 + 5 * 64)),
        ("dense Linears", 2 * 16 * 16),
        ("other parameters and buffers", 100),
    )
    dense = component_bytes(part, grouped, verdicts, Scheme.DENSE)
    assert dense.total == part.inventory.dense_bytes == part.dense_bytes


def test_a_component_of_known_size_is_one_item() -> None:
    part = component(kind=ComponentKind.VAE, inventory=None, dense_bytes=5)
    grouped = group_linears(part, (), RowScale(), {})
    assert component_bytes(part, grouped, (), Scheme.DENSE).items == (
        ("dense weights, not itemised", 5),
    )


def test_activations_follow_the_widest_linear() -> None:
    assert activation_bytes([group(10, 30, 20), group(5, 10, 10)]) == 10 * (30 + 20) * 2 * 2
    assert activation_bytes([group(None)]) == 0


def test_device_context_is_reserved_on_gpus_only() -> None:
    def total(name: str) -> int:
        return plan_memory({}, 7, Host.load(name), 1 << 40).total_bytes

    assert (total("h200"), total("mi300x"), total("cpu"), total("apple-m")) == (
        GIB + 7, GIB + 7, 7, 7,
    )  # fmt: skip


def test_the_plan_reports_each_component_and_fits_at_exactly_its_total() -> None:
    goal = target(*BLOCKS, vae=component(linear("q", 16, 16), kind=ComponentKind.VAE))
    total = plan_of(goal).memory.total_bytes
    exact = plan_of(goal, memory_bytes=total).memory
    assert (exact.fits, exact.budget_bytes) == (True, total)
    assert {item.component for item in exact.items} == {"transformer", "vae", "runtime"}
    assert not plan_of(goal, transformer="fp8", memory_bytes=total - 1).memory.fits


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(load_rules().families)),
    st.sampled_from(["h200", "rtx4090", "cpu"]),
    st.sampled_from(["auto", "dense", "int8"]),
)
def test_items_sum_to_the_total(family: str, host: str, scheme: str) -> None:
    memory = resolve(family, host=Host.load(host), request=Request(transformer=scheme)).memory
    assert sum(item.bytes for item in memory.items) == memory.total_bytes
    assert memory.fits == (memory.total_bytes <= memory.budget_bytes)
    assert all(item.bytes > 0 for item in memory.items)
