"""Sets that settings name: mixtures with weights, held-out sets with tasks, and captions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from math import inf
from typing import NamedTuple

from mmray.config.base import parse_weighted_sum
from mmray.config.prompts import prompt_sets
from mmray.errors import suggest

_SHARE = re.compile(r"(\S.*?) *: *(\d+\.?\d*|\.\d+)")


@dataclass(frozen=True)
class Mixture:
    """The sets of `data.train`.

    Args:
        terms: Address and weight of each set, such as (("prepared/a", 1.0), ("prepared/b", 2.0)).
        are_shares: Whether the weights are the proportions of the sets in each epoch; otherwise an
            epoch takes each row of a set as many times as its weight.
    """

    terms: tuple[tuple[str, float], ...]
    are_shares: bool = False

    @classmethod
    def parse(cls, text: str) -> Mixture:
        """Parse the value of `data.train`, a set or a mixture of sets.

        Args:
            text: `prepared/a + 2 * prepared/b` for repeats, or `prepared/a:0.75 + prepared/b:0.25`
                (also `:3` and `:1`) for shares; a comma and a space are a plus, as in `data.eval`.

        Returns:
            A Mixture: `terms`, pairs (address, weight), and `are_shares`, whether the weights are
            shares.

        Raises:
            ValueError: A term is invalid, a set is repeated, or only some sets have a share.
        """
        text = text.replace(", ", " + ")
        terms = [_SHARE.fullmatch(term.strip()) for term in text.split(" + ")]
        shares = {term[1]: float(term[2]) for term in terms if term is not None}
        if not shares:
            try:
                return cls(tuple(parse_weighted_sum(text).items()))
            except ValueError as error:
                raise ValueError(
                    f"`{text}` is neither a set nor a sum of different sets, at `{error}`; "
                    "write for example `prepared/a + 2 * prepared/b`, or for shares "
                    "`prepared/a:0.75 + prepared/b:0.25`"
                ) from None
        if len(shares) < len(terms) or not all(0 < share < inf for share in shares.values()):
            raise ValueError(
                f"`{text}` is no mixture by shares: write a share above 0 after each set, and each "
                "set once, for example `prepared/a:0.75 + prepared/b:0.25`"
            )
        return cls(tuple(shares.items()), are_shares=True)

    def __str__(self) -> str:
        """Return the value of `data.train`; a repeat of 1 is omitted."""
        terms = []
        for address, weight in self.terms:
            # All digits and no exponent, because runs read the text again from config.yaml.
            number = f"{Decimal(repr(weight)):f}".removesuffix(".0")
            if self.are_shares:
                terms.append(f"{address}:{number}")
            else:
                terms.append(address if weight == 1 else f"{number} * {address}")
        return " + ".join(terms)

    @property
    def is_single(self) -> bool:
        """Whether it is one set that is neither repeated nor has a share."""
        return not self.are_shares and self.weights == [1.0]

    @property
    def addresses(self) -> list[str]:
        """Paths or URIs of the sets, such as `prepared/a`, in order."""
        return [address for address, _ in self.terms]

    @property
    def weights(self) -> list[float]:
        """Weight of each set: how often an epoch takes each of its rows, or its share of an epoch
        if `are_shares`.
        """
        return [weight for _, weight in self.terms]

    def rename(self, name: Callable[[str], str]) -> Mixture:
        """Return the mixture with each address replaced by `name(address)`."""
        return replace(self, terms=tuple((name(address), weight) for address, weight in self.terms))


class EvalSet(NamedTuple):
    """A set to evaluate on, one entry of the setting `data.eval`.

    Attributes:
        name: Prefix of its metrics; "" for the only set without a name.
        task: `retrieval` or `zero_shot`; "": both, if the set has class names.
        prompts: Name of the prompts of zero-shot classification; "": `evaluate.prompts`.
    """

    name: str
    address: str
    task: str = ""
    prompts: str = ""


EVAL_TASKS = ("retrieval", "zero_shot")
_EVAL_NAME = r"[A-Za-z][\w-]*="


def parse_eval_sets(text: str) -> list[EvalSet]:
    """Parse the value of `data.eval`, a set or several named ones.

    Args:
        text: For example `prepared/test`, or `flickr=prepared/flickr, in1k=prepared/in1k
            (zero_shot imagenet)`. A comma separates two sets if a name and `=` follow.

    Returns:
        For each set an EvalSet, in order: `name`, `address`, `task` and `prompts` ("" if not
        given).

    Raises:
        ValueError: A name is repeated or reserved, or a task or its prompts are unknown.
    """
    if not re.match(_EVAL_NAME, text.strip()):
        return [EvalSet("", text)]
    sets: dict[str, EvalSet] = {}
    for term in re.split(rf",\s*(?={_EVAL_NAME})", text.strip()):
        name, _, rest = term.partition("=")
        matched = re.fullmatch(r"(.*?)\s*(?:\(([^()]*)\))?", rest.strip())
        assert matched is not None  # every part of the pattern is optional
        address, task = matched.groups(default="")
        if not address:
            raise ValueError(f"`{term.strip()}` has no set after `{name}=`")
        if name in sets or name in ("loss", "median_rank"):
            raise ValueError(
                f"the name `{name}` is {'repeated' if name in sets else 'the name of a metric'}; "
                "choose another"
            )
        sets[name] = EvalSet(name, address, *_parse_task(task))
    return list(sets.values())


def _parse_task(text: str) -> tuple[str, str]:
    """Return task and prompts of a text such as `zero_shot imagenet`; "" is every task."""
    task, _, prompts = text.strip().partition(" ")
    if task and task not in EVAL_TASKS:
        raise ValueError(f"no task `{task}`; {suggest(task, EVAL_TASKS)}")
    if prompts and task != "zero_shot":
        raise ValueError(f"the task {task} takes no prompts (got `{prompts}`)")
    if prompts and prompts not in prompt_sets():
        raise ValueError(f"no set of prompts `{prompts}`; {suggest(prompts, prompt_sets())}")
    return task, prompts


def parse_captions(text: str) -> dict[str, float]:
    """Parse the value of `data.captions`.

    Args:
        text: For example `alt=0.3, synthetic=0.7`, or `synthetic` for one column.

    Returns:
        Relative frequency of the captions of each column, by its name; {} for an empty text.

    Raises:
        ValueError: A column is repeated, or a weight is no number above 0.
    """
    weights: dict[str, float] = {}
    for term in filter(None, map(str.strip, text.split(","))):
        name, equals, number = (part.strip() for part in term.partition("="))
        try:
            weight = float(number) if equals else 1.0
        except ValueError:
            weight = 0.0
        if not name or name in weights or not 0 < weight < inf:
            raise ValueError(
                f"`{term}` is not a column that is named once with a share above 0; write for "
                "example `alt=0.3, synthetic=0.7`"
            )
        weights[name] = weight
    return weights


def format_eval_sets(sets: list[EvalSet]) -> str:
    """Format sets as a value of the setting `data.eval`, such as `flickr=prepared/flickr,
    in1k=prepared/in1k (zero_shot imagenet)`.
    """
    terms = []
    for each in sets:
        task = " ".join(filter(None, (each.task, each.prompts)))
        terms.append(f"{each.name}={each.address}" + (f" ({task})" if task else ""))
    return ", ".join(terms) if sets[0].name else sets[0].address
