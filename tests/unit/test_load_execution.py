"""One checkpoint, both executions: baking ignores which, loading takes the one asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from baking import COMPONENT, HOST, WAN, forward, save_dense
from fused_plans import assert_same_state, leaders

from prequant import bake, load
from quantpolicy import Host, Request, load_rules, resolve
from quantpolicy.errors import RequestError
from quantpolicy.kernels.linear import FusedLinear
from quantpolicy.rules import RuleTable
from quantpolicy.runtime import apply_plan, unmount
from quantpolicy.runtime.linear import QuantisedLinear
from quantpolicy.schemes import Execution

OVERLAY = """
evidence:
  test.fusions: {kind: measured, source: a test, date: 2026-11-30}
families:
  wan2.2-ti2v-5b:
    override: [fusions]
    fusions:
      self-attention.qkv: {pays: measured, expect: 30, evidence: [test.fusions]}
      cross-attention.kv: {pays: measured, expect: 30, evidence: [test.fusions]}
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("dense") / COMPONENT
    _, inputs = save_dense(WAN, folder)
    return folder, inputs


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> RuleTable:
    path = tmp_path_factory.mktemp("rules") / "fusions.yaml"
    path.write_text(OVERLAY)
    return load_rules(path)


def request_for(scheme: str, execution: Execution) -> Request:
    return Request(transformer=scheme, min_features=16, execution=execution)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_one_checkpoint_serves_both_executions(
    dense: tuple[Path, dict[str, object]], rules: RuleTable, tmp_path: Path, scheme: str
) -> None:
    source, inputs = dense
    requests = {one: request_for(scheme, one) for one in Execution}
    plans = {
        one: resolve(source, host=Host.load(HOST), request=request, rules=rules)
        for one, request in requests.items()
    }
    assert len({plan.weights_digest for plan in plans.values()}) == 1
    assert [len(plan.fusions) for plan in plans.values()] == [0, 4]
    for one, plan in plans.items():
        bake(source, tmp_path / one, plan=plan)
    weights = [sorted((tmp_path / one).glob("*.safetensors")) for one in Execution]
    for first, second in zip(*weights, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes()

    stock = load(tmp_path / Execution.TORCHAO, rules=rules)
    assert not any(isinstance(module, FusedLinear) for module in stock.model.modules())
    for folder in Execution:
        loaded = load(tmp_path / folder, request=requests[Execution.FUSED], rules=rules)
        assert loaded.report.used == "baked"
        assert loaded.report.component.joined == len(leaders(loaded.model)) == 4
        (count,) = loaded.report.component.schemes
        assert count.fused == count.layers > 0
        assert_same_state(loaded.model, stock.model)
        applied = load(tmp_path / folder, request=requests[Execution.TORCHAO], rules=rules).model
        assert any(isinstance(module, QuantisedLinear) for module in applied.modules())
    expected, output = forward(stock.model, inputs), forward(loaded.model, inputs)
    tolerance = 0.0 if scheme == "fp8" else 0.04
    assert (output.float() - expected.float()).norm() <= tolerance * expected.float().norm()
    unmount(loaded.model)
    assert torch.equal(forward(loaded.model, inputs), expected)


def test_requantising_takes_the_execution_too(
    dense: tuple[Path, dict[str, object]], rules: RuleTable, tmp_path: Path
) -> None:
    source, inputs = dense
    request = request_for("int8", Execution.FUSED)
    plan = resolve(source, host=Host.load(HOST), request=request, rules=rules)
    bake(source, tmp_path / "fp8", plan=resolve_fp8(source, rules))
    loaded = load(
        tmp_path / "fp8", request=request, rules=rules, on_stale="requantise", source=source
    )
    assert loaded.report.used == "requantised"
    assert len(leaders(loaded.model)) == len(plan.fusions) == 4
    baked = load_dense(source, plan)
    assert torch.equal(forward(loaded.model, inputs), forward(baked, inputs))


def resolve_fp8(source: Path, rules: RuleTable) -> object:
    request = request_for("fp8", Execution.TORCHAO)
    return resolve(source, host=Host.load(HOST), request=request, rules=rules)


def load_dense(source: Path, plan: object) -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(source, torch_dtype=torch.bfloat16)
    apply_plan(model, plan)
    return model


def test_saving_a_loaded_model_is_refused(
    dense: tuple[Path, dict[str, object]], rules: RuleTable, tmp_path: Path
) -> None:
    source, _ = dense
    bake(source, tmp_path / "out", plan=resolve_fp8(source, rules))
    model = load(tmp_path / "out", rules=rules).model
    with pytest.raises(RequestError, match="prequant bake"):
        model.save_pretrained(tmp_path / "again")
