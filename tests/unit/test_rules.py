from __future__ import annotations

import json
import re
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import overlay, rules
from quantpolicy.errors import RequestError, RuleTableError
from quantpolicy.host import Backend, Host, HostClass
from quantpolicy.json_schema import SCHEMA_FILE, schema_text, write_schema
from quantpolicy.rule_schema import Effect, RuleFile
from quantpolicy.rules import (
    RuleTable,
    build_table,
    find_families_file,
    is_whole_table,
    load_rules,
    load_table,
)
from quantpolicy.schemes import Scheme
from quantpolicy.yaml_source import Plain, parse_yaml, read_yaml

TABLE = """\
version: 1
min_features: 512
schemes:
  int8: {granularity: per_row, alignment: 16, min_sm: 75, dtypes: [bfloat16],
    weight_dtype: int8, kinds: [denoiser, text_encoder]}
  fp8: {granularity: per_row, alignment: 16, dtypes: [bfloat16], activation_floor: 1e-12,
    weight_dtype: host, kinds: [denoiser, text_encoder]}
ladders:
  - {backend: cuda, host_classes: [data_center], min_sm: 89, schemes: [fp8, int8]}
  - {backend: cuda, host_classes: [data_center, consumer], schemes: [int8]}
  - {backend: rocm, host_classes: [data_center], archs: [gfx942], schemes: [fp8]}
evidence:
  d.one:
    kind: published
    source: a page
    date: 2026-11-30
    versions: {torch: "2.10"}
    metrics: {lpips: 1e-12}
rules:
  - {id: common.deny, schemes: [nvfp4], effect: deny, because: not_validated}
groups:
  wan:
    - id: wan.exclude
      schemes: [fp8]
      effect: exclude
      because: zero_rows
      tokens: [condition_embedder]
      expect: {wan.a: 5}
      evidence: [d.one]
  other: []
generic:
  - {id: generic.deny, schemes: [mxfp8], effect: deny, because: not_validated}
families:
  wan.a:
    title: Wan A
    recognise: {class_name: WanTransformer3DModel, config: {num_layers: 30, qk_norm: "off"}}
    components:
      transformer: {kind: denoiser, size_bytes: 1000, keep_in_fp32: [norm1]}
    groups: [wan, other]
    rules:
      - id: wan.a.pad
        schemes: [int8]
        effect: pad_rows
        because: small_m
        tokens: [to_q, "norm*"]
        rows: 17
        expect: 3
    measured: {fp8: [d.one]}
  plain:
    title: Plain
    recognise: {class_name: PlainModel}
    components: {transformer: {kind: denoiser, size_bytes: 1}}
"""


def write(folder: Path, text: str, name: str = "t.yaml") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def table(folder: Path, text: str = TABLE) -> RuleTable:
    return load_table(write(folder, text))


def refusal(folder: Path, text: str) -> RuleTableError:
    with pytest.raises(RuleTableError) as caught:
        table(folder, text)
    return caught.value


def short(error: RuleTableError) -> tuple[str, str]:
    return error.where.rpartition("/")[2], error.found


def replaced(old: str, new: str) -> str:
    assert TABLE.count(old) == 1
    return TABLE.replace(old, new)


def host(backend: str, arch: str, host_class: str) -> Host:
    return Host(
        name="h",
        backend=Backend(backend),
        arch=arch,
        host_class=HostClass(host_class),
        memory_bytes=1,
        fp8_dtype="",
    )


def test_a_table_is_read_with_exact_values(tmp_path) -> None:
    found = table(tmp_path)
    assert found.min_features == 512
    assert found.schemes[Scheme.FP8].activation_floor == 1e-12
    assert found.evidence["d.one"].versions == {"torch": "2.10"}
    assert found.evidence["d.one"].metrics == {"lpips": 1e-12}
    assert found.evidence["d.one"].date.isoformat() == "2026-11-30"
    assert list(found.families) == ["wan.a", "plain"]
    assert found.families["wan.a"].recognise.config == {"num_layers": 30, "qk_norm": "off"}
    assert found.rule("wan.a.pad").effect is Effect.PAD_ROWS


