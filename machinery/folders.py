"""The two folders of a run: the data that it reads, and RUN_DIR, which it alone may write.

Reads DATA_DIR; locks RUN_DIR, and writes its config.json and tokenizer.json when nothing can refuse
the run any more. Next: build.py builds the model.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import config as cfg
import data
import optim
from config import UsageError
from machinery import cli, code, disk
from machinery.formats import Trainer
from machinery.output import brief, tree_of
from machinery.plan import Plan
from machinery.ranks import World
from machinery.shards import Manifest

OF_DATA = {"seq_len", "vocab_size", "bos_id"}  # fields of the model that the data decides


def open_data(folder: str, preset: cfg.Preset) -> tuple[Manifest, cfg.Preset]:
    """The prepared data in `folder`, checked; and the preset, with the fields OF_DATA of its model
    as the data has them, and --tokens for --epochs. folder: --data_dir, or its local copy."""
    manifest = Manifest.load(folder, preset.name)
    manifest.check()
    found = dict(
        vocab_size=manifest.vocab_size, seq_len=manifest.row_len - 1, bos_id=manifest.bos_id
    )
    preset = decide(
        preset, found, preset.run.data_dir, "leave it out, or prepare the data that way"
    )
    if preset.train.epochs:  # another way to say --tokens
        tokens = max(1, round(preset.train.epochs * manifest.tokens("train")))
        preset = replace(preset, train=replace(preset.train, epochs=0.0, tokens=str(tokens)))
    return manifest, preset


def decide(preset: cfg.Preset, found: dict, where: str, remedy: str, free=()) -> cfg.Preset:
    """The preset with the model fields that were `found` in `where`. UsageError for an option that
    asks for another value, except for the fields in `free`: there the option wins."""
    asked = preset.model
    default = cfg.find_preset(preset.name).model
    by_hand = {k: getattr(asked, k) for k in found if getattr(asked, k) != getattr(default, k)}
    for name, value in by_hand.items():
        if name not in free and value != found[name]:
            raise UsageError(
                f"--{name} {value} was asked for, but {where} has {found[name]}; {remedy}"
            )
    return replace(preset, model=replace(asked, **found | by_hand))


def training_order(preset: cfg.Preset, plan: Plan, manifest: Manifest) -> data.Order:
    """The order of the run's rows: its seed, its mixtures, and where the second one begins."""
    train = preset.train
    return data.order_of(
        manifest,
        train.seed,
        cli.weights(train.mixture),
        cli.weights(train.decay_mixture),
        plan.decay_begins * plan.rows_per_step,
    )


