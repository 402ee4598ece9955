"""`data select` finds planted faults, keeps one of near-duplicates, and levels clusters; its page runs nothing."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from clipscale.cli.main import main
from clipscale.common import files
from clipscale.tools.data import near
from clipscale.tools.data.select import keys_of
from clipscale.tools.embed.arrays import open_embedded_set
from tests.conftest import Capture
from tests.data.files import picture, write_tar
from tests.support.user_errors import refused

parquet = pytest.importorskip("pyarrow.parquet")
CAPTION = "</p><script>alert(1)</script>"


def embedded(folder: Path, images: torch.Tensor, texts: torch.Tensor, *sources: Path) -> Path:
    """A folder of `embed` in two parts, whose keys are numbers."""
    folder.mkdir()
    shards = {}
    for part, numbers in enumerate(np.array_split(np.arange(len(images)), 2)):
        for kind, features in (("image", images), ("text", texts)):
            np.save(folder / f"{part}.{kind}.npy", features[numbers].numpy().astype(np.float16))
        lines = [json.dumps({"key": f"{number:04d}", "caption": CAPTION}) + "\n" for number in numbers]
        (folder / f"{part}.jsonl").write_text("".join(lines))
        shards[f"{part}.jsonl"] = {"source": str(sources[part]) if sources else "no.tar", "samples": len(numbers)}
    (folder / "shards.json").write_text(json.dumps(shards))
    (folder / "features.json").write_text(json.dumps({"features": {"dtype": "float16", "width": images.shape[1]}}))
    return folder


def select(folder: Path, *words: str) -> np.ndarray:
    """The weights, in the order of the keys."""
    out = folder.with_suffix(".parquet")
    assert main(["data", "select", str(folder), f"out={out}", "device=cpu", *words]) == 0
    table = parquet.read_table(out)
    assert [str(field.type) for field in table.schema] == ["string", "float"]
    assert table["key"].to_pylist() == [f"{number:04d}" for number in range(len(table))]
    return np.asarray(table["weight"])


def features(count: int, seed: int = 0, width: int = 32) -> torch.Tensor:
    return normalize(torch.randn(count, width, generator=torch.Generator().manual_seed(seed)))


def test_shuffled_captions_and_copies_go_and_each_step_says_how_many(tmp_path: Path, capsys: Capture) -> None:
    images = features(1000)
    images[900:] = normalize(images[400:500] + 0.05 * features(100, 1))  # cosines of 0.999; of others at most 0.8
    texts = normalize(images + features(1000, 2))
    texts[:200] = texts[:200].roll(1, 0)
    images[999] = torch.nan  # no usable picture
    weights = select(embedded(tmp_path / "of", images, texts), "best=0.8", "duplicates=0.95")
    gone = weights == 0
    assert gone[:200].mean() >= 0.95 and gone[500:900].mean() <= 0.05 and gone[999]
    assert ((gone[400:499] + gone[900:999]) == 1).mean() >= 0.95, "one of each two stays"
    assert set(weights[~gone]) == {1}
    out = capsys.readouterr().out
    assert "1,000 samples, 999 with" in out and "best=0.8: 799 stay" in out and f"0.95: {(~gone).sum()} stay" in out


@pytest.mark.parametrize(("different", "words"), [(1, "drops more than half, 39 of 40"), (20, ""), (19, "21 of 40")])
def test_a_line_says_so_where_copies_are_more_than_half(
    tmp_path: Path, capsys: Capture, different: int, words: str
) -> None:
    """This happens where a model sees all pictures alike."""
    images = torch.eye(32)[torch.arange(40) % different]
    weights = select(embedded(tmp_path / "of", images, images), "duplicates=0.95", "clusters=1")
    out = capsys.readouterr().out
    assert weights.sum() == different and words in out and ("more than half" in out) == bool(words)


@pytest.mark.parametrize("block", [4, 64])
@pytest.mark.parametrize("cosine", [0.3, 0.6, 0.9])
def test_the_first_of_near_duplicates_stays_as_one_after_another_would_have_it(
    monkeypatch: pytest.MonkeyPatch, block: int, cosine: float
) -> None:
    monkeypatch.setattr(near, "MAX_COSINES", 61 * block)
    rows = features(61, width=3)
    order = torch.randperm(61)
    kept: list[int] = []
    expected = torch.zeros(61)
    for number in order.tolist():
        expected[number] = max([0.0, *(float(rows[number] @ rows[other]) for other in kept)])
        kept += [number] if expected[number] < cosine else []
    largest, nearest = near.near_duplicates(rows.__getitem__, order, torch.zeros(61, 1, dtype=torch.long), cosine)
    assert torch.allclose(largest, expected, atol=1e-6)
    found = largest > 0
    assert torch.allclose((rows * rows[nearest]).sum(1)[found], largest[found], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_each_duplicate_is_one_of_a_sample_that_stays_whatever_the_clusters(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is in two clusters. What it duplicates in one of them may be a duplicate itself in the other."""
    generator = torch.Generator().manual_seed(seed)
    rows = features(200, seed, width=3)
    samples = torch.randperm(200, generator=generator)
    clusters = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in samples])
    cosine = 0.9
    shown: list[str] = []
    tracked = near.tracked

    def watched(items: Iterable[int], what: str, total: int) -> Iterator[int]:
        shown.append(what)
        return tracked(items, what, total)

    monkeypatch.setattr(near, "tracked", watched)
    largest, nearest = near.near_duplicates(rows.__getitem__, samples, clusters, cosine)
    assert shown[0] == "comparing inside clusters" and all(re.fullmatch(r"comparing \d+ again", x) for x in shown[1:])
    assert len(shown) > 1, "each pass over the clusters has its progress"
    gone = largest >= cosine
    assert 20 < gone.sum() < 180
    assert not gone[nearest[gone]].any()
    assert ((rows * rows[nearest]).sum(1)[gone] >= cosine - 1e-6).all()
    for cluster in range(6):
        members = samples[(clusters == cluster).any(1)]
        kept = members[~gone[members]]
        assert (rows[kept] @ rows[kept].T).fill_diagonal_(0).max() < cosine + 1e-6


