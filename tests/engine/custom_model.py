"""A float64 model, so that differences between numbers of workers are errors and not rounding."""

from mmray.config import TwoTower as Section
from mmray.models.two_tower import TwoTower
from tests.train.runs import IMAGE, TEXT


class DoubleTowers(TwoTower):
    """The towers of runs.py without dropout as a user's model, in float64."""

    def __init__(self, spec, vocab_size):
        text = TEXT.model_copy(update={"dropout": 0.0})
        super().__init__(Section(inputs=spec.inputs, image=IMAGE, text=text, embed_dim=16), vocab_size)
        self.double()
