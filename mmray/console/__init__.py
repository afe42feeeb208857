"""Progress, messages and tables on a terminal, in a notebook or in a log; only this package and
`mmray.cli` print.
"""
