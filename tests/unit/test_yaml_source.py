from __future__ import annotations

import codecs
import math
import subprocess
import sys
import textwrap

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quantpolicy import yaml_source
from quantpolicy.errors import RuleTableError
from quantpolicy.yaml_scalar import MAX_EXACT_INT
from quantpolicy.yaml_source import Plain, parse_yaml, read_yaml

LOADERS = [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)]


@pytest.fixture(params=LOADERS, ids=["pure", "libyaml"], autouse=True)
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_source, "LOADER", request.param)


def parse(text: str | bytes) -> dict[str, Plain]:
    return parse_yaml(text, name="t.yaml").values


def refusal(text: str | bytes) -> RuleTableError:
    with pytest.raises(RuleTableError) as caught:
        parse(text)
    return caught.value


@pytest.mark.parametrize("word", ["off", "on", "no", "yes", "Off", "NO", "y", "n"])
def test_switch_words_stay_text_as_values_and_keys(word: str) -> None:
    source = parse_yaml(f"speed: {word}\n{word}: [1, {word}, '{word}']", name="t.yaml")
    assert source.values == {"speed": word, word: [1, word, word]}
    assert source.bare_words == ((("speed",), word), ((word, 1), word))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-17", -17),
        ("+3", 3),
        ("9007199254740991", MAX_EXACT_INT),
        ("1e-12", 1e-12),
        ("1E3", 1000.0),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("2.10", 2.1),
        ("'2.10'", "2.10"),
        ('"010"', "010"),
        ("2.11.0", "2.11.0"),
        ("2026-11-30", "2026-11-30"),
        ("1280x720", "1280x720"),
        ("nan", "nan"),
        ("-", "-"),
        ("e5", "e5"),
        ("<<", "<<"),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_scalars(written: str, value: Plain) -> None:
    if written == "-":
        assert "not YAML" in refusal("key: -").found
        return
    found = parse(f"key: {written}")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "written",
    ["010", "-07", "0x1F", "0o17", "0b11", "1_000", "1:20", "190:20:30", "09.5", ".nan", "-.INF"],
)
def test_numbers_that_readers_read_differently_are_refused(written: str) -> None:
    error = refusal(f"a: 1\nmetrics:\n  lpips: {written}\n")
    assert error.where == "t.yaml:3 metrics.lpips"
    assert error.found == f"{written!r} is a number to some YAML readers and text to others"
    assert error.remedy == "write it in decimal, or quote it to make it text"
    assert parse(f"lpips: '{written}'") == {"lpips": written}


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("9007199254740992", "integer 9007199254740992"),
        ("-9007199254740992", "integer -9007199254740992"),
        ("9" * 5000, "integer " + "9" * 40),
        ("1e999", "number 1e999 is infinite"),
        ("-1e999", "number -1e999 is infinite"),
    ],
)
def test_numbers_that_json_cannot_hold_are_refused(written: str, found: str) -> None:
    error = refusal(f"a:\n  - {written}")
    assert (error.where, error.found) == ("t.yaml:2 a[0]", found)


def test_an_equal_key_is_refused_with_both_lines() -> None:
    error = refusal("a: 1\nb:\n  c: 1\n  d: 2\n  'c': 3\n")
    assert error.where == "t.yaml:5 b"
    assert error.found == "key 'c' is already given in line 3"
    assert error.remedy == "keep one of the two"
    assert parse("a: {c: 1}\nb: {c: 1}") == {"a": {"c": 1}, "b": {"c": 1}}


@pytest.mark.parametrize("key", ["1", "2.10", "true", "null", "~"])
def test_a_key_that_is_not_text_is_refused(key: str) -> None:
    error = refusal(f"versions:\n  {key}: x")
    assert (error.where, error.found) == ("t.yaml:2 versions", f"key {key!r} is not text")
    assert error.remedy == f'quote it: "{key}"'
    assert parse(f"versions: {{'{key}': x}}") == {"versions": {key: "x"}}


