"""Keys planted in the environment, in addresses and in settings are in nothing that a run writes, prints or sends."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from clipscale.cli.main import main
from clipscale.common.errors import UserError
from clipscale.config.redact import HIDDEN, READ, redact, redacted, remember, restored
from clipscale.config.sections import EvalConfig
from clipscale.config.train import TrainConfig, changes_since, to_yaml
from clipscale.data.shards.access import unsigned
from clipscale.distributed.world import World
from clipscale.eval.verb import _complete
from clipscale.launch import heartbeat, local, torchrun
from tests.conftest import TINY, Command
from tests.data.files import write_shards
from tests.data.shards.web import Web, serving

PLANTED = "planted-7f3a91"
"""Part of every planted secret, so that one search finds them all."""
SIGNATURE = f"X-Amz-Signature={PLANTED}&X-Amz-Expires=900"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no configuration reads, and a value that one does."""
    monkeypatch.setenv("CLIPSCALE_TEST_API_KEY", f"{PLANTED}-key")
    monkeypatch.setenv("NOTES", f"{PLANTED}-of-a-plain-name")
    monkeypatch.setenv(READ, "")


class Signed(Web):
    """Answers only requests that are signed."""

    def answer(self, path: str, asked: str, *others: Any) -> tuple[int, dict[str, str], bytes]:
        place, _, query = path.partition("?")
        return (
            super().answer(place, asked, *others) if query.startswith("X-Amz-") else (403, {"Content-Length": "0"}, b"")
        )


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A presigned address of two shards."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", [24, 24])
    with serving(Signed(tmp_path / "shards")) as served:
        yield f"{served.url}/0000{{0..1}}.tar?{SIGNATURE}"


