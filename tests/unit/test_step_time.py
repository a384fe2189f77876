from __future__ import annotations

import pytest
from by_hand import linear
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.errors import DeniedError
from quantpolicy.host import Rates
from quantpolicy.inventory.forward import AttentionCalls, ForwardWork, PointwiseWork
from quantpolicy.layers import LinearGroup, Verdict
from quantpolicy.schemes import Cause, Execution, Scheme, Tier
from quantpolicy.step_time import Forward, Setting, predict_step, total_ms
from quantpolicy.workload import RowScale

TORCHAO, FUSED = Execution.TORCHAO, Execution.FUSED
TAKEN, KEPT = Verdict(), Verdict(Cause.SMALL_M, "derived.small_m")


def host_with(launch_us: float = 0, **tflops: float) -> Host:
    rates = Rates(
        gemm_tflops=tflops,
        attention_tflops=1,
        masked_attention_tflops=0.5,
        copy_gb_per_s=1000,
        launch_us=launch_us,
        source="made up",
    )
    return Host.load("h200").model_copy(update={"rates": rates})


def group(rows: int | None, n: int = 1000, k: int = 1000, count: int = 1) -> LinearGroup:
    return LinearGroup(linear("a", n, k), count, rows, rows)


def items_of(
    groups: list[LinearGroup],
    scheme: Scheme,
    host: Host,
    *,
    execution: Execution = TORCHAO,
    verdicts: list[Verdict] | None = None,
    work: ForwardWork | None = ForwardWork(),  # noqa: B008
    scale: RowScale = RowScale(),  # noqa: B008
    compiled: bool = True,
    unmasked: bool = False,
) -> dict[str, float]:
    items = predict_step(
        Forward(groups, work, scale),
        verdicts or [TAKEN] * len(groups),
        scheme,
        Setting(host, execution, compiled, unmasked),
    )
    return {item.what: item.ms for item in items}


def test_arithmetic_bound_dense_linear() -> None:
    # 2 * 10^6 * 10^3 * 10^3 operations at 1 TFLOP/s
    assert items_of([group(10**6)], Scheme.DENSE, host_with(dense=1)) == {
        "Linears": 2000, "attention": 0, "pointwise": 0, "launches": 0,
    }  # fmt: skip


def test_traffic_bound_dense_linear_counts_input_weight_and_output() -> None:
    # (2 + 2 + 2) * 10^6 bytes at 1 TB/s
    assert items_of([group(1000)], Scheme.DENSE, host_with(dense=10**6))["Linears"] == 0.006


@pytest.mark.parametrize(
    ("execution", "compiled", "scheme", "quantise_ms"),
    [
        # bytes for each of 10^9 values of the input (and of the output) at 1 TB/s
        (TORCHAO, True, Scheme.FP8, 5),
        (TORCHAO, False, Scheme.FP8, 39),
        (TORCHAO, True, Scheme.INT8, 5),
        (TORCHAO, False, Scheme.INT8, 180 + 180),
        (FUSED, True, Scheme.FP8, 3),
        (FUSED, False, Scheme.INT8, 3),
    ],
)
def test_a_quantised_linear_adds_the_quantisation_of_its_rows(
    execution: Execution, compiled: bool, scheme: Scheme, quantise_ms: int
) -> None:
    host = host_with(dense=1, fp8=2, int8=2)
    items = items_of([group(10**6)], scheme, host, execution=execution, compiled=compiled)
    assert items["Linears"] == 1000 + quantise_ms


def test_linears_that_the_scheme_leaves_cost_what_dense_ones_cost() -> None:
    host, groups = host_with(dense=1, fp8=2), [group(10**6), group(10**6, count=3)]
    items = items_of(groups, Scheme.FP8, host, verdicts=[TAKEN, KEPT])
    assert items["Linears"] == 1005 + 3 * 2000


def test_padded_rows_are_paid_for_where_they_are_padded() -> None:
    host = host_with(dense=1, int8=1)
    padded, whole, few = (
        items_of([group(rows)], Scheme.INT8, host, execution=execution, verdicts=[verdict])
        for rows, verdict, execution in (
            (1, Verdict(pad_rows=17), TORCHAO),
            (17, TAKEN, TORCHAO),
            (1, Verdict(pad_rows=17), FUSED),
        )
    )
    assert padded["Linears"] == whole["Linears"] == 0.034
    assert few["Linears"] == 0.002


