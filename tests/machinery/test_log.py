"""machinery/log.py: what a run did is in metrics.jsonl, whatever wandb does."""

import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import losses, metrics, read_lines, train_here, write_lines
from faults import start
from table import read_table

import session
import train
from config import UsageError
from machinery import log
from machinery.formats import SkippedLine, Stamp, Start

FAKE = """from types import SimpleNamespace
Settings = SimpleNamespace
def setup(): return SimpleNamespace(settings=SimpleNamespace(mode="offline"))
"""
WANDB = {
    "exits at import": "import sys; sys.exit(3)",
    "raises at log": "class R:\n def log(self, *a, **k): raise OSError('gone')\n"
    "def init(**k): return R()",
}
START = Start(time=1.0, command="train.py", device="cpu", world_size=1, data_dir="data")


@pytest.mark.parametrize("fault", WANDB)
def test_wandb_cannot_stop_a_run(fault, trained_run, small_data, run_dir, tmp_path):
    (tmp_path / "wandb.py").write_text(FAKE + WANDB[fault])
    env = dict(PYTHONPATH=str(tmp_path))
    text = start(small_data, run_dir, "--wandb", "--eval_every", 4, env=env).end(0)
    assert text.count("wandb is off") == 1
    assert losses(run_dir) == losses(trained_run)
    assert len(metrics(run_dir)) == len(metrics(trained_run))


def begin(folder, **how) -> log.Log:
    """The log of a run that goes on after step 1."""
    run_log = log.Log(folder, is_first=True, **how)
    run_log.begin(1, validates=False, start=START)
    return run_log


def test_wandb_gets_every_record_and_with_the_command_no_secret(tmp_path, monkeypatch):
    seen = []
    module = ModuleType("wandb")
    exec(FAKE, vars(module))
    of_run = dict(log=lambda record, step: seen.append(record), finish=lambda: seen.append("end"))
    module.init = lambda **how: seen.extend(sys.argv) or SimpleNamespace(**of_run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(sys, "argv", ["train.py", "--mirror", "s3://KEY:hunter2@bucket/runs"])
    (tmp_path / "config.json").write_text("{}")
    run_log = begin(tmp_path, wandb=True)
    with run_log.outcome(None):
        run_log.write(SkippedLine(step=2, tokens=3, skipped=1, more=dict(mine=4.0)))
    assert seen[:3] == ["train.py", "--mirror", "s3://bucket/runs"]
    assert seen[3:] == [*metrics(tmp_path), "end"] and seen[3]["mine"] == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["online", "offline", "disabled", "no key"])
def test_what_wandb_sends_is_its_own_settings_to_decide(settings, small_data, run_dir, tmp_path):
    """The real SDK, and a server of one's own that takes connections and never answers: a run is as
    it would be, a bounded time later."""
    home = tmp_path / "home"
    (home / ".config/wandb").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if settings != "no key":
            netrc = home / ".netrc"
            netrc.write_text(f"machine {address}\n login user\n password {'a' * 40}\n")
            netrc.chmod(0o600)
        if settings in ("offline", "disabled"):  # as `wandb offline` writes it
            (home / ".config/wandb/settings").write_text(f"[default]\nmode = {settings}\n")
        env = dict(HOME=str(home), WANDB_BASE_URL=f"http://{address}")
        spoil = [("wandb_waits", 2.0)]
        text = start(small_data, run_dir, "--wandb", spoil=spoil, env=env).end(0)
        server.settimeout(0)
        try:
            asked = bool(server.accept())
        except BlockingIOError:
            asked = False
    assert asked == ("wandb is off" in text) == (settings == "online")
    assert len(losses(run_dir)) == 12


def test_the_figures_of_a_long_run_are_kept(tmp_path):
    """152,000 steps, as `biatron-345m` has, fill more than 64 MB."""
    line = b'{"step": 1, "loss": 2.0, "val_bpb": 1.0}\n'  # no validation comes again
    (tmp_path / "metrics.jsonl").write_bytes(line + b" " * (65 << 20))
    begin(tmp_path)
    assert losses(tmp_path) == {1: 2.0}


def test_lines_that_are_no_records_are_left_out(tmp_path):
    """Of a stranger's run, or of another program."""
    good = {"step": 1, "loss": 2.0}
    sample = good | {"text": "https://h/x?y#z"}
    write_lines(tmp_path / "metrics.jsonl", [good, {"step": "3"}, 7])
    write_lines(tmp_path / "samples.jsonl", [sample, {"step": None}])
    begin(tmp_path)
    assert metrics(tmp_path) == [good]
    assert read_lines(tmp_path / "samples.jsonl") == [sample]  # its text as it was


def test_what_a_resumed_run_writes_again_is_dropped():
    lines = [
        (b"start", Stamp()),
        (b"before", Stamp(step=4, full_val_bpb=1.0)),
        (b"at", Stamp(step=5)),
        (b"full", Stamp(step=5, full_val_bpb=1.0)),
        (b"after", Stamp(step=6)),
        (b"validation", Stamp(step=5, val_bpb=1.0)),
    ]
    assert log.kept(lines, 5, validates=True) == b"start\nbefore\nat\n"
    assert log.kept(lines, 5, validates=False) == b"start\nbefore\nat\nvalidation\n"


def test_what_cannot_be_read_today_is_kept(tmp_path):
    for n in range(3):
        (tmp_path / "metrics.jsonl").unlink(missing_ok=True)
        (tmp_path / "metrics.jsonl" / f"inner{n}").mkdir(parents=True)
        begin(tmp_path)
    assert len([*tmp_path.glob("metrics_unread_*/inner?")]) == 3


@pytest.mark.parametrize(
    "name, number",
    [
        *[(name, torch.ones(())) for name in ("bytes", "save_now", "scale")],
        ("mine", torch.ones(2)),
        ("mine", "text"),
    ],
)
def test_a_number_of_yours_replaces_none_of_ours(name, number, small_data, tmp_path, monkeypatch):
    """Of those that are added up over the ranks, or stand in metrics.jsonl; and it is one."""
    honest = train.add_gradients
    monkeypatch.setattr(train, "add_gradients", lambda *args: (honest(*args)[0], {name: number}))
    with pytest.raises(UsageError, match=f"{name}.*my_{name}"):
        train_here(small_data, tmp_path)
    assert not losses(tmp_path)


# an import that fails => what is said of it; nothing: it is shown
MISSING = """
raise ModuleNotFoundError('no jinja2', name='jinja2') => no jinja2; pip
raise ImportError('libz.so', name='matplotlib') => libz.so; pip
from machinery.disk import nothing =>
from machinery import nothing =>
"""


@pytest.mark.parametrize("line, says", read_table(MISSING))
def test_a_package_that_is_missing_is_named_and_a_mistake_is_shown(
    line, says, tmp_path, monkeypatch, capsys
):
    """In what the report imports: in the first case a run has no report, and says so once."""
    name = "instruments.pages.report"
    finder = SimpleNamespace(find_spec=lambda wanted, *_: exec(line) if wanted == name else None)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(name, raising=False)
    run_log = log.Log(tmp_path, is_first=True)
    if says[0]:
        assert session.find_report(run_log) is None
        assert says[0] in capsys.readouterr().out
    else:
        with pytest.raises(ImportError, match="nothing"):
            session.find_report(run_log)
