"""A step of a whole run with keys, weights, sizes or teachers equals the step of one dense graph."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig
from clipscale.config.sections import CacheConfig, DistillConfig, LaunchConfig, LossConfig, OptimConfig
from clipscale.config.train_config import TrainConfig
from clipscale.data.shards.features import FEATURES_FILE, encoded_array
from clipscale.distributed.world import World
from clipscale.loss.reference import dense_contrastive_loss
from clipscale.models.towers import ClipModel, build_model, l2_normalize
from tests.data.files import picture, write_tar
from tests.loss.dense_distillation import dense_distillation_loss
from tests.support.gradients import gradients, whole
from tests.support.killed_runs import whole_and_killed
from tests.support.ranks import run_ranks
from tests.support.runs import ARCHITECTURE, four_step_config, train_loop
from tests.support.user_errors import refused

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (clipscale[parquet])")
parquet = pytest.importorskip("pyarrow.parquet")
OFTEN = "often.parquet"
# Feature widths of the teachers, and their logit scale.
WIDTHS = {"big": 12, "wide": 7}
SCALE = 9.0
TAUGHT = DistillConfig(["big", "wide"], weights=(0.4, 0.6))
SCALED = DistillConfig(["big", "wide"], scales=[3.0, 5.0])
SEVERAL = {"captions_per_step": 3}
NEGATIVES = {"negatives": "json:wrong", "negatives_per_step": 2, "same": None}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three samples share a url, and have one to three captions. Beside them are the features of two teachers."""
    members = []
    generator = np.random.default_rng(0)
    for i in range(24):
        captions = [f"a {'very ' * (i % 4)}good number {i} {c}" for c in range(i % 3 + 1)]
        about = {"url": f"u{i // 3}", "captions": captions, "wrong": [f"no number {i} {c}" for c in range(i % 2 + 1)]}
        members += [(f"{i:02d}.png", picture(i, (30, 30))), (f"{i:02d}.json", json.dumps(about).encode())]
        for name, width in WIDTHS.items():
            features = generator.normal(size=(2, width)).astype("float32") / width**0.5
            members.append((f"{i:02d}.{name}.npy", encoded_array(features)))
    folder = tmp_path_factory.mktemp("texts")
    notes = {name: {"width": width, "dtype": "float32", "scale": SCALE} for name, width in WIDTHS.items()}
    (folder / FEATURES_FILE).write_text(json.dumps(notes))
    parquet.write_table(pyarrow.table({"key": ["00", "01", "02"], "weight": [8.0] * 3}), folder / OFTEN)
    return str(write_tar(folder / "0.tar", members))


def config_of(
    shard: str,
    run: Path,
    *,
    data: Mapping[str, Any] = MappingProxyType({}),
    objective: str = "softmax",
    exchange: str = "auto",
    sizes: Sequence[int] = (),
    **settings: Any,
) -> TrainConfig:
    """A run over the shard, with these fields of data, these words of the loss, and other settings."""
    fields = {"same": "url", "captions": ["json:captions"], **data}
    if "sample_weights" in fields:
        fields["sample_weights"] = str(Path(shard).with_name(OFTEN))
    return four_step_config(
        shard,
        run,
        data=DataConfig(train=[shard], workers=0, shard_streams=6, **fields),
        model=ModelConfig(name="test", architecture=ARCHITECTURE, init_bias=-2.0),
        loss=LossConfig(objective, exchange, sizes=[*sizes]),
        precision="fp32",
        **{"optim": OptimConfig(lr=1e-3), "cache": CacheConfig(chunk=["5", "5"]), **settings},
    )


def one_step(rank: int, world_size: int, config: TrainConfig) -> tuple[Any, ...]:
    """Weights before a float64 step, its gradients and value, and this rank's pixels, tokens and keys."""
    cpu = torch.device("cpu")
    with mock.patch("clipscale.start.build.build_model", lambda config, **given: build_model(config, **given).double()):
        run = train_loop(config, World(rank, world_size, cpu))
    for _ in range(1 + (config.cache.keep != "none")):  # the first step measures graphs
        weights = {name: whole(value).detach().clone() for name, value in run.train_step.model.state_dict().items()}
        batch = run.stream.next_batch()
        with mock.patch.object(run.stream, "next_batch", lambda batch=batch: batch):
            run.run_step()
    assert all(run.train_step.cache.num_kept_graphs) == (config.cache.keep != "none")
    own = len(batch) * config.data.captions_per_step
    rows = [
        batch.pixels(0, len(batch)),
        batch.tokens(0, own),
        batch.tokens(own, batch.num_texts),
        batch.sameness_keys(),
    ]
    rows += batch.teachers()
    rows = [tensor.clone() for tensor in rows]
    run.stream.close()
    return weights, gradients(run.train_step.model), run.loss, rows


def test_statistics_pair_an_image_with_its_own_first_caption(shard: str, tmp_path: Path) -> None:
    run = train_loop(config_of(shard, tmp_path / "run", data=SEVERAL | NEGATIVES), World(0, 1, torch.device("cpu")))
    run.stream.close()
    images = torch.eye(8)
    captions = torch.stack([images, -images, -images], 1).flatten(0, 1)
    pending = run.train_step.start_statistics([images, torch.cat([captions, -images])], step=1)
    assert pending and pending.read()["nearest"] == 1


