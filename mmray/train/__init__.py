"""One run on Ray. Callable as `mmray.train(...)`, the function of mmray/api.py."""

import sys

from mmray import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
