"""Whether a command starts a run, resumes it or leaves it unchanged."""

import pytest
import yaml

from mmray.config import Batch, Config, Run
from mmray.errors import UsageError
from mmray.storage.lease import Lease
from mmray.training import run_dir
from mmray.training.run_dir import select_run
from mmray.training.saved_model import load_run_config

DATA = {"train": "set", "fingerprint": "ab", "num_rows": 100}


def parse(settings):
    """{setting: value} of words `setting=value`."""
    words = (word.partition("=") for word in settings.split())
    return {name: yaml.safe_load(value.replace("slot:", "slot: ")) for name, _, value in words}


ALLOWED = parse(
    """recipe=mine batch.micro=8 batch.accumulation=2 cluster.workers=3
    cluster.resources_per_worker={slot:1.0}
    run.resume=must prepare.image_side=64 data.workers=3 data.block_mb=6.0 data.cache=elsewhere
    data.train=elsewhere/set data.local_cache=cache data.local_cache_gb=5.0 data.eval=another
    data.eval_split=val evaluate.every=5 train.steps=20 train.samples=500 train.epochs=2.0
    train.log_every=1 train.checkpoint_every=7 train.keep_checkpoints=5
    train.callbacks=[my.module:Class] train.profile=3 train.parallel=single
    train.activation_checkpointing=[text] train.compile=inductor"""
)
FORBIDDEN = parse(
    """batch.global=32 batch.group_by_length=true data.limit=10
    data.shuffle=false data.shuffle_blocks=8x16x2 augment.flip=0.5 objective.kind=sigmoid
    optimizer.lr=0.5 model.embed_dim=64 model.image.depth=2 model.inputs.image_side=32
    train.seed=1 train.precision=bf16 train.ema=0.9"""
)


def config(tmp_path, global_batch_size=16, **run):
    return Config(
        recipe="sample",
        batch=Batch(micro=4, global_=global_batch_size),
        run=Run(storage=str(tmp_path), **run),
    )


def changed(before, setting, value):
    """The config with one setting changed, as by a flag."""
    values = before.model_dump(mode="json", by_alias=True)
    *sections, name = setting.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    inner[name] = value
    return Config.model_validate(values)


def write_run_files(path, settings, *arguments):
    """Write the files of a run, which then stores a checkpoint."""
    run = run_dir.write_run_files(path, settings, *arguments)
    (run.checkpoints / "step-5").mkdir(exist_ok=True)
    return run


def finish(path, steps):
    (path / "result.json").write_text(f'{{"status": "finished", "steps": {steps}}}')


def test_run_resumes_if_its_set_has_moved(tmp_path):
    wanted = config(tmp_path, name="mine")
    write_run_files(select_run(wanted, DATA, 10).path, wanted, DATA, "{}")
    moved = wanted.replace(data=wanted.data.replace(train="other/set"))
    assert select_run(moved, DATA | {"train": "/new/other/set"}, 10).action == "resume"
    with pytest.raises(UsageError, match="data fingerprint"):
        select_run(moved, DATA | {"train": "/new", "fingerprint": "of other rows"}, 10)


def test_run_of_another_sample_order_is_refused(tmp_path):
    """Version 1 is that of runs whose data.json names none."""
    wanted = config(tmp_path, name="mine")
    write_run_files(select_run(wanted, DATA, 10).path, wanted, DATA, "{}")
    assert select_run(wanted, DATA | {"order": 1}, 10).action == "resume"
    with pytest.raises(UsageError, match="data order: 1 -> 2"):
        select_run(wanted, DATA | {"order": 2}, 10)


def test_new_name_starts_and_same_command_resumes(tmp_path):
    wanted = config(tmp_path)
    (tmp_path / "sample").mkdir()
    (tmp_path / "sample" / ".tokenizer.json.7").touch()  # of a command that was interrupted
    first = select_run(wanted, DATA, steps=10)
    assert (first.action, first.path) == ("start", tmp_path / "sample")
    write_run_files(first.path, wanted, DATA, "{}")
    assert select_run(wanted, DATA, steps=10).action == "resume"


def test_unnamed_run_takes_next_name_if_done_or_different(tmp_path):
    write_run_files(tmp_path / "sample", config(tmp_path), DATA, "{}")
    assert (
        select_run(config(tmp_path, global_batch_size=32), DATA, 10).path == tmp_path / "sample-2"
    )
    finish(tmp_path / "sample", 10)
    assert select_run(config(tmp_path), DATA, 10).path == tmp_path / "sample-2"
    assert select_run(config(tmp_path), DATA, 20).action == "resume"  # more steps than before


def test_run_keeps_its_shuffle_but_not_one_of_an_earlier_version(tmp_path):
    before = config(tmp_path, name="mine")
    before = before.replace(data=before.data.replace(shuffle_blocks="4x8x2"))
    write_run_files(tmp_path / "mine", before, DATA, "{}")
    now = before.replace(data=before.data.replace(shuffle_blocks="8x8x2"))
    assert select_run(now, DATA, 10, keep_shuffle=True).action == "resume"
    for stored in ("4x8x2", "8x2"):
        with pytest.raises(UsageError, match=f"data.shuffle_blocks: '{stored}' -> '8x8x2'"):
            select_run(now, DATA, 10, keep_shuffle=stored == "8x2")
        saved = tmp_path / "mine" / "config.yaml"
        saved.write_text(saved.read_text().replace("4x8x2", "8x2"))


