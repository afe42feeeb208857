"""The number of decode actors follows the time that a rank waits for blocks."""

import pytest

from mmray.data.stream.pool_size import PoolSize


class Rank:
    """A rank that trains `seconds` with a share of waiting; started actors are those requested."""

    def __init__(self, minimum, maximum):
        self.now_s = self.waited_s = 0.0
        self.size = PoolSize(minimum, maximum, 0.0)

    def train(self, seconds, wait_share, num_running=None, must_yield=False, is_contested=False):
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.waited_s += 0.5 * wait_share
            running = self.size.target if num_running is None else num_running
            self.size.update(self.now_s, self.waited_s, running, must_yield, lambda: is_contested)
        return self.size.target


def test_number_grows_while_the_rank_waits_and_not_beyond_the_maximum():
    rank = Rank(1, 10)
    assert [rank.train(5.5, 0.5) for _ in range(6)] == [2, 4, 8, 10, 10, 10]


def test_actors_that_have_not_started_are_awaited():
    rank = Rank(4, 20)
    assert rank.train(60, 0.5, num_running=4) == 8
    assert rank.train(60, 0.5, num_running=7) == 8
    assert rank.train(6, 0.5) == 16


def test_number_shrinks_slowly_without_waits_and_not_below_the_minimum():
    rank = Rank(2, 16)
    rank.train(30, 0.5)
    assert rank.train(61, 0.0) == 16  # it waited in the same minute
    assert [rank.train(61, 0.0) for _ in range(3)] == [14, 12, 10]
    assert rank.train(900, 0.0) == 2
    assert rank.train(50, 0.03) == 2  # neither waits nor idles


def test_number_that_was_too_small_is_tried_less_often():
    rank = Rank(1, 4)
    rank.train(30, 0.5)
    assert [rank.train(61, 0.0) for _ in range(2)] == [4, 3]
    assert rank.train(5.5, 0.2) == 4  # three were not enough
    assert rank.train(61, 0.0) == 4
    assert rank.train(61, 0.0) == 3


def test_all_above_the_minimum_are_given_back_while_others_wait():
    rank = Rank(2, 16)
    rank.train(30, 0.5)
    assert rank.train(0.5, 0.5, must_yield=True) == 2
    assert rank.train(20, 0.5, must_yield=True) == 2
    assert rank.train(11, 0.5) > 2


def test_number_does_not_shrink_because_of_an_evaluation():
    rank = Rank(2, 16)
    rank.train(30, 0.5)
    rank.now_s += 600  # the rank requests no blocks
    assert rank.train(50, 0.0) == 16
    assert rank.train(11, 0.0) == 14


def test_number_grows_by_what_is_missing():
    rank = Rank(8, 100)
    assert rank.train(5.5, 0.1) == 9  # 8 / (1 - 0.1)
    assert rank.train(5.5, 0.25) == 12
    assert rank.train(5.5, 0.9) == 48  # at most three times as many are added


def test_actors_that_never_start_are_not_requested_forever():
    rank = Rank(2, 100)
    rank.train(11, 0.5)
    assert rank.train(6, 0.5) == 16
    assert rank.train(121, 0.0, num_running=5) == 4


def test_a_rank_that_waits_little_gives_processes_to_others():
    rank = Rank(2, 16)
    rank.train(30, 0.5)
    assert rank.train(130, 0.04) == 16
    assert rank.train(61, 0.04, is_contested=True) == 14
    assert rank.train(130, 0.2, is_contested=True) == 16  # it waits itself


class Pool:
    """Ranks that share CPUs, in the order of their requests; each needs some for not waiting."""

    def __init__(self, num_cpus, needs):
        self.num_free = num_cpus
        self.needs = needs
        self.sizes = []
        self.running = []
        self.waited_s = [0.0] * len(needs)
        self.pending = []  # numbers of the ranks
        self.now_s = 0.0

    def start(self):
        self.sizes.append(PoolSize(1, 1000, self.now_s))
        self.running.append(1)  # reserved with the rank, in addition to the pool

    def shares(self):
        return [
            max(0.02, 1 - running / need)
            for running, need in zip(self.running, self.needs, strict=False)
        ]

    def train(self, seconds):
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            for rank, share in enumerate(self.shares()):
                self.waited_s[rank] += 0.5 * share
                self.update(rank)
            while self.pending and self.num_free:
                self.running[self.pending.pop(0)] += 1
                self.num_free -= 1

    def update(self, rank):
        size = self.sizes[rank]
        others = [each for each in self.pending if each != rank]
        size.update(
            self.now_s, self.waited_s[rank], self.running[rank], False, lambda: bool(others)
        )
        while self.running[rank] > size.target:
            self.running[rank] -= 1
            self.num_free += 1
        own = len(self.pending) - len(others)
        missing = max(0, size.target - self.running[rank])
        self.pending = [*others, *[rank] * missing] if own > missing else self.pending
        self.pending += [rank] * (missing - own)


@pytest.mark.parametrize(
    ("num_cpus", "needs"),
    [(21, [8, 8, 8]), (18, [8, 8, 8]), (12, [5.5] * 3), (260, [100, 100, 100])],
)
def test_ranks_that_start_later_get_their_share_of_a_full_pool(num_cpus, needs):
    """The first rank has all CPUs that it needs before the others start."""
    pool = Pool(num_cpus, needs)
    for _ in needs:
        pool.start()
        pool.train(120)
    pool.train(600)
    for _ in range(20):
        pool.train(30)
        assert max(pool.shares()) < 0.2, pool.running