def test_kernels_are_refused_where_a_sample_is_in_a_batch_twice(
    shard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = config_of(shard, tmp_path / "run", data={"same": None, "sample_weights": OFTEN})
    config = replace(config, loss=replace(config.loss, backend="triton"))
    with refused(r"loss.backend=triton: .* data.sample_weights=.*loss.backend=auto"):
        train_loop(config, World(0, 1, torch.device("cpu")))


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (1, {"cache": CacheConfig(chunk=["5", "5"], keep="1G")}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        pytest.param(2, {"objective": "sigmoid", "launch": LaunchConfig(parallel="zero3")}, marks=pytest.mark.slow),
        (1, {"sizes": [3, 8]}),
        pytest.param(2, {"data": {"same": None, "sample_weights": OFTEN}}, marks=pytest.mark.slow),
        # Ordinary: sizes, several captions, negatives and teachers, each on one rank and on two.
        (2, {"data": SEVERAL | NEGATIVES, "objective": "sigmoid", "cache": CacheConfig(chunk=["3", "5"])}),
        (2, {"distill": TAUGHT, "sizes": [8, 3], "exchange": "ring", "launch": LaunchConfig(parallel="zero3")}),
        pytest.param(2, {"sizes": [8, 3, 1], "objective": "sigmoid", "exchange": "ring"}, marks=pytest.mark.slow),
        (1, {"data": SEVERAL}),
        pytest.param(2, {"data": SEVERAL, "exchange": "ring"}, marks=pytest.mark.slow),
        pytest.param(
            3,
            {"data": SEVERAL | NEGATIVES, "exchange": "gather", "cache": CacheConfig(chunk=["3", "5"])},
            marks=pytest.mark.slow,
        ),
        pytest.param(2, {"data": NEGATIVES, "objective": "sigmoid"}, marks=pytest.mark.slow),
        (1, {"distill": TAUGHT, "sizes": [8, 3]}),
        (1, {"distill": SCALED}),
        pytest.param(
            2,
            {"distill": DistillConfig(["wide"]), "exchange": "ring", "launch": LaunchConfig(parallel="zero3")},
            marks=pytest.mark.slow,
        ),
        pytest.param(2, {"distill": TAUGHT, "objective": "sigmoid"}, marks=pytest.mark.slow),
        pytest.param(
            3,
            {"distill": TAUGHT, "exchange": "gather", "cache": CacheConfig(chunk=["3", "3"])},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_step_is_that_of_one_dense_graph(shard: str, tmp_path: Path, ranks: int, given: dict) -> None:
    config = config_of(shard, tmp_path / "run", **given)
    outcomes = run_ranks(one_step, ranks, config) if ranks > 1 else [one_step(0, 1, config)]
    weights, actual, value, _ = outcomes[0]
    rows = [torch.cat(of_ranks) for of_ranks in zip(*(outcome[-1] for outcome in outcomes))]
    pixels, captions, negatives, keys, *taught = rows
    assert len(set(keys.tolist())) < len(keys) or config.data.same is None, "some samples are the same"
    model = build_model(config.model).double()
    model.load_state_dict(weights)
    expected = dense_value(model, config, pixels, torch.cat([captions, negatives]), keys, taught)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-6), "the value is kept in float32"
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def dense_value(
    model: ClipModel, config: TrainConfig, pixels: Tensor, tokens: Tensor, keys: Tensor, taught: list[Tensor]
) -> Tensor:
    """The loss of a global batch in one graph: of the whole features, and of their first numbers for each size."""
    images = model.image(pixels)
    texts = model.text(tokens)
    assert len(texts) == config.batch * config.data.text_layout.texts_per_sample
    scale = model.logit_scale.exp()
    scales = config.distill.scales or [SCALE] * len(taught)
    teachers = [
        (features[:, 0].double(), features[:, 1].double(), s) for features, s in zip(taught, scales, strict=True)
    ]
    of_pairs, of_teachers = config.distill.weights if teachers else (1.0, 0.0)
    value = torch.zeros((), dtype=torch.float64)
    shortened = [(l2_normalize(images[:, :size]), l2_normalize(texts[:, :size])) for size in config.loss.sizes]
    for image_rows, text_rows in [(images, texts), *shortened]:
        value = value + of_pairs * dense_contrastive_loss(
            image_rows,
            text_rows,
            scale,
            logit_bias=model.logit_bias,
            objective=config.loss.objective,
            keys=None if config.data.negatives else keys,
            captions=config.data.captions_per_step,
        )
        if teachers:
            value = value + of_teachers * dense_distillation_loss(image_rows, text_rows, scale, teachers, keys=keys)
    return value


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["distill.teachers=[big,wide]", "distill.weights=[0.4,0.6]", "data.same=url"],
        ["data.captions_per_step=3", "data.negatives=json:wrong", "data.negatives_per_step=2"],
    ],
    ids=str,
)
def test_a_run_of_two_ranks_that_is_killed_has_the_undisturbed_curve(
    shard: str, tmp_path: Path, environment: dict, words: list[str]
) -> None:
    whole_and_killed(tmp_path, environment, [f"data.train={shard}", "data.captions=[json:captions]", *words])
