"""A captioner's loss on held-out pairs is open_clip's, over usable pictures alone, as are the captions it writes."""

import json
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import open_clip.coca_model
import pytest
import torch
from open_clip.coca_model import CoCa
from open_clip.loss import CoCaLoss
from PIL import Image

from clipscale.config.model import ModelConfig
from clipscale.config.sections import EvalConfig
from clipscale.distributed.world import World
from clipscale.eval import caption_meter
from clipscale.eval.run import ResultsFile, evaluate
from clipscale.models.captioner import write_captions
from clipscale.models.towers import ClipModel, build_model
from tests.data.files import write_tar
from tests.eval.sets import COLOURS, NAMES, evaluation, members, pair_set, shown
from tests.support.checkpoints import ONE_RANK
from tests.support.ranks import run_ranks
from tests.support.towers import captioner_architecture

DESCRIPTION = captioner_architecture(8, 4, 12, 49408)
# Captions of ten pictures. One picture is broken.
TEN = [*NAMES, *(f"another {name}" for name in NAMES[:4])]
BROKEN = NAMES[2]


def captioner() -> ClipModel:
    torch.manual_seed(0)
    return build_model(ModelConfig("own", DESCRIPTION)).eval()


def open_clips(model: ClipModel) -> CoCa:
    theirs = CoCa(**DESCRIPTION).eval()
    parts = ("visual", model.image.encoder), ("text", model.text.encoder), ("text_decoder", model.decoder)
    for name, part in parts:
        theirs.get_submodule(name).load_state_dict(part.state_dict())
    theirs.text.correct_cls_mask = True
    return theirs


def measured_set(
    root: Path, batch: int = 4, file: ResultsFile | None = None, world: World = ONE_RANK
) -> dict[str, float]:
    config = EvalConfig(sets=[str(root)], batch=batch)
    return evaluate(captioner(), evaluation(config), world, file=file)[root.name]


def pixels_of(model: ClipModel, names: list[str]) -> torch.Tensor:
    transform = model.eval_transform()
    return torch.stack([torch.from_numpy(transform(picture)) for picture in shown(names)])


@pytest.mark.parametrize("broken", [-1, 2])
def test_the_loss_is_open_clips_over_the_usable_pictures(tmp_path: Path, broken: int) -> None:
    measured = measured_set(pair_set(tmp_path / "pairs", broken=broken))
    model = captioner()
    names = [name for number, name in enumerate(NAMES) if number != broken]
    out = open_clips(model)(model.image.encoder_inputs(pixels_of(model, names)), model.tokenizer(names))
    expected = CoCaLoss(caption_loss_weight=1.0, clip_loss_weight=1.0)(**out)[1].item()
    assert measured["caption_loss"] == pytest.approx(expected, rel=1e-5)
    assert measured["perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)
    assert measured["images"] == len(names)


def measured_on_a_rank(rank: int, size: int, root: str) -> dict[str, float]:
    caption_meter.PAIRS_AT_ONCE = 2
    return measured_set(Path(root), batch=3, world=World(rank, size, torch.device("cpu")))


@pytest.mark.slow
def test_the_loss_does_not_depend_on_batches_and_ranks(tmp_path: Path) -> None:
    root = pair_set(tmp_path / "pairs", broken=4)
    alone = measured_set(root, batch=64)
    for answer in run_ranks(measured_on_a_rank, 2, str(root)):
        assert answer == pytest.approx(alone, rel=1e-6)


def ten_pairs(folder: Path) -> Path:
    root = folder / "pairs"
    root.mkdir()
    pictures = shown([name.split()[-1] for name in TEN], broken=TEN.index(BROKEN))
    write_tar(root / "00000.tar", members("txt", TEN, pictures))
    return root


def written_of_a_set(rank: int, size: int, root: str, batch: int) -> list[dict[str, str]]:
    """What rank 0's file has of ten pictures, of which the third is broken."""
    world = World(rank, size, torch.device("cpu"))
    file = ResultsFile(Path(root).with_name(f"{rank} of {size}, {batch}"), 1)
    measured_set(Path(root), batch=batch, file=file, world=world)
    return json.loads(file.path.read_text())["measured"]["pairs"]["written"] if rank == 0 else []


def test_the_file_has_eight_pictures_with_what_was_written_of_them(tmp_path: Path) -> None:
    """They are the first usable pictures, from as many batches as that takes."""
    root = ten_pairs(tmp_path)
    written = written_of_a_set(0, 1, str(root), 16)
    assert [one["caption"] for one in written] == [name for name in TEN if name != BROKEN][:8]
    colours = [Image.open(BytesIO(b64decode(one["picture"]))).getpixel((4, 4)) for one in written]
    for colour, one in zip(colours, written, strict=True):
        assert colour == pytest.approx(COLOURS[one["caption"].split()[-1]], abs=12), one["caption"]
    assert all(isinstance(one["written"], str) and "<" not in one["written"] for one in written)
    assert written_of_a_set(0, 1, str(root), 3) == written


@pytest.mark.slow  # starts two ranks
def test_the_pictures_with_captions_are_the_same_on_several_ranks(tmp_path: Path) -> None:
    root = str(ten_pairs(tmp_path))
    assert run_ranks(written_of_a_set, 2, root, 3)[0] == written_of_a_set(0, 1, root, 16)


@pytest.mark.slow
def test_captions_are_those_of_open_clips_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """open_clip finds one of its classes in transformers 4 alone; a greedy search does not need that one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (clipscale[hf])")
    warpers: dict[str, Any] = {"top_k": transformers.TopKLogitsWarper}
    monkeypatch.setattr(open_clip.coca_model, "_has_transformers", True)
    monkeypatch.setattr(open_clip.coca_model, "GENERATION_TYPES", warpers)
    model = captioner()
    model.tokenizer.bos_eos_ids = 10, 11
    with torch.no_grad():
        model.decoder.text_projection *= 4
        model.decoder.text_projection[:, 40:] = 0
    pixels = torch.randint(0, 256, (40, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    expected = open_clips(model).generate(
        model.image.encoder_inputs(pixels),
        seq_len=12,
        generation_type="top_k",
        top_k=1,
        min_seq_len=0,
        sot_token_id=10,
        eos_token_id=11,
        fixed_output_length=True,
    )
    _, image = model.image(pixels, with_tokens=True)
    actual = write_captions(model.text, model.decoder, image, (10, 11), 12)
    assert torch.equal(actual, expected)
    assert len({tuple(row) for row in actual.tolist()}) > 1, "pictures count"
