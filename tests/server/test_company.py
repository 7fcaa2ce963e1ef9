"""Requests to one server do not feel each other."""

import company
import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("check", company.CHECKS, ids=lambda check: check.__name__)
def test_an_answer_is_the_same_in_any_company(check, open_server):
    check(open_server)
