"""Requests to one server do not feel each other."""

import company
import pytest

pytestmark = pytest.mark.engine

CHECKS = (
    company.check_seeds,
    company.check_prompt_logprobs,
    company.check_shared_prefixes,
    company.check_bad_company,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_answer_is_the_same_in_any_company(check, open_server):
    check(open_server)
