"""What a decoder of captions learns next to contrast: held-out perplexity, against a model that
knows only how frequent tokens are, captions of held-out images, and recall with and without it.

Run `python -m tests.benchmarks.captioning FOLDER [SOURCE]`: recipe `sample` with a decoder of two
layers. About five minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mmray
from mmray.data.store.prepared_set import PreparedSet
from mmray.data.text.tokenizer import TextEncoder

DECODER = {"width": 96, "depth": 2, "heads": 4}
STEPS = 300
RECALL = ("recall_at_1/image_to_text", "recall_at_1/text_to_image")


def main(folder: Path, source: str) -> None:
    """Train without and with the decoder, and print the table and captions."""
    runs: dict[str, Any] = {}
    for kind, depth in (("contrastive", 0), ("contrastive + captioning", DECODER["depth"])):
        runs[kind] = mmray.train(
            "sample",
            data={"train": source, "cache": str(folder / "prepared")},
            model={"decoder": DECODER | {"depth": depth}},
            objective={"kind": kind},
            train={"steps": STEPS},
            evaluate={"every": 0},
            run={"storage": str(folder / "runs"), "name": kind.split()[-1]},
        )
        recall = ", ".join(f"{100 * runs[kind].metrics[name]:.1f} %" for name in RECALL)
        print(f"{kind}: recall@1 {recall}")
    run = runs["contrastive + captioning"]
    prepared = PreparedSet.open(json.loads((run.path / "data.json").read_text())["train"], "train")
    encoder = TextEncoder(prepared.tokenizer_json or "", 32)
    texts = [text for row in prepared.read(np.arange(prepared.num_rows)) for text in row.texts]
    ids, num_tokens = encoder.encode(texts)
    tokens = np.concatenate([row[1:count] for row, count in zip(ids, num_tokens, strict=True)])
    shares = np.bincount(tokens) / len(tokens)
    entropy = -(shares[shares > 0] * np.log(shares[shares > 0])).sum()
    perplexity = run.metrics["caption_perplexity"]
    print(f"caption perplexity {perplexity:.2f}, of token frequencies {np.exp(entropy):.1f}")
    examples = json.loads((run.path / "examples.json").read_text())
    for each in examples["image_to_text"]:
        print(f"caption: {each['caption']} | generated: {examples['generated'][str(each['row'])]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "sample")
