"""README.md and docs/: each command is one that its program takes, each figure follows."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, environment, git, write_lines

import flops as flops_of
from instruments.run import forecast
from machinery import cli, plan, trained
from model import GPT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
PROGRAM = r"(?:torchrun|python)\b.*? ((?:\w+/)*\w+\.py)\b(.*)"


def commands(pages=PAGES, inline=True):
    """("eval.py", "sample d12 --n 4") for each line of a block that starts a program of ours."""
    text = "\n".join(page.read_text() for page in pages)
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S))
    lines = blocks.replace("\\\n", " ").splitlines()
    if inline:
        lines += re.findall(r"`(python [^`]+)`", text)
    found = [re.search(PROGRAM, " ".join(line.split())) for line in lines]
    ends = r"\s[#&|;]|\)$"  # of a command: a comment, or the shell's
    return [(m[1], re.split(ends, m[2])[0].strip()) for m in found if m and ".." not in m[2]]


class Understood(Exception):
    """The program has read its options."""


@pytest.mark.parametrize("program, words", sorted({*commands()}))
def test_the_program_takes_the_command(program, words, monkeypatch):
    read_options = cli.read_options

    def read_and_stop(*args):
        read_options(*args)
        raise Understood

    assert (ROOT / program).is_file()
    argv = shlex.split(words, comments=True)
    if "/" in program or argv[:1] == ["compare"] or "--help" in argv:
        return
    monkeypatch.setattr(cli, "read_options", read_and_stop)
    monkeypatch.setattr(trained, "find_model", lambda word: {"run_dir": word})
    with pytest.raises(Understood):
        importlib.import_module(program.removesuffix(".py")).main(argv)


def test_the_test_finds_commands():
    found = commands()
    assert len(found) > 60 and ("train.py", "d12 --plan") in found
    assert {program for program, _ in found} >= {"train.py", "eval.py", "prepare_data.py"}


@pytest.mark.slow
def test_the_commands_of_the_readme_work_in_a_clean_clone(tmp_path):
    """In order, with an empty home, on little text; but the referee's and those for an H100."""
    clone = tmp_path / "clone"
    env = environment(HOME=str(tmp_path / "home"))
    git(ROOT, "clone", "--quiet", ".", clone)
    shutil.copytree(clone / "machinery", clone / "my_texts")
    turns = [dict(role="user", content="Oi"), dict(role="assistant", content="Olá!")]
    write_lines(clone / "my_chats.jsonl", [dict(messages=turns * n) for n in range(1, 40)])
    rows = "--vocab_size 512 --row_len 65 --workers 1".split()
    smaller = {"prepare_data.py": rows, "train.py": SMALL}
    here = [c for c in commands(PAGES[:1], inline=False) if "d12" not in c[1] and "/" not in c[0]]
    for program, words in sorted(here, key=lambda command: "look" in command[1]):
        words = words.replace("--steps 3000", "--steps 16").replace("00000200", "00000004")
        words = words.replace("--steps 100", "")  # smaller has --steps
        first, options = cli.first_word(shlex.split(words))
        if program == "prepare_data.py" and "--source" not in options:
            options += ["--source", "files:my_texts"]
        argv = [sys.executable, program, first, *smaller.get(program, []), *options]
        done = subprocess.run(argv, cwd=clone, env=env, input=b"Oi", capture_output=True)
        assert done.returncode == 0 and done.stdout, (argv, done.stderr.decode())
    pages = {str(path.relative_to(clone / "runs")) for path in clone.glob("runs/*/*.html")}
    runs = "tiny longer pt pt-chat base no_offset base2".split()
    assert pages == {"tiny/look.html", *(f"{name}/report.html" for name in runs)}
    assert git(clone, "status", "--porcelain") == "?? my_chats.jsonl\n?? my_texts/\n"


def test_links_lead_to_files():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    assert len(PAGES[0].read_text().splitlines()) <= 180


def rounded(value):
    """Two digits, or whole: 0.6, 2.5, 21, 1,603."""
    return f"{value:,.1f}" if value < 10 else f"{value:,.0f}"


def sized(words, gpu):
    """What train.py is given -> preset, its plan on this GPU, model, weights, tokens to read."""
    preset = cli.parse("train.py", "train", words.split())
    decided = plan.make_plan(preset, forecast.parse_gpus(gpu))
    with torch.device("meta"):
        model = GPT(preset.model)
    size = sum(p.numel() for p in model.parameters())
    return preset, decided, model, size, decided.steps * decided.tokens_per_step


def test_the_table_of_presets_follows_from_the_presets():
    """Hours: FLOPs of the run in the full convention, at 50% and 20% of an H100's peak."""
    row = r"^\| `([\w-]+)` \| (.*?) \| (.*?) \| (.*?) \| (\d.*) \|$"
    peak = flops_of.find_peak(forecast.parse_gpus("H100"), 0)
    rows = []
    for page in (PAGES[0], ROOT / "docs/scaling.md"):
        rows += re.findall(row, page.read_text(), re.M)
    assert {"d12", "d20", "d24", "smol-135m"} <= {name for name, *_ in rows}
    for name, parameters, about, tokens, cost in rows:
        _, decided, model, size, read = sized(name, "H100")
        assert about.startswith(f"depth {name[1:]}") == bool(re.fullmatch(r"d\d+", name))
        flops = model.flops_per_token() * read
        low, high = (flops / (peak * share) / 3600 for share in (0.5, 0.2))
        assert parameters == (f"{size / 1e9:.2f}B" if size >= 1e9 else f"{size / 1e6:.0f}M")
        assert tokens == f"{read / 1e9:.1f}B"
        dollars = f"${3 * low:,.0f} to ${3 * high:,.0f}"
        assert cost == f"{rounded(low)} to {rounded(high)} hours, {dollars}", name


def test_what_fits_on_a_free_gpu_is_planned_so():
    """Of docs/free.md: size, memory, rows; the hours at a quarter of a T4's peak."""
    rows = re.findall(r"^\| `(d.*?)` \| (.*) \|$", (ROOT / "docs/free.md").read_text(), re.M)
    assert len(rows) == 5
    for words, text in rows:
        preset, decided, model, size, tokens = sized(words, "T4")
        memory = re.search(r"needs (\S+) GB, activations about (\S+) GB", decided.text)
        flops = model.flops_per_token()
        head = 6 * model.head.weight.numel()
        flops += (flops - head) / 3 * preset.run.recompute  # the blocks once more
        hours = flops * tokens / (65e12 / 4) / 3600
        found = [f"{size / 1e6:.0f}M", f"{tokens / 1e9:.2f}B"]
        found += [f"{float(memory[1]):.1f}, {float(memory[2]):.1f} GB", str(decided.micro_batch)]
        assert text == " | ".join([*found, rounded(hours)]), words


def test_the_guesses_of_the_page_on_scaling_are_the_laws():
    page = " ".join((ROOT / "docs/scaling.md").read_text().split())
    guesses = []
    for name in ("d12", "d20", "d24"):
        text = forecast.page(cli.parse("train.py", "train", [name]), forecast.parse_gpus("H100"))
        guesses.append(re.search(r"a guess: (\S+) bits", text)[1])
    assert "where that of all 42 says {}, {} and {}".format(*guesses) in page