def test_fused_execution_has_its_own_gemm_rates_where_they_are_known() -> None:
    host = host_with(dense=1, int8=1, fp8=2)
    rates = host.rates.model_copy(update={"fused_gemm_tflops": {Scheme.INT8: 4}})
    host = host.model_copy(update={"rates": rates})

    def linears(scheme: Scheme, execution: Execution) -> float:
        return items_of([group(10**6)], scheme, host, execution=execution)["Linears"]

    assert linears(Scheme.INT8, TORCHAO) == 2005
    assert linears(Scheme.INT8, FUSED) == 503
    assert linears(Scheme.FP8, FUSED) == 1003
    assert linears(Scheme.DENSE, FUSED) == 2000


def attention(query_rows: int, key_rows: int, *, masked: bool = False) -> ForwardWork:
    calls = AttentionCalls(
        name="blocks.*.attn",
        calls=10,
        heads=10,
        query_rows=query_rows,
        key_rows=key_rows,
        head_size=100,
        masked=masked,
    )
    return ForwardWork(attention=(calls,))


def test_attention_follows_queries_times_keys_and_a_mask_slows_it() -> None:
    # 4 * 10 calls * 10 heads * 100 * rows * rows operations at 1 TFLOP/s, masked at half of it
    host = host_with(dense=1)

    def ms(work: ForwardWork, scale: RowScale) -> float:
        return items_of([group(1)], Scheme.DENSE, host, work=work, scale=scale)["attention"]

    same, double = RowScale(1000), RowScale(1000, 1000)
    assert ms(attention(1000, 1000), same) == 40
    assert ms(attention(1000, 1000, masked=True), same) == 80
    assert ms(attention(1000, 1000), double) == 160
    # 500 text tokens stay as many; a joint stream of both has 1,000 more
    assert ms(attention(1000, 500), double) == 40
    assert ms(attention(1500, 1500), double) == 250


def test_attention_that_does_without_its_mask_is_as_fast_as_without_one() -> None:
    host, masked = host_with(dense=1), attention(1000, 1000, masked=True)
    items = items_of([group(1)], Scheme.DENSE, host, work=masked, unmasked=True)
    assert items["attention"] == 40


def test_attention_of_few_rows_is_bound_by_its_bytes() -> None:
    # 2 bytes of queries, keys, values and results: 10^4 * 2 * (100 + 1) * 2 at 1 TB/s
    work = attention(100, 1)
    rates = host_with(dense=1).rates.model_copy(update={"attention_tflops": 10**6})
    host = host_with(dense=1).model_copy(update={"rates": rates})
    assert items_of([group(1)], Scheme.DENSE, host, work=work)["attention"] == 0.004


def test_pointwise_work_follows_the_image_and_a_compiler_saves_most_of_it() -> None:
    work = ForwardWork(
        pointwise=(
            PointwiseWork(name="blocks.*", launches=9, image_bytes=10**12, other_bytes=10**11),
        )
    )

    def ms(scale: RowScale, *, compiled: bool) -> float:
        return items_of(
            [group(1)], Scheme.DENSE, host_with(dense=1), work=work, scale=scale, compiled=compiled
        )["pointwise"]

    assert ms(RowScale(1000), compiled=False) == 1870
    assert ms(RowScale(1000), compiled=True) == 550
    assert ms(RowScale(1000, -500), compiled=False) == 1020


def test_launches_are_told_where_the_device_waits_for_them() -> None:
    # 100 launches of 10 us; the device has 0.002 * 100 ms of work, a fifth of it not hidden
    host = host_with(launch_us=10, dense=1, fp8=1)
    assert items_of([group(1, count=100)], Scheme.DENSE, host) == {
        "Linears": 0.2, "attention": 0, "pointwise": 0, "launches": 0.84,
    }  # fmt: skip
    hidden = items_of([group(10**6, count=100)], Scheme.DENSE, host)
    assert hidden["launches"] == 0.2


