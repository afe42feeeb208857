"""Peak memory of the chunked cross-entropy compared with the plain one: the table in
mmray/models/README.md.

Run `python -m tests.benchmarks.chunked_loss`. Each measurement is in a process of its own, with a
vocabulary of 152,000 tokens, and includes the backward.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

VOCAB = 152_000
HIDDEN = 64
SIZES = {"plain": (500, 2000), "chunked": (500, 2000, 8000)}


def measure(name: str, num_targets: int) -> None:
    """Print the seconds and the MiB by which the loss and its backward raise the peak memory."""
    import torch
    import torch.nn.functional as F

    from mmray.models.vlm.loss import chunked_cross_entropy

    torch.manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    hidden = torch.randn(num_targets, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCAB, (num_targets,))
    weight.grad = torch.zeros_like(weight)  # as in a later micro-batch
    before = peak_mib()
    start_s = time.perf_counter()
    if name == "plain":
        loss = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    else:
        loss, _ = chunked_cross_entropy(hidden, weight, targets)
    loss.backward()
    print(f"{time.perf_counter() - start_s:.2f} {peak_mib() - before:.0f} {float(loss.detach())}")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    print("| loss | targets | all logits, MiB | peak, MiB | s |\n|---|---|---|---|---|")
    for name, sizes in SIZES.items():
        for size in sizes:
            command = [sys.executable, "-m", "tests.benchmarks.chunked_loss", name, str(size)]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seconds, mib, _ = output.split()
            logits_mib = size * VOCAB * 4 / 2**20
            print(f"| {name} | {size:,} | {logits_mib:,.0f} | +{float(mib):,.0f} | {seconds} |")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        measure(sys.argv[1], int(sys.argv[2]))
