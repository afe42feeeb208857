"""Whether a command starts a run, goes on with it, or must leave it alone."""

import pytest

from mmray.config import Batch, Config, Run
from mmray.errors import UsageError
from mmray.train.rundir import create, decide

DATA = {"train": "set", "fingerprint": "ab", "num_rows": 100}


def config(tmp_path, global_rows=16, **run):
    return Config(recipe="sample", batch=Batch(micro=4, global_=global_rows), run=Run(storage=str(tmp_path), **run))


def finish(path, steps):
    (path / "result.json").write_text(f'{{"status": "finished", "steps": {steps}}}')


def test_a_new_name_starts_and_the_same_command_resumes(tmp_path):
    wanted = config(tmp_path)
    first = decide(wanted, DATA, steps=10)
    assert (first.action, first.path) == ("start", tmp_path / "sample")
    create(first.path, wanted, DATA, "{}")
    assert decide(wanted, DATA, steps=10).action == "resume"


def test_an_unnamed_run_takes_the_next_name_when_done_or_different(tmp_path):
    create(tmp_path / "sample", config(tmp_path), DATA, "{}")
    assert decide(config(tmp_path, global_rows=32), DATA, 10).path == tmp_path / "sample-2"
    finish(tmp_path / "sample", 10)
    assert decide(config(tmp_path), DATA, 10).path == tmp_path / "sample-2"
    assert decide(config(tmp_path), DATA, 20).action == "resume"  # longer than it was


def test_a_named_run_is_continued_refused_or_done(tmp_path):
    create(tmp_path / "mine", config(tmp_path, name="mine"), DATA, "{}")
    with pytest.raises(UsageError, match=r"batch.global: 16 -> 32"):
        decide(config(tmp_path, global_rows=32, name="mine"), DATA, 10)
    with pytest.raises(UsageError, match="data fingerprint: 'ab' -> 'cd'"):
        decide(config(tmp_path, name="mine"), {**DATA, "fingerprint": "cd"}, 10)
    finish(tmp_path / "mine", 10)
    assert decide(config(tmp_path, name="mine"), DATA, 10).action == "done"
    assert decide(config(tmp_path, name="mine"), DATA, 11).action == "resume"


def test_resume_modes(tmp_path):
    with pytest.raises(UsageError, match="there is no run at"):
        decide(config(tmp_path, resume="must"), DATA, 10)
    create(tmp_path / "mine", config(tmp_path, name="mine"), DATA, "{}")
    with pytest.raises(UsageError, match="exists; choose another"):
        decide(config(tmp_path, name="mine", resume="never"), DATA, 10)
    create(tmp_path / "sample", config(tmp_path), DATA, "{}")
    assert decide(config(tmp_path, resume="never"), DATA, 10).path == tmp_path / "sample-2"


def test_a_folder_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not a run of mmray"):
        decide(config(tmp_path, name="mine"), DATA, 10)


def test_no_permission_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"choose another --run.storage"):
        create(tmp_path / "file" / "run", config(tmp_path), DATA, "{}")


def test_a_run_on_an_object_store_is_found_and_gone_on_with(s3):
    wanted = config(s3.address, name="mine")
    assert decide(wanted, DATA, 10).action == "start"
    run = create(decide(wanted, DATA, 10).path, wanted, DATA, "{}")
    assert str(run.path) == f"{s3.address}/mine" and run.read_json("data.json") == DATA
    assert decide(wanted, DATA, 10).action == "resume"
    run.write_json("result.json", {"status": "finished", "steps": 10})
    assert decide(wanted, DATA, 10).action == "done"
    with pytest.raises(UsageError, match="data num_rows"):
        decide(wanted, DATA | {"num_rows": 7}, 10)
    with pytest.raises(UsageError, match="not a run of mmray"):
        (run.path / "config.yaml").unlink()
        (run.path / "other").write_text("")
        decide(wanted, DATA, 10)


def test_another_tokenizer_is_another_run(tmp_path):
    create(tmp_path / "mine", config(tmp_path, name="mine"), DATA | {"tokenizer": "ab"}, "{}")
    with pytest.raises(UsageError, match="data tokenizer: 'ab' -> 'cd'"):
        decide(config(tmp_path, name="mine"), DATA | {"tokenizer": "cd"}, 10)
