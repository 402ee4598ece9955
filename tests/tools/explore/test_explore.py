"""The page's answers are what the model computes, and it refuses what is not its own browser's."""

import io
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from clipscale.cli.main import main
from clipscale.common import files
from clipscale.tools.explore.search import nearest_rows, open_explorer
from clipscale.tools.explore.settings import check_explore
from tests.conftest import Capture
from tests.support.browser import CHROMIUM, browser
from tests.support.user_errors import refused
from tests.tools.explore.conftest import config

TABLES = files.read_yaml(Path(__file__).with_name("explore.yaml"))

pytest.importorskip("starlette.testclient", reason="starlette is not installed (clipscale[explore])")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_nearest_rows_are_those_of_the_whole_product(dtype: type[np.floating]) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((53, 8)).astype(dtype)
    rows[[4, 30]] = np.nan  # samples without features
    query = generator.standard_normal(8).astype(np.float32)
    scores = np.nan_to_num(rows.astype(np.float32) @ query, nan=-np.inf)
    order = np.argsort(-scores)[:51]
    for count in (1, 5, 53, 80):
        matches = nearest_rows([rows[:20], np.empty((0, 0)), rows[20:]], query, count)
        assert [row for row, _ in matches] == order[:count].tolist()
        assert np.allclose([score for _, score in matches], scores[order[:count]], atol=1e-6)


def names(rows: list[dict]) -> list[tuple[str, int]]:
    return [(row["part"], row["row"]) for row in rows]


def test_a_text_finds_the_pictures_whose_features_are_nearest(page: Any, place: Path) -> None:
    features = np.concatenate([np.load(place / f"of-a/0000{shard}.image.npy") for shard in (0, 1)])
    scores = features @ open_explorer(config(place, "of-a")).text_feature("two cats")
    answer = page.get("/search", params={"text": "two cats"}).json()
    places = [("00000", i) for i in range(7)] + [("00001", i) for i in range(5)]
    assert names(answer["images"]) == [places[n] for n in np.argsort(-scores)]
    first = answer["images"][0]
    assert first["caption"] == f"<b>{first['key']}</b> & a ring"
    assert first["score"] == pytest.approx(scores.max(), abs=1e-6)


def test_a_picture_finds_itself_and_the_captions_nearest_to_it(page: Any) -> None:
    answer = page.get("/search/9").json()
    first = answer["images"][0]
    assert (first["part"], first["row"], first["number"]) == ("00001", 2, 9)
    assert first["score"] == pytest.approx(1, abs=1e-3) and len(answer["texts"]) == 12
    assert answer["sample"] == {name: value for name, value in first.items() if name != "score"}


def test_the_page_shows_small_pictures_of_the_set(page: Any) -> None:
    assert page.get("/model").json() == {"title": "a, step 7", "samples": 12}
    image = Image.open(io.BytesIO(page.get("/small/3").content))
    assert (image.format, image.size) == ("JPEG", (40, 30))
    for path in ("/", "/page.css", "/page.js"):
        assert page.get(path).status_code == 200
        assert "http://" not in page.get(path).text, "it loads nothing from elsewhere"
        assert "frame-ancestors 'none'" in page.get(path).headers["content-security-policy"]


def test_a_folder_with_features_of_another_model_is_refused(place: Path) -> None:
    with refused(r"of-a: has no features of b, step 7; embed the set with that model"):
        open_explorer(config(place, "of-a", run=str(place / "b")))
    with refused("give one folder of `clipscale embed`"):
        check_explore(config(place, "of-a", "of-b"))


def test_a_check_tells_features_of_another_model(place: Path, capsys: Capture) -> None:
    def status(run: str) -> int:
        return main(["explore", f"run={place / run}", f"data={place / 'of-a'}", "--check"])

    assert status("b") == 2
    assert "of-a: has no features of b, step 7; embed the set with that model" in capsys.readouterr().err
    assert status("a") == 0
    assert "checked, and nothing is started: features of 12 samples by a, step 7" in capsys.readouterr().out


