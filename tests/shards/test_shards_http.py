"""Tar shards over http, with broken connections and error statuses."""

import base64
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from adaecho import EchoLoader, TarShards
from tests.servers import Quiet, serving
from tests.shards.archives import NUM_EXAMPLES, label_alone, labels, number_of, urls


def numbers(shards: TarShards) -> list[int]:
    return [number_of(example) for example in shards]


def test_one_request_for_each_archive(store: Any) -> None:
    assert sorted(numbers(TarShards(urls(store.url)))) == list(range(NUM_EXAMPLES))
    assert store.ranges == 4 * [""]


@pytest.mark.parametrize("kind", ["cut", "reset"])
def test_a_transfer_that_breaks_anywhere_is_resumed_at_its_byte(store: Any, kind: str) -> None:
    expected, draw = numbers(TarShards(urls(store.url))), random.Random(0)
    for _ in range(30):
        store.ranges.clear()
        store.faults[:] = [(kind, draw.randrange(6000)) for _ in range(2)]
        assert numbers(TarShards(urls(store.url))) == expected
        assert len(store.ranges) == 6


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_temporary_errors_are_retried(store: Any, status: int) -> None:
    expected = numbers(TarShards(urls(store.url)))
    store.faults[:] = [status, ("cut", 3000), status]
    assert numbers(TarShards(urls(store.url))) == expected


@pytest.mark.parametrize("status", [401, 403, 404])
def test_other_errors_fail_at_once(store: Any, status: int) -> None:
    store.faults[:], store.ranges[:] = [status], []
    with pytest.raises(ConnectionError, match=rf"shard-00\d\.tar: cannot be read in attempt 1 at .*{status}"):
        numbers(TarShards(urls(store.url)))
    assert len(store.ranges) == 1
    with pytest.raises(ConnectionError, match=r"absent\.tar: .*404"):
        numbers(TarShards(f"{store.url}absent.tar"))


def test_a_server_that_ignores_ranges_is_read_again_up_to_the_byte(store: Any) -> None:
    expected = numbers(TarShards(urls(store.url)))
    store.faults[:] = [("cut", 3000), "whole"]
    assert numbers(TarShards(urls(store.url))) == expected


def test_after_the_last_attempt_the_next_call_resumes(store: Any) -> None:
    shards = TarShards(urls(store.url), open_shards=1)
    expected = numbers(shards)
    one = iter(shards)
    seen = [number_of(next(one))]
    one.close()
    store.faults[:] = 3 * [503]
    with pytest.raises(ConnectionError, match=r"in attempt 3 at byte \d{3,}: HTTPError: HTTP Error 503"):
        next(one)
    assert seen + [number_of(example) for example in one] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_server_that_goes_away_is_never_a_bad_example(store: Any, num_workers: int) -> None:
    shards = TarShards(urls(store.url))
    with EchoLoader(shards, 4, decode=label_alone, max_bad_examples=100, num_workers=num_workers) as loader:
        store.faults[:] = 100 * [("cut", 0)]
        with pytest.raises(ConnectionError, match=r"shard-00\d\.tar: cannot be read in attempt 3"):
            list(islice(loader, 20))
        assert loader.bad_examples == []
        store.faults.clear()
        assert sorted(labels(islice(loader, 6))) != [], "it goes on"


def test_user_and_password_are_sent_and_never_shown(folder: Path) -> None:
    class Guarded(Quiet):
        def do_GET(self) -> None:  # noqa: N802
            basic = self.headers.get("Authorization", "").removeprefix("Basic ")
            if base64.b64decode(basic) != b"me:pass word" or not self.path.endswith("?signature=secret"):
                self.send_error(403)
                return
            super().do_GET()

    with serving(folder, Guarded) as place:
        for password in ("pass%20word", "another-one"):
            url = f"http://me:{password}@{place}/shard-000.tar?signature=secret"
            if password == "pass%20word":
                assert numbers(TarShards(url))
                continue
            with pytest.raises(ConnectionError, match=r"http://\*\*\*@.*shard-000\.tar.*403") as caught:
                numbers(TarShards(url))
            assert "another" not in str(caught.value)
            assert "secret" not in str(caught.value)