@pytest.mark.parametrize("key", ["[a]", "{a: 1}"])
def test_a_key_that_is_a_collection_is_refused(key: str) -> None:
    assert refusal(f"? {key}\n: 1").found == "a key is a list or a mapping"


@pytest.mark.parametrize(
    ("text", "line"), [("a:\n\tb: 1\n", 2), ("\ta: 1\n", 1), ("a:\n  b: 1\n\tc: 1\n", 3)]
)
def test_a_tab_that_indents_is_refused(text: str, line: int) -> None:
    error = refusal(text)
    assert error.where.startswith(f"t.yaml:{line}")
    assert error.found == "a tab stands where only spaces may"
    assert error.remedy == "replace it by spaces"


def test_a_tab_inside_text_is_text() -> None:
    assert parse("a: 'x\ty'\nb: |\n  x\ty\n") == {"a": "x\ty", "b": "x\ty\n"}


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", codecs.BOM_UTF8])
def test_an_empty_file_is_refused(text: str | bytes) -> None:
    error = refusal(text)
    assert (error.where, error.found) == ("t.yaml:1", "the file is empty")


@pytest.mark.parametrize("text", ["---\n", "[1, 2]", "just text", "12"])
def test_a_root_that_is_no_mapping_is_refused(text: str) -> None:
    assert refusal(text).found == "the root is not a mapping"


def test_a_byte_order_mark_is_accepted() -> None:
    assert parse(codecs.BOM_UTF8 + b"version: 1\n") == {"version": 1}
    assert parse("\ufeffversion: 1\n") == {"version": 1}


def test_several_documents_are_refused() -> None:
    error = refusal("---\na: 1\n---\nb: 2\n")
    assert (error.where, error.found) == ("t.yaml:3", "a second document starts")
    assert parse("---\na: 1\n...\n") == {"a": 1}


def test_aliases_are_refused_so_that_nothing_can_explode() -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"
    error = refusal(bomb)
    assert (error.where, error.found) == ("t.yaml:2 b[0]", "alias *a")
    assert refusal("a: [&x 1, [2, {b: *x}]]").where == "t.yaml:1 a[1][1].b"
    assert parse("a: &anchor [x]") == {"a": ["x"]}
    assert refusal("a: &a {x: 1}\nb:\n  <<: *a\n").found == "alias *a"


@pytest.mark.parametrize("tagged", ["!!str 1", "!!python/object/apply:os.getcwd []", "!own {a: 1}"])
def test_tags_are_refused(tagged: str) -> None:
    error = refusal(f"a:\n  b: {tagged}\n")
    assert error.where == "t.yaml:2 a.b"
    assert error.found.startswith("tag ")


def test_deep_nesting_is_refused() -> None:
    assert refusal("a: " + "[" * 65).found == "nested deeper than 64 levels"


def test_the_wrong_encoding_is_refused() -> None:
    error = refusal("a: 1\nb: grün".encode("latin-1"))
    assert (error.where, error.found) == ("t.yaml:2", "byte 0xfc is not UTF-8")
    assert error.remedy == "save the file as UTF-8"
    assert refusal("a: 1".encode("utf-16")).found == "byte 0xff is not UTF-8"


def test_a_lone_surrogate_and_a_control_character_are_refused() -> None:
    assert refusal('a: "\\ud800"').where == "t.yaml:1 a"
    assert refusal("a: \x00").found == "not YAML: " + (
        "control characters are not allowed"
        if yaml_source.LOADER is not yaml.SafeLoader
        else "special characters are not allowed"
    )


@pytest.mark.parametrize(
    "text", ["a: [1", "a: 'x", "a: b: c", "a: {", "- a\nb: 1", "%YAML 9.9\n---\na: 1"]
)
def test_broken_syntax_names_the_line(text: str) -> None:
    error = refusal(text)
    assert error.where.startswith("t.yaml:")
    assert error.found.startswith("not YAML: ")


