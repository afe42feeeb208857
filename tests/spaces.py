"""Search spaces from texts, as on the command line."""

from collections.abc import Sequence

from mmray.config.search_space import Space, build_space, parse_axes


def parse_space(given: Sequence[str], num_samples: int | None = None, seed: int = 0) -> Space:
    """Return the space of values of --space, such as `batch.micro=8,16`."""
    return build_space(parse_axes(given), num_samples, seed)
