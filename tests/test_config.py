"""Settings: round trip through YAML, suggestions for typos, and errors that name the setting."""

import pytest

import mmray
from mmray.config import (
    Clip,
    Cluster,
    Config,
    CustomModel,
    Data,
    EvalSettings,
    ImageTower,
    Siglip,
    TextTower,
    Train,
    TwoTower,
    from_yaml,
    override,
    recipes,
    to_yaml,
)
from mmray.config.sets import EvalSet, format_eval_sets
from mmray.errors import UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch: {micro: 0}", r"run.yaml: batch.micro: .*greater than or equal to 1 \(got 0\)"),
        ("batch: {micr: 3}", "batch.micr: unknown setting; did you mean `micro`"),
        (
            "train: {steps: 3, epochs: 2}",
            r"train: give one of steps, samples, epochs \(got steps, epochs\)",
        ),
        ("model: {inputs: {std: [0, 1, 1]}}", "model.inputs.std.0: input should be greater than 0"),
        (
            "model: {inputs: {image_side: big}}",
            r"model.inputs.image_side: .*integer.*\(got 'big'\)",
        ),
        ("train: {steps: true}", r"train.steps: input should not be a boolean \(got True\)"),
        ("batch: {global: on}", r"batch.global: input should not be a boolean"),
        ("data: {workers: 0}", "data.workers: must be a number of at least 1, or a range"),
        ("run: {name: '../x'}", "run.name: .*pattern"),
        (
            "model: {kind: clap}",
            r"model.kind: unknown kind `clap`; use one of two_tower, clip, siglip",
        ),
        (
            "model: {kind: clip, embed_dm: 3}",
            "model.embed_dm: unknown setting; did you mean `embed_dim`",
        ),
        (
            "optimizer: {lr_multipliers: ['image.*']}",
            r"optimizer.lr_multipliers.0: string should match pattern .*\(got 'image\.\*'\)",
        ),
        (
            "train: {compile: inductr}",
            r"train.compile: input should be .*'inductor'.* \(got 'inductr'\)",
        ),
        (
            "optimizer: {kind: sgd}",
            r"optimizer.kind: no `sgd`; use one of adamw, muon, or name",
        ),
        (
            "optimizer: {schedule: cosin}",
            r"optimizer.schedule: no `cosin`; use one of cosine, linear",
        ),
        (
            f"train: {{seed: {2**63}}}",
            "train.seed: input should be less than or equal to 9223372036854775807",
        ),
        ("data: {shuffle_blocks: 0}", "data.shuffle_blocks: must be `auto`, 1, or lanes x rows"),
        ("data: {shuffle_blocks: 8x16}", "shuffle of an earlier version, which must finish"),
        (
            "data: {train: 'a + 0 * b'}",
            r"data.train: .* is neither a set nor a sum of different sets, at `0 \* b`",
        ),
        ("- 1", "run.yaml contains no settings"),
        ("a: [", "run.yaml is not valid YAML"),
        (
            "train: {steps: 3}\ntrain: {seed: 1}",
            r"run.yaml is not valid YAML .*`train` is given twice\n.*line 2, column 1",
        ),
        ("a: 2020-99-99", "run.yaml is not valid YAML .*month must be in"),
        (b"recipe: caf\xe9", "run.yaml is not valid YAML in UTF-8: unacceptable character #x00e9"),
    ],
)
def test_invalid_settings_are_named(text, message):
    with pytest.raises(UsageError, match=message):
        from_yaml(text, "run.yaml")


def test_numbers_in_yaml_are_those_of_flags():
    assert from_yaml("train: {steps: 0100, seed: 0x10}", "run.yaml").train.steps == 100
    for text in ("1:30", "1:30.5"):
        with pytest.raises(UsageError, match=f"train.steps: .*{text}"):
            from_yaml(f"train: {{steps: {text}}}", "run.yaml")


def test_exponents_are_numbers_also_in_settings_of_any_type():
    config = from_yaml(
        "train: {steps: 1e3}\noptimizer: {settings: {eps: 1e-3, text: '1e-3', name: 1e3x}}",
        "run.yaml",
    )
    assert config.train.steps == 1000
    assert config.optimizer.settings == {"eps": 0.001, "text": "1e-3", "name": "1e3x"}
    assert from_yaml(to_yaml(config), "run.yaml").to_json() == config.to_json()


def test_kind_selects_the_model_config():
    own = from_yaml(
        "model: {kind: 'my.models:Mine', settings: {width: 3, deep: true}}", "run.yaml"
    ).model
    assert isinstance(own, CustomModel) and own.settings == {"width": 3, "deep": True}
    assert isinstance(from_yaml("model: {kind: siglip}", "run.yaml").model, Siglip)
    assert isinstance(from_yaml("model: {temperature: 0.1}", "run.yaml").model, TwoTower)
    for model in (own, Siglip(), Config().model):
        assert from_yaml(to_yaml(Config(model=model)), "here").model == model


