"""benchmarks/ladder.py: what it says of runs whose worth is known, made by a short program."""

import re

import numpy as np
import pytest

pytest.importorskip("scipy")

import ladder

# In place of train.py: its loss is that of `AHEAD` times as many tokens, and its seeds differ by
# `NOISE`; it notes that it was run.
PROGRAM = """import hashlib, json, math, pathlib, sys
AHEAD, NOISE, STEP_S = 1.0, 0.0, 1.0
option = lambda name: sys.argv[sys.argv.index(name) + 1]
here, run_dir = pathlib.Path(__file__), pathlib.Path(option("--run_dir"))
steps, depth, seed = (int(option(name)) for name in ("--steps", "--n_layer", "--seed"))
run_dir.mkdir(parents=True)
with open(here.with_name("made"), "a") as made:
    made.write(run_dir.name + "\\n")
loss = 3 - 0.1 * math.log2(AHEAD * steps) + NOISE * seed - 0.1 * depth
files = {"train.py": hashlib.sha256(here.read_bytes()).hexdigest()}
start = dict(time=0, command="train.py", device="x", world_size=1, data_dir="")
start |= dict(code=dict(files=files), flops_per_token=10)
lines = [dict(start=start)]
for step in (1, steps):
    line = dict(step=step, tokens=2048 * step, loss=1, bpb=1, lr=1, norm=1, time=60, step_s=STEP_S)
    lines.append(line | dict(tokens_per_s=1, data_wait_ms=0, tflops_full=1, tflops_causal=1))
whole = dict(step=steps, tokens=2048 * steps, val_rows=9, full_val_loss=1, full_val_bpb=loss)
text = "".join(json.dumps(line) + "\\n" for line in [*lines, whole])
(run_dir / "metrics.jsonl").write_text(text)
(run_dir / "config.json").write_text("{}")
(run_dir / "status.json").write_text('{"state": "done"}')
"""


@pytest.fixture
def trees(tmp_path, monkeypatch, small_data):
    """(before, after, the command line); the second is in place of this project."""
    for name in ("before", "after"):
        (tmp_path / name / "machinery").mkdir(parents=True)
        (tmp_path / name / "machinery" / "code.py").touch()
        (tmp_path / name / "train.py").write_text(PROGRAM)
    after = tmp_path / "after"
    monkeypatch.setattr(ladder, "ROOT", after)
    monkeypatch.setattr(ladder, "FOLDER", tmp_path / "runs")
    monkeypatch.setattr(ladder, "ROWS", tmp_path / "runs" / "rows.jsonl")
    words = f"--before {tmp_path}/before --data {small_data} --depths 2 3 4 --tokens_per_weight 0.1"
    return tmp_path / "before", after, words.split()


def edit(tree, old: str, new: str):
    text = (tree / "train.py").read_text()
    assert text.count(old) == 1
    (tree / "train.py").write_text(text.replace(old, new))


def made(tree) -> list[str]:
    """The runs since it was last asked."""
    file = tree / "made"
    names = file.read_text().split() if file.exists() else []
    file.unlink(missing_ok=True)
    return names


def test_a_factor_is_found_by_each_measure(trees, capsys):
    """1.25 times fewer tokens and FLOPs, at twice the time of a step; with 0.5% of luck."""
    before, after, words = trees
    edit(before, "NOISE, STEP_S = 1.0, 0.0, 1.0", "NOISE, STEP_S = 1.0, 0.001, 1.0")
    edit(after, "AHEAD, NOISE, STEP_S = 1.0, 0.0, 1.0", "AHEAD, NOISE, STEP_S = 1.25, 0.001, 2.0")
    assert ladder.main(words) == 0
    said = capsys.readouterr().out
    cells = [re.split(r" *\| *", line) for line in said.splitlines() if line.startswith("| d")]
    assert [c[1] for c in cells] == ["d2", "d3", "d4"]
    for _, _, _, _, _, tokens, flops, seconds, *_ in cells:
        assert tokens == flops == "1.25, 1.25 (1.01)"
        assert re.fullmatch(r"0.6[23], 0.6[23] \(1.01\)", seconds)
    assert "by tokens: it helps\nby FLOPs: it helps\nby seconds: it harms" in said
    assert len(made(before)) == len(made(after)) == 3 * 2 * 2
    assert "24 runs, which took 24 minutes" in said


