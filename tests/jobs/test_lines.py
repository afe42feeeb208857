"""Each job documents its submit command, and the command line parses."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from mmray.cli import COMMANDS
from mmray.cli.train import train

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.py"))
LINE = re.compile(r"^    (ray job submit (?:.*\\\n)*.*)$", re.MULTILINE)  # joins continued lines


def submit_line(name):
    """Words of the submit line in the docstring of jobs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "jobs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # the main guard keeps it from running
    (line,) = LINE.findall(module.__doc__)
    return shlex.split(line.replace("\\\n", " "))


@pytest.mark.parametrize("job", [job.stem for job in JOBS])
def test_each_job_documents_its_submit_command(job):
    assert job in COMMANDS
    words = submit_line(job)
    assert words[:7] == ["ray", "job", "submit", "--working-dir", ".", "--", "python"]
    assert words[7] == f"jobs/{job}.py"
    if job == "train":
        config = train.parse(words[8:])["settings"]
        assert config.run.storage == "/shared/runs"
    assert f'main(["{job}", *sys.argv[1:]])' in (ROOT / "jobs" / f"{job}.py").read_text()


def test_shipped_files_are_small_and_contain_the_package(monkeypatch):
    """`--working-dir .` ships the files outside .gitignore and .rayignore;

    Ray refuses more than 512 MiB.
    """
    from ray._private.runtime_env.packaging import _dir_travel

    monkeypatch.chdir(ROOT)
    shipped = []
    _dir_travel(ROOT, [], shipped.append, include_gitignore=True)
    names = {path.relative_to(ROOT).parts[0] for path in shipped if path != ROOT}
    assert {"jobs", "mmray"} <= names and not names & {".git", "runs", "prepared", ".mypy_cache"}
    assert sum(path.stat().st_size for path in shipped if path.is_file()) < 6_000_000
