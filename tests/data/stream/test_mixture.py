"""Mixtures: several sets with one row numbering and distinct keys."""

import pickle

import numpy as np
import pytest

from mmray.config import Data, Inputs
from mmray.config.sets import Mixture
from mmray.data.store.mixture import MixtureComponent, PreparedMixture
from mmray.data.store.stored_row import hash_key
from mmray.data.stream.order import SamplePlan
from mmray.data.stream.reader import RowReader
from mmray.data.text.tokenizer import train_tokenizer
from mmray.errors import UsageError
from tests.made import CAPTIONS, make_set, png, row


@pytest.fixture
def both(tmp_path):
    one = make_set(tmp_path / "one", [row(number) for number in range(7)])
    other = make_set(
        tmp_path / "other", [row(number, png(100 + number), CAPTIONS) for number in range(4)]
    )
    return PreparedMixture([one, other], [1, 2.5])


def test_rows_are_numbered_set_after_set(both):
    assert (
        both.components == (MixtureComponent(7, 7), MixtureComponent(4, 10)) and both.num_rows == 11
    )
    rows = both.read(np.array([10, 0, 7, 6, 10]))
    assert [each.key for each in rows] == [
        "other/row-3",
        "one/row-0",
        "other/row-0",
        "one/row-6",
        "other/row-3",
    ]
    assert rows[0].image == png(103) and all(each.checksum_ok for each in rows)
    assert [each.key for each in pickle.loads(pickle.dumps(both)).read(np.array([7]))] == [
        "other/row-0"
    ]
    for number in (-1, 11):
        with pytest.raises(IndexError, match="of sets of 11"):
            both.read(np.array([number]))


def test_sets_of_the_same_name_get_distinct_names(tmp_path):
    sets = [make_set(tmp_path / folder / "set", [row(0), row(1)]) for folder in ("a", "b")]
    assert [each.key for each in PreparedMixture(sets, [1, 1]).read(np.array([0, 2]))] == [
        "set-0/row-0",
        "set-1/row-0",
    ]


def test_blocks_hold_rows_in_order_and_repeats_get_other_captions(both):
    reader = RowReader(
        both,
        Inputs(image_side=8, fit="squash", max_tokens=12),
        train_tokenizer(CAPTIONS, 60),
        10**6,
    )
    plan = SamplePlan(17, 4, 1, seed=0, steps=50, components=both.components)
    block = reader.read_block(plan, np.arange(17 * 8))
    names = [f"one/row-{number}" for number in range(7)] + [
        f"other/row-{number}" for number in range(4)
    ]
    assert block["valid"].all()
    assert block["key"].tolist() == [
        hash_key(names[number]) for number in plan.row_ids_at(np.arange(17 * 8))
    ]
    in_one_epoch = block["num_tokens"][:17][block["key"][:17] == hash_key("other/row-0")]
    lengths = block["num_tokens"][block["key"] == hash_key("other/row-0")]
    assert len(in_one_epoch) >= 2 and len(lengths) == 20 and len(set(lengths.tolist())) == 3


def test_shares_divide_an_epoch_of_as_many_rows_as_the_sets_have(both):
    shares = PreparedMixture(both.sets, [3, 1], are_shares=True)
    assert shares.components == (MixtureComponent(7, 8), MixtureComponent(4, 3))
    tiny = PreparedMixture(both.sets, [1, 1000], are_shares=True)
    assert tiny.components == (MixtureComponent(7, 1), MixtureComponent(4, 11))
    assert shares.fingerprint != PreparedMixture(both.sets, [3, 1]).fingerprint


def test_order_of_shares_is_exact_across_epochs_and_world_sizes(both):
    parts = PreparedMixture(both.sets, [0.75, 0.25], are_shares=True).components
    one, three = (SamplePlan(11, 5, world, 7, 50, components=parts) for world in (1, 3))
    rows = one.row_ids_at(np.arange(11 * 28))
    for step in range(20):
        ranks = np.concatenate([three.positions(step, rank) for rank in range(3)])
        taken = three.row_ids_at(ranks[ranks >= 0])
        assert taken.tolist() == rows[step * 5 : step * 5 + 5].tolist()
    counts = np.bincount(rows, minlength=11)
    assert counts[:7].sum() == 28 * 8 and counts[7:].sum() == 28 * 3
    assert counts[:7].tolist() == [32] * 7 and counts[7:].tolist() == [21] * 4


@pytest.mark.parametrize(
    ("text", "terms", "are_shares"),
    [
        ("prepared/a", (("prepared/a", 1.0),), False),
        ("a + 2 * b", (("a", 1.0), ("b", 2.0)), False),
        ("0.5 * s3://x/a?r=1 + my sets/b+c", (("s3://x/a?r=1", 0.5), ("my sets/b+c", 1.0)), False),
        ("a:0.75 + b:0.25", (("a", 0.75), ("b", 0.25)), True),
        ("s3://x/a:3 + my sets/b:1", (("s3://x/a", 3.0), ("my sets/b", 1.0)), True),
        ("a:1500000 + b:0.00001", (("a", 1.5e6), ("b", 1e-5)), True),
        ("0.3333333333 * a + b", (("a", 0.3333333333), ("b", 1.0)), False),
    ],
)
def test_mixture_is_parsed_and_formatted(text, terms, are_shares):
    mixture = Mixture.parse(text)
    assert mixture == Mixture(terms, are_shares) and str(mixture) == text
    assert mixture.is_single == (len(terms) == 1)
    assert Mixture.parse(text.replace(" + ", ", ")) == mixture


@pytest.mark.parametrize("text", ["a + ", "0 * a", "-1 * a + b", "inf * a", "x * a", "a + a", ""])
def test_invalid_mixtures_are_refused(text):
    with pytest.raises(UsageError, match=r"data\.train: `.*` is neither"):
        Data(train=text)


@pytest.mark.parametrize("text", ["a:0.5 + b", "a:0 + b:1", "a:1 + a:2", "2 * b + a:1"])
def test_invalid_shares_are_refused(text):
    with pytest.raises(UsageError, match=r"data\.train: `.*` is no mixture by shares"):
        Data(train=text)
