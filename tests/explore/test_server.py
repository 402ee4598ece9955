"""What the page's server refuses, and what it does at once."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clipscale.common.errors import UserError
from clipscale.config.data import DataConfig
from clipscale.explore import pictures as pictures_of_sets
from clipscale.explore import verb
from tests.data.files import picture
from tests.explore.pages import HOME, client, config

pytest.importorskip("starlette.testclient", reason="starlette is not installed (clipscale[explore])")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:9000"}, 200),  # a forwarded port
        ({"host": "[::1]:8765"}, 200),
        ({"host": "evil.example:8765"}, 403),  # a name that was let point to this machine
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "192.168.0.7:8765"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": HOME, "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_requests_of_other_hosts_and_pages_are_refused(page: Any, headers: dict[str, str], status: int) -> None:
    for answer in (page.get("/about", headers=headers), page.post("/search", json={"text": "a"}, headers=headers)):
        assert answer.status_code == status
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_for_other_machines_answers_under_addresses_and_its_own_name(place: Path) -> None:
    from clipscale.explore.server import Guard

    guard = Guard(lambda *_: None, "0.0.0.0")  # type: ignore[arg-type, return-value]
    assert guard.known("192.168.0.7:8765") and guard.known(socket.gethostname()) and guard.known("localhost")
    assert not guard.known("evil.example")


def test_large_and_foreign_bodies_are_refused(page: Any, place: Path) -> None:
    small = client(replace(config(place, "embedded"), data=DataConfig(train=[str(place / "embedded")], max_bytes=5000)))
    assert small.post("/picture", content=b"x" * 5001).status_code == 413
    assert small.post("/picture", content=iter([b"x" * 3000, b"x" * 3000])).status_code == 413, "without a length"
    assert page.post("/search", content=b" " * (1 << 17)).status_code == 413
    for body, message in (
        (b"{", "no JSON"),
        (b"[" * 20_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"{}", "give a text"),
        (b'{"text": " "}', "give a text"),
        (b'{"text": "a", "count": 0}', "count of 1 to"),
        (b'{"text": "a", "count": 1e9}', "count of 1 to"),
    ):
        answer = page.post("/search", content=body)
        assert answer.status_code == 400 and message in answer.json()["error"], body[:20]
    assert page.post("/search", content=b'{"text": "\\ud800"}').status_code == 200
    for body in (b"", b"no picture", picture(0)[:40], b"<svg xmlns='http://www.w3.org/2000/svg'/>"):
        answer = page.post("/picture", content=body)
        assert answer.status_code == 422 and "cannot be used" in answer.json()["error"]
    assert page.post("/sample", json={"part": 3, "row": 1}).status_code == 400


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(place: Path) -> None:
    few = client(replace(config(place, "embedded"), data=DataConfig(train=[str(place / "embedded")], max_pixels=1000)))
    answer = few.post("/picture", content=picture(0, (40, 30)))
    assert answer.status_code == 422 and "huge_image" in answer.json()["error"]
    assert few.get("/small/00000/0").status_code == 422


def test_two_pictures_are_decoded_at_once_and_fetched_before(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,), pictures = verb.prepared(config(place, "embedded"))
    lock, running, most = threading.Lock(), 0, 0

    def slow(decode: Any) -> Any:
        def decoded(*given: Any) -> Any:
            nonlocal running, most
            with lock:
                running, most = running + 1, max(most, running + 1)
            time.sleep(0.01)
            with lock:
                running -= 1
            return decode(*given)

        return decoded

    monkeypatch.setattr(one, "transform", slow(one.transform))
    monkeypatch.setattr(pictures_of_sets, "open_picture", slow(pictures_of_sets.open_picture))
    with ThreadPoolExecutor(12) as pool:
        queries = [pool.submit(one.encode_image, picture(n)) for n in range(6)]
        shown = [pool.submit(pictures.shown, "00000", n) for n in range(6)]
        assert all(future.result() is not None for future in queries + shown)
    assert most == 2

    fetched, fetch = threading.Event(), pictures.encoded
    monkeypatch.setattr(pictures, "encoded", lambda *place: (fetched.set(), fetch(*place))[1])
    with ThreadPoolExecutor(1) as pool, pictures_of_sets.DECODING, pictures_of_sets.DECODING:
        pool.submit(pictures.shown, "00001", 0)
        assert fetched.wait(60), "a slow source keeps no other picture waiting"


def test_labels_are_checked(page: Any) -> None:
    key = page.post("/picture", content=picture(1, (40, 30))).json()["picture"]
    good = {"picture": key, "labels": ["a"], "template": "{}"}
    assert page.post("/classes", json=good).json()["answers"][0][0]["share"] == 1
    for change, status in (
        ({"labels": []}, 400),
        ({"labels": ["a"] * 1001}, 400),
        ({"labels": [3]}, 400),
        ({"template": "a"}, 400),
        ({"picture": "gone"}, 404),
    ):
        assert page.post("/classes", json=good | change).status_code == status, change


def test_a_picture_in_use_is_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clipscale.explore import server

    monkeypatch.setattr(server, "KEPT_QUERIES", 2)
    page = client(config(place, "embedded"))

    def asked(number: int) -> dict[str, Any]:
        key = page.post("/picture", content=picture(number)).json()["picture"]
        return {"picture": key, "labels": ["a"], "template": "{}"}

    first, second = asked(1), asked(2)
    assert page.post("/classes", json=first).status_code == 200
    asked(3)
    assert [page.post("/classes", json=one).status_code for one in (first, second)] == [200, 404]


def test_a_port_in_use_and_an_unknown_host_are_one_line(place: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        settings = config(place, "embedded", port=other.getsockname()[1])
        with pytest.raises(UserError, match=r"port=\d+: cannot listen at 127.0.0.1 \(.*in use.*\); give another port="):
            verb.main(settings)
    with pytest.raises(UserError, match=r"cannot listen at no\.such\.host\.invalid"):
        verb.main(replace(settings, host="no.such.host.invalid"))


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_markup(page: Any) -> None:
    texts = {path: page.get(path).text for path in ("/", "/page.css", "/page.js")}
    assert all("http://" not in text and "https://" not in text and "//cdn" not in text for text in texts.values())
    assert not any(
        word in texts["/page.js"]
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
    )
    policy = page.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "<script>" not in texts["/"] and "style=" not in texts["/"], "the policy refuses them"
