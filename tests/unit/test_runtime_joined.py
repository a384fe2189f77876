"""JoinedLinear: one GEMM for several projections, right in any order of calls, and reversible."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from fused_plans import assert_same_state, storage_bytes
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from quantpolicy.errors import KernelMountError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.runtime.joined import JoinedLinear, join_linears, separate_linears
from quantpolicy.runtime.weights import quantise_weight, tensor_parts
from quantpolicy.schemes import Scheme

SIZES = (64, 32, 96)


class Attention(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(48, size, bias=bias) for size in SIZES)

    @property
    def parts(self) -> list[FusedLinear]:
        return [self.to_q, self.to_k, self.to_v]

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        other = x if other is None else other
        return torch.cat((self.to_q(x), self.to_k(other), self.to_v(other)), dim=-1)


class Count(TorchDispatchMode):
    """Counts the ops that multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += func.name() in ("quantpolicy::fp8_linear", "quantpolicy::int8_linear")
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[Scheme.FP8, Scheme.INT8])
def scheme(request: pytest.FixtureRequest) -> Scheme:
    return request.param


@pytest.fixture
def make(scheme, settings):
    """Return a function that makes an attention, its projections fused and apart."""

    def build(*, bias: bool = True, seed: int = 0) -> Attention:
        torch.manual_seed(seed)
        attention = Attention(bias=bias).bfloat16().eval().requires_grad_(False)
        for name, linear in attention.named_children():
            weight = quantise_weight(linear.weight, scheme, settings[scheme])
            linear.weight = nn.Parameter(weight, requires_grad=False)
            FusedLinear.adopt(linear, name=name)
        return attention

    return build


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_equals_three(make, x, bias):
    apart, joined = make(bias=bias), make(bias=bias)
    leader = join_linears(joined.parts)
    assert leader is joined.to_q
    with Count() as three:
        expected = apart(x)
    with Count() as one:
        output = joined(x)
    assert (three.calls, one.calls) == (3, 1)
    assert torch.equal(output, expected)
    assert leader.waiting is None


def test_stored_bytes_are_the_concatenation(make, scheme, settings):
    attention = make()
    torch.manual_seed(0)
    dense = Attention().bfloat16()
    leader = join_linears(attention.parts)
    whole = torch.cat([linear.weight for linear in dense.children()])
    parts = tensor_parts(quantise_weight(whole, scheme, settings[scheme]))
    assert torch.equal(leader.joined_qdata.float(), parts["qdata"].float())
    assert torch.equal(leader.joined_scale, parts["scale"])
    assert torch.equal(leader.joined_bias, torch.cat([part.bias for part in dense.children()]))


def test_memory_does_not_grow_and_nothing_is_kept_twice(make):
    attention = make()
    before = storage_bytes(attention)
    join_linears(attention.parts)
    assert storage_bytes(attention) == before
    assert [name for name, _ in attention.named_parameters()] == []
    for part in attention.parts:
        assert part.qdata.untyped_storage().data_ptr() == (
            attention.to_q.joined_qdata.untyped_storage().data_ptr()
        )


def test_another_input_is_multiplied_by_the_part_itself(make, x):
    apart, joined = make(), make()
    leader = join_linears(joined.parts)
    other = x.clone()
    assert torch.equal(joined(x, other), apart(x, other))
    assert torch.equal(joined.to_v(other), apart.to_v(other))
    # to_k and to_v of the first input still wait for it.
    assert torch.equal(joined.to_k(x), apart.to_k(x))
    assert torch.equal(joined.to_v(x), apart.to_v(x))
    assert leader.waiting is None


@pytest.mark.parametrize("order", ["vqk", "kvq", "qqkv", "qkkvv", "kqv"])
def test_any_order_of_calls_is_right(make, x, order):
    apart, joined = make(), make()
    join_linears(joined.parts)
    for letter in order:
        name = f"to_{letter}"
        assert torch.equal(getattr(joined, name)(x), getattr(apart, name)(x)), name


def test_a_write_to_the_input_is_noticed(make, x):
    apart, joined = make(), make()
    join_linears(joined.parts)
    joined.to_q(x)
    x.mul_(2)
    assert torch.equal(joined.to_k(x), apart.to_k(x))


def test_works_in_inference_mode(make, x):
    apart, joined = make(), make()
    join_linears(joined.parts)
    with torch.inference_mode():
        assert torch.equal(joined(x * 1), apart(x * 1))


