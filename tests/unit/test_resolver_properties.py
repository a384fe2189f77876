from __future__ import annotations

import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import Host, QuantPlan, Request, resolve
from quantpolicy.rules import load_rules
from quantpolicy.schemes import Cause, Scheme

GIB = 1 << 30


HOSTS = st.sampled_from(
    ["b200", "h200", "a100", "l40s", "rtx4090", "rtx5090", "mi300x", "apple-m", "cpu"]
)
BUDGETS = st.integers(min_value=1, max_value=300 * GIB)


def rank(plan: QuantPlan, ladder: list[str], demoted: set[str]) -> tuple[bool, int]:
    """Higher is better: resident before offloaded, then up the ladder, then dense, then levers."""
    scheme = str(plan.components["transformer"].scheme)
    order = (
        [s for s in ladder if s not in demoted] + ["dense"] + [s for s in ladder if s in demoted]
    )
    return plan.memory.fits, -order.index(scheme)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(load_rules().families)), HOSTS, BUDGETS, BUDGETS)
def test_more_memory_never_gives_a_worse_plan(family: str, host: str, one: int, two: int) -> None:
    machine = Host.load(host)
    less, more, full = (
        resolve(family, host=machine, request=Request(memory_bytes=budget))
        for budget in (min(one, two), max(one, two), 1 << 50)
    )
    trace = [d for d in full.decisions if d.component == "transformer"]
    ladder = [str(d.candidate) for d in trace if d.candidate is not Scheme.DENSE]
    demoted = {str(d.candidate) for d in trace if d.because is Cause.SLOWER}
    assert rank(more, ladder, demoted) >= rank(less, ladder, demoted)
    assert more.tier is less.tier


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(load_rules().families)),
    HOSTS,
    st.builds(
        Request,
        speed=st.sampled_from(["off", "auto", "eager"]),
        quality=st.sampled_from(["lossless", "high"]),
        memory_bytes=st.none() | BUDGETS,
        min_features=st.none() | st.integers(1, 4096),
        confidence=st.sampled_from(["measured", "derived"]),
    ),
)
def test_equal_inputs_give_equal_bytes(family: str, host: str, request: Request) -> None:
    first = resolve(family, host=Host.load(host), request=request)
    again = resolve(
        family,
        host=Host.model_validate_json(Host.load(host).model_dump_json()),
        request=Request.model_validate_json(request.model_dump_json()),
    )
    assert first.to_json() == again.to_json()
    names = [layer.name for layer in first.components["transformer"].layers]
    assert len(names) == len(set(names))


def test_resolving_imports_no_torch() -> None:
    import subprocess

    code = (
        "import sys, quantpolicy as q;"
        "q.resolve('ltx-2', host=q.Host.load('h200')).explain();"
        "assert not {'torch', 'diffusers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
