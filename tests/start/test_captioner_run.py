"""A run with a captioner: what it trains, what it records, what it refuses, and that a kill leaves no trace."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipscale.common.errors import UserError
from clipscale.config.checks import check_across_sections
from clipscale.config.data import DataConfig
from clipscale.config.model import ModelConfig
from clipscale.config.sections import CacheConfig, CaptionConfig, CheckpointConfig
from clipscale.config.train_config import TrainConfig
from clipscale.models.flops import Flops, decoder_flops, image_flops, text_flops, trained_names
from clipscale.models.towers import build_model
from clipscale.run_folder.paths import checkpoint_path
from clipscale.run_folder.records import StepRecord, read_metrics
from clipscale.tools.trained_model import load_model
from clipscale.train import train
from tests.support.killed_runs import whole_and_killed
from tests.support.runs import ARCHITECTURE, four_step_config

DECODER = {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
POOLED = {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 5, "output_tokens": True}
CAPTIONER: dict[str, Any] = {
    **ARCHITECTURE,
    "vision_cfg": ARCHITECTURE["vision_cfg"] | POOLED,
    "text_cfg": ARCHITECTURE["text_cfg"] | {"embed_cls": True, "output_tokens": True},
    "multimodal_cfg": DECODER,
}


def captioning(shards: str, run: Path, **given: Any) -> TrainConfig:
    model = ModelConfig(name="test", architecture=CAPTIONER)
    given = {"model": model, "cache": CacheConfig(chunk=["5"]), "precision": "fp32", **given}
    return four_step_config(shards, run, **given)


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> float:
    """The FLOP/s of this device, as if it were known."""
    of = Flops.of_model
    monkeypatch.setattr(Flops, "of_model", lambda *given: replace(of(*given), peak=1e12))
    return 1e12


def flops_of_a_pair(record: StepRecord, peak: float) -> float:
    """The operations that `mfu` counts."""
    assert record["mfu"] is not None
    return record["mfu"] * peak / record["samples_per_s_per_gpu"]


def flops_by_part(config: ModelConfig, width: int) -> tuple[int, int]:
    """The operations of both passes of the towers, and of the decoder, with captions of so many tokens."""
    model = build_model(config)
    image = image_flops(config, trained_names(model.image.encoder))
    text = text_flops(config, trained_names(model.text.encoder), width)
    return sum(image) + sum(text), sum(decoder_flops(config, trained_names(model.decoder), width))


def test_a_run_records_both_losses_and_trains_the_decoder(shards: str, tmp_path: Path, peak: float) -> None:
    config = captioning(shards, tmp_path / "run")
    train(config)
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    towers, decoder = flops_by_part(config.model, int(records[0]["caption_tokens"]))
    assert flops_of_a_pair(records[0], peak) == pytest.approx(towers + decoder)
    for record in records:
        assert record["loss"] == pytest.approx(record["contrastive_loss"] + 2 * record["caption_loss"], rel=1e-12)
    # Of new weights: ln(49,408) a token.
    assert records[0]["caption_loss"] == pytest.approx(10.8, abs=1)
    assert records[-1]["caption_loss"] < records[0]["caption_loss"]
    assert all(record["caption_tokens"] < 24 for record in records), "captions are sorted and cut"


def test_a_weight_of_0_is_the_contrast_alone(shards: str, tmp_path: Path, peak: float) -> None:
    config = captioning(shards, tmp_path / "run", caption=CaptionConfig(weight=0.0))
    train(config)
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert all("caption_loss" not in record for record in records)
    towers, _ = flops_by_part(config.model, int(records[0]["caption_tokens"]))
    assert flops_of_a_pair(records[0], peak) == pytest.approx(towers)
    torch.manual_seed(config.seed)
    new = build_model(config.model)
    trained = load_model(tmp_path / "run")[0]
    assert new.decoder is not None and trained.decoder is not None
    assert all(torch.equal(x, y) for x, y in zip(new.decoder.parameters(), trained.decoder.parameters(), strict=True))
    assert not torch.equal(new.text.encoder.text_projection, trained.text.encoder.text_projection)


@pytest.mark.parametrize(("weight", "text"), [(2.0, {"qk_norm": True}), (0.0, {"pad_id": 5})])
def test_captions_whose_padding_counts_are_computed_as_a_whole_and_it_is_said(
    shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], weight: float, text: dict
) -> None:
    blocks = CAPTIONER | {"text_cfg": CAPTIONER["text_cfg"] | text}
    model = ModelConfig(name="test", architecture=blocks)
    train(captioning(shards, tmp_path / "run", model=model, caption=CaptionConfig(weight=weight)))
    assert {record["caption_tokens"] for record in read_metrics(tmp_path / "run/metrics.jsonl")} == {24}
    assert "captions are computed with the whole context of 24 tokens" in capsys.readouterr().out


@pytest.mark.slow  # runs without a decoder do so in the ordinary suite
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(shards: str, tmp_path: Path) -> None:
    """The run drops patches at random, keeps graphs, and has an average."""
    model = ModelConfig(name="test", architecture=CAPTIONER, patch_dropout=0.3)
    given = {"model": model, "ema": 0.9, "checkpoint": CheckpointConfig(every="2", keep=0)}
    train(captioning(shards, tmp_path / "whole", **given))
    resume = str(checkpoint_path(tmp_path / "whole", 2))
    train(captioning(shards, tmp_path / "resumed", resume=resume, **given))
    whole, resumed = (read_metrics(tmp_path / run / "metrics.jsonl") for run in ("whole", "resumed"))
    for key in ("loss", "contrastive_loss", "caption_loss", "grad_norm"):
        assert [r[key] for r in whole][2:] == [r[key] for r in resumed], key
    for which in ("trained", "ema"):
        ends = [load_model(tmp_path / run, weights=which)[0].state_dict() for run in ("whole", "resumed")]
        assert all(torch.equal(x, ends[1][name]) for name, x in ends[0].items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": ModelConfig(), "caption": CaptionConfig(weight=1.0)}, r"caption.weight=1: ViT-B-32 has no decoder"),
        ({"data": DataConfig(train=["x"], captions_per_step=2)}, r"data.captions_per_step .* caption.weight=0"),
        ({"data": DataConfig(train=["x"], negatives="json:wrong")}, r"data.negatives: .* caption.weight=0"),
        ({"cache": CacheConfig(chunk=["8", "16"])}, r"cache.chunk=\[8,16\]: .* one size"),
    ],
)
def test_what_does_not_go_with_a_captioner_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_across_sections(replace(captioning("x", tmp_path), **given))


@pytest.mark.slow
@pytest.mark.timeout(1200)  # runs of two ranks
@pytest.mark.parametrize("parallel", ["ddp", "zero3"])
def test_a_run_of_two_ranks_that_is_killed_has_the_undisturbed_curve(
    shards: str, tmp_path: Path, environment: dict, parallel: str
) -> None:
    sizes = ("embed_dim=64", "multimodal_cfg.width=64", "multimodal_cfg.layers=1")
    words = ["model=coca-tiny", *(f"model.architecture.{size}" for size in sizes)]
    words += [f"data.train={shards}", f"launch.parallel={parallel}", "ema=0.9"]
    whole, killed = whole_and_killed(tmp_path, environment, words)
    losses = [[r["caption_loss"] for r in read_metrics(run / "metrics.jsonl")][-1] for run in (whole, killed)]
    assert losses[0] == losses[1]
    for which in ("trained", "ema"):
        state = load_model(killed, weights=which)[0].state_dict()
        assert all(torch.equal(x, state[name]) for name, x in load_model(whole, weights=which)[0].state_dict().items())