def test_rules_come_in_order_common_groups_own(tmp_path) -> None:
    found = table(tmp_path)
    ids = {name: [rule.id for rule in found.rules_for(name)] for name in ("wan.a", "plain")}
    assert ids == {
        "wan.a": ["common.deny", "wan.exclude", "wan.a.pad"],
        "plain": ["common.deny"],
    }
    assert [rule.id for rule in found.rules_for("generic")] == ["common.deny", "generic.deny"]
    assert found.rule_ids() == ("common.deny", "wan.exclude", "generic.deny", "wan.a.pad")


def test_origin_is_the_line_of_the_rule(tmp_path) -> None:
    found = table(tmp_path)
    lines = TABLE.splitlines()
    for rule_id in found.rule_ids():
        name, _, line = found.origin(rule_id).rpartition(":")
        assert name == str(tmp_path / "t.yaml")
        assert f"id: {rule_id}" in lines[int(line) - 1]


def test_unknown_names_are_answered_with_near_ones(tmp_path) -> None:
    found = table(tmp_path)
    with pytest.raises(RequestError, match=r"near: wan\.exclude"):
        found.rule("wan.exclud")
    with pytest.raises(RequestError, match=r"near: wan\.a;"):
        found.rules_for("wan.b")
    with pytest.raises(RequestError, match="no such rule"):
        found.origin("zzz")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (("cuda", "sm90", "data_center"), ["fp8", "int8"]),
        (("cuda", "sm89", "data_center"), ["fp8", "int8"]),
        (("cuda", "sm80", "data_center"), ["int8"]),
        (("cuda", "sm120", "consumer"), ["int8"]),
        (("cuda", "sm89", "workstation"), []),
        (("rocm", "gfx942", "data_center"), ["fp8"]),
        (("rocm", "gfx90a", "data_center"), []),
        (("cpu", "", "cpu"), []),
    ],
)
def test_the_first_ladder_that_matches_counts(tmp_path, facts, expected) -> None:
    ladder = table(tmp_path).ladder_for(host(*facts))
    assert [scheme.value for scheme in ladder] == expected


def test_the_digest_is_of_the_content_not_the_form(tmp_path) -> None:
    digest = table(tmp_path).digest
    assert re.fullmatch("[0-9a-f]{64}", digest)
    dumped = yaml.safe_dump(read_yaml(tmp_path / "t.yaml").values, sort_keys=True)
    assert table(tmp_path, dumped).digest == digest
    assert table(tmp_path, replaced("min_features: 512", "min_features: 513")).digest != digest


