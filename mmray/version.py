"""The version of mmray, also of a checkout that is not installed."""

VERSION = "0.1.0"