def test_a_quantised_linear_has_more_launches_where_it_is_not_compiled() -> None:
    host = host_with(launch_us=10, dense=1000, fp8=1000, int8=1000)

    def launches(scheme: Scheme, execution: Execution, *, compiled: bool) -> float:
        items = items_of(
            [group(0, count=100)], scheme, host, execution=execution, compiled=compiled
        )
        return round(items["launches"] + 0.8 * items["Linears"], 2)

    assert launches(Scheme.DENSE, TORCHAO, compiled=True) == 1
    assert launches(Scheme.FP8, FUSED, compiled=True) == 1
    assert launches(Scheme.FP8, TORCHAO, compiled=True) == 4
    assert launches(Scheme.INT8, TORCHAO, compiled=True) == 5
    assert launches(Scheme.INT8, FUSED, compiled=True) == 4
    assert launches(Scheme.FP8, FUSED, compiled=False) == 9
    assert launches(Scheme.INT8, FUSED, compiled=False) == 9
    assert launches(Scheme.FP8, TORCHAO, compiled=False) == 46


def test_there_is_no_prediction_without_rates_rows_layers_or_the_rest_of_the_forward() -> None:
    host = host_with(dense=1)
    bare = host.model_copy(update={"rates": None})
    assert items_of([group(1)], Scheme.DENSE, bare) == {}
    assert items_of([group(None)], Scheme.DENSE, host) == {}
    assert items_of([], Scheme.DENSE, host) == {}
    assert items_of([group(1)], Scheme.FP8, host) == {}
    assert items_of([group(1)], Scheme.DENSE, host, work=None) == {}
    assert total_ms(()) is None


def test_a_tier_says_whether_a_forward_is_compiled() -> None:
    host = host_with(dense=1)
    compiled = [tier for tier in Tier if Setting.of(host, TORCHAO, tier).compiled]
    assert compiled == [Tier.COMPILE, Tier.MAX]


def test_h200_rates_reproduce_the_measured_gemms() -> None:
    host, large = Host.load("h200"), [group(27070, 9216, 3072)]
    measured = {Scheme.DENSE: 1.96, Scheme.FP8: 1.06 + 0.10, Scheme.INT8: 2.54 + 0.10}
    for scheme, ms in measured.items():
        assert items_of(large, scheme, host)["Linears"] == pytest.approx(ms, rel=0.02)


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


def test_the_tier_is_part_of_the_prediction() -> None:
    def plan_at(speed: str):
        request = Request(speed=speed, resolution="848x480", frames=65)
        return resolve("hunyuanvideo", host=Host.load("h200"), request=request)

    assert plan_at("compile").components["transformer"].scheme is Scheme.FP8
    # torchao's eager chains take longer than its products save
    assert plan_at("eager").components["transformer"].scheme is Scheme.DENSE


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(load_rules().families)),
    st.sampled_from(["h200", "b200", "rtx4090", "cpu"]),
    st.sampled_from(list(Execution)),
    st.sampled_from(["auto", "eager", "compile"]),
    st.sampled_from([None, "256x256", "1280x704"]),
)
def test_items_sum_to_the_prediction_and_auto_is_never_slower_than_dense(
    family: str, host: str, execution: Execution, speed: str, resolution: str | None
) -> None:
    sizes = {} if resolution is None else {"resolution": resolution, "frames": 1}
    request = Request(execution=execution, speed=speed, **sizes)
    try:
        plan = resolve(family, host=Host.load(host), request=request)
    except DeniedError:
        return
    denoisers = [d for d in plan.decisions if plan.components[d.component].kind == "denoiser"]
    assert any(decision.predicted for decision in denoisers)
    for decision in plan.decisions:
        assert bool(decision.predicted) == (decision.predicted_ms is not None)
        assert all(item.ms >= 0 for item in decision.predicted)
        thousandths = sum(round(item.ms * 1000) for item in decision.predicted)
        assert thousandths == round((decision.predicted_ms or 0) * 1000)
    for decision in denoisers:
        if decision.accepted and decision.because is not Cause.MEMORY and plan.memory.fits:
            dense = next(d for d in denoisers if d.candidate is Scheme.DENSE)
            assert decision.predicted_ms <= dense.predicted_ms