WRONG = [
    ("schemes: [nvfp4]", "schemes: [fp9]", "rules[0].schemes", "unknown scheme 'fp9'"),
    ("because: small_m", "because: requested", "because", "cause 'requested' is the resolver's"),
    ("because: small_m", "because: smal_m", "because", "unknown cause 'smal_m'"),
    ("effect: pad_rows", "effect: pad", "effect", "unknown effect 'pad'"),
    ("rows: 17", "row: 17", "rules[0]", "unknown key 'row'"),
    ("        rows: 17\n", "", "rows", "rows is missing with pad_rows"),
    ("rows: 17", "rows: 1", "rows", "1 where a number of more than 1 is meant"),
    ("rows: 17", 'rows: "17"', "rows", '"17" where a whole number is meant'),
    ("rows: 17", "rows: 17.0", "rows", "17.0 where a whole number is meant"),
    ("rows: 17", "rows: true", "rows", "true where a whole number is meant"),
    ("expect: 3", "expect: -3", "expect", "a negative number"),
    ("        expect: 3\n", "", "expect", "the expected number of matches is missing"),
    ("expect: {wan.a: 5}", "expect: {wan.b: 5}", "expect", "unknown family 'wan.b'"),
    ("expect: {wan.a: 5}", "expect: {plain: 5}", "expect", "the rule does not apply to family"),
    ("expect: {wan.a: 5}", "expect: {wan.a: x}", "expect.wan.a", '"x" where a whole number'),
    ('tokens: [to_q, "norm*"]', "tokens: []", "tokens", "pad_rows names no module"),
    ('tokens: [to_q, "norm*"]', "tokens: [to_q, to_q]", "tokens", "token 'to_q' is given twice"),
    ('tokens: [to_q, "norm*"]', "tokens: [a..b]", "tokens", "token 'a..b' is no name of modules"),
    ('tokens: [to_q, "norm*"]', "tokens: ['']", "tokens", "token '' is no name of modules"),
    ('tokens: [to_q, "norm*"]', "tokens: [.a]", "tokens", "token '.a' is no name of modules"),
    ('tokens: [to_q, "norm*"]', "tokens: to_q", "tokens", '"to_q" where a list is meant'),
    ("id: wan.a.pad", "id: Wan", "id", '"Wan": String should match pattern'),
    ("id: wan.a.pad", "id: wan.exclude", "id", "rule id 'wan.exclude' is already taken at"),
    ("evidence: [d.one]", "evidence: [d.two]", "evidence", "unknown evidence 'd.two'"),
    ("min_sm: 75, dtypes", "evidence: [d], dtypes", "evidence", "unknown evidence 'd'"),
    (
        "    measured: {fp8",
        "    tiny: wan\n    measured: {fp8",
        "families.wan.a.tiny",
        "unknown tiny model 'wan'",
    ),
    (
        "    measured: {fp8",
        "    short_streams: {a b: 0}\n    measured: {fp8",
        "families.wan.a.short_streams.a b",
        "token 'a b' is no name of modules",
    ),
    ("measured: {fp8: [d.one]}", "measured: {fp8: [d]}", "measured.fp8", "unknown evidence 'd'"),
    ("measured: {fp8: [d.one]}", "measured: {f8: [d.one]}", "measured.f8", "unknown scheme 'f8'"),
    ("groups: [wan, other]", "groups: [wan2]", "groups", "unknown group 'wan2'"),
    ("version: 1\n", "version: 2\n", "version", "version 2"),
    ("min_features: 512", "min_features: 0", "min_features", "0"),
    ("title: Plain", "title:", "title", "nothing where text is meant"),
    ("title: Plain", "title: 2.10", "title", "2.1 where text is meant"),
    ("title: Plain", "title: true", "title", "true where text is meant"),
    ('torch: "2.10"', "torch: 2.10", "versions.torch", "2.1 where text is meant"),
    ("    title: Plain\n", "", "families.plain", "required key 'title' is missing"),
    ("date: 2026-11-30", "date: 2026-11-31", "date", '"2026-11-31" where a date'),
    ("date: 2026-11-30", "date: 86400", "date", "86400 where a date"),
    ("lpips: 1e-12", "lpips: low", "metrics.lpips", '"low" where a number is meant'),
    ("lpips: 1e-12", 'lpips: "1e-12"', "metrics.lpips", '"1e-12" where a number is meant'),
    ("keep_in_fp32: [norm1]", "keep_in_fp32: [a b]", "keep_in_fp32", "token 'a b' is no name"),
    ("keep_in_fp32: [norm1]", "dtype: bf16", "dtype", "unknown dtype 'bf16'"),
    ('qk_norm: "off"', "qk_norm: off", "config.qk_norm", "the bare word 'off'"),
    ("schemes: [fp8]}", "schemes: [mxfp8]}", "schemes", "scheme 'mxfp8' has no policy"),
    ("  plain:\n", "  generic:\n", "families.generic", "the name generic is taken"),
    ("schemes: [nvfp4]", "schemes: [dense]", "schemes", "dense cannot be ruled out"),
    ("schemes: [nvfp4]", "schemes: []", "schemes", "[]: Tuple should have at least 1 item"),
    ("{id: common.deny, ", "{id: common.deny, rows: 17, ", "rows", "rows is 17 with deny"),
    ("{id: common.deny, ", "{id: common.deny, tokens: [a], ", "tokens", "deny speaks of whole"),
    ("{id: common.deny, ", "{id: common.deny, expect: 1, ", "expect", "deny speaks of whole"),
    (
        "{id: generic.deny, schemes: [mxfp8], effect: deny,",
        "{id: generic.deny, schemes: [mxfp8], effect: exclude, tokens: [a], expect: 1,",
        "expect",
        "common and generic rules have no one count",
    ),
]


