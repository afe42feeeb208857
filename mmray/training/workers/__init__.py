"""The workers of a run: on a Ray cluster, or a process of this machine."""
