import pytest

from quantpolicy.errors import RequestError
from quantpolicy.inventory.shipped import INVENTORIES
from quantpolicy.measure import generate

NAMES = ["z-image", "clip-l"]


def test_shipped_files_are_what_the_command_writes(capsys):
    assert generate.main([*NAMES, "--check"]) == 0
    assert capsys.readouterr().out == "0 out of date: none\n"


def test_check_reports_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "INVENTORIES", tmp_path)
    assert generate.main([*NAMES, "--check"]) == 1
    assert capsys.readouterr().out == "2 out of date: z-image, clip-l\n"
    assert not list(tmp_path.iterdir())


def test_a_stale_file_is_written_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "INVENTORIES", tmp_path)
    (tmp_path / "clip-l.json").write_text("{}")
    assert generate.main(["clip-l"]) == 0
    assert capsys.readouterr().out == "1 written or removed: clip-l\n"
    shipped = (INVENTORIES / "clip-l.json").read_text()
    assert (tmp_path / "clip-l.json").read_text() == shipped


def test_a_name_that_the_table_lacks_is_refused():
    with pytest.raises(RequestError, match=r"inventory 'clip-xl'.*named: wan2\.1-t2v-1\.3b"):
        generate.main(["clip-xl"])
