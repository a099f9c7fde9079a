"""eval.py on a small trained model: which model a word means, the trainer's own figure again, and
what an export, a copy or a damaged checkpoint is worth."""

import re
import shutil

import pytest
from conftest import CPU, look, metrics, read_lines, write_lines
from test_trained import forge

import eval as evaluate
import export
from config import UsageError
from machinery.errors import DataError


def records(run_dir):
    return read_lines(run_dir / "eval.jsonl")


def test_loss_is_what_the_trainer_measured(own_run, capsys):
    out = look(capsys, "loss", own_run, *CPU, "--batch", 3)
    look(capsys, "loss", own_run, "--device", "cpu", "--dtype", "bf16", "--rows", 20)
    whole, other = records(own_run)
    bpb = float(re.search(r"([\d.]+) bits per byte", out)[1])
    assert whole["val_bpb"] == pytest.approx(bpb, abs=1e-4) and whole["step"] == 12
    (trained,) = metrics(own_run, "full_val_bpb")  # in fp32 too
    assert trained["full_val_bpb"] == pytest.approx(whole["val_bpb"], rel=1e-5)
    assert trained["val_rows"] == whole["rows"]
    assert other["rows"] == 20 and other["val_bpb"] != whole["val_bpb"]
    assert other["val_bpb"] == pytest.approx(bpb, rel=0.1)


@pytest.fixture
def exam(tmp_path):
    write_lines(tmp_path / "exam.jsonl", 9 * [dict(query="def f", choices=["(x):", "qqq"], gold=0)])
    return tmp_path / "exam.jsonl"


def test_a_record_goes_to_the_run_of_the_checkpoint(own_run, capsys, tmp_path, monkeypatch, exam):
    path = own_run / "checkpoints" / "step_00000012"
    monkeypatch.chdir(path.parent)
    look(capsys, "loss", path.name, *CPU, "--rows", 8)
    look(capsys, "choice", path, "--device", "cpu", "--task", exam)
    loss, *scores = records(own_run)
    assert loss["run_dir"] == str(own_run) and not (path / "eval.jsonl").exists()
    assert [score["norm"] for score in scores] == ["sum", "per character"]
    score = scores[0]
    assert (score["n"], score["chance"], score["dtype"]) == (9, 0.5, "fp32")

    copy = shutil.copytree(path, tmp_path / "copy")  # where no line can be written
    (copy / "eval.jsonl").mkdir()
    evaluate.main(["loss", str(copy), *CPU, "--rows", "8"])
    out, err = capsys.readouterr()
    assert " bits" in out and str(copy / "eval.jsonl") in err


@pytest.fixture
def alone(own_run, tmp_path):
    """The run on a machine without its data: the folder that its checkpoints name is not there."""
    forge(own_run, lambda tree: tree.update(data_dir=str(tmp_path / "gone")))
    return own_run


@pytest.mark.parametrize(
    "command", ["sample --prompt def", "choice --task {exam}", "look --prompt def"]
)
def test_a_run_without_its_data_folder_is_sampled_and_asked(command, alone, exam, capsys):
    name, *options = command.format(exam=exam).split()
    for model in (alone, alone / "checkpoints" / "step_00000012"):
        assert look(capsys, name, model, *options, "--device", "cpu")
    with pytest.raises(UsageError, match="gone/manifest.json"):
        evaluate.main(["loss", str(alone)])


def test_a_tokenizer_of_another_model_is_named_and_not_used(alone, trained_run, small_data, capsys):
    file = alone / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    args = ("sample", alone, *CPU, "--prompt", "def", "--max_new_tokens", 4)
    with pytest.raises(UsageError, match="gone/manifest.json"):
        evaluate.main([str(arg) for arg in args])
    assert f"warning: {file} is not used: it is not the tok" in capsys.readouterr().out
    out = look(capsys, *args, "--data_dir", small_data)
    assert f"warning: {file} is not used" in out
    honest = look(capsys, "sample", trained_run, *args[2:])
    assert out.partition("---")[2] == honest.partition("---")[2]


def test_an_exported_folder_is_a_model_too(own_run, small_data, capsys, tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "folder"
    assert export.main(["--run_dir", str(own_run), "--out", str(folder)]) == 0
    sample = ("--prompt", "def", "import", "--max_new_tokens", 12)
    loss = ("--rows", 8, "--data_dir", small_data)
    texts = [look(capsys, "sample", model, *CPU, *sample) for model in (folder, own_run)]
    assert len({text.partition("---")[2] for text in texts}) == 1
    texts = [look(capsys, "loss", model, *CPU, *loss) for model in (folder, own_run)]
    assert len({re.search(r"[\d.]+ bits", text)[0] for text in texts}) == 1


def test_a_tokenizer_that_has_changed_is_not_used(own_run, own_data):
    file = own_data / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    (own_run / "tokenizer.json").unlink()  # else it is the run's own that is used
    for name, *more in (["loss"], ["sample", "--prompt", "a"]):
        with pytest.raises(DataError, match="tokenizer.json"):
            evaluate.main([name, str(own_run), "--data_dir", str(own_data), *more])