def expected_line(text: str, *, is_removed: bool) -> int:
    """Return the first changed line; for a removed key, that of the rule or family it was in."""
    lines, changed = TABLE.splitlines(), text.splitlines()
    line = next(i for i, (old, new) in enumerate(zip(lines, changed, strict=False)) if old != new)
    while is_removed and not re.match(r" *- id:|  [a-z.]+:$", changed[line]):
        line -= 1
    return line + 1


@pytest.mark.parametrize(("old", "new", "field", "found"), WRONG)
def test_every_fault_names_its_line_its_field_and_the_fault(
    tmp_path, old: str, new: str, field: str, found: str
) -> None:
    text = replaced(old, new)
    error = refusal(tmp_path, text)
    where = error.where.removeprefix(str(tmp_path / "t.yaml") + ":")
    assert where.endswith(field)
    assert error.found.startswith(found)
    assert error.remedy
    assert int(where.split(" ")[0]) == expected_line(text, is_removed=not new)
    assert error.others == ()


def test_the_message_of_an_unknown_scheme(tmp_path) -> None:
    error = refusal(tmp_path, replaced("schemes: [nvfp4]", "schemes: [int8, fp9]"))
    assert str(error) == (
        f"{tmp_path}/t.yaml:20 rules[0].schemes: unknown scheme 'fp9'; known: dense, fp8, int8,"
        " layerwise_fp8, mxfp8, nvfp4; did you mean 'fp8'."
    )


def test_an_unknown_cause_is_answered_with_the_causes_of_rules_only(tmp_path) -> None:
    error = refusal(tmp_path, replaced("because: small_m", "because: smal_m"))
    assert error.remedy == "did you mean 'small_m'"
    assert "not_validated" in error.allowed
    assert "first_accepted" not in error.allowed


def test_every_fault_of_the_file_is_collected(tmp_path) -> None:
    text = replaced("schemes: [nvfp4]", "schemes: [fp9]").replace("rows: 17", "row: 17")
    error = refusal(tmp_path, text.replace("title: Plain", "title: 7"))
    found = [short(each) for each in (error, *error.others)]
    assert found == [
        ("t.yaml:20 rules[0].schemes", "unknown scheme 'fp9'"),
        ("t.yaml:46 families.wan.a.rules[0]", "unknown key 'row'"),
        ("t.yaml:50 families.plain.title", "7 where text is meant"),
    ]
    assert str(error).endswith(f"(also wrong: {error.others[0].where}, {error.others[1].where}).")
    assert [each["found"] for each in error.to_dict()["others"]] == [found[1][1], found[2][1]]


def test_a_misspelt_key_comes_before_the_key_it_leaves_missing(tmp_path) -> None:
    error = refusal(tmp_path, replaced("min_features: 512", "min_feature: 512"))
    assert short(error) == ("t.yaml:2", "unknown key 'min_feature'")
    assert error.remedy == "did you mean 'min_features'"
    assert [each.found for each in error.others] == ["required key 'min_features' is missing"]
    several = refusal(tmp_path, "version: 1\nmin_features: 1\nschemes: {}\n")
    assert [each.found for each in (several, *several.others)] == [
        "required key 'ladders' is missing",
        "required key 'evidence' is missing",
        "required key 'families' is missing",
    ]


