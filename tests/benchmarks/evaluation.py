"""Time of `mmray evaluate` against a plain torch loop over the same rows: 1,000 images, 5,000
captions, retrieval in both directions.

Run `python -m tests.benchmarks.evaluation FOLDER [--model ViT-B/32] [--images N] [--rounds N]`.
Both are commands of their own, in ABBA order; their CPU time includes child processes. The loop is
written with transformers, torchvision and a DataLoader: captions are padded to the longest of a
batch, a worker for each core decodes images, and Recall@k is an argsort of all similarities.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmray.bench import synthetic_images
from mmray.machine import cores

CAPTIONS = 5  # of an image
ROWS = 128  # of a batch, as `evaluate.batch`
MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "vision": {"image_size": 112, "patch_size": 16, "layers": 4, "width": 256},
        "text": {"layers": 4, "width": 256},
        "embed_dim": 256,
    },
    "ViT-B/32": {
        "vision": {"image_size": 224, "patch_size": 32, "layers": 12, "width": 768},
        "text": {"layers": 12, "width": 512},
        "embed_dim": 512,
    },
}
DIRECTIONS = ("image_to_text", "text_to_image")


def write_rows(folder: Path, num_images: int) -> Path:
    """Write images and `rows.jsonl`, lines of an image and its captions; return that file."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        photos = synthetic_images.synthetic_photos(num_images)
        synthetic_images.write_files(photos, folder)
        words = synthetic_images.WORDS.split()
        lines = []
        for number, (image, _) in enumerate(synthetic_images.read_captions(folder)):
            rng = np.random.default_rng((2, number))
            texts = [" ".join(rng.choice(words, rng.integers(6, 20))) for _ in range(CAPTIONS)]
            lines.append(json.dumps({"image": Path(image).name, "text": texts}))
        rows.write_text("\n".join(lines) + "\n")
    return rows


def write_weights(folder: Path, model: dict[str, Any], texts: list[str]) -> None:
    """Write random weights of a CLIP and a tokenizer of words as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=list(special.values()))
    tokenizer.train_from_iterator(texts, trainer)
    ids = {name: tokenizer.token_to_id(token) for name, token in special.items()}
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", ids["bos_token"]), ("</s>", ids["eos_token"])],
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    towers = {}
    for name in ("vision", "text"):
        given = dict(model[name])
        width, layers = given.pop("width"), given.pop("layers")
        towers[name] = given | {
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 64,
        }
    towers["text"] |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 77,
        "bos_token_id": ids["bos_token"],
        "eos_token_id": ids["eos_token"],
        "pad_token_id": ids["pad_token"],
    }
    config = CLIPConfig(
        vision_config=towers["vision"],
        text_config=towers["text"],
        projection_dim=model["embed_dim"],
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)


def plain(rows_file: Path, weights: Path) -> dict[str, float]:
    """Return the metrics of the plain loop."""
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from transformers import AutoTokenizer, CLIPModel

    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    net = CLIPModel.from_pretrained(weights).eval()
    tokenizer = AutoTokenizer.from_pretrained(weights)
    side = net.config.vision_config.image_size
    preprocess = transforms.Compose(
        [
            transforms.Resize(side, transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(side),
            transforms.ToTensor(),
            transforms.Normalize(
                (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
            ),
        ]
    )

    class Images(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, index: int) -> torch.Tensor:
            path = rows_file.parent / rows[index]["image"]
            pixels: torch.Tensor = preprocess(Image.open(path).convert("RGB"))
            return pixels

    captions = [text for row in rows for text in row["text"]]
    own = torch.arange(len(rows)).repeat_interleave(CAPTIONS)
    image_parts, text_parts = [], []
    with torch.inference_mode():
        for pixels in DataLoader(Images(), ROWS, num_workers=cores()):
            image_parts.append(net.get_image_features(pixel_values=pixels).pooler_output)
        for start in range(0, len(captions), ROWS):
            tokens = tokenizer(captions[start : start + ROWS], padding=True, return_tensors="pt")
            text_parts.append(
                net.get_text_features(
                    input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
                ).pooler_output
            )
        image, text = (
            torch.nn.functional.normalize(torch.cat(parts), dim=1)
            for parts in (image_parts, text_parts)
        )
        similarity = image @ text.T
        by_image = (
            own[similarity.argsort(dim=1, descending=True)] == torch.arange(len(rows))[:, None]
        )
        by_text = similarity.T.argsort(dim=1, descending=True) == own[:, None]
    return {
        f"recall_at_{k}/{direction}": correct[:, :k].any(dim=1).double().mean().item()
        for direction, correct in zip(DIRECTIONS, (by_image, by_text), strict=True)
        for k in (1, 5, 10)
    }


def measure(command: list[str], result: Path) -> dict[str, Any]:
    """Run a command that writes a result; return its seconds, CPU seconds and metrics."""
    start_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return {
        "wall_s": time.perf_counter() - start_s,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "metrics": json.loads(result.read_text())["metrics"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for images, weights and the prepared set")
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--plain", type=Path, metavar="FILE", help="only run the loop; result file")
    args = parser.parse_args()
    folder = args.folder.resolve()
    weights = folder / args.model.replace("/", "-")
    rows = folder / "images" / "rows.jsonl"
    if args.plain:
        args.plain.write_text(json.dumps({"metrics": plain(rows, weights)}))
        return
    write_rows(folder / "images", args.images)
    if not weights.exists():
        texts = [
            text for line in rows.read_text().splitlines() for text in json.loads(line)["text"]
        ]
        write_weights(weights, MODELS[args.model], texts)
    prepared = folder / "prepared"
    mmray = [sys.executable, "-m", "mmray"]
    flags = ["--split", "test", "--vocab-size", "0"]
    subprocess.run([*mmray, "prepare", str(rows), str(prepared), *flags], check=True)
    result = folder / "result.json"
    this = [sys.executable, "-m", "tests.benchmarks.evaluation", str(folder), "--model", args.model]
    evaluate = [*mmray, "evaluate", "--weights", str(weights), "--data", str(prepared)]
    commands = {
        "plain": [*this, "--plain", str(result)],
        "mmray": [*evaluate, "--json", str(result)],
    }
    rounds = []
    for number in range(args.rounds):
        order = list(commands)[:: -1 if number % 2 else 1]
        rounds.append({name: measure(commands[name], result) for name in order})
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr)
    print("| | plain loop | `mmray evaluate` | mmray : plain |\n|---|---|---|---|")
    for unit in ("wall_s", "cpu_s"):
        ratios = [each["mmray"][unit] / each["plain"][unit] for each in rounds]
        cells = [
            f"{statistics.median(each[name][unit] for each in rounds):.1f}" for name in commands
        ]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {unit} | {' | '.join(cells)} | {spread} |")


if __name__ == "__main__":
    main()
