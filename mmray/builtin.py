"""Built-in parts that settings name, and limits that settings share with the code.

Settings do not import torch, and data workers do not import settings. So both read these tables,
whose values are `module:Name`, imported when they are used (`plugins.load_part`).
"""

from __future__ import annotations

FORMATS = {
    "jsonl": "mmray.data.formats.text_lines:JsonlSource",
    "csv": "mmray.data.formats.text_lines:CsvSource",
    "tsv": "mmray.data.formats.text_lines:TsvSource",
    "coco": "mmray.data.formats.listing:CocoSource",
    "saved": "mmray.data.formats.parquet:HFSavedSource",
    "webdataset": "mmray.data.formats.webdataset:WebDatasetSource",
    "parquet": "mmray.data.formats.parquet:ParquetSource",
    "pairs": "mmray.data.formats.listing:ImageTextPairs",
    "folders": "mmray.data.formats.listing:ClassFolders",
}
"""Source formats (`prepare.format`) by name; detection tries the formats in this order.

To add one, write a subclass of `mmray.data.formats.source:Source` whose attributes define how it is
detected, and add an entry here and a row to the table in mmray/data/README.md. A user's own class
needs no entry: `--format my_package.my_module:MySource`.
"""

COLUMNS = (
    "id",
    "key",
    "image_path",
    "image",
    "images",
    "text",
    "texts",
    "label",
    "split",
    "language",
    "boxes",
    "box_labels",
    "messages",
)
"""Columns of a source row; `mmray.data.rows` validates their values."""

OBJECTIVES = {
    "contrastive": "mmray.objectives.contrastive:Contrastive",
    "sigmoid": "mmray.objectives.contrastive:Sigmoid",
    "matching": "mmray.objectives.matching:Matching",
    "classification": "mmray.objectives.cross_entropy:Classification",
    "region_text": "mmray.objectives.cross_entropy:RegionText",
    "language_modelling": "mmray.objectives.cross_entropy:LanguageModelling",
}
"""Objectives (`objective.kind`) by name.

To add one, write a class with the methods of `mmray.objectives.protocol:Objective`, and add an
entry here and a row to the table in mmray/models/README.md. A user's own class needs no entry:
`--objective.kind my_package.my_module:MyObjective`.
"""

GROUP_CHANNELS = 8
"""Channels of a GroupNorm group in the image tower `convnet`; its width is a multiple of it."""
