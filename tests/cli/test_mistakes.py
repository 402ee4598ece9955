"""A first-time user's mistakes by their kind: each gets one line with what was typed and what to type instead."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clipscale.cli.main import main
from tests.cli.conftest import Cli, tiny

MISTAKES = [
    # the kind of mistake, the command, what the line names: what is wrong, and the remedy
    ("a misspelt verb", "tran", "tran", "train"),
    ("a misspelt key", "train optim.lrr=1", "optim.lrr", "optim.lr"),
    ("a key like no other", "train zzz=1", "zzz", "--help"),
    ("a key without its section", "train clip_norm=1", "clip_norm", "optim.clip_norm"),
    ("a section without a key", "train data.augment=64", "data.augment", "data.augment.scale"),
    ("a misspelt preset", "train model=vit-b33", "model=vit-b33", "vit-b32"),
    ("a folder of presets that there is not", "train --config-dir /no experiment=a", "/no", "experiment/NAME.yaml"),
    ("a file of settings as a word", "train mine.yaml", "mine.yaml", "--config-dir"),
    ("a key without an equals sign", "train batch 64", "batch", "batch="),
    ("a run's name alone", "eval b32", "b32", "run=b32"),
    ("several values", "train batch=32k,64k", "batch=32k,64k", "-m"),
    ("a bracket that stays open", "train optim.betas=[0.9", "optim.betas", "cannot be read"),
    ("two equals signs", "train data=demo batch==16", "batch==16", "write batch=16"),
    ("quotes of a word processor", "train data=demo batch=“16”", "batch=“16”", "write batch=16"),
    ("quotes of a word processor around it all", "train “batch=16”", "“batch=16”", "write batch=16"),
    ("a letter of another alphabet", "train data=demo bätch=16", "bätch", "batch"),
    ("the same key twice", "train batch=64 batch=128", "batch", "twice"),
    ("braces without quotes", "train data.train=/d/0.tar data.train=/d/1.tar", "data.train", "data.train='...'"),
    # those who come from open_clip
    (
        "several of its flags",
        "train --model ViT-B-32 --batch-size=256 --precision amp --resume latest --siglip",
        "--model, --batch-size=256",
        "model.name=ViT-B-32 batch=256 precision=fp16 resume=auto loss=siglip",
    ),
    ("its flags that mean one setting", "train --local-loss --gather-with-grad", "--local-loss", "train loss=openclip"),
    ("its flags of both betas", "train --beta1 0.9 --beta2 0.99", "--beta1, --beta2", "--beta2 (optim.betas=[...])"),
    ("its samples of an epoch", "train --epochs 3 --train-num-samples 50", "--epochs", "epochs=3; left out: --train"),
    (
        "its flag without a value",
        "train data=demo --resume --lr 1e-3",
        "--resume",
        "data=demo resume=auto optim.lr=1e-3",
    ),
    ("its flag that has no counterpart", "train --ddp-static-graph", "--ddp-static-graph", "left out: --ddp-static"),
    ("a dash before a setting of the verb", "plan --gpus 8", "--gpus", "clipscale plan gpus=8"),
    ("its word in a section", "train model.pretrained=openai", "model.pretrained", "'model.weights'"),
    ("its word of the model", "train model=ViT-L-14", "model=ViT-L-14", "vit-l14"),
    ("its word of the precision", "train precision=amp", "precision=amp", "fp16"),
    ("its accumulation", "train accum_freq=4", "accum_freq", "cache.chunk"),
    ("torchrun's number of processes", "train gpus=8", "gpus", "launch.procs"),
    # values
    ("not a count", "train batch=many", "batch=many", "768k"),
    ("too small", "train samples=-5", "samples=-5", "at least 1"),
    ("too large", "train model.image.layer_decay=2", "layer_decay=2", "at most 1"),
    ("one number for two", "train optim.betas=0.9", "optim.betas=0.9", "[...]"),
    ("another word for a choice", "train offload=cpu", "offload=cpu", "host"),
    ("bytes with a unit of two letters", "train data=demo cache.keep=20GB", "cache.keep=20GB", "8G"),
    # settings that do not go together, or are not there
    ("both lengths", "train samples=1k epochs=2 data=demo", "samples=1024", "epochs"),
    ("a batch that ranks cannot share", "train batch=10 launch.procs=4 data=demo", "batch=10", "multiple of 4"),
    ("a sigmoid without its bias", "train data=x.tar loss.objective=sigmoid", "loss.objective", "loss=siglip"),
    ("an evaluation of nothing", "train data=x.tar eval.every=5", "eval.every=5", "eval.sets"),
    ("an average that is not kept", "train data=x.tar eval.weights=ema", "eval.weights=ema", "ema=0.9999"),
    ("adapters of nothing", "train data=x.tar model.lora=4", "model.lora=4", "model.weights="),
    ("adapters in shards", "train data=x.tar model.weights=x model.lora=4 launch.parallel=zero3", "zero3", "ddp"),
    ("a tower trained in part", "train data=x.tar model.text.train=half", "model.text.train=half", "all, none"),
    ("a time without its unit", "train data=x.tar checkpoint.every=1.5", "checkpoint.every=1.5", "30m"),
    ("no share of a run", "train data=x.tar schedule.warmup=200%", "schedule.warmup=200%", "at most 100%"),
    ("no form of a length", "train data=x.tar schedule.cooldown=soon", "schedule.cooldown='soon'", "5%"),
    ("another optimizer", "train data=x.tar optim.name=adamww", "optim.name='adamww'", "'adamw'"),
    ("less than a batch", "train data=x.tar samples=8 batch=16", "samples=8", "batch=16"),
    ("no chunk", "train data=x.tar cache.chunk=many", "cache.chunk=many", "auto"),
    ("a hue beyond the circle", "train data.augment.jitter=[.3,.3,.3,.8]", "data.augment.jitter", "0.5 or less"),
    ("half a condition", "train data.filter=[similarity]", "data.filter='similarity'", "similarity>=0.3"),
    ("negatives of no field", "train data=x.tar data.negatives=txt", "data.negatives=txt", "json:FIELD"),
    (
        "negatives and keys",
        "train data=x.tar data.negatives=json:a data.same=url loss.shared=mask",
        "negatives",
        "shared",
    ),
    (
        "kernels for keys",
        "train data=x.tar data.same=url loss.shared=mask loss.backend=triton",
        "loss.backend=triton",
        "loss.backend=auto",
    ),
    ("another word of pixels", "train model.preprocess.crop=3", "model.preprocess.crop", "model.preprocess.std"),
    ("three chunks", "train data=x.tar cache.chunk=[1,2,3]", "cache.chunk=[1,2,3]", "[IMAGES,TEXTS]"),
    # names of earlier versions
    ("a locked tower", "train model.freeze_text=true", "model.freeze_text", "model.text.train=none"),
    ("a filter by name", "train data.filter.min_side=64", "data.filter.min_side", "data.filter=[side>=64]"),
    ("no data", "train model=tiny", "data.train", "data=demo"),
    ("no run", "report", "run", "run=NAME"),
    ("no model", "embed data=x.tar out=y", "run", "model.weights="),
    ("no machine to plan for", "plan", "hardware", "hardware=a100-80g"),
    # what a verb does not use
    ("an order of features", "embed run=a data=x.tar out=y data.shuffle=4", "data.shuffle", "embed does not use it"),
    ("a filter of features", "embed run=a data.filter.min_side=64", "data.filter.min_side", "embed does not use it"),
    ("a checkpoint of no run", "eval model=tiny model.weights=openai checkpoint=3", "checkpoint=3", "run=NAME"),
    ("an average of no run", "embed model=tiny model.weights=openai out=y weights=ema", "ema weights", "run=NAME"),
    ("a section of another verb", "explore run=a eval.sets=[a]", "eval.sets", "explore --help"),
    ("a preset of another verb", "embed run=a loss=clip", "loss", "embed --help"),
    ("evaluations in between", "eval run=a eval.every=5", "eval.every", "eval --help"),
    ("workers of a check", "data check a.tar data.workers=4", "data.workers", "data check --help"),
    ("shares of nothing", "export run=a shares=[0.5,0.5]", "shares=[0.5, 0.5]", "average="),
    ("a run's other model", "eval run=a model=vit-b16", "run=a", "model.name"),
    ("weights beside a run's", "embed run=a data=x.tar out=y model.weights=b", "run=a", "model.weights"),
    ("a folder for a run's results", "eval run=. out=b", "out=b", "leave it out"),
    # what a look at the machine's files shows, before torch is loaded
    ("a GPU that is not there", "train data=demo device=cuda", "device=cuda", "device=cpu"),
    ("a list that is not there", "train data.train=@/nowhere.txt", "data.train='@/nowhere.txt'", "cannot be read"),
    ("a weight without its source", "train data=demo data.weights=[1,2]", "data.weights=[1.0, 2.0]", "for 1 sources"),
    ("a set that is not there", "train data=demo eval.sets=/nowhere", "eval.sets: /nowhere", "folder of a set"),
    ("weights that are not there", "train data=demo model.weights=/nowhere.pt", "'/nowhere.pt'", "a path that exists"),
    ("no set", "eval model=vit-b32 model.weights=openai", "eval.sets is empty", "eval.sets=[FOLDER"),
    ("sets of a run", "eval run=. eval.sets=/nowhere", "eval.sets: /nowhere", "folder of a set"),
    ("a folder of a suite", "train data=demo eval.suite=imagenet", "eval.suite=imagenet", "eval.root=DIR"),
    ("tags of weights", "train data=demo model.weights=laion9b", "model.weights='laion9b'", "'laion2b'"),
    ("a run of weights", "train data=demo model.weights=run:no", "model.weights='run:no'", "runs/no"),
    ("data of features", "embed model=vit-b32 model.weights=openai out=y", "data.train is not set", "data="),
    ("shards of features", "embed run=. out=y data=/nowhere/0.tar", "data.train='/nowhere/0.tar'", "a brace list"),
    ("features to explore", "explore run=. data=/nowhere", "/nowhere", "`clipscale embed`"),
    ("a model", "train data=demo model.name=ViT-B-33", "model.name='ViT-B-33'", "'ViT-B-32'"),
    ("a picture of a run", "report a out=x.gif", "out=x.gif", "out=FILE.html"),
    # settings that are only printed
    ("a chunk of a printed run", "train data=demo cache.chunk=-1 --cfg job", "cache.chunk=-1", "auto"),
    ("shards of a printed run", "train data=/nowhere/0.tar --cfg job", "data.train='/nowhere/0.tar'", "a brace list"),
    # what is not there
    ("a table of pictures", "train data=/d/pairs.csv", "data.train='/d/pairs.csv'", "clipscale data pack"),
    ("shards", "train data.train=/nowhere/{0..3}.tar", "data.train='/nowhere/{0..3}.tar'", "a brace list"),
    ("a checkpoint to go on from", "train data=demo resume=latest", "resume=latest", "run folder"),
    ("a variable of the environment", "train data.train=${oc.env:NOT_SET_HERE}", "NOT_SET_HERE", "environment"),
]


@pytest.mark.parametrize(("words", "wrong", "remedy"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_answered_in_one_line_that_names_the_remedy(cli: Cli, words: str, wrong: str, remedy: str) -> None:
    one_line(cli(*shlex.split(words)), wrong, remedy)


def one_line(answer: tuple[int, str, str], wrong: str, remedy: str) -> None:
    """Status 2 and one line, which names what is wrong, and then the remedy."""
    status, _, err = answer
    assert (status, err.count("\n"), "Traceback" in err) == (2, 1, False), err
    start, actual, rest = err.partition(wrong)
    assert start.startswith("error: ") and actual and remedy in (rest if wrong not in remedy else err), err


LATER = [
    # what only a look at the machine, the shards and the model shows
    ("loss.backend=triton", "loss.backend=triton", "loss.backend=tiled"),
    ("cache.chunk=17", "cache.chunk=17", "1 to 16"),
    ("log=wandb", "log=wandb", "wandb login"),
    ("run=./taken/run", "run=taken/run", "run=PATH"),
    # with a model
    ("model.image_size=31", "model.image_size=31", "30"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has Triton and CUDA")
@pytest.mark.parametrize("row", LATER, ids=[row[0] for row in LATER])
def test_what_cannot_work_is_refused_before_a_step_and_mostly_before_a_model_is_built(
    cli: Cli, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: tuple[str, str, str]
) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    part = "state.train_state.build_model" if row in LATER[:-1] else "train.Run.train_step"
    monkeypatch.setattr(f"clipscale.{part}", lambda *given: pytest.fail("too late"))
    monkeypatch.setattr("wandb.login", lambda **options: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    one_line(cli(*tiny(f"data.train={shards}", *row[0].split())), *row[1:])


def test_a_batch_beyond_the_data_is_refused_from_its_counts(cli: Cli, shards: str) -> None:
    """In the words that were typed: 48 samples, and no length or some epochs."""
    words = [word for word in tiny(f"data.train={shards}", "batch=4k") if not word.startswith("samples=")]
    one_line(cli(*words), "batch=4096: the 48 samples in data.train make 1536", "32 epochs, the default")
    one_line(cli(*words, "epochs=2"), "batch=4096: the 48 samples in data.train make 96", "epochs=2")


def test_under_torchrun_a_sweep_and_a_run_without_a_name_are_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    one_line(cli("train", "-m", "batch=32k,64k"), "-m", "leave torchrun out")
    one_line(cli("train", "data=demo"), "run", "run=NAME")


def test_help_and_mistakes_need_no_torch() -> None:
    """So that they are answered within a second."""
    commands = [["train", "-h"], *(shlex.split(words) for _, words, *_ in MISTAKES if words != "report")]
    code = f"import sys; from {main.__module__} import main; [main(words) for words in {commands!r}]"
    code += "; sys.exit(bool({'torch', 'open_clip', 'torchvision', 'timm'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