def leaks(folder: Path) -> list[str]:
    """Files below the folder that hold something planted."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"GET https://host/a/{{0..9}}.tar?{SIGNATURE} failed", f"GET https://host/a/{{0..9}}.tar?{HIDDEN} failed"),
        (f"'s3://user:{PLANTED}@host/a'", f"'s3://{HIDDEN}@host/a'"),
        (f"https://{PLANTED}@host/a?b={PLANTED}", f"https://{HIDDEN}@host/a?{HIDDEN}"),
        (f"at {PLANTED}-key", "at ${oc.env:CLIPSCALE_TEST_API_KEY}"),
        (f"api_key={PLANTED}", f"api_key={HIDDEN}"),
        (f'{{"token": "{PLANTED}"}}', f'{{"token": "{HIDDEN}"}}'),
        (f"Authorization: Bearer {PLANTED}", f"Authorization: Bearer {HIDDEN}"),
        (f"pipe:curl -H 'Authorization: Basic {PLANTED}' x", f"pipe:curl -H 'Authorization: Basic {HIDDEN}' x"),
        ("hf_abcdefghijklmnopqrstuv and AKIAABCDEFGHIJKLMNOP", f"{HIDDEN} and {HIDDEN}"),
    ],
)
def test_a_secret_in_a_text_is_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "step=1 samples=16 loss=2.7749 tokens=77",
        "model.architecture.text_cfg.hf_tokenizer_name: timm/x",
        "data.train='/data/{00000..41455}.tar' https://host/a.tar, s3://bucket/{0..9}.tar",
        "error: unknown key 'password'; there are basic launchers of many kinds",
        "run=runs/secret: going on after step 2 of 3",
        "commit 5a3601912345678901234567890123456789abcd",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_only_values_that_can_be_secrets_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {
        "SHORT": "adamw",
        "COUNT": "12800000000",
        "FOLDER": str(tmp_path),
        "USER": "a-long-name",
        "VALUE": "not-short",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
        remember(name)
    assert redact(" ".join(values.values())) == f"adamw 12800000000 {tmp_path} a-long-name ${{oc.env:VALUE}}"


def test_names_of_settings_hide_their_values_and_interpolations_come_back() -> None:
    tree = {"options": {"api_key": "x1", "betas": [1, f"{PLANTED}-key"]}, "batch": 16}
    stored = redacted(tree)
    assert stored == {"options": {"api_key": HIDDEN, "betas": [1, "${oc.env:CLIPSCALE_TEST_API_KEY}"]}, "batch": 16}
    assert restored(stored)["options"]["betas"] == [1, f"{PLANTED}-key"]
    assert restored("${oc.env:NOT_SET_ANYWHERE}") == "${oc.env:NOT_SET_ANYWHERE}"


def test_a_new_signature_is_no_change_of_the_settings(tmp_path: Path) -> None:
    def config(signature: str) -> TrainConfig:
        made = TrainConfig(samples=16)
        made.data.train = [f"https://host/0.tar?X-Amz-Signature={signature}"]
        return made

    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config("first-one")))
    assert "first-one" not in file.read_text()
    assert changes_since(file, config("second-one")) == []
    file.write_text(
        yaml.safe_dump({"data": {"train": ["https://host/0.tar?X-Amz-Signature=old"]}})
    )  # of an older version
    assert not [line for line in changes_since(file, config("new")) if line.startswith("data.train")]


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (f"https://host/a.tar?{SIGNATURE}", "https://host/a.tar"),
        (
            "https://x.blob.core.windows.net/c/a.tar?sv=2023&sig=a%2Fb&se=2026",
            "https://x.blob.core.windows.net/c/a.tar",
        ),
        ("https://host/get?file=a.tar&Signature=a/b", "https://host/get?file=a.tar"),
        ("https://host/get?file=a.tar", "https://host/get?file=a.tar"),
        ("/data/what?sig=1.tar", "/data/what?sig=1.tar"),
    ],
)
def test_an_address_signed_anew_names_the_same_shard(address: str, name: str) -> None:
    assert unsigned(address) == name


def test_a_stored_set_without_its_secret_asks_for_it(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"eval": {"sets": ["/sets/${oc.env:NOT_SET_ANYWHERE}"]}}))
    with pytest.raises(UserError, match=r"eval\.sets=.*give eval\.sets again, or set the variable"):
        _complete(EvalConfig(), file)


def test_a_run_on_presigned_addresses_leaks_nothing_and_resumes_with_new_ones(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDS", address)
    words = ["train", *TINY, f"data.cache={tmp_path}/cache", "run=secret", "data.order=resampled"]
    monkeypatch.setattr("sys.argv", ["clipscale", *words, f"data.train={address}"])
    assert main([*words, "data.train=${oc.env:SHARDS}"]) == 0
    config = yaml.safe_load((tmp_path / "runs/secret/config.yaml").read_text())
    assert config["data"]["train"] == ["${oc.env:SHARDS}"]
    assert "data.train=${oc.env:SHARDS}" in str(json.loads((tmp_path / "runs/secret/env.json").read_text())["command"])
    assert main(["report", "run=secret"]) == 0
    signed_again = address.replace(PLANTED, PLANTED + "2")
    assert main([*words, "samples=48", f"data.train={signed_again}"]) == 0
    printed = "".join(capfd.readouterr())
    assert "going on after step 2 of 3" in printed, printed.replace("\n", " | ")
    assert "read from its first sample" not in printed
    assert PLANTED not in printed
    assert leaks(tmp_path) == []


def test_an_error_line_shows_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ["data.train=nowhere://user:${oc.env:NOTES}@host/a.tar"],
        [f"data.train=nowhere://h/a.tar?{SIGNATURE}"],
    ):
        assert main(["train", *TINY, *words, "run=r"]) == 2
    printed = "".join(capsys.readouterr())
    assert printed.count("error: data.train='nowhere://") == 2, printed
    assert PLANTED not in printed
    assert main(["train", *TINY, "data.train=${oc.env:NOT_SET_ANYWHERE}"]) == 2
    assert (
        "error: ${oc.env:NOT_SET_ANYWHERE}: the environment variable NOT_SET_ANYWHERE is not set"
        in capsys.readouterr().err
    )


def test_what_a_failed_rank_leaves_for_others_holds_no_secret(tmp_path: Path) -> None:
    """Its heartbeat stays in the run's folder, and its launcher, or torchrun's agent, prints why it failed."""
    text = f"https://host/a.tar?{SIGNATURE}: refused"
    with pytest.raises(ValueError), heartbeat.Heartbeat(tmp_path, World(0, 2, torch.device("cpu")), 0.3):
        raise ValueError(text)
    record = heartbeat.path_of(tmp_path, 0).read_text()
    assert "ValueError: https://host/a.tar?" in record and "refused" in record
    assert leaks(tmp_path) == []
    message = {"message": f"ValueError: {text}", "extraInfo": {"py_callstack": f"ValueError: {text}"}}
    failed: Any = SimpleNamespace(failures={0: SimpleNamespace(message=message, timestamp=5, exitcode=1)})
    failure = local.first_failure(failed)
    assert "refused" in str(failure) and PLANTED not in str(failure) + failure.details  # type: ignore[union-attr]


def test_torchruns_files_with_tracebacks_are_gone_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda given: seen.append(given.log_dir))
    monkeypatch.setattr(torchrun, "protect", lambda: None)
    monkeypatch.setattr("torch.distributed.launcher.api.LocalElasticAgent", None)
    for words in ([], ["--log-dir", str(tmp_path)]):
        with patch.dict(os.environ):
            assert torchrun.main([*words, "-m", "clipscale", "train"]) == 0
    assert seen[0] and not Path(seen[0]).parent.exists()
    assert seen[1] == str(tmp_path), "where the user says"


def test_torchs_files_with_tracebacks_lie_in_the_launchers_own_folder(tmp_path: Path) -> None:
    """They are not redacted; the folder is deleted with the workers' end. The slow test below starts workers that fail."""
    before = tempfile.gettempdir()
    with local._quiet({}, str(tmp_path)):
        handle, name = tempfile.mkstemp()
        os.close(handle)
    assert Path(name).parent == tmp_path and tempfile.gettempdir() == before


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_workers_loaders_wandb_and_tracebacks_leak_nothing(address: str, tmp_path: Path, command: Command) -> None:
    home = {name: str(tmp_path / "wandb-home") for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")}
    quiet = [word for word in TINY if not word.startswith("data.workers")]
    given = [*quiet, "data.workers=1", "log.wandb=offline", "data.order=resampled", "launch.procs=2"]
    home |= {"TMPDIR": str(tmp_path)}
    done = command("train", "-m", *given, f"data.train={address}", "seed=0", "run=s", **home, timeout=700)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.wandb"))
    # every rank and loader raises with the address in its message: the stack is printed, the address is not
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import clipscale.data.loader.shard_stream as s\n"
        "def take(self, put):\n    raise ValueError(str(self._spec.source.urls))\n"
        "s.ShardStream.take = take\n"
    )
    path = os.pathsep.join(filter(None, [str(broken), os.environ.get("PYTHONPATH", "")]))
    words = ["train", *given, f"data.train={address}", "run=f"]
    failed = command(*words, **home, PYTHONPATH=path, timeout=700)
    assert failed.returncode == 1 and "ValueError" in failed.stderr, failed.stderr
    for result in (done, failed):
        assert PLANTED not in result.stdout + result.stderr
    assert [path for path in leaks(tmp_path) if "sitecustomize" not in path] == []
