"""What the commands ``families``, ``lint`` and ``probe`` show, as tables, Markdown or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from quantpolicy.console import markdown_table, print_json, print_table, print_text
from quantpolicy.errors import RequestError
from quantpolicy.layers import is_met_by_floor
from quantpolicy.ops import OPS
from quantpolicy.rule_schema import Effect, FamilySpec
from quantpolicy.schemes import ComponentKind, Scheme
from quantpolicy.text import format_bytes

if TYPE_CHECKING:
    from quantpolicy.inventory.model import Inventory
    from quantpolicy.lint import LintFinding
    from quantpolicy.rules import RuleTable

SHOWN_SCHEMES = (Scheme.INT8, Scheme.FP8, Scheme.MXFP8, Scheme.NVFP4)


def denials(rules: RuleTable, family: str) -> dict[Scheme, str]:
    """Return the id of the rule that denies each denied scheme of the family's denoiser."""
    denied: dict[Scheme, str] = {}
    for rule in rules.rules_for(family):
        if rule.effect is Effect.DENY and rule.component is ComponentKind.DENOISER:
            for scheme in rule.schemes:
                if not is_met_by_floor(rule, rules.schemes[scheme]):
                    denied.setdefault(scheme, rule.id)
    return denied


def family_facts(rules: RuleTable, family: str) -> dict[str, object]:
    """Return what the table says of a family, as plain JSON values."""
    spec = rules.families[family]
    denied = denials(rules, family)
    automatic = {scheme for ladder in rules.file.ladders for scheme in ladder.schemes}
    return {
        "name": family,
        "title": spec.title,
        "class_name": spec.recognise.class_name,
        "repos": list(spec.recognise.repos),
        "components": {name: part.kind.value for name, part in spec.components.items()},
        "schemes": {
            scheme.value: {
                "allowed": scheme not in denied,
                "automatic": scheme in automatic and scheme not in denied,
                "rule": denied.get(scheme, ""),
                "evidence": list(_evidence(rules, spec, denied, scheme)),
            }
            for scheme in SHOWN_SCHEMES
        },
    }


def _evidence(
    rules: RuleTable, spec: FamilySpec, denied: Mapping[Scheme, str], scheme: Scheme
) -> tuple[str, ...]:
    """Return the evidence behind the denial, or else of the measurements."""
    if scheme in denied:
        return rules.rule(denied[scheme]).evidence
    return spec.measured.get(scheme, ())


def print_families(rules: RuleTable, *, as_json: bool, as_markdown: bool) -> None:
    """Write the families of the table."""
    facts = [family_facts(rules, family) for family in rules.families]
    if as_json:
        print_json(facts)
        return
    columns = ["family", "class", *(scheme.value for scheme in SHOWN_SCHEMES)]
    rows = [_family_row(item) for item in facts]
    if as_markdown:
        print_text(markdown_table(columns, rows))
        return
    print_table(columns, rows)
    print_text("measured: evidence on this family; derived: by the probe or by analogy;")
    print_text("explicit: never chosen by auto; denied: refused by a rule, which --lift lifts.")


def family_details(rules: RuleTable, family: str) -> dict[str, object]:
    """Return all that the table says of a family, its rules and their evidence, as JSON values.

    Raises:
        RequestError: there is no such family; ``generic`` has rules only.
    """
    own = rules.rules_for(family)
    spec = rules.families.get(family)
    cited = [key for rule in own for key in rule.evidence]
    if spec is not None:
        cited += [key for keys in spec.measured.values() for key in keys]
        cited += [key for kernel in spec.kernels for key in kernel.evidence]
    facts: dict[str, object] = {"name": family}
    if spec is not None:
        facts = {**family_facts(rules, family), "kernels": _kernels(spec)}
    return {
        **facts,
        "rules": [
            {**rule.model_dump(mode="json"), "origin": rules.origin(rule.id)} for rule in own
        ],
        "evidence": {
            key: rules.evidence[key].model_dump(mode="json") for key in dict.fromkeys(cited)
        },
    }


def print_family(rules: RuleTable, family: str, *, as_json: bool, as_markdown: bool) -> None:
    """Write one family of the table."""
    details = family_details(rules, family)
    if as_json:
        print_json(details)
        return
    for columns, rows in _family_tables(rules, family, details):
        if as_markdown:
            print_text(markdown_table(columns, rows) + "\n")
        else:
            print_table(columns, rows)