def test_only_questions_of_the_page_are_answered(page: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipscale.tools.explore.server.RESULTS", 3)
    assert len(page.get("/search", params={"text": "a", "count": 10**9}).json()["images"]) == 3
    statuses = {
        "small/999": 422,
        "search/999": 422,
        "search": 400,
        f"small/{'9' * 5000}": 422,
        "small/..%2f..%2fetc": 404,
        "..%2fserver.py": 404,
    }
    assert {name: page.get(f"/{name}").status_code for name in statuses} == statuses
    assert page.post("/search", content=b"x").status_code == 405


@pytest.mark.parametrize("number", ["abc", "", "-1", "1.5", "12", "9" * 30, "1/2", "\u0663"])
def test_a_picture_that_is_no_number_is_answered_with_what_is_wrong(page: Any, number: str) -> None:
    answer = page.get(f"/search/{number}")
    expected = f"picture={number}: the set's 12 pictures are numbered from 0 on"
    assert (answer.status_code, answer.text) == (422, expected)


@pytest.mark.parametrize(
    ("headers", "status"),
    TABLES["requests"],
)
def test_requests_from_other_pages_are_refused(page: Any, headers: dict, status: int) -> None:
    answer = page.get("/search?text=a", headers=headers)
    assert answer.status_code == status and "access-control-allow-origin" not in answer.headers
    assert status != 200 or answer.headers["cross-origin-resource-policy"] == "same-origin"


@contextmanager
def served(application: Any) -> Iterator[int]:
    """The port at which an application is served meanwhile."""
    from clipscale.tools.explore.connections import server

    serving = server(application)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            serving.should_exit = True
            thread.join(30)


def test_connections_that_do_not_ask_lock_nobody_out_and_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that send only the beginning of a request do not either."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    from clipscale.tools.explore import connections

    monkeypatch.setattr(connections, "ASK_S", 1.0)
    application = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
    with served(application) as port, ExitStack() as stack:
        others = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(140)]
        for number, other in enumerate(others[::2]):
            other.sendall(b"GET / HTTP/1.1\r\nHost: x" if number % 2 else b"G")
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as response:
                assert (response.status, response.read()) == (200, b"here")
        for other in others:
            with suppress(ConnectionResetError):
                assert other.recv(1) == b"", "closed"


@pytest.mark.slow
def test_back_returns_to_what_was_found_and_questions_have_addresses(place: Path) -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    from clipscale.tools.explore.server import application

    def shown(words: str) -> None:
        """Wait until this is what the page shows."""
        end = time.monotonic() + 30
        text = "document.body.innerText.replaceAll(/\\s+/g, ' ')"
        while words not in (now := opened.value(text)) or "compared in" not in now:
            assert time.monotonic() < end, now
            time.sleep(0.05)

    with served(application(open_explorer(config(place, "of-a")))) as port, browser() as opened:
        opened.show(f"http://127.0.0.1:{port}/", 390)
        opened.value("id('text').value = 'two cats & a <b>'")
        opened.value("document.querySelector('#ask button').click()")
        shown("Pictures for “two cats & a <b>”")
        searched = opened.value("location.href")
        opened.value("scrollTo(0, 50), document.querySelectorAll('.card')[2].click()")
        shown("Pictures like it")
        looked = opened.value("location.href")
        about = opened.value("id('about').textContent")
        assert re.fullmatch(rf"http://127.0.0.1:{port}/\?picture=\d+", looked) and about.startswith("<b>")
        opened.value("history.back()")
        shown("Pictures for “two cats & a <b>”")
        assert opened.value("[location.href, id('text').value, scrollY]") == [searched, "two cats & a <b>", 50]
        opened.value("history.forward()")
        shown("Pictures like it")
        opened.value("history.go(-2)")
        end = time.monotonic() + 30
        while opened.value("id('hint').hidden || !id('found').hidden"):
            assert time.monotonic() < end, "the first page is empty"
        for address, words in ((looked, "Pictures like it"), (searched, "Pictures for “two cats & a <b>”")):
            opened.show(address, 390)
            shown(words)
        opened.show(looked, 1280)
        shown("Pictures like it")
        assert opened.value("id('about').textContent") == about
        assert opened.errors == []


@pytest.mark.slow
def test_the_verb_serves_until_it_is_interrupted(place: Path, environment: dict) -> None:
    words = ["explore", f"run={place / 'a'}", f"data={place / 'of-a'}", "port=0", "device=cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "clipscale", *words], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = next(filter(None, (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stdout)))
        with urllib.request.urlopen(address[0] + "/small/0", timeout=240) as answer:
            assert answer.read(3) == b"\xff\xd8\xff"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