def test_only_what_is_missing_is_made_again(trees, capsys):
    before, after, words = trees
    edit(after, "AHEAD, NOISE, STEP_S = 1.0, 0.0", "AHEAD, NOISE, STEP_S = 1.0, 0.01")
    edit(before, "AHEAD, NOISE, STEP_S = 1.0, 0.0", "AHEAD, NOISE, STEP_S = 1.0, 0.01")
    assert ladder.main(words) == 0
    assert capsys.readouterr().out.count("no difference") == 3
    assert made(before) and made(after)
    assert ladder.main(words) == 0 and not made(before) + made(after)
    edit(after, "AHEAD, NOISE, STEP_S = 1.0", "AHEAD, NOISE, STEP_S = 0.8")
    assert ladder.main(words) == 0
    assert not made(before) and len(made(after)) == 12
    assert "by tokens: it harms" in capsys.readouterr().out
    assert ladder.main([*words, "--name", "other", "--", "--lr_scale", "0.5"]) == 0
    assert not made(before) and {name.split("_")[0] for name in made(after)} == {"other"}


def test_a_longer_run_goes_on_from_its_own_version(trees):
    """Also where the files are what they were two ideas ago, and the shorter run has its row."""
    before, after, words = trees
    program = (after / "train.py").read_text()
    assert ladder.main(words) == 0
    edit(after, "AHEAD, NOISE, STEP_S = 1.0", "AHEAD, NOISE, STEP_S = 1.1")
    assert ladder.main(words) == 0
    (after / "train.py").write_text(program)
    folders = {path.name for path in ladder.FOLDER.glob("after_*/")}
    assert folders and ladder.main(words) == 0  # all rows are there
    assert not [*ladder.FOLDER.glob("after_*/metrics.jsonl")]  # nothing of another version
    made(after)


def test_a_bound_is_no_verdict(trees):
    """The second version has the loss before its shorter run, at ten times the cost of a token."""
    base = rows([2.0, 1.5])
    other = [row | dict(bpb=row["bpb"] - 0.55, FLOPs=10 * row["FLOPs"]) for row in base]
    assert ladder.less("tokens", base, other) == (pytest.approx(2.0), ">")
    assert ladder.less("tokens", other, base) == (pytest.approx(0.5), "<")
    word = lambda name, *versions: ladder.measure(name, *[[v, v] for v in versions]).word
    assert word("tokens", base, other) == "helps" and word("tokens", other, base) == "harms"
    assert word("FLOPs", base, other) == word("FLOPs", other, base) == ""


def test_files_that_are_edited_meanwhile_make_no_table(trees, capsys):
    """The first run of the second version edits it; the same command then makes that one again."""
    before, after, words = trees
    program = (after / "train.py").read_text()
    last = 'here.write_text(here.read_text().partition("here.write_text(")[0])\n'
    (after / "train.py").write_text(program + last)
    assert ladder.main(words) == 1
    said = capsys.readouterr().out
    assert "edited meanwhile" in said and "| d2" not in said
    n_made = len(made(after))
    assert ladder.main(words) == 0 and 0 < len(made(after)) < n_made


def rows(losses: list[float]) -> list[dict]:
    horizons = zip((1000, 2000), losses)
    return [dict(tokens=n, bpb=x, FLOPs=n, seconds=n) for n, x in horizons]


def test_what_does_nothing_is_seldom_said_to_do_something():
    """Runs that differ by chance alone, at two sizes with two seeds."""
    draw = np.random.default_rng(0)
    words = []
    for _ in range(2000):
        sizes = []
        for _ in range(2):
            drawn = (np.array([2.2, 2.0]) + 0.01 * draw.standard_normal((2, 2, 2))).tolist()
            sizes.append(ladder.measure("tokens", *[[*map(rows, seeds)] for seeds in drawn]))
        words.append(ladder.verdict(sizes))
    called = np.mean([word != "no difference" for word in words])
    assert called < 0.02, called