def test_a_pattern_of_two_ids_names_both_places(tmp_path) -> None:
    error = refusal(tmp_path, replaced("id: wan.a.pad", "id: wan.exclude"))
    assert short(error)[0] == "t.yaml:41 families.wan.a.rules[0].id"
    assert error.found.endswith("/t.yaml:23")


OVERLAY = overlay.__doc__ or ""


def test_the_example_of_the_documentation_works(tmp_path) -> None:
    example = textwrap.dedent(OVERLAY.partition("::\n")[2])
    shipped = load_rules()
    found = load_rules(write(tmp_path, example, "mine.yaml"))
    assert shipped.min_features == 512
    assert found.min_features == 256
    assert found.evidence["mine.2026"].source == "my own run"
    assert found.families["wan2.2-ti2v-5b"].note == "fp8 keeps the patch embedding too"
    added = found.rule("wan2.2-ti2v-5b.fp8.patch-embedding")
    assert added in found.rules_for("wan2.2-ti2v-5b")
    assert added not in found.rules_for("wan2.2-t2v-a14b")
    assert found.rule("wan.deny.nvfp4").evidence == ("mine.2026",)
    assert found.rule("wan.deny.nvfp4") in found.rules_for("wan2.1-t2v-14b")
    assert found.origin("wan.deny.nvfp4").startswith(f"{tmp_path}/mine.yaml:")
    assert found.rule_ids().index("wan.deny.nvfp4") == shipped.rule_ids().index("wan.deny.nvfp4")
    assert found.digest != shipped.digest
    assert load_rules().digest == shipped.digest


def merged(folder: Path, text: str) -> RuleTable:
    return table(folder).with_overlays(write(folder, text, "over.yaml"))


def test_an_overlay_adds_a_family_rules_groups_and_keys(tmp_path) -> None:
    found = merged(
        tmp_path,
        """\
        groups:
          wan:
            - {id: wan.new, schemes: [int8], effect: deny, because: slower, evidence: [d.two]}
          mine: []
        evidence:
          d.two: {kind: measured, source: s, date: 2026-12-01}
        ladders:
          - {backend: mps, host_classes: [integrated], schemes: [int8]}
        families:
          plain: {groups: [mine], measured: {int8: [d.two]}}
          new:
            title: New
            recognise: {class_name: NewModel}
            components: {transformer: {kind: denoiser, size_bytes: 5}}
            rules: [{id: new.deny, schemes: [fp8], effect: deny, because: outliers}]
        """,
    )
    assert [rule.id for rule in found.rules_for("wan.a")] == [
        "common.deny",
        "wan.exclude",
        "wan.new",
        "wan.a.pad",
    ]
    assert list(found.families) == ["wan.a", "plain", "new"]
    assert [rule.id for rule in found.rules_for("new")] == ["common.deny", "new.deny"]
    assert found.families["plain"].groups == ("mine",)
    assert found.families["plain"].measured == {Scheme.INT8: ("d.two",)}
    assert found.families["plain"].title == "Plain"
    assert found.families["new"].note == ""
    assert found.ladder_for(host("mps", "", "integrated")) == (Scheme.INT8,)
    assert found.ladder_for(host("cuda", "sm90", "data_center")) == (Scheme.FP8, Scheme.INT8)
    assert load_table(write(tmp_path, json.dumps(found.file.model_dump(mode="json")))).digest == (
        found.digest
    )


def test_override_replaces_what_it_names(tmp_path) -> None:
    found = merged(
        tmp_path,
        """\
        override: [ladders, schemes]
        ladders: []
        schemes:
          fp8: {granularity: per_row, alignment: 32, dtypes: [bfloat16],
            weight_dtype: host, kinds: [denoiser]}
        evidence:
          d.one: {kind: measured, source: mine, date: 2026-12-01, override: true}
        generic:
          - {id: generic.deny, override: true, schemes: [int8], effect: deny, because: slower}
        families:
          plain: {override: [title], title: Other}
        """,
    )
    assert found.ladder_for(host("cuda", "sm90", "data_center")) == ()
    assert found.schemes[Scheme.FP8].alignment == 32
    assert found.evidence["d.one"].source == "mine"
    assert found.rule("generic.deny").schemes == (Scheme.INT8,)
    assert found.families["plain"].title == "Other"


