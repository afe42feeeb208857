"""Hyperparameter search: short runs of one recipe. Callable as `mmray.tune(...)`, the function of mmray/api.py."""

import sys

from mmray import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
