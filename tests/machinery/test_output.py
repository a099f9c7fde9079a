"""output.py: what may be shown, and what may be kept."""

import math

import pytest
from table import read_table

from machinery import disk
from machinery.output import public, say

SECRET = ("se/cret", "se cret", "se'cret", 'se"cret', "se?cret", "se#cret", "se;cret", "se@cret")


@pytest.mark.parametrize("secret", [*SECRET, "123/secret", "123 secret", "a@b/secret"])
@pytest.mark.parametrize("text", ["ssh://u:{}@host/p", "at s3://u:{}@host:22/p?x: gone\nmore"])
def test_no_part_of_a_password_is_public(secret, text):
    said = public(text.format(secret))
    assert "cret" not in said and "123" not in said and "://host" in said
    assert said.startswith(text[:2]) and said.endswith("more") == text.endswith("more")


# text => what of it is public, if not all
PUBLIC = r"""
s3://b/c of s3://k:s@b/x?e=1 and https://h/x?sig=1 => s3://b/c of s3://b/x and https://h/x
https://TOKEN@h/x, y => https://h/x, y
https://h/x;sig=SECRET => https://h/x
at 'https://h/x#SEC RET' and => at 'https://h/x and
https://to/ken@h/x => https://h/x
reference::https://h/x?y => reference::https://h/x
s3://bucket: not found; try http://127.0.0.1:8000/v1 =>
http://[::1]:80/x =>
me@home ?x; #y /a/b:c@d =>
{"id": "?a=1\""} =>
"""


@pytest.mark.parametrize("text, expected", read_table(PUBLIC))
def test_what_of_a_url_is_public(text, expected):
    assert public(text) == (expected[0] or text)


def test_a_record_keeps_no_secret_and_changes_nothing_else(tmp_path):
    secret = "s3://KEY:hunter2@bucket/x?token=hunter2"
    tree = {"a": [secret, 1.5, None, True, {"b": (secret, "é")}], "c": "1 # 2", "d": 10**30}
    lacks = {"e": None, "f": math.nan, "g": -math.inf}  # JSON
    disk.write_json(tmp_path / "a.json", tree | lacks)
    found = disk.read_json(tmp_path / "a.json")
    kept = "s3://bucket/x"
    assert found == {"a": [kept, 1.5, None, True, {"b": [kept, "é"]}], "c": "1 # 2", "d": 10**30}


@pytest.mark.parametrize("code", [*range(9), *range(11, 32), *range(127, 160)])
def test_no_control_character_reaches_the_terminal(code, capsys):
    say(f"a{chr(code)}]0;title of https://u:hunter2@h\n\tb")
    said = capsys.readouterr().out
    assert chr(code) not in said and "hunter2" not in said and said.endswith("h\n\tb\n")