DENY = "schemes: [int8], effect: deny, because: slower"
SILENT = [
    (
        f"rules:\n  - {{id: common.deny, {DENY}}}",
        "over.yaml:2 rules[0].id",
        "rule id 'common.deny' is already taken at {t}:20 rules[0]",
        "add override: true to replace it, or rename yours",
    ),
    (
        f"generic:\n  - {{id: common.deny, override: true, {DENY}}}",
        "over.yaml:2 generic[0]",
        "rule id 'common.deny' is already taken at {t}:20 rules[0]",
        "move the overriding rule to that section",
    ),
    (
        f"rules:\n  - {{id: common.den, override: true, {DENY}}}",
        "over.yaml:2 rules[0].override",
        "there is no rule 'common.den' to replace",
        "did you mean 'common.deny'",
    ),
    (
        f"rules:\n  - {{id: a, {DENY}}}\n  - {{id: a, override: true, {DENY}}}",
        "over.yaml:3 rules[1].id",
        "rule id 'a' is already taken at {o}:2 rules[0]",
        "keep one of the two",
    ),
    (
        "evidence:\n  d.one: {kind: measured, source: s, date: 2026-12-01}",
        "over.yaml:2 evidence.d.one",
        "this evidence already exists",
        "add override: true, or rename it",
    ),
    (
        "evidence:\n  d.on: {kind: measured, source: s, date: 2026-12-01, override: true}",
        "over.yaml:2 evidence.d.on.override",
        "there is no such evidence to replace",
        "did you mean 'd.one'",
    ),
    (
        "min_features: 64",
        "over.yaml:1 min_features",
        "min_features already has another value",
        "add `override: [min_features]` beside it to replace, or remove it",
    ),
    (
        "version: 2",
        "over.yaml:1 version",
        "version already has another value",
        "add `override: [version]` beside it to replace, or remove it",
    ),
    (
        "schemes:\n  int8: {granularity: per_row, alignment: 8, dtypes: [bfloat16], "
        "weight_dtype: int8, kinds: [denoiser]}",
        "over.yaml:2 schemes.int8",
        "'int8' already has another value",
        "add `override: [schemes]` beside it to replace, or remove it",
    ),
    (
        "families:\n  plain: {title: Other}",
        "over.yaml:2 families.plain.title",
        "title already has another value",
        "add `override: [title]` beside it to replace, or remove it",
    ),
    (
        "families:\n  wan.a: {measured: {fp8: []}}",
        "over.yaml:2 families.wan.a.measured.fp8",
        "'fp8' already has another value",
        "add `override: [measured]` beside it to replace, or remove it",
    ),
    (
        "families:\n  plain: {override: [titel], title: Plain}",
        "over.yaml:2 families.plain.override",
        "'titel' is not given here",
        "did you mean 'title'",
    ),
    (
        "families:\n  plian: {rules: []}",
        "over.yaml:2 families.plian",
        "the new family lacks 'title'",
        "add title, or name a known family",
    ),
    (
        "families:\n  plain: {titel: Other}",
        "over.yaml:2 families.plain",
        "unknown key 'titel'",
        "did you mean 'title'",
    ),
    (
        "families:\n  plain: {title: }",
        "over.yaml:2 families.plain.title",
        "nothing where text is meant",
        "write text",
    ),
    (
        "families:\n  plain: {groups: [none]}",
        "over.yaml:2 families.plain.groups",
        "unknown group 'none'",
        "use one of them",
    ),
    (
        "rules:\n  - {id: x, schemes: [int8], effect: deny, because: slower, evidence: [d.o]}",
        "over.yaml:2 rules[0].evidence",
        "unknown evidence 'd.o'",
        "did you mean 'd.one'",
    ),
]


