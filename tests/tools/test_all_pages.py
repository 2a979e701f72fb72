"""tools/pages/all.py: its commands are those of the pages, and one that fails is run again."""

import shlex

import all as pages
import pytest
import typer


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.path)
def test_pages_and_commands_exist_and_belong_together(page):
    text = (pages.ROOT / page.path).read_text()
    for command in page.commands:
        script = shlex.split(command)[0]
        assert (pages.ROOT / script).is_file()
        assert not page.by_hand or f"python {script}" in text


def test_what_commands_print_is_kept_under_names_of_their_own():
    commands = [command for page in pages.PAGES for command in page.commands]
    assert len({pages.printed(command) for command in commands}) == len(commands)


def test_a_command_that_ended_well_is_not_run_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "count.py").write_text(
        "import pathlib, sys\np = pathlib.Path('ran')\np.write_text(p.read_text() + 'x' if p.exists() else 'x')\n"
        "print('| a table |')\nsys.exit(p.read_text() == 'x')\n"
    )
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "folder", lambda name: tmp_path / name)
    monkeypatch.setattr(pages, "PAGES", (pages.Page("docs/a.md", ("count.py --of 2",)),))
    (tmp_path / "README.md").touch()
    with pytest.raises(typer.Exit):  # it fails the first time
        pages.main()
    assert "FAILED: python count.py --of 2" in capsys.readouterr().out
    kept = tmp_path / "pages" / "count_of_2.txt"
    assert not kept.exists()
    pages.main()
    assert kept.read_text() == "| a table |\n"
    pages.main()
    pages.main(listed=True)
    assert (tmp_path / "ran").read_text() == "xx"
    pages.main(again=True)
    assert (tmp_path / "ran").read_text() == "xxx"
    with pytest.raises(typer.BadParameter, match=r"there are docs/a\.md"):
        pages.main(only="b.md")


def test_pages_that_name_a_bundled_model_are_to_be_read_again():
    others = set(pages.others())
    assert "docs/figures/index.md" in others
    assert not others & {page.path for page in pages.PAGES}
