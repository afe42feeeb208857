"""Named sets of zero-shot prompts, in prompts.json: those that CLIP was evaluated with.

Source: Radford et al. 2021 (arXiv:2103.00020), section 3.1.4, and the notebooks of its repository.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from mmray.errors import suggest

FILE = Path(__file__).with_name("prompts.json")


@cache
def prompt_sets() -> dict[str, tuple[str, ...]]:
    """Return the built-in sets of prompts for zero-shot classification, by name.

    A prompt is a text such as `a photo of a {}.` with `{}` for the class name. `imagenet` has 80,
    `cifar` 18, and `simple` the 7 that work best together on ImageNet.
    """
    return {name: tuple(texts) for name, texts in json.loads(FILE.read_text()).items()}


def expand_prompts(prompts: tuple[str, ...]) -> tuple[str, ...]:
    """Replace the names of prompt sets by their prompts.

    Args:
        prompts: Prompts with `{}` for the class name, and names of sets such as `imagenet`.

    Returns:
        The prompts in order, such as (`a photo of a {}.`, `a drawing of a {}.`).

    Raises:
        ValueError: A text without `{}` is no name of a set.
    """
    texts: list[str] = []
    for prompt in prompts:
        if "{}" in prompt:
            texts.append(prompt)
        elif prompt in prompt_sets():
            texts += prompt_sets()[prompt]
        else:
            raise ValueError(
                f"`{prompt}` has no {{}} for the class name and is no set of prompts; "
                f"{suggest(prompt, prompt_sets())}"
            )
    return tuple(texts)