def test_no_activation_is_kept_alive(make, x):
    joined = make()
    join_linears(joined.parts)
    input = x.clone()
    seen = weakref.ref(input)
    joined(input)
    del input
    gc.collect()
    assert seen() is None


def test_threads_do_not_mix_their_inputs(make):
    apart, joined = make(), make()
    join_linears(joined.parts)
    inputs = [torch.randn(3, 48).bfloat16() for _ in range(4)]
    expected = [apart(input) for input in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not torch.equal(joined(inputs[index]), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("bias", [True, False])
def test_separating_gives_equal_tensors_back(make, x, bias):
    apart, joined = make(bias=bias), make(bias=bias)
    before = storage_bytes(joined)
    parts = separate_linears(join_linears(joined.parts))
    assert [type(part) for part in parts] == [FusedLinear] * 3
    assert storage_bytes(joined) == before
    assert_same_state(joined, apart)
    assert [vars(part).keys() for part in joined.parts] == [vars(p).keys() for p in apart.parts]
    assert [n for n, _ in joined.named_parameters()] == [n for n, _ in apart.named_parameters()]
    assert torch.equal(joined(x), apart(x))
    for part in joined.parts:
        assert part.qdata.untyped_storage().nbytes() == part.qdata.numel()


def test_the_state_dict_is_unfused_and_loads_both_ways(make, x):
    apart, joined = make(), make(seed=1)
    join_linears(joined.parts)
    joined.load_state_dict(apart.state_dict())
    assert_same_state(joined, apart)
    assert torch.equal(joined(x), apart(x))
    other = make(seed=2)
    other.load_state_dict(joined.state_dict())
    assert torch.equal(other(x), apart(x))
    with pytest.raises(RuntimeError, match=r"Missing key.*to_k\.bias"):
        joined.load_state_dict(make(bias=False).state_dict())
    bare = make(bias=False)
    join_linears(bare.parts)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*to_k\.bias"):
        bare.load_state_dict(apart.state_dict())


def test_deepcopy_is_independent_and_still_joined(make, x):
    joined = make()
    join_linears(joined.parts)
    twin = copy.deepcopy(joined)
    assert twin.to_k.leader is twin.to_q
    assert storage_bytes(twin) == storage_bytes(joined)
    with Count() as one:
        assert torch.equal(twin(x), joined(x))
    assert one.calls == 2
    twin.to_q.joined_scale.mul_(2)
    assert not torch.equal(twin(x), joined(x))


def test_devices_change_everything_and_dtypes_nothing(make, x):
    joined = make()
    join_linears(joined.parts)
    expected = joined(x)
    assert torch.equal(joined.to("cpu")(x), expected)
    with pytest.raises(KernelMountError, match="a quantised module can change its device only"):
        joined.half()
    assert torch.equal(joined(x), expected)
    joined.to("meta")
    assert {part.weight.device.type for part in joined.parts} == {"meta"}


def test_one_part_cannot_be_released(make):
    joined = make()
    join_linears(joined.parts)
    with pytest.raises(KernelMountError, match="to_k: joined with other projections"):
        joined.to_k.release()
    assert isinstance(joined.to_k, JoinedLinear)


def test_gradients_are_refused(make, x):
    joined = make()
    join_linears(joined.parts)
    with pytest.raises(KernelMountError, match="to_q: a gradient is wanted"):
        joined(x.requires_grad_())


def test_compiles_to_one_product_without_a_break(make, x):
    apart, joined = make(), make()
    leader = join_linears(joined.parts)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(joined, fullgraph=True, backend=counter)
    with torch.no_grad():
        for rows in (5, 6, 7, 8):
            input = torch.randn(2, rows, 48).bfloat16()
            assert torch.equal(compiled(input), apart(input))
            assert leader.waiting is None
            # A second call with the same input finds nothing that the first left behind.
            assert torch.equal(compiled(input), apart(input))
    assert counter.frame_count == 2
    sizes = [
        node.meta["example_value"].shape[-1]
        for node in counter.graphs[0].graph.nodes
        if "linear" in str(node.target) or "mm" in str(node.target)
    ]
    assert sizes.count(sum(SIZES)) >= 1
    assert not set(sizes) & set(SIZES)
    torch._dynamo.reset()


def test_repr_names_the_place(make):
    joined = make()
    join_linears(joined.parts)
    assert "part=2 of 3" in repr(joined.to_k)
