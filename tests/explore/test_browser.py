"""The page in a real Chromium: it finds, shows and compares, runs nothing of the set, and asks nobody else."""

import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipscale.explore import verb
from tests.data.files import picture
from tests.explore.browser import PROGRAM, Browser
from tests.explore.pages import config

pytestmark = pytest.mark.slow
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed (clipscale[explore])")


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    from clipscale.explore.server import application

    settings = config(place, "embedded", "shards", against=str(place / "b"), port=0)
    models, pictures = verb.prepared(settings)
    with verb.listening(settings) as taken:
        server = uvicorn.Server(uvicorn.Config(application(models, pictures, settings), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{taken.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server goes on"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("chromium is not installed")
    browser = Browser(tmp_path / "profile")
    try:
        yield browser
    finally:
        browser.close()


LOADED = (
    "[...document.images].filter((one) => one.closest('.card')).every((one) => one.complete && one.naturalWidth > 0)"
)


def test_one_looks_at_a_set_in_a_browser(browser: Browser, address: str, tmp_path: Path) -> None:
    browser.open(address)
    browser.wait("models.length === 2")
    assert browser.run("document.getElementById('models').innerText.includes('b, step 7')")

    browser.wait("document.querySelectorAll('.card').length === 12 && document.activeElement.id === 'text'")
    browser.type("two cats")
    browser.wait(
        "document.querySelectorAll('.b .card').length === 12 && document.querySelectorAll('.a .card').length === 12"
    )
    browser.run("for (const one of document.images) one.loading = 'eager'")
    browser.wait(LOADED)
    assert "12 of 12 pictures found by both" in browser.run("document.getElementById('status').textContent")
    assert browser.run("document.querySelector('.card p').textContent").startswith("<b>"), "a caption is no markup"
    assert browser.run("document.querySelectorAll('.card b').length") == 0
    assert browser.run("location.hash") == "#two%20cats"

    name = browser.run("document.querySelector('.card').dataset.name")
    browser.run("document.querySelector('.card').click()")
    browser.wait("key && !document.getElementById('query').hidden")
    assert browser.run("document.querySelector('.card').dataset.name") == name, "a picture is nearest to itself"
    assert browser.run("document.querySelectorAll('#captions .rows').length") == 2

    (tmp_path / "mine.png").write_bytes(picture(3, (40, 30)))
    browser.choose("#file", tmp_path / "mine.png")
    browser.wait(
        "document.getElementById('about').textContent === 'mine.png' && document.getElementById('asked').naturalWidth === 40"
    )
    assert browser.run("document.querySelector('.card').dataset.name") == "00000/3"

    browser.run("document.getElementById('labels').value = 'a ring, a <i>cat</i>, a dog'")
    browser.run("document.querySelector('#classify button').click()")
    browser.wait("document.querySelectorAll('#classes li').length === 6")
    shares = browser.run("[...document.querySelectorAll('#classes .a b')].map((one) => parseFloat(one.textContent))")
    assert sum(shares) == pytest.approx(100, abs=0.2) and shares == sorted(shares, reverse=True)
    assert "a <i>cat</i>" in browser.run("document.getElementById('classes').innerText")

    dropped = "new File([new Uint8Array([1, 2, 3])], 'bad.png', {type: 'image/png'})"
    browser.run(
        f"const data = new DataTransfer(); data.items.add({dropped}); "
        "document.dispatchEvent(new DragEvent('drop', {dataTransfer: data}))"
    )
    browser.wait("document.getElementById('status').className === 'bad'")
    assert "this picture cannot be used" in browser.run("document.getElementById('status').textContent")

    requests = [event["request"]["url"] for event in browser.reported("Network.requestWillBeSent")]
    assert requests and all(url.startswith((address, "blob:", "data:")) for url in requests)
    assert not browser.reported("Runtime.exceptionThrown")
    entries = [event["entry"] for event in browser.reported("Log.entryAdded")]
    assert [one["text"] for one in entries if "422" not in one["text"]] == [], "such as a breach of the policy"


def test_an_answer_about_an_earlier_picture_is_dropped(browser: Browser, address: str) -> None:
    """The page gets the probabilities of the first picture, or an error about it, when the second one is shown."""
    browser.open(address)
    browser.wait("models.length === 2 && document.querySelectorAll('.card').length === 12")
    browser.run(
        "const original = answer, held = []; answer = (path, body) => path !== 'classes' ? original(path, body) "
        ": new Promise((resolve, reject) => held.push({ body, resolve, reject })); "
        "document.getElementById('labels').value = 'a, b'"
    )
    for number in (1, 2, 3):
        browser.run(f"look({{ part: '00000', row: {number} }}, 'picture {number}', 'small/00000/{number}')")
        browser.wait(f"held.length === {number} && document.getElementById('about').textContent === 'picture {number}'")
    browser.run("document.querySelector('#classify button').click()")  # the same picture with other labels
    browser.wait("held.length === 4 && held[3].body.picture === held[2].body.picture")
    given = "{ answers: [[{ label: 'LABEL', share: 1, score: 1 }], [{ label: 'LABEL', share: 1, score: 1 }]] }"
    browser.run(f"held[0].resolve({given.replace('LABEL', 'of the first')})")
    browser.run("held[1].reject(new Error('about the second'))")
    browser.run(f"held[2].resolve({given.replace('LABEL', 'of earlier labels')})")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    assert browser.run("document.getElementById('classes').innerText") == ""
    assert "about the second" not in browser.run("document.getElementById('status').textContent")
    browser.run(f"held[3].resolve({given.replace('LABEL', 'of the last')})")
    browser.wait("document.getElementById('classes').innerText.includes('of the last')")


def test_the_page_says_when_the_server_has_ended(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait("models.length === 2")
    browser.call(
        "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
    )
    browser.type("a ring")
    browser.wait("document.getElementById('status').textContent === 'clipscale explore has ended'")


def test_the_verb_serves_until_it_is_interrupted(place: Path, environment: dict[str, str]) -> None:
    words = [sys.executable, "-m", "clipscale", "explore", f"run={place / 'a'}", f"data={place / 'embedded'}", "port=0"]
    process = subprocess.Popen([*words, "device=cpu"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"12 samples: (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)\n", line)
        assert found, line
        with urllib.request.urlopen(found[1] + "small/00000/0", timeout=240) as answer:
            assert answer.read(3) == b"\xff\xd8\xff"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(urllib.request.Request(found[1], headers={"Host": "evil.example"}), timeout=240)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=240)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
