from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quantpolicy.errors import RequestError
from quantpolicy.paths import exists, is_dir, is_file, list_folder

NOBODY = 65534
# Everything is imported before the rights are dropped: the interpreter itself may lie elsewhere.
CHILD = f"""
import json
import os
import sys
from pathlib import Path

from prequant.source import find_model
from prequant.tree import read_tree
from prequant.validate import validate
from quantpolicy.errors import QuantPolicyError
from quantpolicy.host import Host
from quantpolicy.recognise import target_from
from quantpolicy.rules import load_rules

rules = load_rules()
target_from(sys.argv[2], rules)
Host.load("cpu")
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setuid({NOBODY})
calls = [
    lambda: target_from("./locked", rules),
    lambda: target_from("./locked/inner", rules),
    lambda: target_from("./listed", rules),
    lambda: target_from("./locked/config.json", rules),
    lambda: Host.load("locked/host.yaml"),
    lambda: find_model("locked/inner"),
    lambda: validate("."),
    lambda: read_tree(Path("listed")),
]
for call in calls:
    try:
        call()
    except QuantPolicyError as error:
        print(json.dumps([type(error).__name__, error.where, error.found]))
"""


def test_what_lies_at_a_path(tmp_path: Path) -> None:
    file = tmp_path / "b.txt"
    file.write_text("")
    (tmp_path / "a").mkdir()
    assert (is_file(file), is_dir(file), exists(file)) == (True, False, True)
    assert (is_file(tmp_path), is_dir(tmp_path), exists(tmp_path)) == (False, True, True)
    for absent in (tmp_path / "none", file / "below"):
        assert (is_file(absent), is_dir(absent), exists(absent)) == (False, False, False)
    assert list_folder(tmp_path) == [tmp_path / "a", file]


@pytest.mark.parametrize(
    ("name", "found"), [("x" * 5000, "File name too long"), ("a\0b", "embedded null byte")]
)
def test_a_path_that_cannot_be_followed_is_one_sentence(name: str, found: str) -> None:
    for ask in (is_file, is_dir, exists):
        with pytest.raises(RequestError) as caught:
            ask(Path(name))
        assert caught.value.found == f"cannot be read: {found}"


def test_unreadable_folders_are_one_sentence(tmp_path: Path) -> None:
    released = tmp_path / "config.json"
    released.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    for name, mode in (("locked", 0o000), ("listed", 0o111)):
        (tmp_path / name).mkdir(mode=mode)
    tmp_path.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), "flux.1"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("locked", "listed"):
        (tmp_path / name).chmod(0o755)
    denied = "cannot be read: Permission denied"
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["RequestError", "locked/model_index.json", denied],
        ["RequestError", "locked/inner", denied],
        ["RequestError", "listed", denied],
        ["RequestError", "locked/config.json", denied],
        ["RequestError", "locked/host.yaml", denied],
        ["RequestError", "locked/inner", denied],
        ["RequestError", "locked/quantpolicy.json", denied],
        ["RequestError", "listed", denied],
    ]