def _family_tables(
    rules: RuleTable, family: str, details: Mapping[str, object]
) -> Iterator[tuple[Sequence[str], list[list[str]]]]:
    """Yield the columns and rows of each table about a family; empty tables are left out."""
    facts: list[list[str]] = []
    if family in rules.families:
        spec = rules.families[family]
        schemes = details["schemes"]
        assert isinstance(schemes, dict)
        facts = [["title", spec.title], ["repositories", ", ".join(spec.recognise.repos)]]
        facts += [
            [name, f"{part.class_name or part.kind}, {format_bytes(part.size_bytes)} dense"]
            for name, part in spec.components.items()
        ]
        facts += [[name, _scheme_cell(scheme)] for name, scheme in schemes.items()]
    own = [
        [
            rule.id,
            rule.effect.value,
            " ".join(rule.schemes),
            rule.because.value,
            " ".join(rule.tokens),
            rules.origin(rule.id),
        ]
        for rule in rules.rules_for(family)
    ]
    kernels = details.get("kernels", [])
    assert isinstance(kernels, list)
    mounts = [
        [each["op"], each["component"], each["contract"], " ".join(each["evidence"])]
        for each in kernels
    ]
    evidence = details["evidence"]
    assert isinstance(evidence, dict)
    records = {key: rules.evidence[key] for key in evidence}
    cited = [[key, item.kind.value, item.note or item.source] for key, item in records.items()]
    tables = (
        (("family", family), facts),
        (("rule", "effect", "schemes", "because", "modules", "where"), own),
        (("kernel", "component", "contract", "evidence"), mounts),
        (("evidence", "kind", "what"), cited),
    )
    yield from ((columns, rows) for columns, rows in tables if rows)


def _kernels(spec: FamilySpec) -> list[dict[str, object]]:
    """Return the fused ops that a family may mount, with what each promises."""
    return [
        {
            "op": kernel.op,
            "component": kernel.component.value,
            "contract": OPS[kernel.op].contract.value,
            "evidence": list(kernel.evidence),
        }
        for kernel in spec.kernels
    ]


def _family_row(facts: Mapping[str, object]) -> list[str]:
    schemes = facts["schemes"]
    assert isinstance(schemes, dict)
    cells = [_scheme_cell(schemes[scheme.value]) for scheme in SHOWN_SCHEMES]
    return [str(facts["name"]), str(facts["class_name"]), *cells]


def _scheme_cell(scheme: Mapping[str, object]) -> str:
    if not scheme["allowed"]:
        return "denied"
    confidence = "measured" if scheme["evidence"] else "derived"
    return confidence if scheme["automatic"] else f"{confidence}, explicit"


def print_findings(findings: Sequence[LintFinding], *, as_json: bool) -> None:
    """Write what lint found."""
    if as_json:
        print_json([finding.model_dump(mode="json") for finding in findings])
    elif not findings:
        print_text("nothing to repair")
    else:
        rows = [[item.severity.value, item.code, item.where, item.message] for item in findings]
        print_table(["severity", "check", "where", "what"], rows)


def probe_model(model: str, rules: RuleTable) -> dict[str, Inventory]:
    """Return the inventories of the model's denoisers with freshly probed rows. Imports torch.

    Raises:
        RequestError: the model cannot be read, or its family declares no inputs to probe with.
    """
    from quantpolicy.inventory.shipped import load_inventory
    from quantpolicy.recognise import target_from

    target = target_from(model, rules)
    spec = rules.families.get(target.family)
    if spec is None or not spec.inputs or spec.tiny not in rules.file.tiny:
        raise RequestError(
            f"model {model!r}",
            f"family {target.family} declares no inputs to probe with",
            allowed="a family with `inputs` and a `tiny` model",
            remedy="add them to the family through --rules",
        )
    try:
        from quantpolicy.measure.probe import probe_inventory
        from quantpolicy.measure.tiny import denoiser_of
    except ImportError as error:
        raise RequestError(
            "probe", f"needs torch and diffusers: {error}", remedy="install quantpolicy[runtime]"
        ) from error
    released = load_inventory(denoiser_of(spec).inventory)
    probed = probe_inventory(released, spec, rules.file.tiny[spec.tiny])
    return {
        name: part.inventory.with_rows_of(probed)
        for name, part in target.components.items()
        if part.kind is ComponentKind.DENOISER and part.inventory is not None
    }


def print_probe(model: str, rules: RuleTable, *, as_json: bool) -> None:
    """Probe the model and write the rows of every Linear."""
    inventories = probe_model(model, rules)
    if as_json:
        print_json({name: item.model_dump(mode="json") for name, item in inventories.items()})
        return
    for name, inventory in inventories.items():
        rows = [
            [
                fact.name,
                f"{fact.out_features}x{fact.in_features}",
                "-" if fact.rows is None else str(fact.rows),
                "yes" if fact.zero_rows else "",
            ]
            for fact in inventory.linears
        ]
        print_table([name, "shape", "rows", "zero rows"], rows)