@pytest.mark.parametrize(("text", "where", "found", "remedy"), SILENT)
def test_an_overlay_replaces_nothing_silently(
    tmp_path, text: str, where: str, found: str, remedy: str
) -> None:
    with pytest.raises(RuleTableError) as caught:
        merged(tmp_path, text)
    error = caught.value
    places = {"t": tmp_path / "t.yaml", "o": tmp_path / "over.yaml"}
    assert error.where == f"{tmp_path}/{where}"
    assert error.found == found.format(**places)
    assert error.remedy == remedy


def test_later_overlays_build_on_earlier_ones(tmp_path) -> None:
    first = write(tmp_path, f"rules:\n  - {{id: a, {DENY}}}", "1.yaml")
    second = write(tmp_path, f"rules:\n  - {{id: a, {DENY}, override: true, note: n}}", "2.yaml")
    assert table(tmp_path).with_overlays(first, second).rule("a").note == "n"
    with pytest.raises(RuleTableError, match="there is no rule 'a' to replace"):
        table(tmp_path).with_overlays(second, first)
    chained = table(tmp_path).with_overlays(first).with_overlays(second)
    assert chained.origin("a") == f"{second}:2"


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch):
    def install(*values: str) -> None:
        points = tuple(
            EntryPoint(f"p{i}", value, "quantpolicy.rules") for i, value in enumerate(values)
        )
        monkeypatch.setattr(rules, "entry_points", lambda **_: points)
        rules._load_cached.cache_clear()

    yield install
    rules._load_cached.cache_clear()


@pytest.mark.parametrize("name", ["PATH", "PATHS", "function"])
def test_installed_packages_give_overlays_before_the_callers(
    tmp_path, monkeypatch, entry_points, name: str
) -> None:
    path = write(tmp_path, f"rules:\n  - {{id: a, {DENY}}}", "plugin.yaml")
    code = f"PATH = {str(path)!r}\nPATHS = [PATH]\ndef function():\n    return PATHS\n"
    write(tmp_path, code, f"plugin_{name.lower()}.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    entry_points(f"plugin_{name.lower()}:{name}")
    assert load_rules().origin("a") == f"{path}:2"
    mine = write(tmp_path, f"rules:\n  - {{id: a, {DENY}, override: true, note: m}}", "mine.yaml")
    assert load_rules(mine).rule("a").note == "m"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("no_such_module:x", "cannot be loaded: No module named 'no_such_module'"),
        ("json:nothing", "cannot be loaded: module 'json' has no attribute 'nothing'"),
        ("math:pi", "gives float"),
        ("string:capwords.__defaults__", "gives tuple"),
    ],
)
def test_a_broken_entry_point_is_named(entry_points, value: str, found: str) -> None:
    entry_points(value)
    with pytest.raises(RuleTableError) as caught:
        load_rules()
    assert caught.value.where == f"entry point quantpolicy.rules:p0 ({value})"
    assert caught.value.found == found


def test_the_shipped_table_is_cached_and_found() -> None:
    assert load_rules() is load_rules()
    assert find_families_file().name == "families.yaml"
    assert load_rules().origin("wan.deny.nvfp4").startswith("families.yaml:")


def test_the_table_is_found_beside_the_code_or_in_the_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "quantpolicy"
    (package / "data").mkdir(parents=True)
    monkeypatch.setattr(rules, "_PACKAGE", package)
    with pytest.raises(RuleTableError, match="no such file; reinstall quantpolicy"):
        find_families_file()
    checkout = write(tmp_path, TABLE, "families.yaml")
    assert find_families_file() == checkout
    wheel = write(package / "data", TABLE, "families.yaml")
    assert find_families_file() == wheel


def test_a_whole_table_is_told_from_an_overlay(tmp_path) -> None:
    assert is_whole_table(write(tmp_path, TABLE))
    assert not is_whole_table(write(tmp_path, "rules: []"))


