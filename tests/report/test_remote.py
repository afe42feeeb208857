"""The report of a run on an object store equals the report of the same run on a disk."""

import re

from mmray.report.write import write_report
from mmray.storage.paths import to_path
from mmray.storage.storage import Storage
from tests.report.made_runs import make_whole_run


def test_report_of_a_run_on_a_store_equals_report_on_a_disk(s3, tmp_path):
    make_whole_run(tmp_path / "mine")
    for name in Storage(str(tmp_path)).list_files():
        Storage(s3.address).write(name, (tmp_path / name).read_bytes())
    page = write_report(to_path(f"{s3.address}/mine"))
    assert str(page) == f"{s3.address}/mine/report.html"
    local = write_report(tmp_path / "mine").read_text()
    undated = [re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "", text) for text in (page.read_text(), local)]
    assert undated[0].replace(s3.address, "") == undated[1].replace(str(tmp_path), "")