def test_clusters_come_by_the_power_of_their_samples(tmp_path: Path) -> None:
    sizes = torch.tensor([400, 100, 25])
    images = torch.eye(3).repeat_interleave(sizes, 0)
    weights = select(embedded(tmp_path / "of", images, images), "power=0.5", "clusters=60")
    assert weights.mean() == pytest.approx(1)
    shares = np.array([part.sum() for part in np.split(weights, [400, 500])])
    assert shares / shares[2] == pytest.approx([4, 2, 1])


def test_the_page_shows_the_pictures_and_runs_nothing_of_the_set(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", [(f"{i:04d}.png", picture(i, (300, 200))) for i in range(20)])
    select(embedded(tmp_path / "of", features(40), features(40, 1), tar, tmp_path / "gone.tar"), "best=0.5")
    page = (tmp_path / "of.html").read_text()
    assert page.count('src="data:image/jpeg;base64,/9j/') >= 5 and page.count("no picture can be read") >= 5
    assert "default-src 'none'" in page and "<script" not in page and "&lt;script&gt;" in page
    assert len(page) < 200_000


@pytest.mark.parametrize(("name", "content"), files.read_yaml(Path(__file__).with_name("damaged.yaml")))
def test_a_damaged_file_of_an_embedded_set_is_one_line(tmp_path: Path, name: str, content: str | list) -> None:
    folder = embedded(tmp_path / "of", features(8, width=8), features(8, width=8))
    if isinstance(content, str):
        (folder / name).write_text(content, "latin-1")
    else:
        kind, *shape = content
        np.save(folder / name, np.ones(shape, kind))
    with refused("embed its shards again|neither a path nor"):
        keys_of(open_embedded_set(folder))


def test_a_key_that_comes_twice_is_refused_before_the_work(tmp_path: Path) -> None:
    """Training would refuse the weights: they go by key."""
    folder = embedded(tmp_path / "of", features(8), features(8))
    (folder / "1.jsonl").write_text((folder / "0.jsonl").read_text())
    with refused("2 samples have the key 0000, and sample weights go by key; give each"):
        keys_of(open_embedded_set(folder))


def test_what_lies_there_is_not_replaced(tmp_path: Path, capsys: Capture) -> None:
    folder = embedded(tmp_path / "of", features(4), features(4))
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    assert main(["data", "select", str(folder), f"out={tmp_path}/mine.parquet", "best=0.5"]) == 2
    assert "mine.html, exists; remove both, or choose another file" in capsys.readouterr().err
    assert mine.read_text() == "mine" and not (tmp_path / "mine.parquet").exists()