def test_the_json_schema_is_current_and_holds_for_the_shipped_table(tmp_path) -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
    write_schema(tmp_path / "schema.json")
    schema = json.loads((tmp_path / "schema.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    values = read_yaml(find_families_file()).values
    assert list(validator.iter_errors(values)) == []
    assert [error.message for error in validator.iter_errors({**values, "famlies": {}})] == [
        "Additional properties are not allowed ('famlies' was unexpected)"
    ]


def differences(ours: Plain, theirs: Plain) -> list[tuple[Plain, Plain]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        return [pair for key in ours for pair in differences(ours[key], theirs[key])]
    if isinstance(ours, list) and isinstance(theirs, list):
        assert len(ours) == len(theirs)
        return [pair for pair in zip(ours, theirs, strict=True) for pair in differences(*pair)]
    return [] if (ours, type(ours)) == (theirs, type(theirs)) else [(ours, theirs)]


def test_yaml_1_1_readers_differ_in_short_exponents_and_dates_only() -> None:
    text = find_families_file().read_text(encoding="utf-8")
    theirs = json.loads(json.dumps(yaml.safe_load(text), default=str))
    for our_value, their_value in differences(read_yaml(find_families_file()).values, theirs):
        assert isinstance(our_value, float)
        assert isinstance(their_value, str)
        assert our_value == float(their_value)


def test_the_schema_survives_a_round_trip() -> None:
    body = load_rules().file.model_dump(mode="json")
    assert RuleFile.model_validate_json(json.dumps(body)) == load_rules().file


JUNK = st.sampled_from(
    ["", "x", "1", "-1", "1e999", "true", "~", "[]", "{}", "[[1]]", "{a: 1}", "{override: true}"]
)
LINES = TABLE.splitlines()


@st.composite
def mutated_tables(draw: st.DrawFn) -> str:
    """Replace, drop or repeat a few lines or values of the table."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        index = draw(st.integers(0, len(lines) - 1))
        key, colon, _ = lines[index].partition(": ")
        value = draw(JUNK)
        other = draw(st.integers(0, len(lines) - 1))
        lines[index] = draw(st.sampled_from([key + colon + value, "", lines[other], value]))
    return "\n".join(lines)


@settings(max_examples=400)
@given(mutated_tables())
def test_a_mutated_table_is_read_or_refused_with_the_one_error(text: str) -> None:
    try:
        found = build_table(parse_yaml(text, name="t.yaml"), ())
    except RuleTableError as error:
        assert error.where.startswith("t.yaml:")  # noqa: PT017
        assert error.remedy  # noqa: PT017
    else:
        assert len(found.digest) == 64


@settings(max_examples=400)
@given(mutated_tables(), st.booleans())
def test_a_mutated_overlay_is_merged_or_refused_with_the_one_error(
    text: str, overrides: bool
) -> None:
    base = parse_yaml(TABLE, name="t.yaml")
    if overrides:
        text = "override: [min_features, ladders, schemes]\n" + text.replace(
            "effect: deny,", "effect: deny, override: true,"
        )
    try:
        found = build_table(base, [parse_yaml(text, name="o.yaml")])
    except RuleTableError as error:
        assert error.where.startswith(("o.yaml:", "t.yaml:"))  # noqa: PT017
    else:
        assert len(found.digest) == 64


@pytest.mark.parametrize("override", ["", "    override: [kernels]\n"])
def test_an_item_added_to_a_list_is_named_where_it_stands(tmp_path, override) -> None:
    family = f"families:\n  z-image:\n{override}    kernels:\n"
    fine = write(tmp_path, family + "      - {op: gated_residual}\n", "fine.yaml")
    bad = write(tmp_path, family + "      - {op: swiglu}\n      - {op: nope}\n", "bad.yaml")
    place = f"{bad}:{5 + bool(override)} families.z-image.kernels[1].op"
    for overlays in ((bad,), (fine, bad)):
        with pytest.raises(RuleTableError) as caught:
            load_rules(*overlays)
        assert caught.value.where == place