def test_run_of_a_version_without_a_setting_resumes_with_its_default(tmp_path):
    wanted = config(tmp_path, name="mine")
    write_run_files(tmp_path / "mine", wanted, DATA, "{}")
    assert run_dir.describe_earlier_version(tmp_path / "mine", wanted) == []
    settings = wanted.to_json()
    del settings["objective"]["teacher"], settings["train"]["ema"]
    (tmp_path / "mine" / "config.yaml").write_text(yaml.safe_dump(settings))
    assert select_run(wanted, DATA, 10).action == "resume"
    (line,) = run_dir.describe_earlier_version(tmp_path / "mine", wanted)
    assert "without objective.teacher, train.ema: defaults are used" in line
    with pytest.raises(UsageError, match=r"train\.ema: 0\.0 -> 0\.9"):
        select_run(changed(wanted, "train.ema", 0.9), DATA, 10)


def test_run_with_a_setting_that_was_removed_is_refused(tmp_path):
    wanted = config(tmp_path)
    write_run_files(tmp_path / "sample", wanted, DATA, "{}")
    settings = wanted.to_json()
    settings["train"]["removed"] = 1
    (tmp_path / "sample" / "config.yaml").write_text(yaml.safe_dump(settings))
    selection = select_run(wanted, DATA, 10)
    assert selection.path == tmp_path / "sample-2"
    assert selection.skipped[0].endswith("has other settings: train.removed: 1 -> None")
    with pytest.raises(UsageError, match=r"train\.removed: unknown.*\n.*use that version"):
        load_run_config(tmp_path / "sample")


def test_named_run_is_resumed_refused_or_done(tmp_path):
    write_run_files(tmp_path / "mine", config(tmp_path, name="mine"), DATA, "{}")
    with pytest.raises(UsageError, match=r"batch.global: 16 -> 32"):
        select_run(config(tmp_path, global_batch_size=32, name="mine"), DATA, 10)
    with pytest.raises(UsageError, match="data fingerprint: 'ab' -> 'cd'"):
        select_run(config(tmp_path, name="mine"), {**DATA, "fingerprint": "cd"}, 10)
    finish(tmp_path / "mine", 10)
    assert select_run(config(tmp_path, name="mine"), DATA, 10).action == "done"
    assert select_run(config(tmp_path, name="mine"), DATA, 11).action == "resume"
    run = write_run_files(tmp_path / "mine", config(tmp_path, name="mine"), DATA, "{}")
    # until it ends again
    assert run.read_json("result.json") == {"status": "unfinished", "steps": 10}


@pytest.mark.parametrize("setting", ALLOWED)
def test_run_resumes_with_changed_setting(tmp_path, setting):
    before = config(tmp_path, name="mine")
    write_run_files(tmp_path / "mine", before, DATA, "{}")
    decision = select_run(changed(before, setting, ALLOWED[setting]), DATA, 10)
    assert (decision.action, decision.skipped) == ("resume", ())


@pytest.mark.parametrize("setting", FORBIDDEN)
def test_run_refuses_changed_setting(tmp_path, setting):
    before = config(tmp_path, name="mine")
    write_run_files(tmp_path / "mine", before, DATA, "{}")
    with pytest.raises(UsageError) as refused:
        select_run(changed(before, setting, FORBIDDEN[setting]), DATA, 10)
    lines = str(refused.value).splitlines()
    assert lines[0].endswith("mine has other settings:") and "restore these settings" in lines[-1]
    assert (
        len(lines) == 3
        and lines[1].startswith(f"  {setting}: ")
        and lines[1].endswith(f"-> {FORBIDDEN[setting]!r}")
    )


def test_run_without_a_stored_step_takes_changed_settings(tmp_path):
    """Unless another process may be about to take its first step."""
    path = tmp_path / "mine"
    wanted = config(tmp_path, global_batch_size=32, name="mine")
    run_dir.write_run_files(path, config(tmp_path, name="mine"), DATA, "{}")
    metrics = path / "metrics.jsonl"
    metrics.touch()
    assert select_run(wanted, DATA, 10).action == "start"
    assert select_run(config(tmp_path, name="mine"), DATA, 10).action == "resume"
    with Lease(path), pytest.raises(UsageError, match=r"batch.global: 16 -> 32"):
        select_run(wanted, DATA, 10)
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match=r"batch.global: 16 -> 32"):
        select_run(wanted, DATA, 10)


def test_constant_rate_can_end_with_a_cooldown(tmp_path):
    def scheduled(schedule):
        return changed(config(tmp_path, name="mine"), "optimizer.schedule", schedule)

    write_run_files(tmp_path / "mine", scheduled("constant"), DATA, "{}")
    assert select_run(scheduled("cooldown"), DATA, 20).action == "resume"
    with pytest.raises(UsageError, match=r"optimizer\.schedule: 'constant' -> 'cosine'"):
        select_run(scheduled("cosine"), DATA, 20)


def test_resume_modes(tmp_path):
    with pytest.raises(UsageError, match="no run at"):
        select_run(config(tmp_path, resume="must"), DATA, 10)
    write_run_files(tmp_path / "mine", config(tmp_path, name="mine"), DATA, "{}")
    with pytest.raises(UsageError, match="exists; choose another"):
        select_run(config(tmp_path, name="mine", resume="never"), DATA, 10)
    write_run_files(tmp_path / "sample", config(tmp_path), DATA, "{}")
    assert select_run(config(tmp_path, resume="never"), DATA, 10).path == tmp_path / "sample-2"


def test_folder_that_is_not_a_run_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not an mmray run"):
        select_run(config(tmp_path, name="mine"), DATA, 10)
