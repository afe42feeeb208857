"""The completion script in bash, and its flags against those of the parsers."""

import io
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from mmray import cli
from mmray.cli.completion import SETTINGS, completion_script
from mmray.cli.console import Terminal
from mmray.config.model import KINDS


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "--batch.m"], {"--batch.micro"}),
        (["train", "clip", "--model.text.wi"], {"--model.text.width"}),
        (["train", "si"], {"siglip"}),
        (["tune", "clip", "--go"], {"--goal"}),
        (["bench", "st"], {"step", "strategies"}),
        (["prepare", "a", "b", "--max-b"], {"--max-bad-fraction"}),
        (["evaluate", ""], set()),  # bash completes files
        (["evaluate", "--wei"], {"--weights"}),
        (["export", "--wei"], {"--weights"}),
        (["--pr"], {"--print-completion"}),
    ],
)
def test_bash_completes_commands_recipes_and_flags(words, expected):
    call = (
        f'{completion_script("bash", cli.COMMANDS)}\nCOMP_WORDS=(mmray "$@"); COMP_CWORD=$#; '
        "_mmray mmray\n"
    )
    command = [
        "bash",
        "-c",
        call + 'printf "%s\\n" "${COMPREPLY[@]}"; complete -p mmray',
        "bash",
        *words,
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    *found, registered = completed.stdout.split("\n")[:-1]
    assert set(filter(None, found)) == expected and registered == (
        "complete -o default -F _mmray mmray"
    )


def test_every_flag_of_the_parsers_is_completed(capsys):
    script = completion_script("zsh", cli.COMMANDS)
    assert script.startswith("autoload") and set(SETTINGS) == set(cli.COMMANDS)
    kinds = [["--model.kind", kind] for kind in (*KINDS, "mine:Net")]
    variants = {
        "train": [["sample", *kind] for kind in kinds],
        "tune": [["sample", *kind] for kind in kinds],
    }
    variants["bench"] = [["step"], ["loader"], ["strategies"]]
    for command in set(SETTINGS) - {"evaluate"}:  # its --help needs a run
        documented = set()
        for words in variants.get(command, [[]]):
            with pytest.raises(SystemExit):
                cli.run([command, *words, "--help"], Terminal(Console(file=io.StringIO())))
            documented |= set(
                re.findall(r"^[│ ]? {0,4}(--[a-z][\w.-]*)", capsys.readouterr().out, re.M)
            )
        completed = set(next(re.finditer(rf'\*" {command} -"\*\) names="(.*)"', script))[1].split())
        assert documented and documented <= completed, (command, documented - completed)
