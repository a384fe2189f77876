from __future__ import annotations

import json
import re

import pytest

from quantpolicy.cli import main
from quantpolicy.cli_tables import family_facts
from quantpolicy.rules import load_rules

WAN = "wan2.2-ti2v-5b"


def test_one_family_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", WAN, "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    rules = load_rules()
    assert {key: details[key] for key in family_facts(rules, WAN)} == family_facts(rules, WAN)
    assert [rule["id"] for rule in details["rules"]] == [rule.id for rule in rules.rules_for(WAN)]
    assert all(rule["origin"] == rules.origin(rule["id"]) for rule in details["rules"])
    cited = {key for rule in rules.rules_for(WAN) for key in rule.evidence}
    measured = {key for keys in rules.families[WAN].measured.values() for key in keys}
    kernels = {key for kernel in rules.families[WAN].kernels for key in kernel.evidence}
    assert set(details["evidence"]) == cited | measured | kernels


def test_the_kernels_of_a_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "minimax-h3", "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    kernel = next(kernel for kernel in details["kernels"] if kernel["op"] == "swiglu")
    assert kernel == {
        "op": "swiglu",
        "component": "vae",
        "contract": "high",
        "evidence": ["l.fused-ops-decoder", "l.minimax-h3-decoder"],
    }
    assert set(kernel["evidence"]) <= set(details["evidence"])
    assert main(["families", "minimax-h3"]) == 0
    row = r"^swiglu +vae +high +l\.fused-ops-decoder l\.minimax-h3-decoder$"
    assert re.search(row, capsys.readouterr().out, re.MULTILINE)


def test_one_family_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", WAN]) == 0
    out = capsys.readouterr().out
    rules = load_rules()
    size = rules.families[WAN].components["vae"].size_bytes / 2**30
    assert re.search(rf"^vae +AutoencoderKLWan, {size:.2f} GiB dense$", out, re.MULTILINE)
    assert re.search(r"^nvfp4 +denied$", out, re.MULTILINE)
    deny = rf"^wan\.deny\.nvfp4 +deny +nvfp4 +not_validated +{rules.origin('wan.deny.nvfp4')}$"
    assert re.search(deny, out, re.MULTILINE)
    assert re.search(r"^l\.wan-floor +measured +\S", out, re.MULTILINE)


def test_one_family_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", WAN, "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| family | {WAN} |"
    assert "| rule | effect | schemes | because | modules | where |" in lines


def test_the_generic_family_has_rules_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "generic", "--json"]) == 0
    details = json.loads(capsys.readouterr().out)
    assert list(details) == ["name", "rules", "evidence"]
    assert "generic.fp8.conditioning" in [rule["id"] for rule in details["rules"]]


def test_an_unknown_family_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families", "wan2.2-ti2v-5"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: family 'wan2.2-ti2v-5': the rule table has no such family; ")
    assert (WAN in err, err.count("\n")) == (True, 1)