def describe_data(
    asked: cfg.Preset, preset: cfg.Preset, plan: Plan, manifest: Manifest, order: data.Order
) -> str:
    """Lines on the data: its size, how often it is repeated, which options it decided."""
    epochs, name = max(zip(order.epochs(plan.steps * plan.rows_per_step), manifest.sources))
    whose = f" of {name}" if len(manifest.sources) > 1 else ""
    lines = [
        f"data      {preset.run.data_dir}: {manifest.tokens('train'):,} training tokens in rows "
        f"of {manifest.row_len:,}, {epochs:.2f} epochs{whose}; fingerprint "
        f"{manifest.fingerprint[:12]}, tokenizer {manifest.tokenizer_sha256[:12]}"
    ]
    before = asdict(asked.model)
    now = asdict(preset.model)
    changed = {k: f"{k} {now[k]}, not {before[k]}" for k in now if now[k] != before[k]}
    for where, names in (("the data", OF_DATA), (preset.run.init_from, now.keys() - OF_DATA)):
        changes = [text for name, text in changed.items() if name in names]
        if changes:
            lines.append(f"decided   by {where}: {', '.join(changes)}")
    if epochs > 4 and not manifest.marks:  # 200 conversations still taught in the 25th
        lines.append(
            f"warning: {epochs:.1f} epochs{whose}, but the same text teaches little after the "
            "fourth; prepare more, or lower --steps"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------- RUN_DIR


def lock_run(preset: cfg.Preset, world: World) -> AbstractContextManager:
    """Lock RUN_DIR; returns the lock to close."""
    if not world.is_first:
        return nullcontext()
    run_dir = Path(preset.run.run_dir)
    lock = disk.lock(run_dir, "--run_dir")
    disk.sweep(run_dir.glob(disk.TEMPORARY))
    return lock


def describe_run(preset: cfg.Preset, manifest: Manifest, world: World) -> None:
    """Write the run's config.json, tokenizer.json and, if its code has edits, code.diff. To be
    called when nothing can refuse the run any more, so that they stay those of its checkpoints."""
    if world.is_first:
        run_dir = Path(preset.run.run_dir)
        disk.write_json(run_dir / "config.json", identity(preset, manifest))
        code.keep_edits(run_dir)
        disk.write_bytes(run_dir / "tokenizer.json", disk.read_bytes(manifest.tokenizer_file()))


def identity(preset: cfg.Preset, manifest: Manifest) -> dict:
    """The facts that decide the numbers of a run: with one changed, it is another run. Only its
    code may change on the way, with a warning (build.load)."""
    facts = dict(data_fingerprint=manifest.fingerprint, tokenizer_sha256=manifest.tokenizer_sha256)
    if manifest.marks:
        facts["conversations"] = True
    facts["revisions"] = [source.revision for source in manifest.facts.sources]
    facts["code"] = tree_of(code.of_process()[0])
    return asdict(preset.train) | asdict(preset.model) | facts


def check_same_run(now: dict, where: Path | str, trainer: Trainer) -> None:
    """UsageError with the fields that differ if the checkpoint `where`, with this trainer.json, is
    of another run than the one with identity `now`. With wsd, only the number of steps may differ,
    as long as `trainer` is from before the learning rate of either run begins to fall."""
    before = trainer.identity
    differ = differences(before, now, (now.keys() | before.keys()) - {"code"})
    remedy = "give the same options to resume it, or another --run_dir to start a new run"
    if list(differ) == ["steps"] and now["schedule"] == "wsd" and type(before.get("steps")) is int:
        begins = optim.decay_begins(min(before["steps"], now["steps"]), now["decay"])
        if trainer.step <= begins:
            return
        kept = Path(where).with_name(f"step_{begins:08d}")
        found = kept if kept.exists() else f"a checkpoint up to step {begins}"
        remedy = f"add --resume {found} and another --run_dir, or {remedy}"
    if differ:
        raise UsageError(
            f"{where} belongs to another run: {'; '.join(differ.values())}; {remedy} (--init_from "
            "starts one from these weights)"
        )


MAY_CHANGE = {"seq_len", "rope_theta", "doc_mask"}  # as in a last stage on longer rows


def check_weights_fit(where: str, before: dict, preset: cfg.Preset, manifest: Manifest) -> str:
    """UsageError if the weights in `where` are of another architecture, or of another tokenizer,
    than this run's; returns a remark on the fields that differ and may."""
    names = asdict(preset.model).keys() | {"tokenizer_sha256"}
    differ = differences(before, identity(preset, manifest), names)
    refused = [text for name, text in differ.items() if name not in MAY_CHANGE]
    if refused:
        raise UsageError(
            f"the weights in {where} are of another model: {'; '.join(refused)}; give its model "
            "options, and data prepared with its tokenizer (--tokenizer)"
        )
    return f" ({'; '.join(differ.values())})" if differ else ""


def differences(
    before: dict, now: dict, names, there: str = "there", here: str = "here"
) -> dict[str, str]:
    """name -> "name is X there and Y here", of the names whose values differ in two identities."""
    usual = asdict(cfg.TrainConfig()) | asdict(cfg.GPTConfig())  # for missing fields
    before = usual | before
    now = usual | now
    differ = [n for n in sorted(names) if json.dumps(before.get(n)) != json.dumps(now.get(n))]
    return {n: brief(f"{n} is {before.get(n)!r} {there} and {now.get(n)!r} {here}") for n in differ}
