"""``--help`` names every group, option and key as they are, within 80 columns."""

import re

import pytest

from adaecho.run import CONF
from scripts import config_page
from tests.forks import typed


@pytest.fixture(scope="module")
def help_text() -> str:
    done = typed("adaecho", "--help")  # the package is the command
    assert done.code == 0, done.err
    return done.out


def test_it_fits_a_narrow_terminal(help_text: str) -> None:
    assert [line for line in help_text.splitlines() if len(line) > 80] == []


def test_it_names_every_option_of_every_group(help_text: str) -> None:
    groups = help_text.split("group=option:\n")[1].split("\n\n")[0]
    named = {
        name: set(re.split(r",\s+", " ".join(options.split())))
        for name, options in re.findall(r"^  (\w+) +((?:.+\n?)(?:^ {10}.+\n?)*)", groups, flags=re.MULTILINE)
    }
    folders = [path for path in CONF.iterdir() if path.is_dir()]
    assert named == {folder.name: {path.stem for path in folder.glob("*.yaml")} for folder in folders}


def test_every_key_it_names_is_one(help_text: str) -> None:
    keys = re.findall(r"^  ([a-z_]+(?:\.[a-z_]+)*)  +\S", help_text.split("Main keys")[1], flags=re.MULTILINE)
    known = set(re.findall(r"^\| `([\w.]+)`", config_page.page(), flags=re.MULTILINE))
    assert len(keys) >= 20
    assert set(keys) <= known
