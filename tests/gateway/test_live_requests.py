import asyncio

import pytest

from headrace.common.errors import AlreadyExists, Overloaded, Unavailable
from headrace.gateway.live_requests import LiveRequests


def test_an_id_is_held_for_the_life_of_its_request() -> None:
    live = LiveRequests(10)
    with live.enter("a") as request_id:
        assert request_id == "a"
        with pytest.raises(AlreadyExists, match="'a'"), live.enter("a"):
            pass
        assert len(live) == 1
    with live.enter("a"):
        pass


def test_an_id_is_free_again_after_an_error() -> None:
    live = LiveRequests(10)
    with pytest.raises(ZeroDivisionError), live.enter("a"):
        raise ZeroDivisionError
    assert len(live) == 0


def test_requests_without_an_id_get_one_of_their_own() -> None:
    live = LiveRequests(10)
    with live.enter("") as first, live.enter("") as second:
        assert first
        assert second
        assert first != second


def test_no_more_than_the_limit() -> None:
    live = LiveRequests(1)
    with live.enter("a"), pytest.raises(Overloaded, match="1 requests"), live.enter("b"):
        pass


async def test_draining_takes_nothing_new_and_waits_for_the_rest() -> None:
    live = LiveRequests(10)
    with live.enter("a"):
        live.drain()
        with pytest.raises(Unavailable), live.enter("b"):
            pass
        assert not await live.wait_until_none(0.01)
        waiting = asyncio.create_task(live.wait_until_none(5))
    assert await waiting
