"""tools/pages/all.py: what commands print goes into their pages, and a command that fails is run again."""

import shlex

import all as pages
import claims
import pytest
import typer
from blocks import commands, fill


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.path)
def test_pages_and_commands_exist(page):
    assert (pages.ROOT / page.path).is_file()
    for command in page.commands:
        script, *options = shlex.split(command)
        assert (pages.ROOT / script).is_file()
        if script == "tools/pages/claims.py":
            assert options and not set(options) - set(claims.claims())


def test_every_block_ends():
    for page in (pages.ROOT / "docs").rglob("*.md"):
        text = page.read_text()
        assert text.count("<!-- python ") == text.count("<!-- end -->") == len(commands(page))


def test_what_commands_print_is_kept_under_names_of_their_own():
    every = [command for page in pages.pages() for command in page.commands]
    assert len({pages.printed(command) for command in every}) == len(every)


def test_what_measures_time_is_known():
    every = {c for page in pages.pages() for c in page.commands}
    assert "tools/pages/leaderboard.py --part quality" in every
    alone = {c for c in every if pages.timed(c)}
    assert "tools/pages/leaderboard.py" in alone and "tools/bench/bench_like.py --rounds 3" in alone
    assert not any("quality" in c or "claims" in c or "served" in c for c in alone)


def test_a_block_gets_what_its_command_printed(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "# A\n\n<!-- python x.py 1 -->\n| old |\n<!-- end -->\ntext\n\n<!-- python y.py -->\n<!-- end -->\n"
    )
    fill(page, {"x.py 1": "| new \\1 |\n"}.get)
    assert page.read_text() == (
        "# A\n\n<!-- python x.py 1 -->\n\n| new \\1 |\n\n<!-- end -->\ntext\n\n<!-- python y.py -->\n<!-- end -->\n"
    )


def test_a_command_that_ended_well_is_not_run_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "count.py").write_text(
        "import pathlib, sys\np = pathlib.Path('ran')\np.write_text(p.read_text() + 'x' if p.exists() else 'x')\n"
        "print('| a table |')\nsys.exit(p.read_text() == 'x')\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "folder", lambda name: tmp_path / name)
    monkeypatch.setattr(pages, "WHOLE", ())
    (tmp_path / "README.md").touch()
    page = tmp_path / "docs" / "a.md"
    page.parent.mkdir()
    page.write_text("<!-- python count.py --of 2 -->\n<!-- end -->\n")
    with pytest.raises(typer.Exit):  # it fails the first time
        pages.main()
    assert "FAILED:\n  python count.py --of 2\n" in capsys.readouterr().out
    kept = tmp_path / "pages" / "count_of_2.txt"
    assert not kept.exists()
    pages.main()
    assert kept.read_text() == "| a table |\n"
    assert "\n| a table |\n\n`python count.py --of 2`, " in page.read_text()
    pages.main()
    pages.main(listed=True)
    assert (tmp_path / "ran").read_text() == "xx"
    pages.main(again=True)
    assert (tmp_path / "ran").read_text() == "xxx"
    monkeypatch.setattr(pages, "timed", lambda command: True)
    pages.main(again=True, untimed=True)
    assert (tmp_path / "ran").read_text() == "xxx"
    pages.main(again=True)
    assert (tmp_path / "ran").read_text() == "xxxx"
    with pytest.raises(typer.BadParameter, match=r"there are docs/a\.md"):
        pages.main(only="b.md")


def test_pages_that_name_a_bundled_model_are_to_be_read_again():
    others = set(pages.others())
    assert "docs/figures/index.md" in others
    assert not others & {page.path for page in pages.pages()}
