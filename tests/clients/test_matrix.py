"""The matrix of clients: what is written is read back; columns that were not tried again stay as they are."""

import pytest

from tests.clients import __main__ as clients
from tests.clients.__main__ import PAGE, Client, read_clients, try_client
from tests.clients.matrix import BEGIN, END, Outcome, matrix, read_matrix, update

OLD = Outcome(
    version="1.0", runtime="Python 3.13.0", server="0.1.0", tried="2026-11-25",
    features={"chat": "", "tools, auto": "ValueError: no"},
)  # fmt: skip
NEW = Outcome(
    version="2.0", runtime="node 20.20.2", server="0.2.0", tried="2026-11-26", features={"embeddings": "", "chat": ""}
)
PAGE_OF_TWO = f"# Clients\n\n{BEGIN}\n\n{matrix({'one': OLD, 'two': OLD})}\n\n{END}\n\nMore.\n"


def test_what_is_written_is_read_back():
    outcomes = {"one": OLD, "two": NEW}
    assert read_matrix(matrix(outcomes)) == outcomes


@pytest.mark.parametrize("text", ["two\nlines `of` code", "x" * 3000, "a | b: `c`", " \n", "`", "x" * 199 + " y"])
def test_every_failure_stays_a_failure(text):
    once = matrix({"one": Outcome(features={"starts": text, "chat": ""})})
    (read,) = read_matrix(once).values()
    assert read.features["starts"]
    assert read.features["chat"] == ""
    assert matrix({"one": read}) == once


def test_only_the_columns_that_were_tried_are_replaced():
    page = update(PAGE_OF_TWO, {"two": NEW, "three": NEW}, ["one", "two", "three"])
    assert read_matrix(page) == {"one": OLD, "two": NEW, "three": NEW}
    assert page.startswith("# Clients\n")
    assert page.endswith(f"{END}\n\nMore.\n")
    assert update(page, {}, ["one", "two", "three"]) == page


def test_columns_are_in_the_order_of_the_clients_and_those_of_no_client_are_dropped():
    page = update(PAGE_OF_TWO, {"three": NEW}, ["three", "two"])
    assert list(read_matrix(page)) == ["three", "two"]


def test_the_page_holds_what_the_runner_writes():
    names = [client.name for client in read_clients()]
    page = PAGE.read_text()
    assert update(page, {}, names) == page


def test_a_client_that_cannot_be_installed_has_its_reason_in_the_matrix(tmp_path, monkeypatch):
    def install(_):
        raise clients.NotInstalled("no matching distribution")

    monkeypatch.setattr(clients, "_install", install)
    client = Client(name="one", packages=["one"], script="one.py")
    outcome = try_client(client, tmp_path, {})
    assert outcome.tried
    assert outcome.features == {"installs": "no matching distribution"}
