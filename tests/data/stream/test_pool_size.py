"""The number of decode actors follows the time that a rank waits for blocks."""

from mmray.data.stream.pool_size import PoolSize


class Rank:
    """A rank that trains `seconds` with a share of waiting; started actors are those requested."""

    def __init__(self, minimum, maximum):
        self.now_s = self.waited_s = 0.0
        self.size = PoolSize(minimum, maximum, 0.0)

    def train(self, seconds, wait_share, num_running=None, must_yield=False):
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            self.waited_s += 0.5 * wait_share
            running = self.size.target if num_running is None else num_running
            self.size.update(self.now_s, self.waited_s, running, must_yield)
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
