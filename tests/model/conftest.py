"""Any processor will do."""

import pytest

from attnres_serve.compat import source


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """INT8 weights are loaded and not multiplied, which not every processor does rightly."""
    monkeypatch.setattr(source, "lacks_int8", lambda: False)
