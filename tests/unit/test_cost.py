from __future__ import annotations

from by_hand import BLOCKS, component, linear, plan_of, target
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.cost import activation_bytes, component_bytes, plan_memory
from quantpolicy.layers import LinearGroup, Verdict, group_linears
from quantpolicy.schemes import Cause, ComponentKind, Scheme
from quantpolicy.workload import RowScale

GIB = 1 << 30
TAKEN, KEPT = Verdict(), Verdict(Cause.SMALL_M, "derived.small_m")


def group(rows: int | None, n: int = 1000, k: int = 1000) -> LinearGroup:
    return LinearGroup(linear("a", n, k), 1, rows, rows)


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