@pytest.mark.parametrize(("given", "least", "most"), [(2, 2, 2), ("1-4", 1, 4), ("3", 3, 3)])
def test_workers_are_a_number_or_a_range(given, least, most):
    cluster = Cluster(workers=given)
    assert (cluster.min_workers, cluster.max_workers, cluster.elastic) == (
        least,
        most,
        least != most,
    )
    assert from_yaml(to_yaml(Config(cluster=cluster)), "here").cluster == cluster


def test_local_weight_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exported").mkdir()
    assert Clip(weights="exported").weights == str(tmp_path / "exported")
    assert Clip(weights="openai/clip").weights == "openai/clip"
    absolute = TwoTower(text=TextTower(weights="exported"), image=ImageTower(weights="pretrained"))
    assert (absolute.text.weights, absolute.image.weights) == (
        str(tmp_path / "exported"),
        "pretrained",
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"workers": value}, "workers: must be a number of at least 1")
            for value in (-3, 0, "4-1", "0-2", "no", "1-")
        ),
        ({"workerz": 5}, "workerz: unknown setting; did you mean `workers`"),
        ({"max_failures": "many"}, "max_failures: input should be a valid integer"),
    ],
)
def test_replaced_settings_are_validated(settings, message):
    with pytest.raises(UsageError, match=f"cluster.{message}"):
        Config().with_cluster(**settings)


@pytest.mark.parametrize(
    "make", [lambda lengths: Train(**lengths), lambda lengths: Train().replace(**lengths)]
)
def test_contradicting_settings_are_a_usage_error(make):
    with pytest.raises(UsageError, match=r"^train: give one of steps, samples, epochs \(got"):
        make({"steps": 3, "epochs": 2})


def test_batch_tokens_replace_the_micro_batch_of_a_recipe():
    given = override(recipes.load("sample-vlm"), {"batch": {"tokens": 4096}})
    assert (given.batch.tokens, given.batch.micro, given.batch.global_) == (4096, None, 32)
    both = override(recipes.load("sample-vlm"), {"batch": {"tokens": 4096, "micro": 2}})
    assert both.batch.micro == 2  # refused by resolve_batch_shape


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (
            "generative",
            "recipe: llava\n"
            "model: {kind: generative, inputs: {image_side: 336, chat: {user: '{}'}}}\n",
            r"replaced by `vlm`.*--model.weights.*export` of the version",
        ),
        (
            "fusion",
            "recipe: fusion\nmodel: {kind: fusion, inputs: {image_side: 224}, matching: true}\n",
            r"now `towers` with model.inputs.clip_s 0.*export` of the version",
        ),
    ],
)
def test_removed_kind_names_its_replacement(tmp_path, kind, text, message):
    old = tmp_path / "config.yaml"
    old.write_text(text)
    for read in (
        lambda: recipes.load(str(old)),
        lambda: from_yaml(old.read_text(), str(old)),
        lambda: mmray.export(tmp_path, tmp_path / "out"),
        lambda: mmray.evaluate(tmp_path, "prepared/test"),
        lambda: recipes.load("vlm").with_model_kind(kind),
    ):
        with pytest.raises(UsageError, match=message):
            read()


def test_removed_recipe_names_its_replacement():
    with pytest.raises(UsageError, match="replaced by `vlm`"):
        recipes.load("llava")


def test_evaluation_sets_have_names_tasks_and_prompts():
    text = "flickr=s3://b/x=1/set, in1k=prepared/in (zero_shot imagenet), c=a,b (retrieval)"
    sets = Data(eval=text).eval_sets
    assert sets == [
        EvalSet("flickr", "s3://b/x=1/set"),
        EvalSet("in1k", "prepared/in", "zero_shot", "imagenet"),
        EvalSet("c", "a,b", "retrieval"),
    ]
    assert format_eval_sets(sets) == text
    assert Data(eval="a, b/c").eval_sets == [EvalSet("", "a, b/c")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a=x (zeroshot)", "no task `zeroshot`; did you mean `zero_shot`"),
        ("a=x (zero_shot imagnet)", "`imagnet`; did you mean `imagenet`"),
        ("a=x (retrieval imagenet)", "retrieval takes no prompts"),
        ("a=x, a=y", "the name `a` is repeated"),
        ("a=, b=y", "no set after `a=`"),
    ],
)
def test_invalid_evaluation_sets_are_named(value, message):
    with pytest.raises(UsageError, match=f"data.eval: .*{message}"):
        Data(eval=value)


def test_prompts_are_texts_or_a_set_of_them():
    assert len(EvalSettings(prompts=("imagenet",)).with_prompts("").prompts) == 80
    own = EvalSettings(prompts=("{}!", "simple")).with_prompts("").prompts
    assert own[:2] == ("{}!", "itap of a {}.") and len(own) == 8
    with pytest.raises(UsageError, match="did you mean `cifar`"):
        EvalSettings(prompts=("cifr",))
