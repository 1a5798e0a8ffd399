import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.addresses import Address, free_port, is_port_taken, parse_address


@given(host=st.sampled_from(["localhost", "127.0.0.1", "core-0.core", "::1", "fe80::1"]), port=st.integers(1, 65535))
def test_an_address_survives_its_text(host, port):
    assert parse_address(str(Address(host, port))) == Address(host, port)


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:-1", "a:1.0", "::1:2", "a:b:1", "a:¹"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


def test_a_port_is_taken_exactly_while_something_listens():
    address = Address("127.0.0.1", free_port("127.0.0.1"))
    assert not is_port_taken(address)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC servers do
        listener.bind((address.host, address.port))
        listener.listen()
        assert is_port_taken(address)
    assert not is_port_taken(address)


def test_a_host_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="assign"):
        is_port_taken(Address("203.0.113.1", 5))
