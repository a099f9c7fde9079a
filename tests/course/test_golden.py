"""course/golden.json: what pages and lessons state is what was seen, and stated no more surely."""

import json
import re

import pytest
import seeds
from conftest import ROOT
from table import read_table

NUMBERS = {n["said"][0]: n for numbers in seeds.golden().values() for n in numbers}


def text_of(file: str) -> str:
    """Of a page or a lesson, without line breaks and the signs of comments."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return " ".join(re.sub(r"^# ", "", text, flags=re.M).split())


def wrong(place: str, number: dict, text: str) -> str | None:
    """What is wrong with the words that state a number, or with what they rest on."""
    file, _, words = place.partition(": ")
    low, high = seeds.spread(number)
    if re.sub("[<>]", "", words) not in text:
        return "these words are not there"
    if len({(one["seed"], one["machine"]) for one in number["seen"]}) < 3:
        return "seen with fewer than three seeds or machines"
    if file.endswith(".pt.md"):
        words = words.replace(",", ".").replace(" a ", " to ")
    stated, *spreads = re.findall("<(.+?)>", words.replace(",", ""))
    value = float(stated)
    half = 0.5001 * 10 ** -len(stated.partition(".")[2])  # of its last digit
    if not low - half <= value <= high + half:
        return f"the number lies outside of what was seen, {low:g} to {high:g}"
    for spread in spreads:  # "2.30 to 2.33", or "0.02": as much to each side
        bounds = [float(bound) for bound in spread.split(" to ")]
        if len(bounds) == 1:
            bounds = [value - bounds[0], value + bounds[0]]
        if bounds[0] - half > low or bounds[1] + half < high:
            return f"the spread is less than what was seen, {low:g} to {high:g}"
    return None


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_stated_as_it_was_seen(name):
    for place in NUMBERS[name]["said"]:
        said = wrong(place, NUMBERS[name], text_of(place.partition(": ")[0]))
        assert said is None, f"{place}: {said}"


STATED = """
a.md: at <2.31> (<2.30 to 2.32>), by <0.01> => None
a.pt.md: <2,31>, <2,30 a 2,32> => None
a.md: at <2.33> => outside
a.md: <2.31> (<2.31 to 2.32>) => less
a.md: <2.30>, by <0.01> => less
"""


def test_what_was_seen_is_recorded_and_what_is_stated_otherwise_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "GOLDEN", tmp_path / "golden.json")
    new = dict(printed=r"^ends at (\S+)", said=[], seen=[])
    seeds.GOLDEN.write_text(json.dumps({"a.py": [new]}))
    for seed, bits in ((10, 9.99), (10, 2.30), (20, 2.31), (0, 2.32)):  # 9.99 is replaced
        seeds.record("a.py", seed, f"it\nends at {bits}\n")
    (number,) = seeds.golden()["a.py"]
    for words, (fault,) in read_table(STATED):
        assert fault in str(wrong(words, number, re.sub("[<>]", "", words)))
    assert "not there" in wrong("a.md: <2.31>", number, "2.32")
    number["seen"].pop()
    assert "fewer" in wrong("a.md: <2.31>", number, "2.31")