def test_a_missing_file_and_a_folder_are_refused(tmp_path) -> None:
    missing = tmp_path / "none.yaml"
    for path, reason in ((missing, "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(RuleTableError) as caught:
            read_yaml(path)
        assert caught.value.where == str(path)
        assert caught.value.found == f"cannot be read: {reason}"


def test_lines_of_every_key_and_item(tmp_path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        textwrap.dedent(
            """\
            # a comment
            version: 1
            rules:
              - id: one
                schemes:
                  [fp8,
                   int8]
              - {id: two,
                 note: folded
                   text}
            families: {"flux.1": {title: t}}
            """
        )
    )
    source = read_yaml(path, name="t.yaml")
    assert source.line(()) == 1
    assert source.line(("version",)) == 2
    assert source.line(("rules",)) == 3
    assert source.line(("rules", 0)) == 4
    assert source.line(("rules", 0, "schemes")) == 5
    assert source.line(("rules", 0, "schemes", 1)) == 7
    assert source.line(("rules", 1)) == 8
    assert source.line(("rules", 1, "note")) == 9
    assert source.line(("rules", 1, "missing")) == 8
    assert source.line(("rules", 9)) == 3
    assert source.where(("families", "flux.1", "title")) == "t.yaml:11 families.flux.1.title"
    assert source.where(("rules", 0, "schemes", 1)) == "t.yaml:7 rules[0].schemes[1]"
    assert source.has(("rules", 1, "note"))
    assert not source.has(("rules", 2))
    assert not source.has(("rules", "id"))


@settings(max_examples=400)
@given(st.one_of(st.text(), st.binary()))
def test_arbitrary_input_gives_a_mapping_or_the_one_error(data: str | bytes) -> None:
    try:
        assert isinstance(parse(data), dict)
    except RuleTableError as error:
        assert error.where.startswith("t.yaml:")  # noqa: PT017


YAMLISH = st.lists(
    st.sampled_from(
        [*"ab:-#&*!|>'\"%@`{}[],?\n\t \\", ": ", "- ", "  ", "\n  ", "1e3", "010", "off", "---\n"]
    ),
    max_size=40,
).map("".join)


@settings(max_examples=600)
@given(YAMLISH)
def test_text_that_looks_like_yaml_gives_a_mapping_or_the_one_error(text: str) -> None:
    try:
        assert isinstance(parse(text), dict)
    except RuleTableError as error:
        assert error.where.startswith("t.yaml:")  # noqa: PT017


def _is_plain_text(text: str) -> bool:
    """Leave out text that PyYAML leaves unquoted although YAML 1.2 readers take it for a number."""
    return not any(letter.isdigit() for letter in text) and text.strip() not in (".", "+", "-")


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))).filter(_is_plain_text)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-MAX_EXACT_INT, MAX_EXACT_INT),
    st.floats(allow_nan=False, allow_infinity=False),
    TEXT,
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


@settings(max_examples=300)
@given(st.dictionaries(TEXT, VALUES, max_size=5), st.sampled_from([None, True, False]))
def test_dumped_values_come_back(values: dict[str, Plain], flow: bool | None) -> None:
    text = yaml.dump(values, Dumper=_PlainDumper, default_flow_style=flow, allow_unicode=True)
    assert parse(text) == values


def test_floats_come_back_with_their_sign() -> None:
    assert math.copysign(1.0, float(str(parse("a: -0.0")["a"]))) == -1.0


def test_no_torch_is_imported() -> None:
    code = "import sys, quantpolicy.yaml_source, quantpolicy.rules, quantpolicy.lint; "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_depth_up_to_the_limit_is_read() -> None:
    found: Plain = parse("a: " + "[" * 63 + "]" * 63)["a"]
    depth = 0
    while isinstance(found, list):
        depth, found = depth + 1, found[0] if found else None
    assert depth == 63
    assert "nest" in refusal("a: " + "[" * 50_000).found
