"""Which local files of a run are checked on the nodes of a cluster."""

from pathlib import Path
from types import SimpleNamespace

from mmray.cluster.shared_storage import LocalInput, find_missing
from mmray.config import Config, Data, Towers, Vlm
from mmray.data.store.mixture import PreparedMixture
from mmray.storage.paths import to_path
from mmray.training.workers.inputs import local_inputs


def stored(folder, images=None):
    """A prepared set in a folder; its images are in another one, if given."""
    manifest = SimpleNamespace(is_index_only=images is not None, num_rows=1)
    return SimpleNamespace(
        folder=to_path(folder),
        image_folder=to_path(images or folder),
        manifest=manifest,
        num_rows=1,
    )


def resolved(config, train, evaluate=()):
    return SimpleNamespace(config=config, train_set=train, eval_sets=dict(enumerate(evaluate)))


def test_sets_of_a_mixture_and_their_original_files_are_listed_once(tmp_path):
    config = Config(data=Data(train="any", cache=str(tmp_path / "cache")))
    first, second = stored("/sets/a", "/photos"), stored(tmp_path / "cache/b")
    remote = stored("s3://bucket/c", "/photos")
    mixture = PreparedMixture([first, second, remote], [1.0, 1.0, 1.0])
    assert local_inputs(resolved(config, mixture, [first, stored("/sets/eval")])) == [
        LocalInput("data.train", Path("/sets/a"), True),
        LocalInput("data.train, original files", Path("/photos"), True),
        LocalInput("data.train, prepared in data.cache", tmp_path / "cache/b", True),
        LocalInput("data.eval", Path("/sets/eval"), True),
    ]


def test_local_weights_are_listed_and_names_of_the_hub_are_not(tmp_path):
    weights = str(tmp_path)
    remote = stored("s3://bucket/set")
    vlm = Config(model=Vlm(weights=weights))
    assert local_inputs(resolved(vlm, remote)) == [LocalInput("model.weights", tmp_path, True)]
    towers = Towers(text={"weights": weights}, audio={"weights": "openai/whisper-tiny"})
    assert local_inputs(resolved(Config(model=towers), remote)) == [
        LocalInput("model.text.weights", tmp_path, False)
    ]


def test_missing_file_and_empty_folder_are_found(tmp_path):
    (tmp_path / "mount").mkdir()
    (tmp_path / "file").write_text("weights")
    names = ["absent", "mount", "file"]
    assert find_missing([tmp_path / name for name in [*names, "."]]) == [
        tmp_path / "absent",
        tmp_path / "mount",
    ]
